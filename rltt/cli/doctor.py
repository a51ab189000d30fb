"""`rltt doctor`: do rollout and training see the same policy?"""

import json
from typing import Annotated

import typer

from rltt.cli.train import OverridesArgument, RecipeArgument


def doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Compare the rollout engine with the training path on real rollouts, and name the cause of a difference.

    Ends with status 1 when they do not see the same policy. Nothing is written.
    """
    from rltt.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    resolved.require("train")

    from rich.console import Console

    from rltt import doctor as library

    report = library.doctor(resolved, Console(stderr=True))
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.render())
    if report.culprit is not None:
        raise typer.Exit(1)
