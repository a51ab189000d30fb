r"""Sets of real numbers however they are written: `(-\infty, 3)`, `x < 3`, `x \in (-\infty, 3)`, `x < 1 or x > 2`."""

import sympy

from rltt.rewards.answer import Answer, Bracketed, Relation, SetOf, Several, Union, Value, Without
from rltt.rewards.quantity import quantity
from rltt.rewards.value import UnreadableError, equal, expression, same_items

_VARIABLE = sympy.Symbol("x", real=True)
_INEQUALITIES = {"<": sympy.Lt, ">": sympy.Gt, r"\leq": sympy.Le, r"\geq": sympy.Ge, r"\neq": sympy.Ne}


def same(gold: Answer, answer: Answer) -> bool:
    """Whether both are sets of real numbers, and the same one."""
    left = real_set(gold)
    right = real_set(answer) if left is not None else None
    return left is not None and right is not None and _equal(left, right)


def is_condition(answer: Several) -> bool:
    r"""Whether all items are inequalities, or memberships: `x \in \mathbb{R}, x \neq 0`."""
    return all(
        isinstance(item, Relation) and (set(item.operators) <= _INEQUALITIES.keys() or item.operators == (r"\in",))
        for item in answer.items
    )


def variables(relation: Relation) -> set[sympy.Symbol]:
    sides = [side.text for side in relation.sides if isinstance(side, Value)]
    return set().union(*(expression(quantity(side).text).free_symbols for side in sides))


def real_set(answer: Answer) -> sympy.Set | None:
    """The set that an answer describes, or None when it does not describe one."""
    match answer:
        case Bracketed(left, (start, end), right):
            ends = [_real(start), _real(end)]
            return None if None in ends else sympy.Interval(*ends, left == "(", right == ")")
        case Without(whole, removed):
            sets = [real_set(whole), real_set(removed)]
            return None if None in sets else sympy.Complement(*sets)
        case SetOf(items):
            elements = [_real(item) for item in items]
            return None if None in elements else sympy.FiniteSet(*elements)
        case Union(items):
            return _joined(sympy.Union, items)
        case Several(items, joiner) if is_condition(answer):
            if len({frozenset(variables(item)) for item in items if isinstance(item, Relation)}) != 1:
                return None  # x > 1, y < 2
            both, either = _joined(sympy.Intersection, items), _joined(sympy.Union, items)
            # A comma can mean either: `x > 1, x < 2` and `x < 1, x > 2`.
            return either if joiner == "or" or (joiner == "," and both == sympy.S.EmptySet) else both
        case Several(items, _) if all(isinstance(item, Bracketed) for item in items):
            # Intervals. Where one would vanish in another, or is empty, they are points: (2,3), (3,2).
            union = _joined(sympy.Union, items)
            return union if isinstance(union, sympy.Union) and len(union.args) == len(items) else None
        case Relation((_, described), (r"\in",)):
            return real_set(described)
        case Relation():
            return _solutions(answer)
        case _:
            return None


def _joined(join: type[sympy.Set], items: tuple[Answer, ...]) -> sympy.Set | None:
    sets = [real_set(item) for item in items]
    return None if None in sets else join(*sets)


def _solutions(relation: Relation) -> sympy.Set | None:
    """Where an inequality in one variable holds."""
    if not set(relation.operators) <= _INEQUALITIES.keys() or not all(isinstance(s, Value) for s in relation.sides):
        return None
    names = variables(relation)
    if len(names) != 1:
        return None
    replacement = {names.pop(): _VARIABLE}
    sides = [expression(quantity(s.text).text).xreplace(replacement) for s in relation.sides if isinstance(s, Value)]
    steps = zip(relation.operators, sides, sides[1:], strict=False)
    condition = sympy.And(*(_INEQUALITIES[operator](left, right) for operator, left, right in steps))
    return sympy.S.Reals if condition is sympy.true else condition.as_set()  # -oo < x < oo


def _real(answer: Answer) -> sympy.Expr | None:
    """A real number or an infinity."""
    if not isinstance(answer, Value):
        return None
    try:
        number = expression(quantity(answer.text).text)
    except UnreadableError:
        return None
    return number if number.is_extended_real else None


def _equal(left: sympy.Set, right: sympy.Set) -> bool:
    """Equal also when their ends are the same numbers in other forms."""
    if left == right:
        return True
    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        closed = (left.left_open, left.right_open) == (right.left_open, right.right_open)
        return bool(closed) and equal(left.start, right.start) and equal(left.end, right.end)
    if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
        return same_items(list(left), list(right), equal)
    if isinstance(left, sympy.Union) and isinstance(right, sympy.Union):
        return same_items(list(left.args), list(right.args), _equal)
    return False
