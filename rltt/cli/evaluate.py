"""`rltt eval`: accuracy of a checkpoint, greedy and sampled, at each depth."""

from pathlib import Path
from typing import Annotated

import typer


def _whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of `1,2,4`, each at least 1."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise typer.BadParameter(f"found {text!r}; expected whole numbers from 1, such as 1,2,4", param_hint=option)
    return [int(part) for part in parts]


def evaluate(
    model: Annotated[str, typer.Argument(help="A checkpoint: Hub id or folder.")],
    data: Annotated[str, typer.Option(help="Hub id, a data file, or arithmetic.")],
    split: Annotated[str | None, typer.Option(help="Split of a Hub data set, or of arithmetic.")] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only so many rows, evenly spread.")] = None,
    loops: Annotated[str | None, typer.Option(help="Depths, such as 1,2,3,4. Default: the model's own.")] = None,
    k: Annotated[str, typer.Option(help="The k of pass@k, such as 1,8.")] = "1",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    reward: Annotated[
        str, typer.Option(help="Reward that grades: a name, file.py:function or module:function.")
    ] = "math",
    max_completion_length: Annotated[int, typer.Option(min=1, help="Tokens after which a completion is cut.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Completions generated at once.")] = 64,
    prompt_template: Annotated[str, typer.Option(help="User turn; {prompt} is the row's prompt.")] = "{prompt}",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file too.")] = None,
) -> None:
    """Evaluate a checkpoint: greedy and sampled accuracy, pass@k, at each depth, with standard errors."""
    from rltt.recipe import DataSection, DataSource, check

    depths = None if loops is None else _whole_numbers("--loops", loops)
    ks = _whole_numbers("--k", k)
    rows = {"path": data, "split": split, "config": config, "limit": limit}
    source = check(DataSource, rows, source="--data")
    # Both: a recipe's section has to have training rows, and evaluation reads `eval`.
    section = check(
        DataSection, {"train": source, "eval": source, "prompt_template": prompt_template}, source="rltt eval"
    )

    from transformers.utils import logging

    from rltt.evaluate import run_eval

    logging.disable_progress_bar()  # loading takes a moment, and its bar would stay on the screen
    run_eval(
        model=model,
        data=section,
        loops=depths,
        ks=ks,
        temperature=temperature,
        reward=reward,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        seed=seed,
        json_path=json,
    )
