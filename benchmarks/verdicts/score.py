"""How often the verdict is right: `python benchmarks/verdicts/score.py`.

Reads the committed histories, asks for the verdict at 20 % of each run and at its end, and compares it with what really
happened: the held-out solve rate before and after, measured apart from the run. A run *gains* where that rises by two
standard errors and by two points. "Will not move" is said by `stalled` and `unstable`. A cause is right where it is the
fault that was planted; runs without a fault that did not gain either are not asked for a cause.

Exits with 1 when precision or recall of "will not move" on held-out runs is below what is stated here.
"""

import gzip
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltt.telemetry import HeldOut, History, Verdict, judge

HISTORIES = Path(__file__).parent / "histories"
LEAST_GAIN = 0.02
STATED = {0.2: (0.9, 0.9), 1.0: (0.9, 0.9)}
"""Precision and recall of "will not move" on either split, at 20 % of the run and at its end."""
STATED_CAUSES = {0.2: (0.85, 0.85), 1.0: (0.85, 0.85)}
"""The same of all causes together."""


@dataclass(frozen=True)
class Judged:
    """One run: what happened, what was done to it, and what the verdict said."""

    name: str
    split: str
    gains: bool
    cause: str | None
    verdict: Verdict

    @property
    def says_no(self) -> bool:
        """Whether the verdict is that the run will not move."""
        return self.verdict.verdict in ("stalled", "unstable")


@dataclass(frozen=True)
class Score:
    """Counts of a yes-or-no question."""

    hits: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        """Share of what was said that was right; 1 where nothing was said."""
        return self.hits / (self.hits + self.false) if self.hits + self.false else 1.0

    @property
    def recall(self) -> float:
        """Share of what was there that was said; 1 where nothing was there."""
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 1.0

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool]]) -> "Score":
        """From pairs of what was said and what was so."""
        found = list(pairs)
        return cls(found.count((True, True)), found.count((True, False)), found.count((False, True)))

    def __str__(self) -> str:
        return (
            f"{self.precision:.2f} / {self.recall:.2f}  ({self.hits} right, {self.false} false, {self.missed} missed)"
        )


def load(file: Path) -> tuple[dict[str, Any], History]:
    """The head of a history file, with the label, and the history."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        head, *rows = [json.loads(line) for line in lines]
    settings = head["settings"]
    before, after = (
        head[key] and (head[key]["solve_rate"], head[key]["stderr"]) for key in ("eval_before", "eval_after")
    )
    history = History(
        rows,
        file.name,
        settings,
        settings["train.max_steps"],
        HeldOut(0, *before) if before else None,
        HeldOut(rows[-1]["step"], *after) if after else None,
    )
    return head, history


def gains(head: dict[str, Any]) -> bool:
    """Whether the held-out solve rate rose by more than chance and by more than nothing."""
    return bool(head["gain"] >= 2 * head["gain_stderr"] and head["gain"] >= LEAST_GAIN)


def judged(share: float) -> list[Judged]:
    """Every run, judged after `share` of its steps."""
    result = []
    for file in sorted(HISTORIES.glob("*.jsonl.gz")):
        head, history = load(file)
        assert history.total_steps is not None
        verdict = judge(history.up_to(int(share * history.total_steps)))
        result.append(Judged(head["name"], head["split"], gains(head), head["cause"], verdict))
    return result


def will_not_move(runs: Iterable[Judged]) -> Score:
    """ "Will not move" against what the held-out solve rate did."""
    return Score.of((run.says_no, not run.gains) for run in runs)


def by_cause(runs: Iterable[Judged]) -> dict[str, Score]:
    """Each cause that was planted or named."""
    asked = [run for run in runs if run.cause is not None or run.gains]
    causes = {run.cause for run in asked} | {run.verdict.cause for run in asked}
    return {
        cause: Score.of((run.verdict.cause == cause, run.cause == cause) for run in asked)
        for cause in sorted(filter(None, causes))
    }


def causes(runs: Iterable[Judged]) -> Score:
    """All causes together: how many that were named were planted, and how many that were planted were named."""
    each = by_cause(runs).values()
    return Score(sum(s.hits for s in each), sum(s.false for s in each), sum(s.missed for s in each))


def speaks_at(history: History) -> int | None:
    """The first step from which on, for three steps, the verdict is that the run will not move; None: never."""
    said = 0
    for step in range(1, history.last_step + 1):
        said = said + 1 if judge(history.up_to(step)).verdict in ("stalled", "unstable") else 0
        if said == 3:
            return step - 2
    return None


def main() -> None:
    enough = True
    for share, (precision, recall) in STATED.items():
        every = judged(share)
        for split in ("tuning", "held-out"):
            runs = [run for run in every if run.split == split]
            score = will_not_move(runs)
            print(f"\nat {share:.0%} of the run, {split}: {len(runs)} runs, {sum(run.gains for run in runs)} gained")
            print(f"  {'will not move':24} {score}")
            print(f"  {'all causes':24} {causes(runs)}")
            for cause, of_cause in by_cause(runs).items():
                print(f"  {cause:24} {of_cause}")
            for run in runs:
                if run.says_no == run.gains:
                    print(f"    wrong: {run.name} {'gained' if run.gains else 'did not gain'}: {run.verdict.title}")
            if split == "held-out":
                enough &= score.precision >= precision and score.recall >= recall
    still = [history for head, history in map(load, sorted(HISTORIES.glob("*.jsonl.gz"))) if not gains(head)]
    steps = sorted(step for step in map(speaks_at, still) if step is not None)
    print(
        f"\nof {len(still)} runs that did not gain, {len(steps)} were told so at some step: half of them by step "
        f"{steps[len(steps) // 2]}, nine in ten by step {steps[len(steps) * 9 // 10]}"
    )
    sys.exit(0 if enough else 1)


if __name__ == "__main__":
    main()
