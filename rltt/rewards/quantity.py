r"""Numbers as people write them: `\$1,234.50`, `1\frac{1}{4}`, `28\%`, `18 dollars`, `0.\overline{3}`, `1.2e5`.

Read exactly, as fractions: 0.333 is not 1/3, and 1000001 is not 1000000.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rltt.rewards.units import NO_UNITS, Unit, is_known_unit, is_unit, named_unit, singular, unit_and_scale, word_set

_INTEGER = r"\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+"
_DECIMAL = rf"(?:(?:{_INTEGER})?\.\d+|(?:{_INTEGER})\.?)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\s*
    (?:
        (?:(?P<whole>\d+)\s*)?                                                    # of a mixed number
        (?: \\frac\{{\s*(?P<n1>-?{_DECIMAL})\s*\}}\{{\s*(?P<d1>-?{_DECIMAL})\s*\}} # \frac{{1}}{{4}}
          | (?<![\d.])(?P<n2>\d+)\s*/\s*(?P<d2>\d+)                               # 1/4
        )
      | (?P<n3>{_DECIMAL})\s*/\s*(?P<d3>{_DECIMAL})                               # 1.5/4
      | (?P<fixed>\d*\.\d*)\\overline\{{(?P<repeating>\d+)\}}                       # 0.\overline{{3}}
      | (?P<mantissa>{_DECIMAL})
        (?: \s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*(?P<power1>[-+]?\d{{1,4}})\s*\}}? # 1.2 \times 10^{{5}}
          | [eE](?P<power2>[-+]?\d{{1,4}})                                        # 1.2e5
        )
      | (?P<decimal>{_DECIMAL})
    )
    """,
    re.VERBOSE,
)
_DIGITS_IN_BASE = re.compile(r"(-?(?=[\w.]*\d)[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(\d{1,2}|[a-z]+)")

_CURRENCY = re.compile(r"(?:\bUS\s?)?([$€£¥₹])|^(USD|EUR|Rs)\b\.?")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
# What may stand behind a number: words in \text (several with a stroke between them), in parentheses, or plain ones;
# with a power or without.
_PIECE = r"\\text\{[^{}]*\}(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_TAIL_TEXT = re.compile(rf"\s*(?:/?\s*{_PIECE}(?:\s*/?\s*{_PIECE})*|\\Omega)\s*$")
_TAIL_WORDS = re.compile(r"(?<=[\d})\s])([A-Za-z¢][A-Za-z.¢-]*(?:[ /][A-Za-z.-]+)*)\s*(?:\^\s*\{?[23]\}?)?\s*$")
_TAIL_PARENTHESES = re.compile(r"\s\(\s*([A-Za-z][A-Za-z. -]+|[gmshlL])\s*\)$")
_TAIL_TEMPERATURE = re.compile(r"\^\\circ\s*(?:\\text\{)?\s*([CF])\s*\}?$")
_TAIL_PRIMES = re.compile(r"(?<=\d)\s*('{1,2}|\"|\^\s*\{?\\prime(?:\s*\\prime)?\}?)$")

# `1 hour 30 minutes`, `\$5 and 20 cents`, `5' 4"`: two amounts, of one thing perhaps.
_AMOUNTS = re.compile(r"(\$?\d[\d.]*[^\d,;]*?)(?:,? and |[ ,]+|(?<=[}'.]))(?=\d)(\d[\d.]*[^\d,;]*)")

# Numbers in words.
_TO_NINETEEN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_TO_NINETEEN += " seventeen eighteen nineteen"
_TENS_OF = "twen thir for fif six seven eigh nine"
_TENS = {f"{ten}ty": 10 * number for number, ten in enumerate(_TENS_OF.split(), 2)}
_NUMBER_WORDS = {word: number for number, word in enumerate(_TO_NINETEEN.split())} | _TENS
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}


@dataclass(frozen=True)
class Quantity:
    """A number or an expression without what surrounds it. `unit` is None for none."""

    text: str
    unit: Unit | None = None
    percent: bool = False

    @property
    def number(self) -> Fraction | None:
        return exact(self.text)


@lru_cache(maxsize=4096)
def quantity(text: str, is_gold: bool = False) -> Quantity:
    """Part a number or an expression from its money sign, unit and percent sign. `text` is tidy.

    The 3 of `3m` is a length in an answer where 3 is the gold, but `3m` as a gold is an expression.
    """
    unit, percent, scale = None, False, 1
    if currency := _CURRENCY.search(text):
        unit = named_unit(currency[1] or currency[2])
        text = _CURRENCY.sub("", text).strip()
    while True:
        if text.endswith("%"):
            percent, text = True, text[:-1].strip()
        elif text.endswith("^\\circ") and not _FUNCTION.search(text):
            unit, text = named_unit("°"), text.removesuffix("^\\circ").strip()
        elif tail := _TAIL_TEMPERATURE.search(text):
            unit = named_unit("celsius" if tail[1] == "C" else "fahrenheit")
            text = text[: tail.start()].strip()
        elif tail := _TAIL_TEXT.search(text):
            words, rest = _TEXT.sub(r" \1 ", tail[0].replace(r"\Omega", "ohm")), text[: tail.start()].strip()
            if not rest or word_set(words) & NO_UNITS:
                break
            unit, factor = unit_and_scale(words, unit)
            scale, text = scale * factor, rest
        elif (tail := _TAIL_PARENTHESES.search(text)) and exact(text[: tail.start()]) is not None:
            unit, _ = unit_and_scale(tail[1], unit)
            text = text[: tail.start()].strip()
        elif (tail := _TAIL_WORDS.search(text)) and _in_words(text) is None:
            words, spaced, rest = tail[1], text[tail.start() - 1] == " ", text[: tail.start()].strip()
            is_number = exact(rest) is not None
            # Behind anything but a number only what can be nothing but a unit: `12\pi cm^2`, not `3\pi ab`.
            if is_number and not is_unit(words, spaced):
                break
            if not is_number and not (spaced and len(words) > 1 and is_known_unit(words) and rest[-1:] not in "+-*/="):
                break
            if is_gold and not spaced and len(words) == 1:
                break
            unit, factor = unit_and_scale(tail[0], unit)
            scale, text = scale * factor, rest
        elif tail := _TAIL_PRIMES.search(text):
            unit = named_unit("ft" if tail[1] in ("'", "^{\\prime}", "^\\prime") else "in")
            text = text[: tail.start()].strip()
        else:
            break
    if scale != 1:
        number = exact(text)
        text = str(number * scale) if number is not None else rf"({text}) \cdot {scale}"
    return Quantity(text, unit, percent)


def sum_of_amounts(text: str) -> str | None:
    r"""`1 hour 30 minutes` and `5 ft 4 in` in the smaller unit; None for what is no such sum.

    The units must convert, the larger one first: `4 apples and 3 oranges` are two values.
    """
    match = _AMOUNTS.fullmatch(text)
    if match is None:
        return None
    first, second = quantity(match[1]), quantity(match[2])
    if first.unit is None or second.unit is None or first.number is None or second.number is None:
        return None
    factor = first.unit.conversion(second.unit)
    if factor is None or factor <= 1 or not 0 <= second.number < factor:
        return None
    return rf"{first.number * factor + second.number} \text{{{second.unit.name}}}"


def exact(text: str) -> Fraction | None:
    """The rational number that `text` writes, or None if it is anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return _in_words(text)
    part = match.groupdict()
    sign = -1 if part["sign"] == "-" else 1
    if part["fixed"] is not None:
        return sign * _repeating(part["fixed"], part["repeating"])
    for top, bottom in (("n1", "d1"), ("n2", "d2"), ("n3", "d3")):
        if part[top] is not None:
            numerator, denominator = _decimal(part[top]), _decimal(part[bottom])
            if denominator == 0:
                return None
            fraction = numerator / denominator
            if part["whole"] is None:
                return sign * fraction
            # 2\frac{1}{3} is a mixed number; 2\frac{5}{3} can only be a product.
            return sign * (int(part["whole"]) + fraction if 0 < fraction < 1 else int(part["whole"]) * fraction)
    if part["mantissa"] is not None:
        return sign * _decimal(part["mantissa"]) * Fraction(10) ** int(part["power1"] or part["power2"])
    return sign * _decimal(part["decimal"])


def _in_words(text: str) -> Fraction | None:
    r"""`nine`, `\text{twenty-one}`, `half`, `two thirds`; None for anything else."""
    words = _TEXT.sub(r"\1", text).casefold().replace("-", " ").strip(" .").split()
    if not 1 <= len(words) <= 3 or not all(word.isalpha() for word in words[-1:]):
        return None
    parts = Fraction(1)
    if (part := _PARTS.get(singular(words[-1]))) and (len(words) > 1 or part == 2):
        parts = Fraction(1, part)
        words = [word for word in words[:-1] if word != "a"] or ["one"]
    elif words[-1] == "halves":
        parts, words = Fraction(1, 2), words[:-1]
    numbers = [_NUMBER_WORDS.get(word) for word in words]
    match numbers:
        case [int(number)]:
            return number * parts
        case [int(tens), int(ones)] if words[0] in _TENS and 0 < ones < 10:
            return (tens + ones) * parts
        case _:
            return None


@dataclass(frozen=True)
class Based:
    """`2516_8`: its digits as written and its value."""

    digits: str
    value: Fraction


def in_base(text: str) -> Based | None:
    match = _DIGITS_IN_BASE.fullmatch(re.sub(r"\\text|[{}() ]", "", text))
    if match is None:
        return None
    base = int(match[2]) if match[2].isdigit() else _NUMBER_WORDS.get(match[2], 0)
    if not 2 <= base <= 36:
        return None
    whole, _, part = match[1].partition(".")
    try:
        return Based(match[1], Fraction(int(whole + part, base), base ** len(part)))
    except ValueError:  # a digit that the base does not have
        return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _repeating(fixed: str, repeating: str) -> Fraction:
    before, _, after = fixed.partition(".")
    shift = 10 ** len(after)
    return Fraction(int(before or "0") * shift + int(after or "0"), shift) + Fraction(
        int(repeating), shift * (10 ** len(repeating) - 1)
    )
