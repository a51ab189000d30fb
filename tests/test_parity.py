"""The numbers that compare a rollout engine with the training path."""

import math

import pytest
import torch

from rltt.rollout.parity import combined, measure_parity


def test_the_numbers_are_those_of_the_chosen_tokens() -> None:
    ours = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]])
    theirs = torch.tensor([[-1.2, -1.9, 0.0], [-0.5, 0.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    parity = measure_parity(ours, theirs, mask, tolerance=0.15)
    gaps = [0.2, -0.1, 0.0]  # training path - engine
    assert parity.tokens == 3
    assert parity.max == pytest.approx(0.2, abs=1e-6)
    assert parity.mean == pytest.approx(0.1, abs=1e-6)
    assert parity.above == pytest.approx(1 / 3)
    assert parity.raw_ratio == pytest.approx(sum(math.exp(d) for d in gaps) / 3, abs=1e-6)
    assert parity.kl == pytest.approx(sum(math.exp(d) - d - 1 for d in gaps) / 3, abs=1e-6)


def test_a_token_without_a_number_is_a_gap() -> None:
    parity = measure_parity(torch.zeros(1, 2), torch.tensor([[0.0, math.nan]]), torch.ones(1, 2), tolerance=1.0)
    assert parity.max == math.inf
    assert parity.above == 0.5


def test_nothing_to_compare() -> None:
    assert measure_parity(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), tolerance=1.0).tokens == 0


def test_several_measurements_are_combined_by_their_tokens() -> None:
    ours, theirs = torch.randn(3, 7), torch.randn(3, 7)
    masks = torch.zeros(2, 3, 7)
    masks[0, :, :5] = 1
    masks[1, :, 5:] = 1
    parts = [measure_parity(ours, theirs, mask, tolerance=0.5) for mask in masks]
    whole = measure_parity(ours, theirs, torch.ones(3, 7), tolerance=0.5)
    both = combined(parts)
    for name in ("max", "mean", "kl", "above", "raw_ratio", "tokens"):
        assert getattr(both, name) == pytest.approx(getattr(whole, name))
