"""Tests that may be read after every step: they speak as soon as the evidence is enough, and not before.

Reading an ordinary test again and again finds an effect sooner or later where there is none. These stay valid however
often they are read (Wald, Sequential Analysis, 1947; Robbins, Ann. Math. Stat. 41, 1970; Howard et al., Ann. Stat. 49,
2021). The noise is estimated from the run itself, which makes their error rates approximate.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

CERTAIN = 0.99
"""No confidence above this: models of noise are not that good."""


@dataclass(frozen=True)
class Slope:
    """The trend of a noisy series.

    Attributes:
        slope: change from one value to the next, least squares.
        stderr: its standard error.
        noise: standard deviation of a value around the trend.
        confidence: that the trend is not zero, at any time of reading: 1 - 1/E of the mixture test.
    """

    slope: float
    stderr: float
    noise: float
    confidence: float
    count: int

    @property
    def rises(self) -> float:
        """Confidence that the series rises."""
        return self.confidence if self.slope > 0 else 0.0

    @property
    def falls(self) -> float:
        """Confidence that the series falls."""
        return self.confidence if self.slope < 0 else 0.0


def trend(values: Sequence[float], *, expected_slope: float, floor: float, least: int = 6) -> Slope | None:
    """Whether a series rises or falls, by a mixture sequential test against "no trend".

    With x_i = a + b·i + noise, the residual of each value from the mean of those before it, scaled by √((i-1)/i), is
    independent noise around b·c_i, c_i = i/2·√((i-1)/i), whatever a. Under a normal prior b ~ N(0, τ²) the likelihood
    ratio against b = 0 is E = √(1/(1+τ²V/σ²))·exp(τ²S²/(2σ²(σ²+τ²V))), with S = Σ c·w and V = Σ c². Whoever reads E
    after every step sees E ≥ 1/α with probability at most α if there is no trend (Ville).

    Args:
        values: one a rollout.
        expected_slope: slope of a real trend, the scale τ of the prior. It must not depend on the number of values.
        floor: smallest noise of a value that is believed.
        least: values below which nothing is said: None.
    """
    count = len(values)
    if count < least:
        return None
    # Differences of neighbours see the noise and hardly the trend. `floor` counts like five of them.
    squares = sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2
    variance = (squares + 5 * floor**2) / (count - 1 + 5)
    total = values[0]
    weighted = information = 0.0
    for i, value in enumerate(values[1:], start=2):
        scale = math.sqrt((i - 1) / i)
        coefficient = i / 2 * scale
        weighted += coefficient * (value - total / (i - 1)) * scale
        information += coefficient**2
        total += value
    prior = expected_slope**2
    ratio = prior * information / variance
    log_e = -0.5 * math.log1p(ratio) + prior * weighted**2 / (2 * variance * (variance + prior * information))
    middle, mean = (count - 1) / 2, total / count
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    confidence = 0.0 if log_e <= 0 else min(CERTAIN, -math.expm1(-log_e))
    return Slope(slope, math.sqrt(variance / spread), math.sqrt(variance), confidence, count)


def normal_sprt(values: Sequence[float], *, low: float, high: float, noise: float) -> float:
    """Wald's log-likelihood ratio of "the mean is `high`" to "the mean is `low`" for normal values."""
    return sum((high - low) * (value - (high + low) / 2) for value in values) / noise**2


def share_sprt(hits: float, trials: float, *, low: float, high: float) -> float:
    """Wald's log-likelihood ratio of "the share is `high`" to "the share is `low`" after `hits` of `trials`."""
    return hits * math.log(high / low) + (trials - hits) * math.log((1 - high) / (1 - low))


def confidence(log_ratio: float) -> float:
    """Wald: a log-likelihood ratio of log((1-α)/α) is reached by mistake with probability at most about α."""
    return min(CERTAIN, 1 / (1 + math.exp(-max(min(log_ratio, 50.0), -50.0))))


def neighbour_noise(values: Sequence[float]) -> float:
    """Standard deviation around a slow trend, from the differences of neighbours; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(fmean([(b - a) ** 2 for a, b in itertools.pairwise(values)]) / 2)
