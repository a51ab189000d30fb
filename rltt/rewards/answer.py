r"""The shape of an answer: a value, words, several values, a point or interval, a set, a matrix, a ratio, a relation.

The shape is read from the outermost level of the text, so that `(1,2)`, `[1,2]`, `\{1,2\}` and `1,2` stay apart; what
is inside is read the same way, down to plain values, which `plain.py` compares.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rltt.rewards.quantity import sum_of_amounts
from rltt.rewards.spelling import tidy

INEQUALITIES = ("<", ">", r"\leq", r"\geq", r"\neq")
RELATIONS = ("=", r"\approx", r"\equiv", r"\in", r"\subset", r"\subseteq", *INEQUALITIES)
_TOKEN = re.compile(r"\\begin\s*\{[a-zA-Z*]+\}|\\end\s*\{[a-zA-Z*]+\}|\\[A-Za-z]+|\\.|[A-Za-z]+|.", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([bpBvV]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BARS = {"vmatrix": "|", "Vmatrix": "||"}
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# `(C) 12`, `C. 12`, `C)`; not `(A), (C)`, which are two.
_CHOICE = re.compile(r"(?:\\text\{)?\s*(?:\(([A-H])\)|([A-H])\s*[).:])\s*\}?\s*(?!\s|[,;]|and\b|or\b)(\S.*)", re.DOTALL)
_LETTER = re.compile(r"([A-Ha-h])\)")
# A comma between digits in groups of three. Inside brackets it always separates.
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,]*\d)")
_GROUP_OF_ZERO = re.compile(r"(?<=\d),0\d\d")
_REALS = {r"\mathbb{R}", "all real numbers", "all reals", "real numbers"}
_NOTHING = re.compile(
    r"\s*(?:there (?:is|are) )?no (?:real |integer )?(?:solutions?|roots?)(?: exists?)?|\s*(?:the )?(?:empty|null) set",
    re.IGNORECASE,
)
_MODULO = re.compile(
    r"(.+?)\s*(?:\\pmod|\\bmod|\\mod|\(\s*(?:\\text\{\s*)?(?:\\bmod|\\mod|mod)\s*\}?)\s*\{?\s*(\d+)\s*\}?\s*\)?"
)
# Intervals as they are written in France: `]a, b[` is `(a, b)`.
_FRENCH = re.compile(r"(^|\\cup|\\in(?![A-Za-z]))(\s*)([\[\]])([^\[\]()]*[,;][^\[\]()]*)([\[\]])(?=\s*(?:$|\\cup))")


@dataclass(frozen=True)
class Value:
    """A number or an expression, with its unit; also words that no `\\text{}` marks as such."""

    text: str


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Choice:
    """`(C) 12`: a letter and what stands beside it in the list of choices."""

    letter: str
    content: "Answer"


@dataclass(frozen=True)
class Several:
    """Values in no order: `1, 2`, `1 and 2`. `joiner` is `and`, `or` or `,`."""

    items: tuple["Answer", ...]
    joiner: str


@dataclass(frozen=True)
class Bracketed:
    """A point, a vector or an interval: order and brackets count."""

    left: str
    items: tuple["Answer", ...]
    right: str


@dataclass(frozen=True)
class SetOf:
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Union:
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Without:
    """`\\mathbb{R} \\setminus \\{0\\}`."""

    whole: "Answer"
    removed: "Answer"


@dataclass(frozen=True)
class Modulo:
    r"""`x \equiv 3 \pmod{7}`, and `3 \pmod{7}`; `value` is what stands on the right."""

    value: "Answer"
    modulus: int


@dataclass(frozen=True)
class Matrix:
    """`bars` are those of a determinant, `|`, or of a norm, `||`; other brackets mean the same."""

    rows: tuple[tuple["Answer", ...], ...]
    bars: str = ""


@dataclass(frozen=True)
class Ratio:
    """`3:4`, and clock times too."""

    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Relation:
    r"""An equation, an inequality or a membership: `x = 2`, `1 < x \leq 3`. One operator fewer than sides."""

    sides: tuple["Answer", ...]
    operators: tuple[str, ...]


Answer = Value | Words | Choice | Several | Bracketed | SetOf | Union | Without | Modulo | Matrix | Ratio | Relation


def readings(text: str) -> list[Answer]:
    """What an answer can mean: one reading, or two where `100,200` may be one number or two."""
    text = _FRENCH.sub(_in_round_brackets, tidy(text))
    bracketed = text.startswith(("(", "[", r"\{"))
    joined = text if bracketed else _THOUSANDS.sub(lambda match: match[1] + match[2].replace(",", ""), text)
    # Nobody writes 0 as 000, nor 80 as 080: `10,080` is one number.
    one = joined == text or _GROUP_OF_ZERO.search(text)
    return [read(joined)] if one else [read(joined), read(text)]


def read(text: str) -> Answer:
    """The shape of a tidy text."""
    text = text.strip()
    if (text if "\\" in text else text.casefold()) in _REALS:
        return Bracketed("(", (Value(r"-\infty"), Value(r"\infty")), ")")
    if text == r"\emptyset":
        return SetOf(())
    if _NOTHING.fullmatch(_TEXT.sub(r"\1", text)):
        return SetOf(())
    if marked := _TEXT.fullmatch(text):
        inside = read(marked[1])
        return Words(inside.text) if isinstance(inside, Value) and re.match("[A-Za-z]{2}", inside.text) else inside
    if choice := _CHOICE.fullmatch(text):
        return Choice(choice[1] or choice[2], read(choice[3]))
    if letter := _LETTER.fullmatch(text):
        return Value(letter[1])
    if matrix := _MATRIX.fullmatch(text.strip("()[] ")):
        return _read_matrix(matrix[2], "", _BARS.get(matrix[1], ""))
    if total := sum_of_amounts(text):
        return Value(total)
    parts, joiners = _split(text, (",", ";", "and", "or", r"\land", r"\lor"))
    if len(parts) > 1 and (items := _flat([read(part) for part in parts if part.strip()])):
        return items[0] if len(items) == 1 else Several(items, _joiner(joiners))
    if modulo := _MODULO.fullmatch(text):
        return Modulo(read(_split(modulo[1], (r"\equiv", "="))[0][-1]), int(modulo[2]))
    parts, _ = _split(text, (r"\cup",))
    if len(parts) > 1 and all(len(_split(part, INEQUALITIES)[0]) > 1 for part in parts):  # x < 1 \cup x > 2
        return Several(tuple(read(part) for part in parts), "or")
    parts, _ = _split(text, (r"\notin",))
    if len(parts) == 2:
        return Without(read(r"\mathbb{R}"), read(parts[1]))
    parts, operators = _split(text, RELATIONS)
    if len(parts) > 1:
        return Relation(tuple(read(part) for part in parts), tuple(operators))
    parts, _ = _split(text, (r"\cup",))
    if len(parts) > 1:
        return Union(tuple(read(part) for part in parts))
    parts, _ = _split(text, (r"\setminus", *("-" for _ in range(text.startswith(r"\mathbb{R}")))))
    if len(parts) == 2 and parts[1].lstrip().startswith((r"\{", "(", "[")):
        return Without(read(parts[0]), read(parts[1]))
    if text and _closing(text) == len(text) - (2 if text.endswith(r"\}") else 1):
        return _read_bracketed(text)
    parts, _ = _split(text, (":",))
    if len(parts) > 1 and all(part.strip() for part in parts):
        return Ratio(tuple(read(part) for part in parts))
    if scaled := _MATRIX.search(text):
        before, after = text[: scaled.start()].strip("([ "), text[scaled.end() :].strip(")] ")
        if not _MATRIX.search(before) and not after:
            return _read_matrix(scaled[2], before.removesuffix(r"\cdot").strip())
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return Several((read(_with_signs(text, "+", "-")), read(_with_signs(text, "-", "+"))), ",")
    return Value(text)


def _read_bracketed(text: str) -> Answer:
    """What stands in brackets from end to end."""
    if text.startswith(r"\{"):
        inside = text[2:-2]
        parts, _ = _split(inside, ("|", ":"))
        if len(parts) == 2 and len(_split(parts[1], RELATIONS)[0]) > 1:
            # {y : y < 3} is what its condition says, whatever the name of the variable.
            name = re.match(r"\s*([a-z])\s*(?:\\in(?![A-Za-z])|$)", parts[0])
            return read(re.sub(rf"(?<![A-Za-z\\]){name[1]}(?![A-Za-z])", "x", parts[1]) if name else parts[1])
        return SetOf(_flat([read(part) for part in _split(inside, (",", ";"))[0]]))
    items = tuple(read(part) for part in _split(text[1:-1], (",", ";"))[0])
    if len(items) > 1 and text[0] != "{":
        return Bracketed(text[0], items, text[-1])
    return read(text[1:-1]) if text[0] + text[-1] in ("()", "{}") else Value(text)


def _read_matrix(inside: str, factor: str, bars: str = "") -> Matrix:
    """The matrix of these rows, each cell times `factor` (`-`, `\\frac{1}{2}`, nothing)."""
    rows = [row for row in _split(inside, (r"\\",))[0] if row.strip()]
    if factor:
        factor = "-1" if factor == "-" else factor
        return Matrix(
            tuple(
                tuple(Value(rf"({factor}) \cdot ({cell.strip()})") for cell in _split(row, ("&",))[0]) for row in rows
            )
        )
    return Matrix(tuple(tuple(read(cell) for cell in _split(row, ("&",))[0]) for row in rows), bars)


def _flat(items: list[Answer]) -> tuple[Answer, ...]:
    r"""Items in one list: `\pm 1, \pm 2` are four values."""
    return tuple(
        part for item in items for part in (item.items if isinstance(item, Several) and item.joiner == "," else (item,))
    )


def _in_round_brackets(interval: re.Match[str]) -> str:
    left, right = "(" if interval[3] == "]" else "[", ")" if interval[5] == "[" else "]"
    return f"{interval[1]}{interval[2]}{left}{interval[4]}{right}"


def _with_signs(text: str, plus: str, minus: str) -> str:
    return re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, text))


def _joiner(joiners: list[str]) -> str:
    for joiner in ("or", "and"):
        if joiner in joiners or rf"\l{joiner}" in joiners:
            return joiner
    return ","


def nesting(text: str) -> int:
    """How deep brackets are nested."""
    return max((depth for _, _, depth in _levels(text)), default=0)


def _levels(text: str) -> Iterator[tuple[str, int, int]]:
    """Each token with its start and the depth of brackets it stands at (a bracket itself: the depth outside)."""
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in (")", "]", "}", r"\}", r"\rfloor", r"\rceil") or token[0].startswith(r"\end"):
            depth -= 1
        yield token[0], token.start(), depth
        if token[0] in ("(", "[", "{", r"\{", r"\lfloor", r"\lceil") or token[0].startswith(r"\begin"):
            depth += 1


def _split(text: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The parts of `text` between separators outside all brackets, and the separators."""
    parts, found, start = [], [], 0
    for token, position, depth in _levels(text):
        if depth == 0 and token in separators:
            parts.append(text[start:position])
            found.append(token)
            start = position + len(token)
    return [*parts, text[start:]], found


def _closing(text: str) -> int | None:
    """Where the bracket that `text` begins with is closed, if it begins with one."""
    if not text.startswith(("(", "[", "{", r"\{")):
        return None
    return next((position for _, position, depth in _levels(text) if position > 0 and depth == 0), None)
