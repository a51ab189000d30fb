"""1.0 when the final number is exactly the gold one, as in GSM8K. Fast, and enough when every gold is a plain number.

    rewards: [rewards/exact_number.py:exact_number]

The final answer is the last `\\boxed{}`, `#### 42` or `answer is 42`. Commas and a dollar sign do not matter; 3 is 3.0.
A row whose gold is not a number gets None: the reward does not apply to it.
"""

from fractions import Fraction

from rltt.rewards.extract import completion_text, final_answer


def exact_number(completions, gold, **kwargs):
    golds = [number(str(value)) for value in gold]
    answers = [number(final_answer(completion_text(completion)) or "") for completion in completions]
    return [None if gold is None else float(answer == gold) for gold, answer in zip(golds, answers, strict=True)]


def number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "").replace("\\$", "").strip(" $."))
    except (ValueError, ZeroDivisionError):
        return None
