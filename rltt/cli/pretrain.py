"""`rltt pretrain`: train with the LoopLM objective."""

import typer

from rltt.cli.train import DryRunOption, OverridesArgument, RecipeArgument


def pretrain(recipe: RecipeArgument, overrides: OverridesArgument = None, dry_run: DryRunOption = False) -> None:
    """Train a looped model with the LoopLM objective on the responses of a data set, as the recipe says."""
    from rltt.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    resolved.require("pretrain")

    from rltt.train import run

    if dry_run:
        typer.echo(resolved.to_yaml())
        typer.echo(run.describe(resolved))
    else:
        typer.echo(f"finished: {run.pretrain(resolved)}")
