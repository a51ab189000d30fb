"""Which learning rate a probe recommends, and why. Numbers only.

KL grows like (learning rate · steps)² at first and slows down as the policy leaves its start. In the 25 healthy runs of
benchmarks/verdicts (80 steps), KL after 5 updates went like the square of the rate within a factor of 2.2, up to a KL
of 0.03. Where it was above 0.01, it then grew to the end like the steps to the power 0.1 to 0.6; where it was below
0.003, to the power 0.9 to 1.8.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from rltt.recipe import Recipe
from rltt.telemetry.causes import KL_FAR
from rltt.telemetry.changes import Change, nice
from rltt.telemetry.signals import KL_AIM, KL_NOTHING

GROWTH = 0.5
"""KL at the end of a run is taken to be that of the probe times (steps of the run / steps of the probe) to this power;
`GROWTH_LEAST` and `GROWTH_MOST` bound it."""

GROWTH_LEAST, GROWTH_MOST = 0.1, 1.0

BELOW_UNSTABLE = 3.0
"""A recommended rate is at least so many times smaller than one that was unstable."""

FARTHEST = 10.0
"""How many times beyond the rates that were tried a recommendation may lie."""


@dataclass(frozen=True)
class Trial:
    """One learning rate.

    Attributes:
        rows: the metrics of each step. The KL in a row is that before the step's update.
    """

    rate: float
    rows: Sequence[dict[str, Any]]

    def _known(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if row.get(name) is not None]

    @property
    def kl(self) -> float | None:
        """To the start, after all updates but that of the last row; None where it is not a number."""
        return self.rows[-1].get("kl") if self.rows else None

    @property
    def grad_norm(self) -> float | None:
        """Median over the steps, before clipping."""
        return median(known) if (known := self._known("grad_norm")) else None

    @property
    def changed(self) -> float | None:
        """Mean share of weights that an update changed."""
        return fmean(known) if (known := self._known("update/changed")) else None

    @property
    def solve_rates(self) -> list[float]:
        """Of each step, on its own prompts."""
        return self._known("solve_rate")

    @property
    def entropies(self) -> list[float]:
        """Of each step."""
        return self._known("entropy")

    @property
    def unstable(self) -> str | None:
        """What is wrong at this rate; None where nothing is."""
        norms, entropies = self._known("grad_norm"), self.entropies
        if self.kl is None or len(norms) < len(self.rows) or any(row.get("nonfinite_steps") for row in self.rows):
            return "not finite"
        if self.kl > KL_FAR:
            return f"KL above {KL_FAR:g}"
        positive = [norm for norm in norms if norm > 0]
        if positive and max(positive) > 10 * median(positive):
            return "gradient spikes"
        if entropies[0] > 0.02 and entropies[-1] < 0.35 * entropies[0]:
            return "entropy collapses"
        return None

    def to_json(self) -> dict[str, Any]:
        """The numbers of `RateReport.render`."""
        return {
            "learning_rate": self.rate,
            "kl": self.kl,
            "kl_by_step": [row.get("kl") for row in self.rows],
            "grad_norm": self.grad_norm,
            "update_changed": self.changed,
            "entropy": self.entropies,
            "solve_rate": self.solve_rates,
            "unstable": self.unstable,
        }

    def __str__(self) -> str:
        def show(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        first, last = (show(values[index] if (values := self.solve_rates) else None, ".2f") for index in (0, -1))
        return (
            f"{self.rate:<8.2g} {show(self.kl, '.1e'):>8} {show(self.grad_norm, '.3g'):>10} "
            f"{show(self.changed, '.0%'):>8}   {first} to {last}   {self.unstable or ''}".rstrip()
        )


@dataclass(frozen=True)
class Recommendation:
    """A learning rate, and the bounds between which the right one may lie.

    Attributes:
        low, high: reach `KL_AIM` if KL grows as fast, or as slowly, as it may.
        expected_kl: at the end of the run.
        reason: how it was found.
    """

    rate: float
    low: float
    high: float
    expected_kl: float
    reason: str


@dataclass(frozen=True)
class RateReport:
    """What a few steps at each learning rate have shown.

    Attributes:
        recipe: that of the run.
        steps: updates at each rate.
        trials: in the order in which they were made.
    """

    recipe: Recipe
    steps: int
    trials: tuple[Trial, ...]

    @property
    def horizon(self) -> int:
        """Updates of the run."""
        return self.recipe.train.max_steps

    def _grown(self, growth: float) -> float:
        """KL at the end of the run over KL at the end of the probe."""
        return max(1.0, self.horizon / self.steps) ** growth

    @cached_property
    def stable(self) -> list[Trial]:
        """By learning rate, up to the first that is unstable, and only where the policy moved at all."""
        ordered = sorted(self.trials, key=lambda trial: trial.rate)
        first = next((index for index, trial in enumerate(ordered) if trial.unstable), len(ordered))
        return [trial for trial in ordered[:first] if (trial.kl or 0.0) > KL_NOTHING]

    @cached_property
    def recommended(self) -> Recommendation | None:
        """The rate at which KL should reach `KL_AIM` by the end of the run; None where none moved the policy.

        Between two rates that were tried log KL is a straight line in log rate, beyond them KL is proportional to the
        square of the rate.
        """
        if not self.stable:
            return None
        rate, low, high = (self._reaching(KL_AIM / self._grown(g)) for g in (GROWTH, GROWTH_MOST, GROWTH_LEAST))
        reason = f"KL {KL_AIM:g} expected at step {self.horizon}"
        tried = [trial.rate for trial in self.stable]
        bound = self.bound
        if bound is not None and rate > bound:
            rate, reason = bound, f"{BELOW_UNSTABLE:g} times below {bound * BELOW_UNSTABLE:g}, which is unstable"
        elif not tried[0] <= rate <= tried[-1]:
            rate = min(max(rate, tried[0] / FARTHEST), tried[-1] * FARTHEST)
            reason = (
                "towards " + reason.replace(" expected", "") + ", beyond the rates that were tried: probe there too"
            )
        rate = nice(rate)
        if bound is not None and rate > bound:
            rate = nice(rate / 2)
        at_rate = self._kl_at(rate) * self._grown(GROWTH)
        return Recommendation(rate, nice(low), nice(min(high, bound or high)), at_rate, reason)

    @property
    def bound(self) -> float | None:
        """What a recommended rate must not exceed, by the smallest unstable one."""
        unstable = [trial.rate for trial in self.trials if trial.unstable]
        return min(unstable) / BELOW_UNSTABLE if unstable else None

    def _reaching(self, kl: float) -> float:
        """The learning rate at which the probe would have come to a KL."""
        return _along([(trial.kl or 0.0, trial.rate) for trial in self.stable], kl, power=1 / 2)

    def _kl_at(self, rate: float) -> float:
        """The KL that the probe would have come to at a learning rate."""
        return _along([(trial.rate, trial.kl or 0.0) for trial in self.stable], rate, power=2)

    @property
    def change(self) -> Change | None:
        """The recommendation as an override."""
        found, now = self.recommended, self.recipe.train.learning_rate
        if found is None:
            return None
        bounds = f"{found.low:g} to {found.high:g} by how KL grows beyond the probe"
        return Change(f"train.learning_rate={found.rate:g}", f"now {now:g}: {found.reason}; {bounds}")

    def to_json(self) -> dict[str, Any]:
        """Everything that `render` shows, as JSON has it."""
        return {
            "recipe": self.recipe.name,
            "steps": self.steps,
            "horizon": self.horizon,
            "kl_aim": KL_AIM,
            "growth": {"expected": GROWTH, "least": GROWTH_LEAST, "most": GROWTH_MOST},
            "rates": [trial.to_json() for trial in self.trials],
            "recommended": None if self.recommended is None else asdict(self.recommended),
            "change": None if self.change is None else asdict(self.change),
        }

    def render(self) -> str:
        """The report as text."""
        lines = [
            f"{self.steps} updates at each rate from the same start, on the same prompts; KL to the start after them",
            HEAD,
            *map(str, self.trials),
            "",
        ]
        if self.change is None:
            lines.append("no rate recommended: none of these moved the policy and was stable")
        else:
            lines += ["suggestion, to be put after `rltt train recipe.yaml`:", f"  {self.change}"]
        return "\n".join(lines)


HEAD = f"{'rate':<8} {'KL':>8} {'grad norm':>10} {'changed':>8}   solve rate"


def _along(points: Sequence[tuple[float, float]], x: float, power: float) -> float:
    """y at x on straight lines between points in logarithms; beyond them y goes like x to the power."""
    known = sorted((math.log(a), math.log(b)) for a, b in points)
    at = math.log(x)
    for (left, y_left), (right, y_right) in pairwise(known):
        if left <= at <= right and left < right:
            return math.exp(y_left + (y_right - y_left) * (at - left) / (right - left))
    near = known[0] if at < known[0][0] else known[-1]
    return math.exp(near[1] + power * (at - near[0]))
