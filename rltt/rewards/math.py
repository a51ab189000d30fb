"""The math verifier: is the final answer of a completion the gold answer?

`grade.py` decides one pair in a worker process; here are the two doors to it, for Python and for TRL.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rltt.rewards.extract import completion_text
from rltt.rewards.outcome import STATUSES, Outcome
from rltt.rewards.pool import Pool, Reply

_pool: Pool | None = None
_starting = threading.Lock()


def shared_pool() -> Pool:
    """The process's one pool of math workers; its processes start when first used and end with this one."""
    global _pool
    with _starting:
        if _pool is None:
            _pool = Pool("rltt.rewards.grade:grade")
        return _pool


def verify_math(golds: Sequence[str], completions: Sequence[str]) -> list[Outcome]:
    """Grade each completion against the gold answer at the same place; one `Outcome` each, in order.

    A gold is a bare answer in LaTeX or plain text (`\\frac{1}{2}`, `70,110`, `\\text{Evelyn}`), boxed or not. The
    completion's answer is found as `extract.py` says. Takes at most the pool's deadline for an item; callable from
    threads.
    """
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds for {len(completions)} completions")
    return [_outcome(reply) for reply in shared_pool().map(list(zip(golds, completions, strict=True)))]


def _outcome(reply: Reply) -> Outcome:
    if reply.status == "ok":
        return reply.value
    return Outcome("timeout" if reply.status == "timeout" else "error", reply.detail)


def math_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """TRL reward: 1.0 right; 0.0 wrong, unparseable or timed out; None (TRL ignores it) when the gold is bad.

    Logs the share of each outcome as `reward/math/right` and so on.
    """
    outcomes = verify_math([str(value) for value in gold], [completion_text(completion) for completion in completions])
    if log_metric is not None and outcomes:
        counts = Counter(outcome.status for outcome in outcomes)
        for status in STATUSES:
            log_metric(f"reward/math/{status}", counts[status] / len(outcomes))
    return [REWARD_OF[outcome.status] for outcome in outcomes]


def _check_golds(golds: Sequence[str]) -> list[Outcome]:
    """Each gold graded against itself, as a completion that boxes it (see `golds.py`)."""
    return verify_math(golds, [rf"\boxed{{{gold}}}" for gold in golds])


math_reward.check_golds = _check_golds  # type: ignore[attr-defined]

# The grader's own failure says nothing of the completion, so it must not be trained on either.
REWARD_OF = {"right": 1.0, "wrong": 0.0, "unparseable": 0.0, "timeout": 0.0, "bad_gold": None, "error": None}
