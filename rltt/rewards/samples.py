r"""Completions to try a reward function on: from a file, from the rollouts of a run, or made of the golds.

Completions that carry no golds or columns get them from the data, by the first of these that every completion has:

1. `row`, which names the row of the data, as rollouts do (`train.jsonl:17`);
2. `prompt`, the text of the row's prompt (without the recipe's template);
3. neither: by order, and then there must be as many completions as rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltt.data.files import read_rows
from rltt.data.problems import Problem, Unreadable
from rltt.errors import DataError
from rltt.rewards.extract import completion_text
from rltt.rewards.registry import FROM_TRL

# What rollouts hold beside the columns of the data.
_OF_ROLLOUTS = ("step", "rewards", "reward", "solved", "advantage")


@dataclass(frozen=True)
class Sample:
    """One completion (text, or messages) with the columns of its row. `prompt` is None where none is known."""

    where: str
    completion: Any
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


def samples_of_golds(problems: Sequence[Problem]) -> list[Sample]:
    """For each problem its gold in a box, its bare gold, and nothing at all, as completions."""
    return [
        Sample(f"{problem.where} ({kind})", completion, problem.prompt, columns_of(problem))
        for problem in problems
        for kind, completion in (("boxed", rf"\boxed{{{problem.gold}}}"), ("bare", problem.gold), ("empty", ""))
    ]


def read_samples(path: Path) -> list[Sample]:
    """Completions of a .jsonl (.json, .csv, .parquet) file, of a run directory or of its `rollouts` folder.

    A row has its completion under `completion`, else under `response`. Raises `DataError` naming a row without one.
    """
    return [_sample(where, row) for file in _files(path) for where, row in read_rows(file, str(file))]


def with_data(samples: Sequence[Sample], problems: Sequence[Problem]) -> list[Sample]:
    """The samples with the columns of their rows in the data added; what a sample has already stays.

    Raises `DataError` when a sample's row cannot be told, by the rule at the top of this file.
    """
    return [
        Sample(
            sample.where,
            sample.completion,
            problem.prompt if sample.prompt is None else sample.prompt,
            columns_of(problem) | sample.columns,
        )
        for sample, problem in zip(samples, _matched(samples, problems), strict=True)
    ]


def keywords_of(samples: Sequence[Sample], trainer_state: Any, chat: bool) -> dict[str, Any]:
    """What TRL would pass to a reward function, but for the loggers. With `chat`, text is passed as messages."""

    def shaped(role: str, value: Any) -> Any:
        return [{"role": role, "content": value}] if chat and isinstance(value, str) else value

    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {name: [sample.columns.get(name) for sample in samples] for name in names} | {
        "prompts": [shaped("user", sample.prompt or "") for sample in samples],
        "completions": [shaped("assistant", sample.completion) for sample in samples],
        # No tokenizer made them: the bytes stand in for tokens.
        "completion_ids": [list(completion_text(sample.completion).encode()) for sample in samples],
        "trainer_state": trainer_state,
    }


def _matched(samples: Sequence[Sample], problems: Sequence[Problem]) -> list[Problem]:
    if all("row" in sample.columns for sample in samples):
        by_row = {_place(problem.where): problem for problem in problems}
        return [
            _found(by_row, _place(str(sample.columns["row"])), f"{sample.where}: row {sample.columns['row']!r}")
            for sample in samples
        ]
    if all(sample.prompt is not None for sample in samples):
        by_prompt: dict[str, Problem] = {}
        for problem in problems:
            earlier = by_prompt.setdefault(problem.prompt.strip(), problem)
            if columns_of(earlier) | {"row": None} != columns_of(problem) | {"row": None}:
                raise DataError(
                    f"{earlier.where} and {problem.where} have the same prompt and differ otherwise: completions "
                    "cannot be matched by prompt; name the row of each in a field `row`, or remove their `prompt`"
                )
        return [
            _found(by_prompt, _prompt_text(sample.prompt).strip(), f"{sample.where}: its prompt") for sample in samples
        ]
    if len(samples) != len(problems):
        raise DataError(
            f"{len(samples)} completions for {len(problems)} rows of data: without a `row` or a `prompt` in every "
            "completion they are matched by order, and must be as many"
        )
    return list(problems)


def _found(problems: Mapping[Any, Problem], key: Any, what: str) -> Problem:
    if key not in problems:
        raise DataError(
            f"{what} is not in the data of --data. Completions are matched by `row`, else by `prompt`, else by order: "
            "name the data that they come from, or remove that field."
        )
    return problems[key]


def _place(where: str) -> tuple[str, str]:
    """A row's name with the file's path made absolute, so that `data/train.jsonl:3` is found however it was spelled."""
    name, _, number = where.rpartition(":")
    return (str(Path(name).resolve()) if Path(name).is_file() else name), number


def _prompt_text(prompt: Any) -> str:
    """A prompt as text; of messages, the last one's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""


def columns_of(problem: Problem) -> dict[str, Any]:
    """The columns that a problem has in a dataset, its prompt aside."""
    response = {} if problem.response is None else {"response": problem.response}
    return {"gold": problem.gold, "row": problem.where, **response, **problem.columns}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or run directory.")
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(folder.glob("*.jsonl"))
    # A run directory without rollouts has .jsonl files too, its metrics.
    if not files or (folder == path and (path / "summary.json").exists()):
        raise DataError(f"{path}: holds no rollouts; name a run directory, its rollouts folder, or a .jsonl file.")
    return files


def _sample(where: str, row: object) -> Sample:
    if isinstance(row, Unreadable):
        raise DataError(f"{where}: {row.reason}")
    if not isinstance(row, dict):
        raise DataError(f"{where}: found {type(row).__name__}; expected an object with a field `completion`")
    key = next((name for name in ("completion", "response") if name in row), None)
    if key is None:
        raise DataError(f"{where}: has neither `completion` nor `response`; found {', '.join(map(repr, row))}")
    completion = row[key]
    if not isinstance(completion, str) and not _is_messages(completion):
        raise DataError(f"{where}: {key} is {repr(completion)[:60]}; expected text, or a list of messages")
    left_out = {key, "prompt", *(_OF_ROLLOUTS if "rewards" in row and "advantage" in row else ())}
    columns = {name: value for name, value in row.items() if name not in left_out}
    if taken := sorted(FROM_TRL & set(columns)):
        raise DataError(f"{where}: a column may not be called {taken[0]!r}, which the trainer itself passes; rename it")
    if "gold" in columns:
        gold = columns["gold"]  # golds are text in training, also where a file has numbers
        columns["gold"] = str(gold) if isinstance(gold, int | float) and not isinstance(gold, bool) else gold
    prompt = row.get("prompt")
    if prompt is not None and not isinstance(prompt, str) and not _is_messages(prompt):
        raise DataError(f"{where}: prompt is {repr(prompt)[:60]}; expected text, or a list of messages")
    return Sample(where, completion, prompt, columns)


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)
