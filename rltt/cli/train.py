"""`rltt train`: post-train a looped policy with RL, in one process or several."""

import signal
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from rltt.errors import UserError
from rltt.launch import Layout, launch
from rltt.processes import is_main

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, such as recipes/quickstart.yaml.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.learning_rate=1e-5.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved recipe and what it amounts to, then stop.")
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in the run directory; one that was cut off goes on also without this.",
    ),
]
AcceptChangeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="Go on although the recipe has changed in this key, such as train.learning_rate."),
]


NumProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Run in so many processes on each machine, one a GPU.")
]
NodesOption = Annotated[int, typer.Option(min=1, help="Machines; start the same command on each.")]
NodeRankOption = Annotated[int, typer.Option(min=0, help="Index of this machine.")]
MainAddressOption = Annotated[str | None, typer.Option(help="Name of machine 0 on the network.")]
MainPortOption = Annotated[int | None, typer.Option(min=1, help="A free port on machine 0.")]


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    accept_change: AcceptChangeOption = None,
    num_processes: NumProcessesOption = None,
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    main_address: MainAddressOption = None,
    main_port: MainPortOption = None,
) -> None:
    """Post-train a looped policy with RL, as the recipe says."""
    layout = layout_of(num_processes, nodes, node_rank, main_address, main_port)
    start("train", recipe, overrides, dry_run, layout, resume, accept_change or [])


def start(
    job: Literal["train", "pretrain"],
    file: Path,
    overrides: list[str] | None,
    dry_run: bool,
    layout: Layout | None,
    resume: bool,
    accept: list[str],
) -> None:
    """Run a recipe, here or in the processes of a layout, or say what it amounts to."""
    from rltt.recipe import load_recipe

    recipe = load_recipe(file, overrides or [])
    recipe.require(job)
    arguments = [job, str(file), *(overrides or []), *(["--resume"] if resume else [])]
    arguments += [f"--accept-change={key}" for key in accept]
    if layout is not None and recipe.train.sharding == "none":
        raise UserError(
            f"train.sharding: 'none' is for one process, but --num-processes asks for {layout.processes}; "
            "choose ddp, zero2 or zero3"
        )
    if layout is not None and not dry_run:
        if layout.node_rank == 0:
            typer.echo(f"same as:        {layout.torchrun(arguments)}")
            typer.echo(f"or, with GPUs:  {layout.accelerate(arguments)}")
        since = time.time()
        status, error = launch(layout, arguments)
        if status:
            from rltt.train.run_directory import is_preempted, record_failure

            if status == 128 + signal.SIGTERM and is_preempted(recipe.run_directory, since):
                return
            record_failure(recipe.run_directory, error, since)
            raise typer.Exit(status)
        return

    from rltt.telemetry.trackers.trackio import place_beside

    place_beside(recipe.run_directory)
    from rltt.train import run

    if dry_run:
        typer.echo(recipe.to_yaml())
        typer.echo(run.describe(recipe, 1 if layout is None else layout.processes * layout.nodes))
        if layout is not None:
            typer.echo(f"launch it with:  {layout.torchrun(arguments)}")
            typer.echo(f"or, with GPUs:   {layout.accelerate(arguments)}")
        return
    path = run.train(recipe, resume, accept) if job == "train" else run.pretrain(recipe, resume, accept)
    if is_main():
        typer.echo(f"finished: {path}")


def layout_of(
    num_processes: int | None, nodes: int, node_rank: int, main_address: str | None, main_port: int | None
) -> Layout | None:
    """Where to launch processes; None runs in this one, alone or as a launcher has started it."""
    if num_processes is None:
        if nodes > 1 or node_rank or main_address is not None or main_port is not None:
            raise UserError("--num-processes: missing; --nodes and what belongs to it describe a launch")
        return None
    layout = Layout(num_processes, nodes, node_rank, main_address, main_port)
    layout.check()
    return None if num_processes * nodes == 1 else layout
