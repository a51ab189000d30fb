"""Math, but only in a box: the built-in verifier, with 0.1 for a wrong answer that is at least boxed.

    rewards: [{use: rewards/math_boxed.py:math_boxed, solved_at: 1.0}]

Start from this file when `rewards: [math]` is nearly what you want. `verify_math` grades in worker processes with a
deadline; each outcome's `status` is right, wrong, unparseable, bad_gold, timeout or error, and `detail` says why.
"""

from rltt.data.boxed import last_boxed
from rltt.rewards import verify_math
from rltt.rewards.extract import completion_text, visible

IN_A_BOX = 0.1


def math_boxed(completions, gold, log_metric=None, **kwargs):
    boxes = [last_boxed(visible(completion_text(completion))) for completion in completions]
    outcomes = verify_math([str(value) for value in gold], [f"\\boxed{{{box or ''}}}" for box in boxes])
    if log_metric is not None:
        log_metric("reward/math_boxed/boxed", sum(bool(box) for box in boxes) / len(boxes))
    return [score(outcome.status, box) for outcome, box in zip(outcomes, boxes, strict=True)]


def score(status, box):
    if status in ("bad_gold", "error"):  # nothing can be said about the completion
        return None
    return 1.0 if status == "right" else IN_A_BOX * bool(box)
