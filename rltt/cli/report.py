"""`rltt report`: runs as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder for each chart as a PNG file as well.")] = None,
) -> None:
    """Write runs as one HTML file that needs nothing else: verdict, evaluations, curves, rollouts, recipe."""
    from rltt.report import write_pngs, write_report
    from rltt.telemetry.run_files import find_runs

    paths = find_runs(runs)
    write_report(paths, out)
    typer.echo(f"written: {out}")
    if png is not None:
        typer.echo(f"written: {len(write_pngs(paths, png))} charts in {png}")
