"""One completion against one gold answer, in a worker process of the pool."""

from functools import lru_cache

from rltt.rewards.answer import Answer, readings
from rltt.rewards.compare import check, same
from rltt.rewards.extract import final_answer, gold_answer
from rltt.rewards.outcome import Outcome
from rltt.rewards.value import UnreadableError, warm_up

__all__ = ["grade", "warm_up"]

# No answer is that long. What is, is a model repeating itself, and slow to parse.
MAX_LENGTH = 2000


def grade(pair: tuple[str, str]) -> Outcome:
    """The outcome for a (gold, completion) pair."""
    gold, completion = pair
    try:
        golds = _read(gold_answer(gold))
    except UnreadableError as error:
        return Outcome("bad_gold", f"gold {gold[:80]!r}: {error}")
    text = final_answer(completion)
    if text is None:
        return Outcome("unparseable", "no final answer")
    try:
        return _verdict(golds, text)
    except UnreadableError as error:
        return Outcome("unparseable", f"answer {text[:80]!r}: {error}")


def _verdict(golds: list[Answer], text: str) -> Outcome:
    answers = _read(text)
    if len(golds) == len(answers) == 2:
        # Both may be one number or several (`100,200`). Nothing tells, so they are taken as numbers.
        golds, answers = golds[:1], answers[:1]
    right = any(same(gold, answer) for gold in golds for answer in answers)
    return Outcome("right" if right else "wrong", f"answer {text[:80]!r}")


@lru_cache(maxsize=4096)  # the completions of a group have one gold, and often the same answer
def _read(text: str) -> list[Answer]:
    if not text.strip():
        raise UnreadableError("empty")
    if len(text) > MAX_LENGTH:
        raise UnreadableError(f"{len(text)} characters long")
    try:
        answers = readings(text)
        for answer in answers:
            check(answer)
    except RecursionError as error:
        raise UnreadableError("nested too deeply") from error
    return answers
