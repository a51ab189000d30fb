"""`rltt dashboard`: the numbers of runs in a browser, side by side."""

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders of them; runs if none.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, help="Port; the first free one from 7860 on if not given.")] = None,
    host: Annotated[str, typer.Option(help="Address to serve at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser as well.")] = False,
) -> None:
    """Show runs on a page of Trackio: metrics side by side, live, with rollouts and verdicts. No account is needed."""
    from rltt.telemetry.dashboard import serve
    from rltt.telemetry.run_files import find_runs

    try:
        serve(find_runs(runs or [Path("runs")]), host, port, open_browser, typer.echo)
    except KeyboardInterrupt:
        return
