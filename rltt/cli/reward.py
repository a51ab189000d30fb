"""`rltt reward test`: what a reward function gives on real completions."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

if TYPE_CHECKING:
    from rltt.data import Problem
    from rltt.recipe import Recipe
    from rltt.rewards.trial import Trial, TrialReport

reward = typer.Typer(help="Try reward functions.", no_args_is_help=True)

ROWS_SHOWN = 40
TRACEBACKS_SHOWN = 5
SNIPPET = 60


@reward.callback()
def _group() -> None:
    """Try reward functions."""


@reward.command("test")
def try_out(
    use: Annotated[
        str | None,
        typer.Argument(help="A name such as math, file.py:function or module:function; with --recipe, one of its own."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Take rewards with their keys, data and tokenizer from this recipe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A data file (or Hub id, or arithmetic) with golds and other columns.")
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file with `completion` (or `response`) in each row, or a run directory."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Take only so many completions (rows of --data without them), evenly spread."),
    ] = None,
    solved_at: Annotated[
        float | None, typer.Option(help="Reward from which a completion counts as solved. Default: 1.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="A keyword argument of the function as key=value; may be repeated.")
    ] = None,
    no_isolate: Annotated[
        bool, typer.Option("--no-isolate", help="Call it in this process, where a debugger reaches it.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one call may take. Default: 10.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Pass completions as messages, as with a chat template.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint whose tokenizer goes to a function that names it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every completion and the summary as JSON.")] = False,
) -> None:
    """Show what a reward function gives on completions, before a run.

    Ends with status 1 when the function fails on any of them. Without --completions, each gold is tried boxed, bare,
    and against an empty completion.
    """
    from rltt.errors import UserError
    from rltt.recipe import RewardEntry, check, load_recipe

    if recipe is None and data is None and completions is None:
        raise UserError("rltt reward test: give --completions, --data, or both, or --recipe")
    if use is None and recipe is None:
        raise UserError("rltt reward test: name a reward function, or give --recipe")
    given = {"solved_at": solved_at, "timeout": timeout, "isolate": False if no_isolate else None}
    keys = {key: value for key, value in given.items() if value is not None}
    args = _arguments(arg or [])
    resolved = None if recipe is None else load_recipe(recipe)
    written: list[dict[str, Any]] = [{"use": use}] if resolved is None else _of_recipe(resolved, use)
    entries = [
        check(RewardEntry, keyed | keys | {"args": keyed.get("args", {}) | args}, source="rltt reward test")
        for keyed in written
    ]
    load = _tokenizer(tokenizer, resolved)

    from rltt.data.sources import spread
    from rltt.rewards.samples import read_samples, samples_of_golds, with_data
    from rltt.rewards.trial import try_reward

    problems = None if data is None else _problems(data)
    if problems is None and resolved is not None:
        from rltt.data import read_problems

        problems = read_problems(resolved.data.train, resolved.data)
    if completions is None:
        assert problems is not None
        samples = samples_of_golds(spread(problems, limit))
    else:
        samples = read_samples(completions)
        samples = spread(samples if problems is None else with_data(samples, problems), limit)
    with _prints_to_stderr():  # what the function prints must not stand between the lines of the result
        reports = [try_reward(entry, samples, chat=chat, tokenizer=load) for entry in entries]
    if as_json:
        found = [report.to_json() for report in reports]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False, indent=2, default=str))
    else:
        for report in reports:
            _show(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _arguments(given: list[str]) -> dict[str, Any]:
    """`key=value` as keyword arguments; values are YAML, as in a recipe."""
    from rltt.errors import UserError

    for argument in given:
        if not argument.partition("=")[0].isidentifier() or "=" not in argument:
            raise UserError(f"--arg {argument}: write it as key=value, such as --arg limit=512")
    return {key: yaml.safe_load(value) for key, _, value in (argument.partition("=") for argument in given)}


def _of_recipe(recipe: "Recipe", use: str | None) -> list[dict[str, Any]]:
    """The keys of a recipe's rewards, or of the one that `use` names: as written there, or by its last part."""
    from rltt.errors import UserError

    found = [entry for entry in recipe.rewards if use in (None, entry.use, entry.use.rpartition(":")[2])]
    if not found:
        raise UserError(f"{use} is none of the recipe's rewards: {', '.join(entry.use for entry in recipe.rewards)}")
    return [entry.model_dump(exclude_unset=True) for entry in found]


def _tokenizer(path: str | None, recipe: "Recipe | None") -> Callable[[], Any] | None:
    """Loads the tokenizer of a checkpoint or of a recipe's policy: called only when a function names it."""
    checkpoint = path
    if path is None and recipe is not None:
        checkpoint = recipe.policy.path
        if checkpoint is None:
            from rltt.data import arithmetic_tokenizer

            return arithmetic_tokenizer
    if checkpoint is None:
        return None

    def load() -> Any:
        from rltt.models.load import load_tokenizer

        return load_tokenizer(checkpoint)

    return load


def _problems(path: str) -> "list[Problem]":
    from rltt.data import read_problems
    from rltt.recipe import DataSection, DataSource, check

    source = check(DataSource, {"path": path}, source="--data")
    return read_problems(source, check(DataSection, {"train": source}, source="--data"))


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """Standard output goes to standard error, that of worker processes too."""
    sys.stdout.flush()
    kept, out = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = out
        os.dup2(kept, 1)
        os.close(kept)


def _show(report: "TrialReport") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    # Failures are never left out of the table.
    shown = {id(trial) for trial in [*report.failed, *report.trials][:ROWS_SHOWN]}
    table = Table("row", "completion", "gold", "reward", "outcome")
    for trial in report.trials:
        if id(trial) in shown:
            number = "" if trial.reward is None else f"{trial.reward:g}"
            row = trial.where.rpartition("/")[2]  # a path would leave no room for the others
            cells = (row, _beginning(trial.completion), _beginning(trial.gold), number, _outcome(report, trial))
            table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if len(shown) < len(report.trials):
        console.print(f"and {len(report.trials) - len(shown)} more; --json has them all")
    for failure in report.batch_failures:
        at = "" if failure.index is None else f", for completion {report.trials[failure.index].completion[:200]!r}"
        console.print(f"reward function {report.name!r} {failure.problem}{at}, in a call with a whole batch.")
    # What a traceback says of a completion alone, it says of the batch.
    for trial in report.failed[:TRACEBACKS_SHOWN]:
        assert trial.failure is not None
        console.print(
            f"reward function {report.name!r} {trial.failure.problem}, for {trial.where}: {trial.completion[:200]!r}\n"
            f"{trial.failure.traceback}".rstrip()
        )
    if len(report.failed) > TRACEBACKS_SHOWN:
        console.print(f"and {len(report.failed) - TRACEBACKS_SHOWN} more failures; --json has them all")
    if not report.failed:  # only a batch failed: its traceback is the only one
        for failure in report.batch_failures:
            console.print(failure.traceback.rstrip())
    for line in _summary(report):
        console.print(line)


def _summary(report: "TrialReport") -> Iterator[str]:
    numbers = report.summary()
    mean = "none" if numbers["mean"] is None else f"{numbers['mean']:.3f}"
    yield (
        f"{report.name}: {numbers['completions']} completions, mean {mean}, solved {numbers['solved']:.3f} "
        f"(reward >= {report.solved_at:g}), None {numbers['none']}, failed {numbers['failed']}"
    )
    yield (
        f"seconds: {numbers['batch_seconds']:.3f} in batches (with the start of the workers), {numbers['seconds']:.3f} "
        f"one at a time: median {numbers['seconds_median']:.4f}, max {numbers['seconds_max']:.4f}"
    )
    if numbers["otherwise_alone"]:
        yield (
            f"note: {numbers['otherwise_alone']} completions got another reward alone than in their batch: the "
            "function compares completions, keeps a state, or is random"
        )


def _outcome(report: "TrialReport", trial: "Trial") -> str:
    if trial.failure is not None and trial.failure.kind != "none":
        return trial.failure.problem
    if trial.outcome is not None:
        return f"{trial.outcome.status}: {trial.outcome.detail}" if trial.outcome.detail else trial.outcome.status
    if trial.reward is None:
        return "None: does not apply"
    return "solved" if trial.reward >= report.solved_at else "not solved"


def _beginning(value: object) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= SNIPPET else f"{text[:SNIPPET]}…"
