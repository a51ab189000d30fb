"""Is one plain value the gold one? Numbers with units, expressions, words, choice letters."""

import re
from contextlib import suppress

from rltt.rewards.quantity import NUMBER_WORDS, Quantity, exact, in_base, quantity
from rltt.rewards.spelling import squeezed
from rltt.rewards.value import TooLargeError, UnreadableError, equal, expression

_CHOICES = set("ABCDEFGH")
_DOTS = re.compile(r"\\[lcv]?dots|\.\.\.|…")
_COMMAND = re.compile(r"\\[A-Za-z]+")


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
    if left.unit and right.unit and left.unit != right.unit and "?" not in (left.unit, right.unit):
        return False
    if (numbers := _same_numbers(left, right)) is not None:
        return numbers
    gold_base, answer_base = in_base(gold), in_base(answer)
    if answer_base:
        return answer_base.value == (gold_base.value if gold_base else left.number)
    if gold_base:
        return gold_base.digits == right.text
    if is_words(left.text) or is_words(right.text):
        return False
    return equal(expression(left.text), expression(right.text))


def same_words(gold: str, answer: str) -> bool:
    """Words, and letters of choices, without regard to case (which counts for variables); and `four` for 4."""
    left, right = words(gold), words(answer)
    if left == right:
        return len(left) > 1 or gold in _CHOICES
    for word, other in ((left, right), (right, left)):
        if word in NUMBER_WORDS:
            return exact(other) == NUMBER_WORDS[word]
    return False


def is_letter(text: str, letter: str) -> bool:
    """Whether a text is nothing but this letter of a list of choices."""
    return words(text) == letter.casefold()


def is_words(text: str) -> bool:
    r"""Whether a text is words rather than mathematics: has a `\text{}`, or a run of letters too long for a product."""
    return r"\text{" in text or re.search(r"[A-Za-z]{4,}", _COMMAND.sub(" ", text)) is not None


def words(text: str) -> str:
    """A text as its bare words in lower case; `Option C` is `c`."""
    bare = re.sub(r"\\text|[{}()\\$.,'\"*]", " ", text).casefold().split()
    return " ".join(bare[1:] if len(bare) == 2 and bare[0] in ("option", "choice") else bare)


def _same_numbers(left: Quantity, right: Quantity) -> bool | None:
    """28 % is 28, for which was asked, as well as 0.28. None when they are not both rational numbers."""
    a, b = left.number, right.number
    if a is None or b is None:
        return None
    if a == b or left.percent == right.percent:
        return a == b
    return a == 100 * b if left.percent else 100 * a == b
