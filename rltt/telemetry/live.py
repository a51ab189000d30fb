"""The verdict on a run while it runs: judged at every step, told when it changes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rltt.telemetry.history import HeldOut, History, read_rows
from rltt.telemetry.verdict import Verdict, judge

Level = Literal["info", "warn", "error"]

LEVELS: dict[str, Level] = {"stalled": "warn", "unstable": "error"}
"""How loud a verdict is; the others are for information."""

STEADY = 3
"""Steps that a new verdict has to hold before it is told: next to its threshold it may come and go."""


class Alert(Protocol):
    """Tells people of something that they should not overlook."""

    def __call__(self, title: str, text: str, level: Level) -> None: ...


class LiveVerdict:
    """Judges a run at each step.

    Args:
        metrics: the run's metrics.jsonl. What is in it already is its past, before it was resumed.
        settings: the recipe as dotted keys.
        total_steps: how many steps the run is to have.
        say: prints the verdict.
        keep: writes the verdict of each step to where it can be read.
        on_stalled: `stop` ends a run that has stalled.

    Attributes:
        before: the held-out evaluation before the first step, where there was one.
        alert: told of each new verdict: a tracker's alert. To begin with, nobody.
        stop: whether the run is to end.
    """

    def __init__(
        self,
        metrics: Path,
        settings: Mapping[str, Any],
        total_steps: int,
        say: Callable[[str], None],
        keep: Callable[[Verdict], None],
        on_stalled: Literal["warn", "stop"] = "warn",
    ) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.say = say
        self.keep = keep
        self.on_stalled = on_stalled
        self.before: HeldOut | None = None
        self.alert: Alert | None = None
        self.stop = False
        self.rows = read_rows(metrics) if metrics.is_file() else []
        self._told: tuple[str, str | None] = ("undecided", None)
        self._new: tuple[str, str | None] = self._told
        self._since = 0

    def replay(self) -> None:
        """Judge the run's past once more, in silence: what was told then is not told again."""
        past, self.rows = self.rows, []
        say, keep, on_stalled = self.say, self.keep, self.on_stalled
        self.say, self.keep, self.on_stalled = (lambda _: None), (lambda _: None), "warn"
        for row in past:
            self.update(row)
        self.say, self.keep, self.on_stalled = say, keep, on_stalled

    def update(self, row: Mapping[str, float | None]) -> dict[str, float]:
        """Judge the run with one more step, and return the verdict as metrics of that step."""
        # A run that goes on from a checkpoint makes the steps after it once more.
        while self.rows and (self.rows[-1]["step"] or 0) >= (row["step"] or 0):
            self.rows.pop()
        self.rows.append(dict(row))
        history = History(self.rows, "metrics.jsonl", self.settings, self.total_steps, self.before)
        verdict = judge(history)
        self.keep(verdict)
        found = (verdict.verdict, verdict.cause)
        self._since = self._since + 1 if found == self._new else 1
        self._new = found
        if self._since >= STEADY and found != self._told:
            self._told = found
            self._tell(verdict)
        return {"verdict/code": verdict.code, "verdict/confidence": verdict.confidence}

    def _tell(self, verdict: Verdict) -> None:
        text = str(verdict)
        if verdict.verdict == "stalled" and self.on_stalled == "stop":
            self.stop = True
            text += "\n  the run ends here (telemetry.on_stalled: stop)"
        self.say(f"verdict at step {verdict.step}: {text}")
        if self.alert is not None:
            self.alert(f"{verdict.title}, step {verdict.step}", text, LEVELS.get(verdict.verdict, "info"))
