r"""Units: the words that name one, those that contradict each other, and those that convert (45 minutes, 3/4 hour)."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

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
        "celsius": "celsius",
        "fahrenheit": "fahrenheit",
        "rad": "rad radian",
        "am": "am",
        "pm": "pm",
    }.items()
    for name in names.split()
}
_RATES = {"mph": "mile/hour", "kmh": "km/hour", "kph": "km/hour"}
# What a unit measures, and how much of it: units that measure the same convert. A year is 12 months, a month no number
# of days.
_SIZES = {
    "mm": ("length", Fraction(1, 1000)),
    "cm": ("length", Fraction(1, 100)),
    "m": ("length", Fraction(1)),
    "km": ("length", Fraction(1000)),
    "in": ("length", Fraction(254, 10_000)),
    "ft": ("length", 12 * Fraction(254, 10_000)),
    "yd": ("length", 36 * Fraction(254, 10_000)),
    "mi": ("length", 63_360 * Fraction(254, 10_000)),
    "mg": ("mass", Fraction(1, 1000)),
    "g": ("mass", Fraction(1)),
    "kg": ("mass", Fraction(1000)),
    "oz": ("weight", Fraction(1)),
    "lb": ("weight", Fraction(16)),
    "s": ("time", Fraction(1)),
    "min": ("time", Fraction(60)),
    "h": ("time", Fraction(3600)),
    "day": ("time", Fraction(86_400)),
    "week": ("time", Fraction(604_800)),
    "month": ("months", Fraction(1)),
    "year": ("months", Fraction(12)),
    "cent": ("money", Fraction(1)),
    "dollar": ("money", Fraction(100)),
    "ml": ("volume", Fraction(1)),
    "l": ("volume", Fraction(1000)),
}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words behind a number that are no unit: `2 thirds` is not 2.
NO_UNITS = {"half", "halves", "third", "quarter", "fourth", "fifth", "sixth", "eighth", "tenth", "hundredth"}
_FILLERS = {"of", "the", "a", "each", "about", "approximately", "exactly"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

# `^2` behind a unit.
_POWER = re.compile(r"\^\s*\{?\s*(\d)\s*\}?")
# `s^{-1}`: per second.
_INVERSE = re.compile(r"([a-z]+)\s*\^\s*\{?\s*-\s*1\s*\}?")


@dataclass(frozen=True)
class Unit:
    r"""`cm^2` is ("cm", power=2), `mph` is ("mi", per="h"). `name` is `?` for a unit that the table does not have."""

    name: str
    per: str = ""
    power: int = 1

    def conversion(self, other: "Unit") -> Fraction | None:
        """What turns a number of these into one of `other`: 1 where nothing says that they differ, None if they do.

        A power that was left out (`18 cm` for an area) is no contradiction, but nothing is converted then.
        """
        factor = Fraction(1)
        for mine, others, power in ((self.name, other.name, self.power), (self.per, other.per, -1)):
            if mine == others or not mine or not others or "?" in (mine, others):
                continue
            (kind, size), (other_kind, other_size) = (_SIZES.get(name, (name, Fraction(1))) for name in (mine, others))
            if kind != other_kind or self.power != other.power:
                return None
            factor *= (size / other_size) ** power
        return factor


def unit_and_scale(words: str, unit: Unit | None) -> tuple[Unit | None, int]:
    """The unit that words behind a number name, and what a word like `thousand` multiplies. `unit` is known already."""
    words = _INVERSE.sub(r"/ \1", words.casefold().replace(".", ""))
    for name, rate in _RATES.items():
        words = re.sub(rf"\b{name}\b", rate, words)
    over, _, under = re.sub(r"\bper\b", "/", words).partition("/")
    power = _POWER.search(over)
    found = Unit("", power=int(power[1]) if power else 1)
    scale = 1
    for word in map(singular, _POWER.sub(" ", over).split()):
        if word in SCALES:
            scale *= SCALES[word]
        elif word in _POWERS:
            found = replace(found, power=_POWERS[word])
        elif word not in _FILLERS and found.name in ("", "?"):
            found = replace(found, name=_UNITS.get(word, "?"))
    for word in map(singular, _POWER.sub(" ", under).split()):
        if word not in _FILLERS and found.per in ("", "?"):
            found = replace(found, per=_UNITS.get(word, "?"))
    if unit is not None and unit.name not in ("", "?"):
        return replace(unit, per=unit.per or found.per), scale
    return found if found.name or found.per else unit, scale


def named_unit(word: str) -> Unit:
    """The unit that a money sign or another word of the table names."""
    return Unit(_UNITS[word.rstrip(".").lower()])


def is_unit(words: str, spaced: bool) -> bool:
    """Whether plain words behind a number are its unit and not a factor: `5 eggs` and `5cm`, not `5xy` or `5x`."""
    found = word_set(words)
    if found & NO_UNITS:
        return False
    if is_known_unit(words) or found & SCALES.keys():
        return True
    return spaced and any(len(word) >= 3 and re.search("[aeiou]", word) for word in found)


def is_known_unit(words: str) -> bool:
    """Whether one of the words is a unit of the table."""
    return bool(word_set(words) & (_UNITS.keys() | _RATES.keys()))


def word_set(text: str) -> set[str]:
    """The words of a text, in the singular."""
    return {singular(word) for word in re.split(r"[\s/]+", text.casefold().replace(".", "")) if word}


def singular(word: str) -> str:
    if word in _UNITS or word in NO_UNITS or word in _RATES:
        return word
    return word[:-1] if word.endswith("s") and word[:-1] else word
