"""Rows of local files, each with its place, for people who will have to look it up.

A row that cannot be decoded is handed on as `Unreadable`, so that one pass names every broken row of a file; a file
that cannot be read at all is a `DataError`.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rltt.data.problems import Unreadable
from rltt.errors import DataError

Row = object


def read_rows(file: Path, name: str) -> list[tuple[str, Row]]:
    """`(where, row)` for each row of `file`, where as `name:line` (or the row's number, in files without lines)."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        found = f"unknown extension '{file.suffix}'" if file.suffix else "no extension"
        raise DataError(f"{name}: {found}; rltt reads {', '.join(READERS)} files.")
    if file.stat().st_size == 0:
        raise DataError(f"{name} is empty.")
    try:
        return [(f"{name}:{number}", row) for number, row in reader(file)]
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: {error}") from error
    except _FileError as error:
        raise DataError(f"{name} {error}") from error


class _FileError(Exception):
    """The file as a whole is unreadable; the message continues its name."""


def _jsonl(file: Path) -> Iterator[tuple[int, Row]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.rstrip())  # without the line break, which would count as line 2, column 1
            except json.JSONDecodeError as error:
                yield number, Unreadable(f"not JSON: {error.msg} (column {error.colno})")


def _json(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        hint = " (one object a line? Name it .jsonl)" if error.msg == "Extra data" else ""
        raise _FileError(f"is not JSON: {error.msg}, line {error.lineno}, column {error.colno}{hint}") from error
    if not isinstance(rows, list):
        raise _FileError("does not hold a list of objects")
    yield from enumerate(rows, start=1)


def _csv(file: Path) -> Iterator[tuple[int, Row]]:
    # newline="": cells may hold line breaks. utf-8-sig: Excel writes a byte order mark before the first column's name.
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader)
            if repeated := {name for name in header if header.count(name) > 1}:
                raise _FileError(f"names a column twice: {', '.join(sorted(repeated))}")
            last_line = reader.line_num
            for cells in reader:
                line, last_line = last_line + 1, reader.line_num
                if len(cells) > len(header):
                    yield line, Unreadable(f"has {len(cells)} cells, but the header has {len(header)} columns")
                elif cells:  # not a blank line; a short row has its last fields missing
                    yield line, dict(zip(header, cells, strict=False))
        except csv.Error as error:
            raise _FileError(f"is not readable as CSV: {error}, line {reader.line_num}") from error


def _parquet(file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _FileError(f"is not readable as parquet: {error}") from error
    yield from enumerate(rows, start=1)


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
