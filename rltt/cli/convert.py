"""`rltt convert`: make a looped checkpoint of a dense one."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    model: Annotated[str, typer.Argument(help="A dense Llama- or Qwen3-family checkpoint: Hub id or folder.")],
    loops: Annotated[int, typer.Option(min=1, help="How often the layers run.")],
    out: Annotated[Path, typer.Option(help="Folder to write the looped checkpoint to.")],
    family: Annotated[str, typer.Option(help="looped, or plt: a Parallel Loop Transformer (Llama only).")] = "looped",
    mixing: Annotated[str, typer.Option(help="Input of the later loops: scalar or identity.")] = "scalar",
    mixing_init: Annotated[float, typer.Option(help="First weight of the embeddings, between 0 and 1.")] = 0.99,
    norm_each_loop: Annotated[bool, typer.Option(help="Apply the final norm at the end of every loop.")] = True,
    window: Annotated[int, typer.Option(help="Positions of its own loop that a later loop of a plt sees.")] = 64,
) -> None:
    """Turn a dense checkpoint into a looped one that runs its layers several times."""
    from rltt.recipe import ConvertSection, check

    values = {
        "family": family,
        "mixing": mixing,
        "mixing_init": mixing_init,
        "norm_each_loop": norm_each_loop,
        "window": window,
    }
    how = check(ConvertSection, values, source="rltt convert")

    from transformers.utils import logging

    from rltt.models.convert import convert_checkpoint

    logging.disable_progress_bar()  # loading takes a moment, and its bar would stay on the screen
    convert_checkpoint(model, out, loops, how.mixing, how.mixing_init, how.norm_each_loop, how.family, how.window)
    typer.echo(f"written: {out}")
