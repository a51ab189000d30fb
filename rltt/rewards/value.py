"""Are two expressions equal? Parsed by math-verify's LaTeX parser, compared without tolerance.

math-verify's own comparison rounds to six decimals, subtracts to fifteen digits and drops what is tiny, so that
1/3 equals 0.3333333 and 1/2004! equals 1/2006!. Here decimals are fractions, constants are compared to fifty
significant digits, and expressions with variables at points.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef

T = TypeVar("T")

DIGITS = 50
MAX_DIGITS = 100_000
_PRECISION = sympy.Float(10, DIGITS) ** (8 - DIGITS)
_TINY = sympy.Float(10, DIGITS) ** -40
# Where variables are tried: mostly positive, because a root or a logarithm often has no real value elsewhere.
_RANGES = ((1, 3), (0, 1), (3, 10), (-3, -1), (-1, 0))
_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z])\s*\^\\circ")
# `2\frac{1}{3}\pi` is a mixed number times pi, not a product of three.
_MIXED = re.compile(r"(?<![\d.}^_])(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}")
_UNFINISHED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


class UnreadableError(ValueError):
    """A text that is not mathematics, or none that the parser knows."""


class TooLargeError(UnreadableError):
    """A number with more digits than can be written out, such as a tower of powers."""


@lru_cache(maxsize=4096)
def expression(text: str) -> sympy.Basic:
    """A tidy text as a sympy expression: exact, with `i` and `e` as the constants. Raises `UnreadableError`."""
    if re.search(r"\d\s*_", text):  # the parser would drop the subscript
        raise UnreadableError("a number with a subscript that is no base")
    text = _MIXED.sub(_as_sum, text)
    text = _DEGREES.sub(r"\\frac{\1 \\pi}{180}", text)
    try:
        parsed = latex2sympy(text, is_real=None, normalization_config=None, conversion_config=_CONVERSION)
    except RecursionError as error:
        raise UnreadableError("nested too deeply") from error
    except Exception as error:  # the parser raises bare Exceptions
        raise UnreadableError(str(error).split("\n")[0]) from error
    if not isinstance(parsed, sympy.Expr):
        raise UnreadableError(f"{type(parsed).__name__} is not an expression")
    if _digits(parsed) > MAX_DIGITS:
        raise TooLargeError("too large a number to evaluate")
    return _exact(parsed)


def _as_sum(mixed: re.Match[str]) -> str:
    whole, top, bottom = mixed.groups()
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else mixed[0]


def _digits(parsed: sympy.Basic) -> float:
    """Roughly how many digits evaluating the numbers in an expression writes out."""
    if parsed.is_Symbol:
        return 4.0  # of the points where it is tried
    if parsed.is_Float:
        return float(len(str(parsed)))
    if parsed.is_Rational:
        return math.log10(max(1, abs(parsed.p), parsed.q))
    if parsed.is_Pow:
        base, exponent = parsed.args
        times = abs(float(exponent)) if exponent.is_Number else 10.0 ** min(_digits(exponent), 300)
        return _digits(base) * times
    if isinstance(parsed, sympy.factorial):
        number = 10.0 ** min(_digits(parsed.args[0]), 300)
        return number * math.log10(number + 1)
    return sum(map(_digits, parsed.args))


def _exact(parsed: sympy.Expr) -> sympy.Expr:
    parsed = parsed.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))
    parsed = parsed.xreplace({symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"})
    # f(x) is compared like a variable of that name.
    parsed = parsed.xreplace({call: sympy.Symbol(str(call)) for call in parsed.atoms(AppliedUndef)})
    return parsed.doit()


def equal(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two expressions have the same value, wherever both are real when they have variables."""
    if left == right:
        return True
    if left.has(*_UNFINISHED) or right.has(*_UNFINISHED):
        return sympy.simplify(left - right) == 0
    if not left.free_symbols and not right.free_symbols:
        return _equal_constants(left, right)
    points = _at_points(left, right)
    real = [(a, b) for a, b, defined in points if defined and a.is_real and b.is_real]
    pairs = real if len(real) >= 2 else [(a, b) for a, b, _ in points]
    return len(pairs) >= 2 and all(_agree(a, b) for a, b in pairs)


def proportional(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr | None:
    """The constant c with left = c·right, or None. With one, `left = 0` and `right = 0` are the same equation."""
    pairs = _at_points(left, right) if left.free_symbols and right.free_symbols else []
    if len(pairs) < 3 or any(b == 0 for _, b, _ in pairs):
        return None
    ratios = [a / b for a, b, _ in pairs]
    same = ratios[0] != 0 and all(_agree(first, second) for first, second in pairwise(ratios))
    return ratios[0] if same else None


def same_solutions(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether `left = 0` and `right = 0`, in the same variables, have the same solutions for each of them.

    For one of them is not enough: solved for x, y = sqrt(25 - x^2) has both solutions of the whole circle.
    """
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    for variable in sorted(left.free_symbols, key=lambda symbol: symbol.name):
        solutions, others = sympy.solve(left, variable), sympy.solve(right, variable)
        if not solutions or not same_items(solutions, others, equal):
            return False
    return True


def same_items(left: Sequence[T], right: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether two collections hold the same items in any order."""
    rest = list(right)
    for item in left:
        found = next((index for index, other in enumerate(rest) if same(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return not rest


def _equal_constants(left: sympy.Expr, right: sympy.Expr) -> bool:
    if left.is_Rational and right.is_Rational:
        return False  # not the same one
    a, b = _evaluated(left), _evaluated(right)
    if a is None or b is None:
        return False  # infinite or undefined
    if max(abs(a), abs(b)) < _TINY:  # a zero in disguise has no significant digits
        return sympy.simplify(left - right) == 0
    return _agree(a, b)


def _agree(a: sympy.Expr, b: sympy.Expr) -> bool:
    if a == b:
        return True
    return not (a.is_Rational and b.is_Rational) and bool(abs(a - b) <= _PRECISION * max(abs(a), abs(b)))


def _at_points(left: sympy.Expr, right: sympy.Expr) -> list[tuple[sympy.Expr, sympy.Expr, bool]]:
    """The values of both at some rational points, left out where one has none. A name has the same value in both.

    The bool says that no root or logarithm of a negative number was taken on the way: sqrt(a) sqrt(b) is sqrt(ab) only
    where a and b are positive.
    """
    symbols = left.free_symbols | right.free_symbols
    roots = [power.base for power in (left.atoms(sympy.Pow) | right.atoms(sympy.Pow)) if _is_even_root(power)]
    roots += [logarithm.args[0] for logarithm in left.atoms(sympy.log) | right.atoms(sympy.log)]
    pairs = []
    for low, high in _RANGES:
        point = {
            symbol: sympy.Rational(random.Random(f"{symbol.name} {low}").randint(1000 * low, 1000 * high), 1001)
            for symbol in symbols
        }
        a, b = _evaluated(left.xreplace(point)), _evaluated(right.xreplace(point))
        if a is not None and b is not None:
            inside = [_evaluated(root.xreplace(point)) for root in roots]
            pairs.append((a, b, all(value is not None and value.is_nonnegative for value in inside)))
    return pairs


def _is_even_root(power: sympy.Pow) -> bool:
    return bool(power.exp.is_Rational) and power.exp.q % 2 == 0


def _evaluated(constant: sympy.Expr) -> sympy.Expr | None:
    value = constant if constant.is_Rational else constant.evalf(DIGITS)
    return value if value.is_number and value.is_finite and not value.has(*_UNFINISHED) else None
