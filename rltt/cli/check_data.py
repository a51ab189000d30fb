"""`rltt check-data`: what is wrong with the data of a recipe."""

import json
from typing import Annotated

import typer

from rltt.cli.train import OverridesArgument, RecipeArgument


def check_data(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Look for golds that cannot be graded, repeated prompts, and prompts both trained and evaluated on.

    Ends with status 1 when a gold cannot be graded.
    """
    from rltt.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])

    from rltt import check_data as library
    from rltt.data.problems import MalformedRowsError
    from rltt.errors import DataError

    try:
        report = library.check_data(resolved)
    except MalformedRowsError as error:
        raise DataError(error.in_full) from error
    typer.echo(json.dumps(report.to_json(), ensure_ascii=False, indent=2) if as_json else report.render())
    if report.bad_golds:
        raise typer.Exit(1)
