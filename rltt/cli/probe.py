"""`rltt probe`: what a run would have to learn from, and at which learning rate, before it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltt.cli.train import RecipeArgument
from rltt.errors import UserError

if TYPE_CHECKING:
    from rltt.probe.rate_report import RateReport
    from rltt.probe.report import Report
    from rltt.recipe import Recipe

PROMPTS, STEPS = 256, 5

ArgumentsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RATES] KEY=VALUE",
        help="Overrides, such as rollout.temperature=0.9; with --lr also rates, as 1e-6,1e-5.",
    ),
]


def probe(
    recipe: RecipeArgument,
    arguments: ArgumentsArgument = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help=f"Training prompts to sample, evenly spread. [default: {PROMPTS}]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Completions of each. [default: the recipe's rollout.num_generations]")
    ] = None,
    lr: Annotated[bool, typer.Option("--lr", help="Try learning rates in place of sampling prompts.")] = False,
    steps: Annotated[int | None, typer.Option(min=2, help=f"Updates at each learning rate. [default: {STEPS}]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file too.")] = None,
) -> None:
    """Sample the policy on training prompts: how often are they solved, and how many groups would be mixed?

    With --lr: a few updates at each of several learning rates, and which one to take.

    Nothing is written but what was found of each prompt, for data.filter.
    """
    from rltt.recipe import load_recipe

    overrides = [argument for argument in arguments or [] if "=" in argument]
    listed = [argument for argument in arguments or [] if "=" not in argument]
    for option, value, wanted in (
        ("--prompts", prompts, not lr),
        ("--samples", samples, not lr),
        ("--steps", steps, lr),
    ):
        if value is not None and not wanted:
            raise UserError(f"{option}: has no effect {'without' if option == '--steps' else 'with'} --lr; remove it")
    if listed and not lr:
        raise UserError(f"found {listed[0]!r}: write an override as key=value; learning rates go with --lr")
    rates = rates_in(listed)
    resolved = load_recipe(recipe, overrides)
    resolved.require("train")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out: {out}: there is no folder {out.parent}")
    typer.echo(_announced(resolved, prompts or PROMPTS, samples, lr, rates, steps or STEPS), err=True)

    from rich.console import Console

    from rltt.files import write_text

    console = Console(stderr=True)
    report: Report | RateReport
    if lr:
        from rltt.probe.learning_rates import probe_rates

        report = probe_rates(resolved, rates, steps or STEPS, console)
    else:
        from rltt.probe.solve_rates import probe as probe_prompts

        report = probe_prompts(resolved, prompts or PROMPTS, samples, console)
    text = json.dumps(report.to_json(), indent=2, ensure_ascii=False)
    if out is not None:
        write_text(out, text + "\n")
    typer.echo(text if as_json else report.render())


def rates_in(listed: list[str]) -> list[float] | None:
    """The learning rates in `1e-6,1e-5`, or with brackets and blanks; None where there are none.

    Raises:
        UserError: one of them is not a number above 0.
    """
    words = " ".join(listed).replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        rates = [float(word) for word in words]
    except ValueError:
        raise UserError(f"--lr: found {' '.join(listed)!r}; write rates as numbers, such as 1e-6,1e-5") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise UserError(f"--lr: found {' '.join(listed)!r}; learning rates are above 0")
    return rates or None


def _announced(
    recipe: "Recipe", prompts: int, samples: int | None, lr: bool, rates: list[float] | None, steps: int
) -> str:
    """What will be done, told before anything is loaded."""
    first = "warms the policy up as the recipe says, then " if recipe.pretrain else ""
    what = f"samples up to {prompts} training prompts, {samples or recipe.rollout.num_generations} completions each"
    if lr:
        count = f"{len(rates)} learning rates" if rates else "learning rates around the recipe's"
        what = f"trains {steps} updates at each of {count}, from the same start"
    return (
        f"probe of {recipe.name}: {first}{what} (rollout.engine {recipe.rollout.engine}); "
        f"{recipe.run_directory} is not touched"
    )
