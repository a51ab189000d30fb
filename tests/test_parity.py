"""The numbers that compare a rollout engine with the training path."""

import math

import pytest
import torch

from rltt.errors import ParityError
from rltt.rollout.parity import check_parity, measure_parity


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
    check_parity(parity, 0.21)
    with pytest.raises(ParityError, match=r"at most 2\.00e-01.*33\.3% of 3 tokens.*tolerance 0\.19"):
        check_parity(parity, 0.19)


def test_a_token_without_a_number_is_a_gap() -> None:
    parity = measure_parity(torch.zeros(1, 2), torch.tensor([[0.0, math.nan]]), torch.ones(1, 2), tolerance=1.0)
    assert parity.max == math.inf
    with pytest.raises(ParityError):
        check_parity(parity, 1.0)


def test_nothing_to_compare() -> None:
    assert measure_parity(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), tolerance=1.0).tokens == 0
