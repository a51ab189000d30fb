"""`rltt verdict`: whether a run moves its policy, from its metrics."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer


def verdict(
    run: Annotated[Path, typer.Argument(help="A run directory, a metrics.jsonl, or with --trl a trainer_state.json.")],
    trl: Annotated[bool, typer.Option("--trl", help="The run is one of plain TRL.")] = False,
    step: Annotated[int | None, typer.Option(min=1, help="Judge as after this step.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say whether a run moves its policy, why not, and what to change in its recipe."""
    from rltt.telemetry import judge, read_history

    history = read_history(run, trl=trl)
    found = judge(history if step is None else history.up_to(step))
    typer.echo(json_module.dumps(found.to_dict(), indent=2, ensure_ascii=False) if json else str(found))
