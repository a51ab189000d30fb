"""Is one plain value the gold one? Numbers with units, expressions, words, choice letters."""

import re
from contextlib import suppress
from dataclasses import replace

import sympy

from rltt.rewards.quantity import Quantity, in_base, quantity
from rltt.rewards.spelling import squeezed
from rltt.rewards.units import named_unit
from rltt.rewards.value import TooLargeError, UnreadableError, equal, expression

_CHOICES = set("ABCDEFGH")
_DOTS = re.compile(r"\\[lcv]?dots|\.\.\.|…")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_DEGREE, _RADIAN = named_unit("°"), named_unit("rad")


def check_value(text: str) -> None:
    """Raises `UnreadableError` unless the text is a number, an expression or words."""
    value = quantity(text)
    if not value.text:
        raise UnreadableError("empty")
    if value.number is None and not in_base(text) and not is_words(value.text) and not _DOTS.search(text):
        with suppress(TooLargeError):  # which can be read, and compared as text
            expression(value.text)


def same_value(gold: str, answer: str) -> bool:
    """The gold comes first: `2516_8` may be given as 2516, for the question says the base."""
    if squeezed(gold) == squeezed(answer) or same_words(gold, answer):
        return True
    if _DOTS.search(gold) or _DOTS.search(answer):
        return False
    left, right = quantity(gold, is_gold=True), quantity(answer)
    if _same_angle(left, right):
        return True
    if (converted := _converted(left, right)) is None:
        return False
    if (numbers := _same_numbers(converted, right)) is not None:
        return numbers
    gold_base, answer_base = in_base(gold), in_base(answer)
    if answer_base:
        return answer_base.value == (gold_base.value if gold_base else left.number)
    if gold_base:
        return gold_base.digits == right.text
    if is_words(left.text) or is_words(right.text):
        return False
    return equal(_value(converted), _value(right))


def same_words(gold: str, answer: str) -> bool:
    """Words, and letters of choices, without regard to case (which counts for variables)."""
    left, right = words(gold), words(answer)
    return left == right and _are_words(gold) and _are_words(answer) and (len(left) > 1 or gold in _CHOICES)


def same_number(gold: str, answer: str) -> bool:
    r"""Whether both are numbers, and equal: `\text{nine apples}` is 9."""
    right = quantity(answer)
    left = _converted(quantity(gold, is_gold=True), right)
    return left is not None and bool(_same_numbers(left, right))


def _are_words(text: str) -> bool:
    r"""Whether a text may be compared as words, which leave brackets out: not `\sqrt{2} x`, not `f(x +1)`."""
    text = text.replace(r"\text", "")
    return "\\" not in text and (is_words(text) or not re.search(r"[^A-Za-z .,'`\"(){}-]", text))


def is_letter(text: str, letter: str) -> bool:
    """Whether a text is nothing but this letter of a list of choices."""
    return words(text) == letter.casefold()


def is_a_letter(text: str) -> bool:
    """Whether a text is nothing but a letter of a list of choices."""
    return words(text).upper() in _CHOICES


def is_words(text: str) -> bool:
    r"""Whether a text is words rather than mathematics: has a `\text{}`, or a run of letters too long for a product."""
    return r"\text{" in text or re.search(r"[A-Za-z]{4,}", _COMMAND.sub(" ", text)) is not None


def words(text: str) -> str:
    """A text as its bare words in lower case; `Option C` is `c`, `an ellipse` is `ellipse`."""
    bare = re.sub(r"\\text|[{}()\\$.,'`\"*]|(?<=[A-Za-z])-(?=[A-Za-z])", " ", text).casefold().split()
    if len(bare) == 2 and bare[0] in ("option", "choice", "answer"):
        bare = bare[1:]
    return " ".join(bare[1:] if len(bare) > 1 and bare[0] in ("a", "an", "the") else bare)


def _same_numbers(left: Quantity, right: Quantity) -> bool | None:
    """28 % is 28, for which was asked, as well as 0.28. None when they are not both rational numbers.

    Where the gold is a share, such as 1/4, percent were not asked for: 0.25 % is not 0.25.
    """
    a, b = left.number, right.number
    if a is None or b is None:
        return None
    if left.percent == right.percent:
        return a == b
    if left.percent:
        return a in (b, 100 * b)
    return 100 * a == b or (a == b and abs(a) >= 1)


def _value(quantity: Quantity) -> sympy.Expr:
    """As an expression; what is a number is not left to the parser, to which `1e16` is a product."""
    number = quantity.number
    return expression(quantity.text) if number is None else sympy.Rational(number.numerator, number.denominator)


def _same_angle(left: Quantity, right: Quantity) -> bool:
    r"""Whether one is in degrees and the other in radians (a multiple of \pi needs no unit), and they are equal."""
    degrees, others = (left, right) if left.unit == _DEGREE else (right, left)
    radians = others.unit == _RADIAN or (others.unit is None and r"\pi" in others.text)
    if degrees.unit != _DEGREE or not radians:
        return False
    return equal(expression(rf"\frac{{\pi}}{{180}} \cdot ({degrees.text})"), expression(others.text))


def _converted(left: Quantity, right: Quantity) -> Quantity | None:
    """`left` in the unit of `right`; None where their units contradict each other."""
    if left.unit is None or right.unit is None:
        return left
    factor = left.unit.conversion(right.unit)
    if factor is None or factor == 1:
        return left if factor else None
    text = (
        str(left.number * factor)
        if left.number is not None
        else rf"({left.text}) \cdot \frac{{{factor.numerator}}}{{{factor.denominator}}}"
    )
    return replace(left, text=text)
