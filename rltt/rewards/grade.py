"""One completion against one gold answer, in a worker process of the pool."""

from collections.abc import Iterator
from functools import lru_cache

from rltt.rewards.answer import Answer, nesting, readings
from rltt.rewards.compare import check, same
from rltt.rewards.extract import final_answer, gold_answer
from rltt.rewards.outcome import Outcome
from rltt.rewards.value import UnreadableError

# No answer is that long or that deep. What is, is a model repeating itself, and slow to parse.
MAX_LENGTH = 2000
MAX_NESTING = 40


# The parser builds its tables as it meets new grammar, and sympy loads parts of itself when needed. These golds and
# answers lead through most of both; they are those of MATH that take longest in a new process.
_TYPICAL = [
    (r"\frac{x^{2}+1}{2}-\sqrt{3}y", r"\frac{x^2}{2}-y\sqrt{3}"),
    (r"\sin(2x)\cos y", r"\log_{2}{8}+a(b+c)"),
    (r"3i+e^{x}", "n!-|x|"),
    ("y=2x+3", "12x-4y+3z-169=0"),
    (r"(-\infty,3)\cup[4,\infty)", r"x<3 \text{ or } x \ge 4"),
    (r"\frac{2\pi}{3}", r"2\cos 15^\circ"),
    ("8y^{11}+6y^9-2y^7", "x^5-x^4+x^3-x^2+x-1"),
    ("3x(3x+1)", "(-4x^2+x+1)(4x^2+x+1)"),
    (r"\frac{2x-7}{(x+1)(x-2)}", r"\frac{3x^2}{2}"),
    (r"2\sin 5x \cos x", r"2\tan^2 x"),
    ("13a^2(a+7)", "-29x^5(7x^6-2)"),
    (r"\begin{pmatrix} 1/\sqrt{2} & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
]


def warm_up() -> Iterator[None]:
    """Grade typical answers, one a step: the nursery does so while it waits (see `worker.py`)."""
    for gold, answer in _TYPICAL:
        grade((gold, rf"\boxed{{{answer}}}"))
        yield


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
    if nesting(text) > MAX_NESTING:
        raise UnreadableError("brackets nested too deeply")
    answers = readings(text)
    for answer in answers:
        check(answer)
    return answers
