"""What the measures say about the number of loops: the rule of LoopCoder-v2, section 5.

An effective rank that still rises at the last loop says that another loop may refine; one that has begun to fall says
that the representations narrow, and further loops add cost. The rule reads one model; it does not train another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CLEAR = 2.0
"""Standard errors that a change of rank must exceed to be one."""

Trend = Literal["rising", "level", "falling"]


@dataclass(frozen=True)
class Recommendation:
    """The rule's answer.

    Attributes:
        verdict: what to do, in words that stay the same.
        loops: how many loops the rule says; None when it says nothing.
        reason: in a sentence, with the numbers.
        trend: of the effective rank from loop r - 1 to r, for loops 2 to R.
        limits: what the answer does not know.
    """

    verdict: Literal["another loop may pay", "stop", "undecided"]
    loops: int | None
    reason: str
    trend: list[Trend]
    limits: list[str]


def trend_of(change: float, stderr: float | None) -> Trend:
    """Whether a change of rank is one. Without a standard error (a single sequence) its sign decides."""
    if (stderr is not None and abs(change) <= CLEAR * stderr) or change == 0:
        return "level"
    return "rising" if change > 0 else "falling"


def recommend(
    ranks: Sequence[float],
    changes: Sequence[float],
    stderrs: Sequence[float | None],
    *,
    samples: int,
    trained_loops: int,
    offset: bool,
) -> Recommendation:
    """The number of loops by the trajectory of the effective rank.

    Args:
        ranks: mean effective rank at loops 1 to R.
        changes: mean over sequences of its change from loop r - 1 to r, for loops 2 to R.
        stderrs: of the changes.
        trained_loops: the checkpoint's own number of loops.
        offset: whether each loop has the cost of a shift.
    """
    loops = len(ranks)
    trend = [trend_of(change, stderr) for change, stderr in zip(changes, stderrs, strict=True)]
    limits = _limits(loops, samples, trained_loops, offset)
    if loops == 1:
        reason = "one loop has no rank to compare with; measure at more loops (--loops 2)"
        return Recommendation("undecided", None, reason, trend, limits)
    told = ", ".join(f"{rank:.2f}" for rank in ranks)
    last = _told(loops, changes[-1], stderrs[-1])
    if trend[-1] == "rising":
        reason = (
            f"the effective rank still rises at loop {loops} ({last}; by loop: {told}): loop {loops + 1} may refine"
        )
        return Recommendation("another loop may pay", loops + 1, reason, trend, limits)
    peak = loops
    while peak > 1 and trend[peak - 2] != "rising":
        peak -= 1
    falls = [r for r in range(peak + 1, loops + 1) if trend[r - 2] == "falling"]
    if not falls:
        reason = f"the effective rank is level at loop {loops} ({last}; by loop: {told}): neither rising nor falling"
        return Recommendation("undecided", None, reason, trend, limits)
    first = falls[0]
    fall = _told(first, changes[first - 2], stderrs[first - 2])
    reason = f"the effective rank falls from loop {first} on ({fall}; by loop: {told}): stop at loop {first - 1}"
    return Recommendation("stop", first - 1, reason, trend, limits)


def _told(loop: int, change: float, stderr: float | None) -> str:
    return f"{change:+.2f} from loop {loop - 1} to {loop}" + ("" if stderr is None else f" ± {stderr:.2f}")


def _limits(loops: int, samples: int, trained_loops: int, offset: bool) -> list[str]:
    limits = [
        "a rule of thumb from one family of models (7B PLT, 18T tokens); it does not measure task accuracy: evaluate "
        "the number of loops that it names",
        "the loop count of training shapes the ranks: another number of loops means another training",
        "it cannot tell whether the loops were trained: of a model just made or converted it says nothing",
    ]
    if samples < 2:
        limits.append("a single sequence: the changes have no standard error, and their sign alone decides")
    if loops != trained_loops:
        limits.append(
            f"measured at {loops} loops, trained with {trained_loops}: what untrained depth does is not known"
        )
    if not offset:
        limits.append("no shift between loops, so no offset cost: a falling rank speaks of narrowing alone")
    return limits
