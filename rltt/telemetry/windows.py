"""Stretches of a run: its first and last steps, and what a metric was over them.

Closing the Loop (arXiv 2610.00673, appendix C) reads KL and gradient norm over the first 20 and the last 20 optimizer
steps. A run of fewer than 40 steps is cut in the middle, so that the two never overlap.
"""

from dataclasses import dataclass
from statistics import fmean, median

from rltt.telemetry.history import History

WIDTH = 20


@dataclass(frozen=True)
class Window:
    """A metric over some steps."""

    metric: str
    steps: tuple[int, int]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the steps."""
        return fmean(self.values)

    @property
    def median(self) -> float:
        """The median over the steps."""
        return median(self.values)


class Windows:
    """The first and the last steps of a run."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.width = min(WIDTH, max(1, len(history) // 2))

    def first(self, metric: str) -> Window | None:
        """Over the first steps; None where the metric is not known there."""
        return self._window(metric, 0, self.width)

    def last(self, metric: str, width: int | None = None) -> Window | None:
        """Over the last steps."""
        count = len(self.history)
        return self._window(metric, max(0, count - (width or self.width)), count)

    def whole(self, metric: str) -> Window | None:
        """Over all steps."""
        return self._window(metric, 0, len(self.history))

    def _window(self, metric: str, start: int, end: int) -> Window | None:
        known = [
            (int(row["step"] or 0), value)
            for row in self.history.rows[start:end]
            if (value := row.get(metric)) is not None
        ]
        if not known:
            return None
        return Window(metric, (known[0][0], known[-1][0]), tuple(value for _, value in known))


def rollout_rows(history: History) -> list[int]:
    """Indices of the rows that tell of a new rollout: several updates can share one, and their rows repeat it.

    TRL counts tokens when it samples, so `num_tokens` stands in the first row of each rollout alone.
    """
    rows = range(len(history))
    if "num_tokens" not in history.names:
        return list(rows)
    return [index for index in rows if history.rows[index].get("num_tokens") is not None]
