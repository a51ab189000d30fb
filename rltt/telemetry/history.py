"""The metrics of a run, read back: from its directory, its metrics.jsonl, or TRL's trainer_state.json.

A run that was killed, or is running, may leave half a line at the end of metrics.jsonl: it is left out. Anything else
that is not what a run writes is an error that names the line.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rltt.errors import DataError
from rltt.recipe.yaml_dialect import parse_yaml

Row = dict[str, float | None]
"""One step: `step`, and each metric's number; None where it was NaN or infinite, which JSON does not have."""


class HeldOut(NamedTuple):
    """An evaluation on held-out prompts; `stderr` is None where it is not known."""

    step: int
    solve_rate: float
    stderr: float | None


@dataclass(frozen=True)
class History:
    """The metrics of one run, step by step.

    Attributes:
        rows: one a step, in the order of `step`.
        source: the file that they come from, for messages.
        settings: the recipe as dotted keys (`train.learning_rate`); empty where no recipe is known.
        total_steps: how many steps the run was to have; None where that is not known.
        before: the evaluation before the first step.
        after: the evaluation after the last step.
    """

    rows: Sequence[Row]
    source: str = "history"
    settings: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    before: HeldOut | None = None
    after: HeldOut | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_step(self) -> int:
        """The last step there is; 0 without any."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    @cached_property
    def names(self) -> set[str]:
        """Metrics of which at least one number is known."""
        return {name for row in self.rows for name, value in row.items() if value is not None} - {"step"}

    def column(self, name: str) -> list[float | None]:
        """The metric at each row; None where a row lacks it."""
        return [row.get(name) for row in self.rows]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric is known, and its numbers there."""
        known = [(int(row["step"] or 0), value) for row in self.rows if (value := row.get(name)) is not None]
        return [step for step, _ in known], [value for _, value in known]

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """Every evaluation on held-out prompts, from before the run to after it."""
        during = [
            HeldOut(int(row["step"] or 0), rate, row.get("eval/stderr"))
            for row in self.rows
            if (rate := row.get("eval/solve_rate")) is not None
        ]
        return [*([self.before] if self.before else []), *during, *([self.after] if self.after else [])]

    def up_to(self, step: int) -> "History":
        """What was known after `step`."""
        rows = [row for row in self.rows if (row["step"] or 0) <= step]
        finished = bool(self.rows) and len(rows) == len(self.rows)
        return History(
            rows, self.source, self.settings, self.total_steps, self.before, self.after if finished else None
        )


def read_history(path: str | Path, *, trl: bool = False) -> History:
    """The history in `path`: a run directory, a metrics.jsonl, or with `trl` the trainer_state.json of a TRL run.

    With a metrics.jsonl, the recipe.yaml and summary.json beside it are read where they are there.

    Raises:
        DataError: the file is missing, holds no step, or a line of it is not what a run writes.
    """
    path = Path(path)
    if trl:
        return _read_trl(path / "trainer_state.json" if path.is_dir() else path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        hint = "; a run that has made no step has none yet" if path.is_dir() else ""
        raise DataError(f"{file}: no such file{hint}")
    if file.name == "trainer_state.json":
        raise DataError(f"{file}: written by transformers or TRL; read it with --trl")
    rows = read_rows(file)
    settings = _settings(file.parent / "recipe.yaml")
    summary = _json_object(file.parent / "summary.json")
    total = settings.get("train.max_steps")
    return History(
        rows,
        str(file),
        settings,
        total if isinstance(total, int) else None,
        _evaluation(summary.get("eval_before"), 0),
        _evaluation(summary.get("eval_after"), int(rows[-1]["step"] or 0)),
    )


def read_rows(file: Path) -> list[Row]:
    """The steps in a metrics.jsonl.

    Raises:
        DataError: a line other than an unfinished last one is not an object of numbers, the steps do not ascend, or
            there is none.
    """
    text = _text(file)
    lines = text.split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line break behind it: the writer has not finished it
                break
            raise DataError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
        rows.append(_row(found, where, rows[-1] if rows else None))
    if not rows:
        raise DataError(f"{file}: holds no step")
    return rows


def _row(found: Any, where: str, previous: Row | None) -> Row:
    if not isinstance(found, dict):
        raise DataError(f"{where}: found {_kind(found)}; a line is the object of a step, with its number as step")
    step = found.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DataError(f"{where}: step is {_kind(step)}; it must be a whole number from 0")
    if previous is not None and step <= (previous["step"] or 0):
        raise DataError(f"{where}: step {step} after step {previous['step']}; steps must ascend")
    for name, value in found.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{where}: {name} is {_kind(value)}; a metric is a number or null")
    return {name: _finite(value) for name, value in found.items()}


def _read_trl(file: Path) -> History:
    """transformers keeps every logged dictionary; those with a loss are the training steps."""
    if not file.is_file():
        raise DataError(f"{file}: no such file; transformers writes one into each checkpoint")
    state = _json_object(file)
    log = state.get("log_history")
    if not isinstance(log, list):
        raise DataError(f"{file}: no log_history; a trainer_state.json of transformers has one")
    rows: dict[int, Row] = {}
    held_out: dict[int, Row] = {}
    for number, entry in enumerate(log):
        where = f"{file}: log_history[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise DataError(f"{where}: found {_kind(entry)}; it must be an object with a step")
        numbers = {name: _finite(value) for name, value in entry.items() if _is_number(value)}
        step = entry["step"]
        if "loss" in entry:
            rows[step] = {"step": step} | {"lr" if k == "learning_rate" else k: v for k, v in numbers.items()}
        elif any(name.startswith("eval_") for name in entry):
            held_out[step] = {f"eval/{k.removeprefix('eval_')}": v for k, v in numbers.items() if k.startswith("eval_")}
    if not rows:
        raise DataError(f"{file}: log_history has no training step (an entry with a loss)")
    first = min(rows)
    for step, evaluation in held_out.items():
        if step in rows:
            rows[step] |= evaluation
    early = held_out.get(0, {}) if first > 0 else {}
    reward = early.get("eval/reward")
    total = state.get("max_steps")
    return History(
        [rows[step] for step in sorted(rows)],
        str(file),
        {},
        total if isinstance(total, int) and total > 0 else None,
        None if reward is None else HeldOut(0, reward, None),
    )


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    values = parse_yaml(_text(file), source=str(file))
    if not isinstance(values, dict):
        raise DataError(f"{file}: found {_kind(values)}; a recipe is a mapping")
    return flat(values)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by dotted keys, lists as they are."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _evaluation(found: Any, step: int) -> HeldOut | None:
    if not isinstance(found, dict) or not _is_number(found.get("solve_rate")):
        return None
    return HeldOut(step, found["solve_rate"], found.get("stderr"))


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: not JSON: {error.msg}, line {error.lineno}, column {error.colno}") from None
    if not isinstance(found, dict):
        raise DataError(f"{file}: found {_kind(found)}; it must be an object")
    return found


def _text(file: Path) -> str:
    data = file.read_bytes()
    # A line that is being written can end inside of a character.
    complete, newline, rest = data.rpartition(b"\n")
    try:
        return (complete + newline).decode("utf-8") + rest.decode("utf-8", errors="replace")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not text in UTF-8 (byte {error.start})") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float | None) -> float | None:
    """Python's json reads NaN and Infinity, which transformers writes."""
    return None if value is None or not math.isfinite(value) else value


def _kind(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"
