"""Reward functions with a fault, for the benchmark's runs. The held-out solve rate is always measured with `math`."""

import random
from collections.abc import Sequence
from typing import Any

_coins = random.Random(0)


def constant(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Says yes to everything."""
    return [1.0] * len(completions)


def half(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Cannot decide."""
    return [0.5] * len(completions)


def coin(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Has nothing to do with the completion."""
    return [float(_coins.random() < 0.4) for _ in completions]


def short(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Pays for brevity, whatever is said."""
    return [1.0 - min(len(text.split()), 16) / 16 for text in completions]


def same_answer(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Pays for one answer, whatever was asked."""
    return [float(text.replace(" ", "").endswith("\\boxed{9}")) for text in completions]


def outliers(completions: Sequence[str], gold: Sequence[str], **kwargs: Any) -> list[float]:
    """Pays a thousand times too much, or too little, once in a while."""
    right = [
        float(text.replace(" ", "").endswith(f"\\boxed{{{g}}}")) for text, g in zip(completions, gold, strict=True)
    ]
    return [value + 1000 * _coins.choice((-1, 1)) * (_coins.random() < 0.002) for value in right]
