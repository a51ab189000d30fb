r"""Clock times: `3:45 p.m.`, `15:45` and `7 p.m.`, which are no ratios."""

import math
import re
from dataclasses import dataclass

from rltt.rewards.answer import Answer, Ratio, Value
from rltt.rewards.quantity import quantity


@dataclass(frozen=True)
class Clock:
    """A time of day; `half` is `am`, `pm`, or "" where nothing says which."""

    hour: int
    minute: int
    half: str

    @property
    def minutes(self) -> int | None:
        """Since midnight; None where it may be either half of the day."""
        if self.half:
            return 60 * (self.hour % 12 + 12 * (self.half == "pm")) + self.minute
        return 60 * self.hour + self.minute if self.hour == 0 or self.hour > 12 else None


def clock(answer: Answer) -> Clock | None:
    """The time that an answer says, or None. `3:45` could be a ratio too: see `only_a_time`."""
    match answer:
        case Ratio((Value(hour), Value(rest))):
            minute = quantity(rest)
        case Value(text):
            hour, minute = quantity(text).text, quantity(rf"00 \text{{{_half(text)}}}")
        case _:
            return None
    half = minute.unit.name if minute.unit is not None else ""
    if not re.fullmatch(r"\d{1,2}", hour) or not re.fullmatch(r"[0-5]\d", minute.text) or int(hour) > 24:
        return None
    if (isinstance(answer, Value) and not half) or half not in ("", "am", "pm"):
        return None
    return Clock(int(hour), int(minute.text), half)


def _half(text: str) -> str:
    unit = quantity(text).unit
    return unit.name if unit is not None and unit.name in ("am", "pm") else ""


def only_a_time(answer: Ratio) -> bool:
    """Whether a ratio is a time and no ratio: it says a.m. or p.m., or could be reduced (`10:30`, `9:05`)."""
    time = clock(answer)
    if time is None:
        return False
    return bool(time.half) or time.minute < 10 or math.gcd(time.hour, time.minute) > 1


def same_time(gold: Clock, answer: Clock) -> bool:
    """As the clock shows it; where both say which half of the day, by the 24 hours: `15:45` is `3:45 p.m.`."""
    if gold.minutes is not None and answer.minutes is not None:
        return gold.minutes == answer.minutes
    return (gold.hour, gold.minute) == (answer.hour, answer.minute)
