r"""From rows of any source to problems: which column is what, where the gold is in a text, which rows are broken."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Literal

from rltt.data.boxed import last_boxed
from rltt.errors import DataError

Role = Literal["prompt", "gold", "response"]
GoldKind = Literal["auto", "hash", "boxed", "text"]

# Column names tried in this order when the recipe maps none.
_USUAL_NAMES: dict[Role, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem"),
    "gold": ("gold", "answer", "solution"),
    "response": ("response", "solution"),
}
_FAULTS_SHOWN = 10

# JSON can spell it ("\ud83d" without its other half), but neither Arrow nor a tokenizer can take it.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")
# ASDiv writes "9 (apples)": the unit is a remark, no completion is asked to repeat it.
_NUMBER_WITH_UNIT = re.compile(r"([-+]?\$?[\d.,/]*\d%?)\s*\([^()]*[A-Za-z][^()]*\)")


@dataclass(frozen=True)
class Problem:
    """One problem to solve.

    `prompt` is the bare question (no template yet), `gold` the bare answer, `response` a worked answer to imitate where
    the source has one. `columns` keeps the remaining columns of the row for reward functions; `where` names the row, as
    in `train.jsonl:17` or `openai/gsm8k[train]:17`.
    """

    prompt: str
    gold: str
    response: str | None
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Unreadable:
    """Stands for a row that its reader could not decode, so that it is reported in order with the other faults."""

    reason: str


class _RowError(Exception):
    """What is wrong with one row; collected, never seen by callers."""


class _NoAnswerError(Exception):
    r"""The row has an empty `\boxed{}` for a gold: the source is well formed but does not know the answer."""


class MalformedRowsError(DataError):
    """Rows of a source that are no problems. The message has the first of them, `in_full` all."""

    def __init__(self, faults: list[str], rows: int, source_name: str) -> None:
        head = f"{len(faults)} of {rows} rows of {source_name} {'is' if len(faults) == 1 else 'are'} malformed:"
        lines = [head, *(f"  {fault}" for fault in faults)]
        more = len(faults) - _FAULTS_SHOWN
        shown = lines if more <= 0 else [*lines[: _FAULTS_SHOWN + 1], f"  and {more} more; `rltt check-data` lists all"]
        super().__init__("\n".join(shown))
        self.in_full = "\n".join(lines)


def problems_from_rows(
    rows: Sequence[tuple[str, object]], source_name: str, columns: Mapping[Role, str], gold_kind: GoldKind
) -> tuple[list[Problem], list[str]]:
    r"""Turns `(where, row)` pairs into problems, in order.

    `columns` maps prompt, gold and response to column names; what it leaves out is found by its usual name.

    Returns the problems and the `where` of rows without an answer (an empty box: MATH's training set has two).
    Raises `DataError` with every malformed row (the first ten in full), after having looked at all of them.
    """
    found = list(dict.fromkeys(name for _, row in rows if isinstance(row, Mapping) for name in row))
    names = _choose_columns(found, source_name, columns) if found else {}
    problems, answerless, faults = [], [], []
    for where, row in rows:
        try:
            problems.append(_problem(row, where, names, gold_kind, response_required="response" in columns))
        except _RowError as fault:
            faults.append(f"{where}: {fault}")
        except _NoAnswerError:
            answerless.append(where)
    if faults:
        raise MalformedRowsError(faults, len(rows), source_name)
    return problems, answerless


def _choose_columns(found: list[str], source_name: str, mapped: Mapping[Role, str]) -> dict[Role, str]:
    """Column names for prompt, gold and (where there is one) response."""
    names: dict[Role, str] = {}
    for role, usual in _USUAL_NAMES.items():
        if role in mapped:
            names[role] = _existing_column(mapped[role], role, found, source_name)
            continue
        free = [name for name in usual if name in found and name not in names.values()]
        if free:
            names[role] = free[0]
        elif role != "response":
            raise DataError(
                f"{source_name} has no column for the {role}: found {_listed(found)}, looked for {_listed(usual)}. "
                f"Name it in data.columns, as in {{{role}: {found[-1]}}}."
            )
    return names


def _existing_column(name: str, role: str, found: list[str], source_name: str) -> str:
    if name in found:
        return name
    near = get_close_matches(name, found, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise DataError(
        f"data.columns.{role} is '{name}', but {source_name} has no such column: found {_listed(found)}{hint}"
    )


def _problem(
    row: object, where: str, names: Mapping[Role, str], gold_kind: GoldKind, *, response_required: bool
) -> Problem:
    if isinstance(row, Unreadable):
        raise _RowError(row.reason)
    if not isinstance(row, Mapping):
        raise _RowError(f"expected an object with named fields, found {_kind(row)}")
    prompt = _text(row, names["prompt"])
    answer = _text(row, names["gold"], numbers=True)
    gold = _read_gold(answer, names["gold"], gold_kind)
    response = None
    if "response" in names and (response_required or row.get(names["response"]) is not None):
        response = _text(row, names["response"])
    elif gold != answer and not _NUMBER_WITH_UNIT.fullmatch(answer):
        response = answer  # a gold read out of a worked answer: that answer is one to imitate
    used = set(names.values())
    return Problem(prompt, gold, response, {name: row[name] for name in row if name not in used}, where)


def _text(row: Mapping[str, Any], name: str, *, numbers: bool = False) -> str:
    """The text of a field; a number becomes text where `numbers` allows."""
    if name not in row:
        raise _RowError(f"field '{name}' is missing")
    value = row[name]
    if numbers and isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        return _number_text(value)
    if not isinstance(value, str):
        raise _RowError(f"field '{name}' should be text{' or a number' if numbers else ''}, found {_kind(value)}")
    if not value.strip():
        raise _RowError(f"field '{name}' is empty")
    if _LONE_SURROGATE.search(value):
        raise _RowError(f"field '{name}' holds half a surrogate pair, which is no character")
    return value


def _number_text(value: float | Decimal) -> str:
    """18.0 as `18` and 1e-7 as `0.0000001`: how a completion would write it."""
    text = format(Decimal(str(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _read_gold(text: str, name: str, kind: GoldKind) -> str:
    r"""The bare answer in `text`: after the last `####`, in the last complete `\boxed{}`, or the text itself."""
    text = text.strip()
    if kind == "hash" or (kind == "auto" and "####" in text):
        _, mark, gold = text.rpartition("####")
        if not mark:
            raise _RowError(f"field '{name}' has no '####' before its answer (data.gold is hash)")
        gold = gold.strip()
        if not gold:
            raise _RowError(f"field '{name}' has nothing after its last '####'")
        return gold.replace(",", "") if _THOUSANDS.fullmatch(gold) else gold
    if kind == "boxed" or (kind == "auto" and re.search(r"\\boxed(?![A-Za-z])", text)):
        boxed = last_boxed(text)
        if boxed is None:
            raise _RowError(f"field '{name}' has no complete \\boxed{{}}")
        if not boxed:
            raise _NoAnswerError
        return boxed
    unit = _NUMBER_WITH_UNIT.fullmatch(text) if kind == "auto" else None
    return unit[1] if unit else text


def _kind(value: object) -> str:
    """What a JSON value is, in the words of its user."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float() | Decimal():
            return f"the number {value}"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return type(value).__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
