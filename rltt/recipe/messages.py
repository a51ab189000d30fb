"""What a user reads when a recipe is wrong: the key, what was found there, and what would be right."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic_core import ErrorDetails

from rltt.recipe.section import ConflictError, Loc, Problem, Section, keys_of, section_at

_EXPECTED = {
    "string_type": "text, in quotes if YAML takes it for something else",
    "string_too_short": "some text",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' only, a letter or digit first",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list, such as [math]",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section, a mapping of keys to values",
    "literal_error": "{expected}",
    "greater_than": "a value above {gt}",
    "greater_than_equal": "a value of at least {ge}",
    "less_than": "a value below {lt}",
    "less_than_equal": "a value of at most {le}",
}


def problems_of(error: ErrorDetails, root: type[Section]) -> Iterator[Problem]:
    """The key and the message of each problem that one of pydantic's errors stands for."""
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    if loc and loc[-1] == "[key]":  # a key, not a value, of a mapping with fixed keys
        loc = loc[:-1]
    key = _dotted(loc)
    cause = context.get("error")
    if isinstance(cause, ConflictError):
        for inner, message in cause.problems:
            yield _dotted((*loc, inner)), message
    elif isinstance(cause, ValueError):
        yield key, str(cause)
    elif kind in ("extra_forbidden", "invalid_key"):
        yield key, f"unknown key; {_suggestion(root, loc[:-1], str(loc[-1]))}"
    elif kind == "missing":
        section = section_at(root, loc[:-1])
        description = section.model_fields[str(loc[-1])].description if section else None
        yield key, f"missing. {description}"
    elif kind in _EXPECTED:
        yield key, f"found {found(error['input'])}; expected {_EXPECTED[kind].format(**context)}"
    else:
        yield key, error["msg"]


def _dotted(loc: Loc) -> str:
    """`rewards[0].use` for `("rewards", 0, "use")`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def found(value: Any) -> str:
    """`value` in a reader's words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case int() | float():
            return f"the number {value}"
        case _:
            return f"a {type(value).__name__}"


def _suggestion(root: type[Section], parent: Loc, name: str) -> str:
    """What to say after 'unknown key': the key that was probably meant, or all that could be."""
    section = section_at(root, parent)
    siblings = list(section.model_fields) if section else []
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        return f"the nearest is '{_dotted((*parent, *close))}'"
    # The right name in the wrong section, then anything alike here, then anything alike elsewhere.
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(list(keys_of(root)))}
    if name in elsewhere:
        return f"the nearest is '{elsewhere[name]}'"
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"the nearest is '{_dotted((*parent, *close))}'"
    if close := difflib.get_close_matches(name, elsewhere, n=1):
        return f"the nearest is '{elsewhere[close[0]]}'"
    return f"the keys here are {', '.join(siblings)}"
