"""`rltt watch`: a run in the terminal."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, of a run that is under way or has ended.")],
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and stop.")] = False,
) -> None:
    """Show a run in the terminal while it grows: verdict, curves, loops, completions. Ctrl-C ends it, not the run."""
    from rich.console import Console

    from rltt.telemetry.watch import watch as show

    try:
        show(run, Console(highlight=False), once)
    except KeyboardInterrupt:
        return
