"""What a tracker does, and the guard around it: a run is never lost to the tool that shows it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

Level = Literal["info", "warn", "error"]
Metrics = Mapping[str, float | None]

ROLLOUT_ROWS = 16
"""Completions of a rollout that a tracker shows; the run directory has all of them."""


class Tracker(Protocol):
    """Shows a run. Each call may fail in any way: it is made through `Guarded`."""

    def log(self, step: int, metrics: Metrics) -> None:
        """The numbers of a step, with `loop{t}/exit_prob` as a distribution besides."""

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some completions of a rollout, as `rltt.train.trainer` writes them."""

    def alert(self, title: str, text: str, level: Level) -> None:
        """Something that people should not overlook."""

    def finish(self) -> None:
        """Nothing more will come."""


class NoTracker:
    """Shows nothing."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def alert(self, title: str, text: str, level: Level) -> None: ...

    def finish(self) -> None: ...


class Guarded:
    """Opens a tracker and passes calls on to it. A failure is said when it first happens, and counted.

    Args:
        name: of the tracker, for messages.
        start: makes the tracker.
        say: prints a message.
    """

    def __init__(self, name: str, start: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name = name
        self.say = say
        self.failures = 0
        self._tracker: Tracker = NoTracker()
        self._guard("start", lambda: setattr(self, "_tracker", start()))

    def log(self, step: int, metrics: Metrics) -> None:
        self._guard("log", lambda: self._tracker.log(step, metrics))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._guard("log rollouts", lambda: self._tracker.log_rollouts(step, rows))

    def alert(self, title: str, text: str, level: Level) -> None:
        self._guard("alert", lambda: self._tracker.alert(title, text, level))

    def finish(self) -> None:
        self._guard("finish", self._tracker.finish)
        if self.failures > 1:
            self.say(f"tracker {self.name}: {self.failures} calls failed in all; the run directory has every number")

    def __enter__(self) -> "Guarded":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker raises: its network, its files, its versions
            self.failures += 1
            if self.failures == 1:
                self.say(
                    f"tracker {self.name} failed ({what}): {type(error).__name__}: {error}; the run goes on, its "
                    "numbers are in metrics.jsonl. Further failures are counted and told at the end"
                )


def known(metrics: Metrics) -> dict[str, float]:
    """The numbers that are there, without the step's own."""
    return {name: value for name, value in metrics.items() if value is not None and name != "step"}


def exit_distribution(metrics: Metrics) -> list[float]:
    """Mean probability to leave at loop 1 to T; empty without a gate."""
    found: list[float] = []
    while (value := metrics.get(f"loop{len(found) + 1}/exit_prob")) is not None:
        found.append(value)
    return found


COLUMNS = ("prompt", "completion", "gold", "reward", "solved", "advantage")
"""Columns of a table of rollouts."""


def rollout_table(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """The first rows as `COLUMNS`; a chat prompt as its last message."""
    table = []
    for row in list(rows)[:ROLLOUT_ROWS]:
        texts = [last_message(row["prompt"]), last_message(row["completion"]), str(row.get("gold"))]
        table.append([*texts, *(row.get(name) for name in COLUMNS[3:])])
    return table


def last_message(text: Any) -> str:
    """A prompt or completion as text: that of its last message where it is a chat."""
    return str(text[-1]["content"]) if isinstance(text, list) and text else str(text)
