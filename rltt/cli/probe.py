"""`rltt probe`: what a run would have to learn from, before it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rltt.cli.train import OverridesArgument, RecipeArgument


def probe(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    prompts: Annotated[int, typer.Option(min=1, help="Training prompts to sample, evenly spread.")] = 256,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Completions of each. Default: the recipe's rollout.num_generations.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file too.")] = None,
) -> None:
    """Sample the policy on training prompts: how often are they solved, and how many groups would be mixed?

    Nothing is trained but a warm start, and nothing is written but what was found of each prompt, for data.filter.
    """
    from rltt.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    resolved.require("train")
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"{out}: there is no folder {out.parent}", param_hint="--out")
    many = samples or resolved.rollout.num_generations
    first = "warms the policy up as the recipe says, then " if resolved.pretrain else ""
    typer.echo(
        f"probe of {resolved.name}: {first}samples up to {prompts} training prompts, {many} completions each "
        f"(rollout.engine {resolved.rollout.engine}); {resolved.run_directory} is not touched",
        err=True,
    )

    from rich.console import Console

    from rltt.files import write_text
    from rltt.probe.solve_rates import probe as library

    report = library(resolved, prompts, samples, Console(stderr=True))
    text = json.dumps(report.to_json(), indent=2, ensure_ascii=False)
    if out is not None:
        write_text(out, text + "\n")
    typer.echo(text if as_json else report.render())
