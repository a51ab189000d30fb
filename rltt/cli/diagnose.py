"""`rltt diagnose`: what each loop of a policy does."""

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    model: Annotated[str, typer.Argument(help="A looped checkpoint: Hub id or folder.")],
    data: Annotated[str, typer.Option(help="Held-out text: a .txt or data file, a Hub id, or arithmetic.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not be there yet.")],
    split: Annotated[str | None, typer.Option(help="Split of a Hub data set, or of arithmetic.")] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns that make a text, as question,answer. Default: text, or prompt, response."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Take at most so many texts, evenly spread.")] = 100,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens after which a text is cut.")] = 2048,
    loops: Annotated[int | None, typer.Option(min=1, help="Depth. Default: the model's own.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that go through the model at once.")] = 1,
) -> None:
    """Measure what each loop does on held-out text, and what that says about the number of loops."""
    from rltt.recipe import DataSource, check

    source = check(DataSource, {"path": data, "split": split, "config": config}, source="--data")

    from transformers.utils import logging

    from rltt.diagnostics.diagnose import run_diagnose

    logging.disable_progress_bar()  # loading takes a moment, and its bar would stay on the screen
    run_diagnose(
        model,
        source,
        out,
        columns=None if columns is None else columns.split(","),
        limit=limit,
        max_length=max_length,
        loops=loops,
        batch_size=batch_size,
    )
