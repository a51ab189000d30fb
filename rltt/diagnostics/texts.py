"""Held-out text in: token ids of rows of any source, or of a plain text file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import prompt_ids
from ..data.problems import problems_from_rows
from ..data.sources import ARITHMETIC, read_problems, some, source_rows, spread
from ..errors import DataError
from ..models.load import end_of_response_id
from ..recipe import DataSection, DataSource

SHORTEST = 2
"""Tokens of a text in which one token predicts another."""


@dataclass(frozen=True)
class Texts:
    """What is measured on, before it is tokenized.

    Attributes:
        kind: `text`, `prompt and response` or `input_ids`.
        rows: where each is from, and the text, the pair of prompt and response, or the token ids.
    """

    kind: str
    rows: list[tuple[str, Any]]

    @property
    def need_tokenizer(self) -> bool:
        return self.kind != "input_ids"


def read_texts(source: DataSource, columns: Sequence[str] | None) -> Texts:
    """The rows of a source, all of them.

    A `.txt` file is one text. A row is its column `text`, or token ids in `input_ids`, or prompt and response where it
    has them; or what `columns` names, joined by line breaks.

    Raises:
        DataError: the source cannot be read, is empty, or has none of these columns.
    """
    path = Path(source.path)
    if path.suffix.lower() == ".txt" and (path.exists() or path.parent.is_dir()):
        return Texts("text", [(source.path, _read(path))])
    if source.path == ARITHMETIC:
        section = DataSection(train=source, eval=source)
        problems = read_problems(source, section, default_split="test")
        return Texts("prompt and response", [(p.where, (p.prompt, p.response)) for p in problems])
    rows = source_rows(source, default_split="test")
    found = list(dict.fromkeys(name for _, row in rows if isinstance(row, Mapping) for name in row))
    if columns is not None:
        if missing := [name for name in columns if name not in found]:
            raise DataError(f"{source.path} has no column {missing[0]!r}: found {', '.join(found)}")
        return Texts("text", [(where, "\n".join(_texts_of(where, row, columns))) for where, row in rows])
    if "input_ids" in found:
        return Texts("input_ids", [(where, _ids_of(where, row)) for where, row in rows])
    if "text" in found:
        return Texts("text", [(where, _texts_of(where, row, ["text"])[0]) for where, row in rows])
    try:
        problems, _ = problems_from_rows(rows, source.path, {}, "text")
    except DataError as error:
        raise DataError(
            f"{source.path} has no column `text`, nor prompts with responses; name what to read with --columns "
            f"(found {', '.join(found) or 'no columns'})"
        ) from error
    if any(problem.response is None for problem in problems):
        raise DataError(
            f"{source.path} has prompts without responses; name what to read with --columns, as in --columns "
            f"{','.join(found[:2])}"
        )
    return Texts("prompt and response", [(p.where, (p.prompt, p.response)) for p in problems])


def token_ids(
    texts: Texts, tokenizer: Any, vocabulary: int, max_length: int, limit: int | None
) -> tuple[list[Tensor], list[str]]:
    """Token ids of at most `limit` texts, spread evenly, cut at `max_length` tokens; and which were too short.

    A single text is cut into consecutive pieces instead. Prompt and response are joined as for pretraining, with the
    token that ends a response.

    Raises:
        DataError: no text has two tokens, or a token is not in the vocabulary.
    """
    rows = list(_tokenized(texts, tokenizer))
    if len(rows) == 1:
        where, ids = rows[0]
        pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)] or [ids]
        rows = [(where, piece) for piece in pieces if len(piece) >= SHORTEST or len(pieces) == 1]
    rows = spread(rows, limit)
    short = [where for where, ids in rows if len(ids) < SHORTEST]
    if len(short) == len(rows):
        raise DataError(
            f"no text is long enough: {some(short)} with fewer than {SHORTEST} tokens, of which one predicts the next"
        )
    for where, ids in rows:
        if outside := [token for token in ids if not 0 <= token < vocabulary]:
            raise DataError(f"{where}: token {outside[0]} is not in the policy's vocabulary of {vocabulary}")
    return [torch.tensor(ids[:max_length]) for _, ids in rows if len(ids) >= SHORTEST], short


def _tokenized(texts: Texts, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    if texts.kind == "prompt and response":
        end = end_of_response_id(tokenizer, chat=False)
        for where, (prompt, response) in texts.rows:
            answer = tokenizer(response, add_special_tokens=False)["input_ids"]
            yield where, [*prompt_ids([prompt], tokenizer)[0], *answer, end]
        return
    for where, content in texts.rows:
        yield where, content if texts.kind == "input_ids" else tokenizer(content)["input_ids"]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise DataError(f"{path} is empty.")
    return text


def _texts_of(where: str, row: Any, columns: Sequence[str]) -> list[str]:
    texts = []
    for name in columns:
        value = row.get(name) if isinstance(row, Mapping) else None
        if not isinstance(value, str):
            raise DataError(f"{where}: column {name!r} must hold text, found {type(value).__name__}")
        texts.append(value)
    return texts


def _ids_of(where: str, row: Any) -> list[int]:
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"{where}: column 'input_ids' must hold a list of whole numbers")
    return ids
