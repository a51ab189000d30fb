r"""Numbers as people write them: `\$1,234.50`, `1\frac{1}{4}`, `28\%`, `18 dollars`, `0.\overline{3}`, `1.2e5`.

Read exactly, as fractions: 0.333 is not 1/3, and 1000001 is not 1000000.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

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
_DIGITS_IN_BASE = re.compile(r"(-?(?=[\w.]*\d)[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(\d{1,2})")

# Units that can stand for each other, under one name. Only a unit of this table contradicts another one of it.
_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gm gram",
        "kg": "kg kilogram kilo",
        "lb": "lb pound",
        "oz": "oz ounce",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "dollar": "$ dollar usd buck",
        "cent": "cent ¢",
        "euro": "€ euro eur",
        "sterling": "£",
        "rupee": "₹ rs rupee",
        "yen": "¥ yen",
        "l": "l liter litre",
        "ml": "ml milliliter millilitre",
        "gallon": "gal gallon",
        "°": "° deg degree",
        "rad": "rad radian",
        "mph": "mph",
        "kmh": "kmh kph km/h km/hr",
        "am": "am",
        "pm": "pm",
    }.items()
    for name in names.split()
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words behind a number that are no unit: `2 thirds` is not 2.
_NO_UNITS = {"half", "halves", "third", "quarter", "fourth", "fifth", "sixth", "eighth", "tenth", "hundredth"}
_TO_TWELVE = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: number for number, word in enumerate(_TO_TWELVE.split())}

_CURRENCY = re.compile(r"[$€£¥₹]|^(?:USD|EUR|Rs)\b\.?")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
# What may stand behind a number: words in \text, in parentheses or plain ones, with a power or without.
_TAIL_TEXT = re.compile(r"\s*\\text\{([^{}]*)\}\s*(?:\^\s*\{?\d\}?)?\s*$")
_TAIL_WORDS = re.compile(r"(?<=[\d})\s])([A-Za-z¢][A-Za-z.¢-]*(?:[ /][A-Za-z.-]+)*)\s*(?:\^\s*\{?[23]\}?)?\s*$")
_TAIL_PARENTHESES = re.compile(r"\s\(\s*([A-Za-z][A-Za-z. -]+|[gmshlL])\s*\)$")
_FILLERS = {"square", "sq", "cubic", "cu", "of", "the", "a", "per", "each", "about", "approximately", "exactly"}


@dataclass(frozen=True)
class Quantity:
    """A number or an expression without what surrounds it. `unit` is "" for none and `?` for one we do not know."""

    text: str
    unit: str = ""
    percent: bool = False

    @property
    def number(self) -> Fraction | None:
        return exact(self.text)


@lru_cache(maxsize=4096)
def quantity(text: str, is_gold: bool = False) -> Quantity:
    """Part a number or an expression from its money sign, unit and percent sign. `text` is tidy.

    The 3 of `3m` is a length in an answer where 3 is the gold, but `3m` as a gold is an expression.
    """
    unit, percent, scale = "", False, 1
    if currency := _CURRENCY.search(text):
        unit = _UNITS[currency[0].rstrip(".").lower()]
        text = _CURRENCY.sub("", text).strip()
    while True:
        if text.endswith("%"):
            percent, text = True, text[:-1].strip()
        elif text.endswith("^\\circ") and not _FUNCTION.search(text):
            unit, text = "°", text.removesuffix("^\\circ").strip()
        elif tail := _TAIL_TEXT.search(text):
            words, rest = tail[1], text[: tail.start()].strip()
            if not rest or _words(words) & _NO_UNITS:
                break
            unit, factor = _unit_and_scale(words, unit)
            scale, text = scale * factor, rest
        elif (tail := _TAIL_PARENTHESES.search(text)) and exact(text[: tail.start()]) is not None:
            unit, _ = _unit_and_scale(tail[1], unit)
            text = text[: tail.start()].strip()
        elif (tail := _TAIL_WORDS.search(text)) and exact(text[: tail.start()].strip()) is not None:
            words, spaced = tail[1], text[tail.start() - 1] == " "
            if not _is_unit(words, spaced) or (is_gold and not spaced and len(words) == 1):
                break
            unit, factor = _unit_and_scale(words, unit)
            scale, text = scale * factor, text[: tail.start()].strip()
        else:
            break
    if scale != 1:
        number = exact(text)
        text = str(number * scale) if number is not None else rf"({text}) \cdot {scale}"
    return Quantity(text, unit, percent)


def exact(text: str) -> Fraction | None:
    """The rational number that `text` writes, or None if it is anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
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


@dataclass(frozen=True)
class Based:
    """`2516_8`: its digits as written and its value."""

    digits: str
    value: Fraction


def in_base(text: str) -> Based | None:
    match = _DIGITS_IN_BASE.fullmatch(re.sub(r"\\text|[{}() ]", "", text))
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    base, (whole, _, part) = int(match[2]), match[1].partition(".")
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


def _words(text: str) -> set[str]:
    return {_singular(word) for word in re.split(r"[\s/]+", text.casefold().replace(".", "")) if word}


def _singular(word: str) -> str:
    if word in _UNITS or word in _NO_UNITS:
        return word
    return word[:-1] if word.endswith("s") and word[:-1] else word


def _is_unit(words: str, spaced: bool) -> bool:
    """Whether plain words behind a number are its unit and not a factor: `5 eggs` and `5cm`, not `5xy` or `5x`."""
    if _words(words) & _NO_UNITS:
        return False
    if _words(words) & (_UNITS.keys() | _SCALES.keys()):
        return True
    return spaced and any(len(word) >= 3 and re.search("[aeiou]", word) for word in _words(words))


def _unit_and_scale(words: str, unit: str) -> tuple[str, int]:
    """The unit's name and what a word like `thousand` multiplies."""
    scale = 1
    for word in re.split(r"\s+", words.casefold().replace(".", "").strip()):
        word = _singular(word)
        if word in _SCALES:
            scale *= _SCALES[word]
        elif word not in _FILLERS and word:
            known = _UNITS.get(word) or _UNITS.get(words.casefold().strip()) or "?"
            unit = known if unit in ("", "?") else unit
    return unit, scale
