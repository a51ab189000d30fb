"""Is an answer the gold answer? The rules for each shape; the gold comes first, for it says what was asked for.

What must be the same: brackets of intervals, the order in a point, the number of values, the direction of an
inequality. What need not: the order of several values, units and money signs, `x =` before a value, the form of a
number.
"""

import re
from fractions import Fraction

import sympy

from rltt.rewards import sets
from rltt.rewards.answer import (
    Answer,
    Bracketed,
    Choice,
    Matrix,
    Modulo,
    Ratio,
    Relation,
    SetOf,
    Several,
    Union,
    Value,
    Without,
    Words,
)
from rltt.rewards.clock import clock, only_a_time, same_time
from rltt.rewards.plain import check_value, is_a_letter, is_letter, same_number, same_value, same_words
from rltt.rewards.quantity import exact, quantity
from rltt.rewards.value import expression, proportional, same_items, same_solutions

_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
_CALL = re.compile(r"([A-Za-z])'*(?:\^\{-1\})?\([^()]*\)")
_OF_X = re.compile(r"[a-z]\(x\)")
_CONSTANTS = {r"\pi", r"\infty", "e", "i"}


def same(gold: Answer, answer: Answer) -> bool:
    """Whether `answer` says what `gold` says. Both have passed `check`."""
    if gold == answer:
        return True
    match gold, answer:
        case (Value(), Value()):
            return same_value(gold.text, answer.text)
        case (Words() | Value(), Words() | Value()):
            return same_words(gold.text, answer.text) or same_number(gold.text, answer.text)
        case (Choice(), Choice()):
            return gold.letter == answer.letter
        case (Value() | Words(), Choice()):
            # A gold that is a letter is the letter of a choice: `(A) B` is choice A, whatever stands beside it.
            return is_letter(gold.text, answer.letter) or (not is_a_letter(gold.text) and same(gold, answer.content))
        case (Choice(), _):
            letter = isinstance(answer, Value | Words) and is_letter(answer.text, gold.letter)
            return letter or same(gold.content, answer)
        case (Modulo(), Modulo()):
            return gold.modulus == answer.modulus and _congruent(gold, answer)
        case (Modulo(), _):
            return same(gold.value, answer)
        case (_, Modulo()):
            return same(gold, answer.value)
        case (Relation(), Relation()):
            return _same_relation(gold, answer)
        case (Relation(), _):
            named = named_value(gold)
            return same(named, answer) if named is not None else sets.same(gold, answer)
        case (_, Relation()):
            named = named_value(answer)
            return same(gold, named) if named is not None else sets.same(gold, answer)
        case (Bracketed(), Bracketed()):
            return (gold.left, gold.right) == (answer.left, answer.right) and _in_order(gold.items, answer.items)
        # `1, 2` for the point (1, 2), and `x = 1, y = 2`; but never `1, 2` for the interval [1, 2].
        case (Bracketed("(", parts, ")"), Several(others, _)) | (Several(parts, _), Bracketed("(", others, ")")):
            return _in_order(parts, others) or sets.same(gold, answer)
        case (Several(), Several()) if sets.is_condition(gold):
            return sets.same(gold, answer)
        case (Several(), Several()):
            return same_items(gold.items, answer.items, same)
        case (SetOf() | Several(), SetOf() | Several()):
            return same_items(_distinct(gold.items), _distinct(answer.items), same)
        case (SetOf((item,)), Value()):
            return same(item, answer)
        case (Value(), SetOf((item,))):
            return same(gold, item)
        case (Matrix(), Matrix()):
            same_kind = gold.bars == answer.bars and len(gold.rows) == len(answer.rows)
            return same_kind and all(map(_in_order, gold.rows, answer.rows))
        # A column of numbers is the vector of these coordinates.
        case (Matrix(rows, ""), Bracketed("(", parts, ")")) | (Bracketed("(", parts, ")"), Matrix(rows, "")):
            return all(len(row) == 1 for row in rows) and _in_order(parts, tuple(row[0] for row in rows))
        case (Ratio() | Value(), Ratio() | Value()) if (left := clock(gold)) and (right := clock(answer)):
            return same_time(left, right)
        case (Ratio(), Ratio()):
            return _same_ratio(gold, answer)
        case (Ratio(), Value()):
            return _is_quotient(gold, answer)
        case (Value(), Ratio()):
            return _is_quotient(answer, gold)
        case _:
            return sets.same(gold, answer)


def check(answer: Answer) -> None:
    """Read every part; raises `UnreadableError` for the first that cannot be read."""
    match answer:
        case Value(text):
            check_value(text)
        case Choice(_, content) | Modulo(content, _):
            check(content)
        case Without(whole, removed):
            check(whole)
            check(removed)
        case (
            Relation(parts, _) | Bracketed(_, parts, _) | Several(parts, _) | SetOf(parts) | Union(parts) | Ratio(parts)
        ):
            for part in parts:
                check(part)
        case Matrix(rows):
            for row in rows:
                for cell in row:
                    check(cell)


def named_value(relation: Relation) -> Answer | None:
    r"""What a name is said to be: the 5 of `x = 5`, `f(2) = 3 + 2 = 5`, `x \in \{5\}`; also of `2 + 3 = 5`.

    None for an inequality, and for an equation that is left to solve, such as `x^2 + 1 = 0`.
    """
    first, *rest = relation.sides
    operators = set(relation.operators)
    if not operators <= {"=", r"\approx", r"\in"}:
        return None
    if is_name(first):
        return rest[0] if relation.operators[-1] == r"\approx" else rest[-1]
    if operators == {r"\approx"}:
        return first
    if operators == {"="} and is_name(rest[-1]):
        return first if len(rest) == 1 else None
    if operators == {"="} and not _has_letters(first) and all(same(first, side) for side in rest):
        return rest[-1]
    return None


def is_name(answer: Answer) -> bool:
    r"""Whether this names a quantity: `x`, `a_1`, `f(2)`, `\angle ABC`, `a + b`, `(x, y)`; not `x^2 + 1`, not `\pi`."""
    match answer:
        case Words():
            return True
        case Bracketed(_, items, _):
            return all(map(is_name, items))
        case Value(text):
            text = _CALL.sub(r"\1", _SUBSCRIPT.sub("", text))
            return bool(re.search("[A-Za-z]", text)) and not re.search(r"\d", text) and text.strip() not in _CONSTANTS
        case _:
            return False


def _has_letters(answer: Answer) -> bool:
    return not isinstance(answer, Value) or re.search(r"(?<!\\)\b[A-Za-z]", answer.text) is not None


def _same_relation(gold: Relation, answer: Relation) -> bool:
    named, given = named_value(gold), named_value(answer)
    if named is not None and given is not None and _same_name(_name(gold), _name(answer)):
        return same(named, given)
    if set(gold.operators) == set(answer.operators) == {"="}:
        return _same_equation(gold, answer)
    steps, others = _ascending(gold), _ascending(answer)
    if len(steps) == len(others) and all(map(_same_step, steps, others)):
        return True
    return sets.variables(gold) == sets.variables(answer) and sets.same(gold, answer)


def _name(relation: Relation) -> Answer:
    return relation.sides[0] if is_name(relation.sides[0]) else relation.sides[-1]


def _same_name(gold: Answer, answer: Answer) -> bool:
    """The same, or both name a function's graph: `y = 2x` is `f(x) = 2x`."""
    texts = [side.text.replace(" ", "") for side in (gold, answer) if isinstance(side, Value)]
    return same(gold, answer) or (len(texts) == 2 and "y" in texts and any(_OF_X.fullmatch(text) for text in texts))


def _same_equation(gold: Relation, answer: Relation) -> bool:
    """Equal up to a factor, or with the same solutions: `y = 2x + 3` and `2x - y + 3 = 0`."""
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return False
    left, right = _difference(*gold.sides), _difference(*answer.sides)
    if left is None or right is None:
        return False
    return proportional(left, right) is not None or same_solutions(left, right)


def _difference(left: Answer, right: Answer) -> sympy.Expr | None:
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    return expression(quantity(left.text).text) - expression(quantity(right.text).text)


def _ascending(relation: Relation) -> list[tuple[str, Answer, Answer]]:
    r"""Each step of a chain as (operator, smaller, greater), from the smallest on: `3 > x` as `x < 3`."""
    flipped = {">": "<", r"\geq": r"\leq"}
    steps = [
        (flipped[operator], right, left) if operator in flipped else (operator, left, right)
        for operator, left, right in zip(relation.operators, relation.sides, relation.sides[1:], strict=False)
    ]
    return steps[::-1] if relation.operators[0] in flipped else steps


def _same_step(gold: tuple[str, Answer, Answer], answer: tuple[str, Answer, Answer]) -> bool:
    operator, *sides = gold
    if operator != answer[0]:
        return False
    if _in_order(tuple(sides), answer[1:]):
        return True
    left, right = _difference(*sides), _difference(*answer[1:])
    if left is None or right is None or operator not in ("<", r"\leq", r"\neq"):
        return False
    factor = proportional(left, right)
    return factor is not None and bool(factor.is_real) and (operator == r"\neq" or bool(factor > 0))


def _same_ratio(gold: Ratio, answer: Ratio) -> bool:
    """Clock times term by term; ratios of two numbers in proportion, so that 3:4 is 6:8."""
    if _in_order(gold.items, answer.items):
        return True
    left, right = _terms(gold), _terms(answer)
    if left is None or right is None or any(_is_clock_time(ratio) for ratio in (gold, answer)):
        return False
    return len(left) == len(right) and all(a * right[0] == b * left[0] for a, b in zip(left, right, strict=True))


def _is_clock_time(ratio: Ratio) -> bool:
    minutes = ratio.items[1]
    return isinstance(minutes, Value) and re.match(r"\d\d", minutes.text) is not None


def _is_quotient(ratio: Ratio, value: Value) -> bool:
    terms, quotient = _terms(ratio), quantity(value.text).number
    if terms is None or len(terms) != 2 or quotient is None or only_a_time(ratio):
        return False
    return terms[0] == quotient * terms[1]


def _terms(ratio: Ratio) -> list[Fraction] | None:
    """The numbers of a ratio, none of them 0; or None."""
    terms = [exact(item.text) if isinstance(item, Value) else None for item in ratio.items]
    numbers = [term for term in terms if term]
    return numbers if len(terms) == len(numbers) else None


def _congruent(gold: Modulo, answer: Modulo) -> bool:
    sides = [quantity(side.value.text).number if isinstance(side.value, Value) else None for side in (gold, answer)]
    if sides[0] is None or sides[1] is None:
        return same(gold.value, answer.value)
    return (sides[0] - sides[1]) % gold.modulus == 0


def _in_order(left: tuple[Answer, ...], right: tuple[Answer, ...]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _distinct(items: tuple[Answer, ...]) -> list[Answer]:
    seen: list[Answer] = []
    for item in items:
        if not any(same(item, other) for other in seen):
            seen.append(item)
    return seen
