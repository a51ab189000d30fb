"""Where problems come from: the Hub, a local dataset folder, a local file, or the arithmetic generator.

A source is the recipe's `DataSource`: path, config, split, limit and, for arithmetic, difficulty and size. Everything
that is wrong with it is a `DataError`, raised before any model loads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rltt.data.arithmetic import arithmetic_problems
from rltt.data.files import READERS, read_rows
from rltt.data.problems import GoldKind, Problem, problems_from_rows
from rltt.errors import DataError

if TYPE_CHECKING:
    from rltt.recipe import DataSection, DataSource

T = TypeVar("T")

ARITHMETIC = "arithmetic"


class AnswerlessWarning(UserWarning):
    """Rows of a source have no answer and are left out; `rows` names them all."""

    def __init__(self, message: str, rows: list[str]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Preset:
    """What a recipe need not say about a well-known data set."""

    configs: tuple[str, ...] = ()
    split: str | None = None
    gold: GoldKind = "auto"


_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
PRESETS = {
    "openai/gsm8k": Preset(configs=("main",), gold="hash"),
    "EleutherAI/hendrycks_math": Preset(configs=_MATH_SUBJECTS, gold="boxed"),
    "HuggingFaceH4/MATH-500": Preset(split="test", gold="text"),
}


def read_problems(source: DataSource, section: DataSection, default_split: str = "train") -> list[Problem]:
    r"""Every problem of `source`, in its order, or `source.limit` of them spread evenly over it.

    `section` says how to read a row: its `columns` and `gold`. `default_split` is used when neither the source nor the
    preset of its Hub id names a split. Rows without an answer (an empty `\boxed{}`) are left out with a warning.

    Raises `DataError` when the source cannot be read, and for malformed rows, all of them at once.
    """
    if source.path == ARITHMETIC:
        problems = arithmetic_problems(source.difficulty, source.size, source.split or default_split)
        return spread(problems, source.limit)
    gold: GoldKind = section.gold
    # A recipe that names the gold column or its form knows better than the preset.
    if gold == "auto" and "gold" not in section.columns and not _is_local_file(source.path):
        gold = PRESETS.get(source.path, Preset()).gold
    rows = source_rows(source, default_split)
    problems, answerless = problems_from_rows(rows, source.path, section.columns, gold)
    if answerless:
        count = f"{len(answerless)} of {len(rows)} rows of {source.path}"
        message = f"{count} have no answer (an empty \\boxed{{}}) and are left out: {some(answerless)}"
        if not problems:
            raise DataError(f"{message}; none remains.")
        warnings.warn(AnswerlessWarning(message, answerless), stacklevel=2)
    return spread(problems, source.limit)


def source_rows(source: DataSource, default_split: str = "train") -> list[tuple[str, object]]:
    """Every row of a file, a folder or a Hub id as it is, after where it is from.

    Raises `DataError` when the source cannot be read or has no rows.
    """
    if _is_local_file(source.path):
        _refuse_idle_keys(source)
        rows = read_rows(_existing_file(source.path), source.path)
    else:
        rows = _dataset_rows(source, default_split)
    if not rows:
        raise DataError(f"{source.path} has no rows.")
    return rows


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of the items, evenly spaced and in order; all of them for None or a count beyond their number.

    Not the first ones: files are often sorted, and the head of MATH is all algebra.
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def some(rows: Sequence[str], shown: int = 3) -> str:
    """The first few rows of a list, for a message."""
    return ", ".join(rows[:shown]) + (", …" if len(rows) > shown else "")


def _refuse_idle_keys(source: DataSource) -> None:
    """A key that would change nothing is a misunderstanding: better said than passed over."""
    for key in ("config", "split"):
        if value := getattr(source, key):
            raise DataError(f"{source.path} is a file and has no {key}: remove {key} '{value}'.")


def _is_local_file(path: str) -> bool:
    """Whether `path` means a file on this disk, there or not, rather than a dataset folder or a Hub id."""
    local = Path(path)
    if local.is_dir():
        return False
    if local.suffix.lower() in READERS or local.is_file() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        return True
    # Both `train.txt` and `some-user/corpus.en` could be a Hub id; what lies in an existing folder is meant as a file.
    return bool(re.fullmatch(r"\.[A-Za-z]+", local.suffix)) and local.parent.is_dir()


def _existing_file(path: str) -> Path:
    local = Path(path)
    if local.is_file():
        return local
    if not local.parent.is_dir():
        raise DataError(f"{path} does not exist: there is no folder {local.parent}.")
    neighbours = sorted(file.name for file in local.parent.iterdir() if file.suffix.lower() in READERS)
    near = get_close_matches(local.name, neighbours, n=1, cutoff=0)
    hint = f"the nearest name in that folder is {near[0]}." if near else "the folder holds no data files."
    raise DataError(f"{path} does not exist; {hint}")


def _dataset_rows(source: DataSource, default_split: str) -> list[tuple[str, object]]:
    """Rows of a Hub id or of a local dataset folder, through `datasets.load_dataset`."""
    import datasets

    preset = PRESETS.get(source.path, Preset())
    split = source.split or preset.split or default_split
    configs = (source.config,) if source.config else preset.configs or (None,)
    # datasets 5.2 keeps serving the old rows of a folder with a README when its files were edited since.
    mode = "force_redownload" if Path(source.path).is_dir() else None
    rows: list[tuple[str, object]] = []
    for config in configs:
        name = f"{source.path}/{config}" if source.config or len(configs) > 1 else source.path
        try:
            part = datasets.load_dataset(source.path, config, split=split, download_mode=mode)
        # Not found, unreachable or empty; no such config or split; files that do not parse.
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise DataError(f"{name}[{split}] cannot be loaded: {reason}") from error
        rows += [(f"{name}[{split}]:{number}", row) for number, row in enumerate(part, start=1)]
    return rows
