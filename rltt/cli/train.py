"""`rltt train`: post-train a looped policy with RL."""

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, such as recipes/quickstart.yaml.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.learning_rate=1e-5.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved recipe and what it amounts to, then stop.")
]


def train(recipe: RecipeArgument, overrides: OverridesArgument = None, dry_run: DryRunOption = False) -> None:
    """Post-train a looped policy with RL, as the recipe says."""
    from rltt.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    resolved.require("train")

    from rltt.train import run

    if dry_run:
        typer.echo(resolved.to_yaml())
        typer.echo(run.describe(resolved))
    else:
        typer.echo(f"finished: {run.train(resolved)}")
