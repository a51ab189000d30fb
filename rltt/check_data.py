"""`rltt check-data`: what is wrong with the data of a recipe, by row, before anything is trained.

Bad golds decide the exit status. Repeated and shared prompts are reported: they may be meant.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rltt.data.check import RepeatedPrompt, SharedPrompt, repeated_prompts, shared_prompts
from rltt.data.sources import AnswerlessWarning
from rltt.data.split import SharedPromptWarning, load_split
from rltt.recipe import Recipe
from rltt.rewards.extract import quoted
from rltt.rewards.golds import BadGold, bad_golds, gold_checks

_PROMPTS_SHOWN = 20
_ROWS_SHOWN = 6
_SNIPPET = 60


@dataclass(frozen=True)
class DataReport:
    """What was found. `checked_by` are the rewards that checked the golds; `no_answer` are rows that were left out."""

    train_rows: int
    eval_rows: int
    checked_by: tuple[str, ...]
    bad_golds: tuple[BadGold, ...]
    no_answer: tuple[str, ...]
    repeated: tuple[RepeatedPrompt, ...]
    shared: tuple[SharedPrompt, ...]
    warnings: tuple[str, ...]

    @property
    def contradictions(self) -> tuple[RepeatedPrompt, ...]:
        """Repeated prompts whose golds differ."""
        return tuple(prompt for prompt in self.repeated if len(prompt.golds) > 1)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it; `contradictions` is also a part of `repeated`."""
        return asdict(self) | {"contradictions": [asdict(prompt) for prompt in self.contradictions]}

    def render(self) -> str:
        """The report as text, one finding a line. Every bad gold is there; of prompts the first ones."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"rows: {self.train_rows} to train on, {self.eval_rows} to evaluate on"
        yield from (f"note: {message}" for message in self.warnings)
        yield f"no answer: {_rows(self.no_answer)}, left out" if self.no_answer else "no answer: none"
        if not self.checked_by:
            yield "bad golds: not checked; none of the recipe's rewards checks golds, as math does (check_golds)"
        else:
            by = ", ".join(self.checked_by)
            yield f"bad golds: {len(self.bad_golds) or 'none'} (checked by {by})"
            yield from (f"  {gold}" for gold in self.bad_golds)
        plain = [prompt for prompt in self.repeated if len(prompt.golds) == 1]
        yield f"repeated prompts with different golds: {len(self.contradictions) or 'none'}"
        yield from _first([f"{_rows(p.rows)}: {_snippet(p.prompt)} has {_golds(p.golds)}" for p in self.contradictions])
        yield f"repeated prompts with the same gold: {len(plain) or 'none'}"
        yield from _first([f"{_rows(prompt.rows)}: {_snippet(prompt.prompt)}" for prompt in plain])
        yield f"prompts both trained and evaluated on: {len(self.shared) or 'none'}"
        yield from _first(
            [f"{_rows(p.eval_rows)} is also {_rows(p.train_rows)}: {_snippet(p.prompt)}" for p in self.shared]
        )


def check_data(recipe: Recipe) -> DataReport:
    """Load a recipe's problems and look at them. No network for local files and arithmetic.

    Raises:
        DataError: a source cannot be read, rows are malformed (an empty prompt or gold is), or the same rows are on
            both sides.
        RewardError: a reward cannot be loaded, or its check of golds fails.
    """
    checks = gold_checks(recipe.rewards)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        train, evaluation = load_split(recipe.data)
    messages = [entry.message for entry in told]
    return DataReport(
        train_rows=len(train),
        eval_rows=len(evaluation),
        checked_by=tuple(checks),
        bad_golds=tuple(bad_golds([*train, *evaluation], checks)),
        no_answer=tuple(row for message in messages if isinstance(message, AnswerlessWarning) for row in message.rows),
        repeated=tuple(repeated_prompts(train) + repeated_prompts(evaluation)),
        shared=tuple(shared_prompts(train, evaluation)),
        # Those two are in the report by row.
        warnings=tuple(str(m) for m in messages if not isinstance(m, AnswerlessWarning | SharedPromptWarning)),
    )


def _rows(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    return ", ".join(rows[:_ROWS_SHOWN]) + more


def _golds(golds: Sequence[str]) -> str:
    return " and ".join(_snippet(gold) for gold in golds[:3]) + (" and more" if len(golds) > 3 else "")


def _snippet(text: str) -> str:
    return quoted(text, _SNIPPET)


def _first(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:_PROMPTS_SHOWN])
    if len(lines) > _PROMPTS_SHOWN:
        yield f"  and {len(lines) - _PROMPTS_SHOWN} more; --json has them all"
