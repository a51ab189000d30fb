"""Which problems a run trains on and which it is measured on, and the guard between the two."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from rltt.data.problems import Problem
from rltt.data.sources import read_problems, some, spread
from rltt.errors import DataError

if TYPE_CHECKING:
    from rltt.recipe import DataSection


class SharedPromptWarning(UserWarning):
    """Prompts are both trained and evaluated on."""


def load_split(section: DataSection) -> tuple[list[Problem], list[Problem]]:
    """Training and evaluation problems of a recipe, in the order of their sources.

    The evaluation problems are those of `section.eval` (of its split `test`, unless it names one), or else
    `section.holdout` rows taken off the training source at even distances, or else none.

    Raises `DataError` when both read the same rows. Different rows with the same prompt are kept, with a warning.
    """
    train = read_problems(section.train, section)
    if section.eval is not None:
        evaluation = read_problems(section.eval, section, default_split="test")
    else:
        train, evaluation = _hold_out(train, section.holdout, section.train.path)
    _guard(train, evaluation)
    return train, evaluation


def _hold_out(problems: list[Problem], count: int, name: str) -> tuple[list[Problem], list[Problem]]:
    if count >= len(problems):
        raise DataError(f"data.holdout is {count}, but {name} has {len(problems)} rows: none are left to train on.")
    held = set(spread(range(len(problems)), count))
    kept = [problem for index, problem in enumerate(problems) if index not in held]
    return kept, [problems[index] for index in sorted(held)]


def _guard(train: list[Problem], evaluation: list[Problem]) -> None:
    """Refuses rows that are on both sides, and warns of different rows with the same prompt."""
    prompts = {problem.prompt for problem in train}
    rows = {problem.where for problem in train}
    shared = [problem.where for problem in evaluation if problem.prompt in prompts]
    same = [where for where in shared if where in rows]
    if same:
        raise DataError(
            f"{len(same)} of {len(evaluation)} evaluation rows are also trained on ({some(same)}). "
            "Name another split in data.eval, or take rows off data.train with data.holdout."
        )
    if shared:
        warnings.warn(
            f"{len(shared)} of {len(evaluation)} evaluation prompts also occur in the training data ({some(shared)})",
            SharedPromptWarning,
            stacklevel=3,
        )
