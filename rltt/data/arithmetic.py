r"""A generator of arithmetic word problems in five difficulties: data for the quickstart and the tests, from nothing.

The language is tiny on purpose. Every word comes from the tables below, so that `arithmetic_tokenizer` covers it with
fewer than a hundred tokens and a tiny model made from scratch can learn it.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rltt.data.problems import Problem
from rltt.errors import DataError

NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "cards", "coins", "cups", "pens", "shells", "stamps")

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
# One problem text in ten, by its hash, is for testing.
_TEST_SHARE = 10


@dataclass(frozen=True)
class Form:
    """Sentences that share one way to the answer.

    `steps` are equations over the slots of the sentences ("a + b = r"); the last result is the answer. Each sentence
    must use every slot, {name} and {things}: two different fillings then never give the same text.
    """

    steps: tuple[str, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """One difficulty: its forms (with equally many sentences each), and the values of each slot."""

    forms: tuple[Form, ...]
    slots: dict[str, range]


_ADD_OR_SUBTRACT = (
    Form(
        ("a + b = r",),
        (
            "{name} has {a} {things} and buys {b} more. How many {things} now?",
            "{name} finds {a} {things}. {other} finds {b} {things}. How many {things} in all?",
            "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} now?",
            "A box holds {a} {things}. {name} adds {b} more. How many {things} in the box?",
        ),
    ),
    Form(
        ("a - b = r",),
        (
            "{name} has {a} {things} and loses {b}. How many {things} are left?",
            "{name} has {a} {things} and gives {b} to {other}. How many {things} are left?",
            "{name} has {a} {things}. {other} has {b} {things}. How many more has {name}?",
            "A box holds {a} {things}. {name} takes {b}. How many {things} in the box?",
        ),
    ),
)

_TWO_STEPS = (
    Form(
        ("a + b = p", "p + c = r"),
        (
            "{name} has {a} {things}, buys {b} more and finds {c} more. How many {things} now?",
            "A box holds {a} {things}. {name} adds {b} more. {other} adds {c} more. How many {things} in the box?",
        ),
    ),
    Form(
        ("a + b = p", "p - c = r"),
        (
            "{name} has {a} {things}, buys {b} more and loses {c}. How many {things} are left?",
            "A box holds {a} {things}. {name} adds {b} more. {other} takes {c}. How many {things} in the box?",
        ),
    ),
    Form(
        ("a - b = p", "p + c = r"),
        (
            "{name} has {a} {things}, gives {b} to {other} and buys {c} more. How many {things} now?",
            "A box holds {a} {things}. {name} takes {b}. {other} adds {c} more. How many {things} in the box?",
        ),
    ),
    Form(
        ("a - b = p", "p - c = r"),
        (
            "{name} has {a} {things}, loses {b} and gives {c} to {other}. How many {things} are left?",
            "A box holds {a} {things}. {name} takes {b}. {other} takes {c}. How many {things} in the box?",
        ),
    ),
)

_MULTIPLY = (
    Form(
        ("b * c = p", "a + p = r"),
        (
            "{name} has {a} {things} and buys {b} boxes of {c} {things}. How many {things} now?",
            "{name} finds {a} {things}. {other} finds {b} boxes of {c} {things}. How many {things} in all?",
            "{name} has {a} {things}. {other} gives {name} {b} boxes of {c}. How many {things} now?",
        ),
    ),
    Form(
        ("b * c = p", "p - a = r"),
        (
            "{name} buys {b} boxes of {c} {things} and loses {a}. How many {things} are left?",
            "{name} has {b} boxes of {c} {things} and gives {a} to {other}. How many {things} are left?",
            "{name} has {b} boxes of {c} {things}. {other} has {a} {things}. How many more has {name}?",
        ),
    ),
)

# {d} {extras} is the distractor: a number that the answer does not need.
_DISTRACTED = (
    Form(
        ("b * c = p", "a + p = q", "q - e = r"),
        (
            "{name} has {a} {things} and {d} {extras}, buys {b} boxes of {c} {things} and loses {e} {things}. "
            "How many {things} are left?",
            "A box holds {a} {things} and {d} {extras}. {name} adds {b} boxes of {c} {things}. "
            "{other} takes {e} {things}. How many {things} in the box?",
            "{name} has {a} {things}. {other} has {d} {extras}. {name} buys {b} boxes of {c} {things} and gives {e} "
            "to {other}. How many {things} has {name} now?",
        ),
    ),
    Form(
        ("a - e = p", "b * c = q", "p + q = r"),
        (
            "{name} has {a} {things} and {d} {extras}, loses {e} {things} and buys {b} boxes of {c} {things}. "
            "How many {things} now?",
            "A box holds {a} {things} and {d} {extras}. {name} takes {e} {things}. "
            "{other} adds {b} boxes of {c} {things}. How many {things} in the box?",
            "{name} has {a} {things}. {other} has {d} {extras}. {name} gives {e} {things} to {other} and buys {b} "
            "boxes of {c}. How many {things} has {name} now?",
        ),
    ),
)

# Numbers start at 2, which spares the sentences a singular.
LEVELS = {
    1: Level(_ADD_OR_SUBTRACT, {"a": range(2, 11), "b": range(2, 11)}),
    2: Level(_ADD_OR_SUBTRACT, {"a": range(10, 100), "b": range(10, 100)}),
    3: Level(_TWO_STEPS, {"a": range(10, 40), "b": range(2, 21), "c": range(2, 21)}),
    4: Level(_MULTIPLY, {"a": range(2, 41), "b": range(2, 10), "c": range(2, 10)}),
    5: Level(
        _DISTRACTED,
        {"a": range(10, 31), "b": range(2, 6), "c": range(2, 7), "d": range(2, 10), "e": range(2, 11)},
    ),
}


def arithmetic_problems(difficulty: int, size: int, split: str = "train") -> list[Problem]:
    r"""`size` different word problems, always the same ones; a larger size only adds to a smaller one.

    Difficulty 1: one + or - with numbers up to 10. 2: the same with two-digit numbers. 3: two steps. 4: a product and a
    step. 5: three steps and a number to ignore. Answers are whole numbers from 0. The response shows the steps and
    boxes the answer: `12 + 7 = 19, 19 - 4 = 15. \boxed{15}`.

    No text of the split `train` occurs in `test`, at any pair of difficulties; the same sum under another name may.

    Raises `DataError` for a difficulty or split that does not exist, and when `size` exceeds the problems there are.
    """
    if difficulty not in LEVELS:
        raise DataError(f"arithmetic has difficulties 1 to {max(LEVELS)}, not {difficulty!r}.")
    if split not in ("train", "test"):
        raise DataError(f"arithmetic has the splits 'train' and 'test', not {split!r}.")
    level = LEVELS[difficulty]
    candidates = (problem for problem in _every_problem(level) if _is_test(problem.prompt) == (split == "test"))
    problems = [
        Problem(p.prompt, p.gold, p.response, {"difficulty": difficulty}, f"arithmetic-{difficulty}[{split}]:{number}")
        for number, p in enumerate(itertools.islice(candidates, size), start=1)
    ]
    if len(problems) < size:
        raise DataError(
            f"arithmetic of difficulty {difficulty} has {len(problems)} different {split} problems, "
            f"fewer than the size {size}."
        )
    return problems


def vocabulary() -> list[str]:
    """Every word, digit and sign that a problem or its response can hold, sorted."""
    sentences = [sentence for level in LEVELS.values() for form in level.forms for sentence in form.sentences]
    fixed = re.sub(r"\{\w+\}", " ", " ".join(sentences))
    words = set(re.findall(r"[A-Za-z]+|[^\sA-Za-z]", fixed))
    return sorted(words | {*NAMES, *THINGS, *"0123456789", *_OPERATIONS, "=", ",", ".", r"\boxed{", "}"})


def _every_problem(level: Level) -> Iterator[Problem]:
    """Each problem of a level once, in a fixed scattered order.

    A problem pairs a case (a form and its numbers) with a setting (a sentence, a name and things). Both lists are
    shuffled and paired along diagonals, which reaches every pair once without holding them all: there are millions.
    """
    cases = [(form, values) for form in level.forms for values in _fillings(form, level.slots)]
    settings = list(itertools.product(range(len(level.forms[0].sentences)), range(len(NAMES)), range(len(THINGS))))
    shuffle = random.Random(0)
    shuffle.shuffle(cases)
    shuffle.shuffle(settings)
    for turn, (index, (form, values)) in itertools.product(range(len(settings)), enumerate(cases)):
        sentence, name, thing = settings[(turn + index) % len(settings)]
        prompt = form.sentences[sentence].format(
            name=NAMES[name],
            other=NAMES[(name + 1) % len(NAMES)],
            things=THINGS[thing],
            extras=THINGS[(thing + 1) % len(THINGS)],
            **values,
        )
        work = [" ".join(str(values.get(word, word)) for word in step.split()) for step in form.steps]
        answer = values[form.steps[-1].split()[-1]]
        yield Problem(prompt, str(answer), rf"{', '.join(work)}. \boxed{{{answer}}}")


def _fillings(form: Form, slots: dict[str, range]) -> Iterator[dict[str, int]]:
    """Values for the slots and for the result of each step, wherever no result is negative."""
    for numbers in itertools.product(*slots.values()):
        values = dict(zip(slots, numbers, strict=True))
        for step in form.steps:
            left, sign, right, _, result = step.split()
            values[result] = _OPERATIONS[sign](values[left], values[right])
        if all(value >= 0 for value in values.values()):
            yield values


def _is_test(prompt: str) -> bool:
    """Python's own hash of a string changes from process to process; this one never does."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) % _TEST_SHARE == 0
