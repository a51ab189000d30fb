"""What a history says about the four things a verdict weighs: solve rate, mixed groups, KL, certainty.

Each is one object with its numbers, its window and its sequential test. Thresholds stand here, with their source.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from rltt.telemetry.history import History
from rltt.telemetry.sequential import Slope, neighbour_noise, normal_sprt, share_sprt, trend
from rltt.telemetry.windows import Window, Windows, rollout_rows

KL_MOVES = 5e-3
"""KL to the start that a run has to reach. Closing the Loop, table 9: 0.084 and a gain, 0.003 and none."""

KL_AIM = 0.1
"""KL that a suggested learning rate aims at, by the end of the run: about that of the paper's run that gained."""

KL_NOTHING = 1e-12
"""Below this two models are the same one, up to the rounding of their log-probs (rltt measures it in float64)."""

KL_NOTHING_FP32 = 2e-7
"""The same for e^d - d - 1 computed in fp32, as TRL does."""

MIXED_LOW, MIXED_ENOUGH = 0.08, 0.2
"""Shares of mixed groups with too little signal and with enough of it: the two hypotheses that are weighed."""

UNRELATED = 0.1
"""Correlation of reward and log-prob below which a reward has nothing to do with the task; usual are 0.3 to 0.5."""

DEFAULT_PROMPTS, DEFAULT_GROUP = 32, 8
"""Prompts in a rollout and completions of each, where no recipe says so."""

DEFAULT_HORIZON = 140
"""Steps that a run is taken to have where nobody says so."""


@dataclass(frozen=True)
class KL:
    """How far the policy has gone, and will have gone at the end.

    Attributes:
        last: over the last few steps.
        at_end: expected at the last step of the run, if the policy goes straight on: KL grows like the square of
            the way, and the way like the sum of the learning rates. Noise walks slower, so this is an upper estimate.
        stays: log-likelihood ratio of "it will not reach `KL_MOVES`" to "it will".
        leaves: the same the other way round, if it grew no further than like the root of the way.
    """

    last: Window
    at_end: float
    stays: float
    leaves: float


@dataclass(frozen=True)
class Mixed:
    """Share of groups with solved and unsolved completions, over the last rollouts.

    Attributes:
        lacking: log-likelihood ratio of `MIXED_LOW` to `MIXED_ENOUGH`.
    """

    window: Window
    share: float
    lacking: float


@dataclass(frozen=True)
class Certainty:
    """Correlation of reward and log-prob, over all rollouts. `upper` bounds it from above with 97.5 % confidence."""

    window: Window
    mean: float
    upper: float


class Signals:
    """The measured facts of a run; None where a metric is missing, which `missing` names."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.windows = Windows(history)
        rows = rollout_rows(history)
        self.rollouts = History([history.rows[index] for index in rows], history.source, history.settings)
        self.per_rollout = Windows(self.rollouts)

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the recipe."""
        return self.history.settings.get(key, default)

    @property
    def horizon(self) -> int:
        """Steps that the run is to have."""
        return max(self.history.total_steps or DEFAULT_HORIZON, self.history.last_step)

    @property
    def prompts(self) -> int:
        """Prompts in a rollout."""
        return self.setting("train.prompts_per_step", DEFAULT_PROMPTS) * self.setting("train.updates_per_rollout", 1)

    @property
    def group(self) -> int:
        """Completions of a prompt."""
        return self.setting("rollout.num_generations", DEFAULT_GROUP)

    @cached_property
    def solve_name(self) -> str | None:
        """What tells of progress: solve_rate, or the reward where TRL logs no solve rate."""
        return next((name for name in ("solve_rate", "reward") if name in self.history.names), None)

    @cached_property
    def missing(self) -> list[str]:
        """Metrics that a verdict would have read."""
        wanted = ("solve_rate", "mixed_groups", "kl", "grad_norm", "reward_logp_corr", "update/changed", "entropy")
        return [name for name in wanted if name not in self.history.names]

    @cached_property
    def solve(self) -> Slope | None:
        """The trend of the solve rate."""
        return self._trend(self.solve_name) if self.solve_name else None

    @cached_property
    def reward(self) -> Slope | None:
        """The trend of the reward that is optimised."""
        return self._trend("reward")

    def _trend(self, name: str) -> Slope | None:
        _, values = self.rollouts.series(name)
        return self.trend_of(values) if values else None

    def trend_of(self, values: Sequence[float]) -> Slope | None:
        """The trend of solve rates or rewards, one a rollout."""
        spread = neighbour_noise(values)
        rate = min(max(fmean(values), 0.02), 0.98)
        # Prompts differ, so a solve rate is noisier than its completions, and less noisy than one completion a prompt.
        usual = 0.7 * math.sqrt(rate * (1 - rate) / self.prompts)
        unit = 1.0 if min(values) >= 0 and max(values) <= 1 else max(spread / usual, 1.0)
        return trend(values, expected_slope=0.3 * unit / self.expected_rollouts, floor=usual * unit)

    @property
    def expected_rollouts(self) -> float:
        """Rollouts in the whole run."""
        shared = self.setting("train.updates_per_rollout", 1) * self.setting("train.num_iterations", 1)
        return max(self.horizon / shared, 1.0)

    @cached_property
    def solve_last(self) -> Window | None:
        """Solve rate over the last rollouts."""
        return self.per_rollout.last(self.solve_name) if self.solve_name else None

    @cached_property
    def solve_first(self) -> Window | None:
        """Solve rate over the first rollouts."""
        return self.per_rollout.first(self.solve_name) if self.solve_name else None

    @cached_property
    def mixed(self) -> Mixed | None:
        """Mixed groups of the last rollouts, at most 20."""
        name, turned = "mixed_groups", False
        if name not in self.history.names:
            name, turned = "frac_reward_zero_std", True
        window = self.per_rollout.last(name, width=20)
        if window is None:
            return None
        shares = [1 - value if turned else value for value in window.values]
        trials = len(shares) * self.prompts
        llr = share_sprt(sum(shares) * self.prompts, trials, low=MIXED_ENOUGH, high=MIXED_LOW)
        return Mixed(window, fmean(shares), llr)

    @cached_property
    def certainty(self) -> Certainty | None:
        """Correlation of reward and log-prob, from at least five rollouts."""
        window = self.per_rollout.whole("reward_logp_corr")
        if window is None or len(window.values) < 5:
            return None
        return Certainty(window, window.mean, window.mean + 1.96 * stdev(window.values) / math.sqrt(len(window.values)))

    @cached_property
    def kl(self) -> KL | None:
        """KL to the start. The first step of a run has none by construction and says nothing."""
        way = self._way()
        known = [
            (way[index], value)
            for index, row in enumerate(self.history.rows)
            if (value := row.get("kl")) is not None and int(row["step"] or 0) > 1 and way[index] > 0
        ]
        last = self.windows.last("kl", width=min(5, self.windows.width))
        if not known or last is None:
            return None
        recent = known[len(known) // 2 :][-20:]
        logs = [math.log(max(value, 1e-9)) for _, value in recent]
        # Successive KLs share the way that the policy has gone, so they are not worth as much as independent ones.
        noise = max(1.5 * neighbour_noise(logs), 0.4)
        end = way[-1] + self._way_ahead()
        straight = [log + 2 * math.log(end / gone) for log, (gone, _) in zip(logs, recent, strict=True)]
        walking = [log + 0.5 * math.log(end / gone) for log, (gone, _) in zip(logs, recent, strict=True)]
        aim, step = math.log(KL_MOVES), math.log(2)
        return KL(
            last,
            math.exp(fmean(straight)),
            -normal_sprt(straight, low=aim - step, high=aim, noise=noise),
            normal_sprt(walking, low=aim, high=aim + step, noise=noise),
        )

    def _way(self) -> list[float]:
        """Sum of the learning rates up to each row, in units of the largest; steps where it is not known."""
        rates = self.history.column("lr")
        steps = [int(row["step"] or 0) for row in self.history.rows]
        peak = max((rate for rate in rates if rate is not None), default=0.0)
        if peak <= 0:
            return [float(step) for step in steps]
        way, total, before = [], 0.0, 0
        for step, rate in zip(steps, rates, strict=True):
            total += (step - before) * (1.0 if rate is None else rate / peak)
            before = step
            way.append(total)
        return way

    def _way_ahead(self) -> float:
        """The same from here to the end. A rate that falls to zero covers half of the way that is left."""
        left = self.horizon - self.history.last_step
        falling = self.setting("train.lr_scheduler_type", "constant") in ("linear", "cosine")
        return left * (0.5 if falling else 1.0)

    @property
    def learning_rate(self) -> float | None:
        """The recipe's, or the largest that was logged."""
        rates = [rate for rate in self.history.column("lr") if rate is not None]
        found = self.setting("train.learning_rate") or max(rates, default=None)
        return found if found else None
