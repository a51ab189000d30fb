"""Trackio: files beside the runs, no account, no network; `rltt dashboard` opens its page.

All runs of a folder are one project, so that the page compares them. The files lie in `.trackio` of that folder, or
where the environment variable TRACKIO_DIR says. Trackio reads it once, when it is imported, which importing TRL does:
the command line calls `place_beside` before that. Where a program did not, Trackio's own default holds, and
`rltt dashboard` reads the run directory.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from rltt.telemetry.trackers.tracker import COLUMNS, Level, Metrics, exit_distribution, known, rollout_table


class TrackioTracker:
    """Logs to a Trackio run that has the name of the run directory.

    Args:
        run: the run directory.
        config: the recipe as a mapping.
        past: steps that the run has made before; a run that goes on makes some of them again.
        project, name: of the Trackio run, in place of the folder's and the run directory's.
        replace: begin anew where Trackio has a run of that name; otherwise add to it.
    """

    def __init__(
        self,
        run: Path,
        config: Mapping[str, Any],
        past: Sequence[Metrics] = (),
        project: str | None = None,
        name: str | None = None,
        replace: bool = True,
    ) -> None:
        import trackio

        self.trackio = trackio
        project, name = project or project_of(run), name or run.resolve().name
        if replace:
            remove_run(project, name)
        with quiet():
            self.run = trackio.init(
                project=project, name=name, config=dict(config), resume="allow", embed=False, auto_log_cpu=False
            )
        for row in past:
            self.log(int(row["step"] or 0), row)

    def log(self, step: int, metrics: Metrics) -> None:
        row: dict[str, Any] = known(metrics)
        if exits := exit_distribution(metrics):
            edges = [t + 0.5 for t in range(len(exits) + 1)]
            row["exit_distribution"] = self.trackio.Histogram(np_histogram=(exits, edges))
        self.run.log(row, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.trackio.Table(columns=list(COLUMNS), data=rollout_table(rows))
        self.run.log({"rollouts": table}, step=step)

    def alert(self, title: str, text: str, level: Level) -> None:
        with quiet():  # the run says it itself
            self.run.alert(title=title, text=text, level=self.trackio.AlertLevel(level))

    def finish(self) -> None:
        with quiet():
            self.trackio.finish()


def place_beside(run: Path) -> None:
    """Let Trackio write beside a run, unless TRACKIO_DIR says where."""
    os.environ.setdefault("TRACKIO_DIR", str(run.resolve().parent / ".trackio"))


def project_of(run: Path) -> str:
    """The project of a run: the folder that it lies in."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().parent.name).strip("-") or "rltt"


def remove_run(project: str, name: str) -> None:
    """Remove a run from Trackio's files, where it is there."""
    for found in runs_of(project):
        if found.name == name:
            found.delete()


def runs_of(project: str) -> list[Any]:
    """The runs of a project that Trackio has."""
    import trackio

    try:
        return list(trackio.Api().runs(project))
    except ValueError:  # no run of this project was ever logged
        return []


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Trackio prints. It prints how to open its page, and each alert: rltt has its own words for both."""
    with redirect_stdout(StringIO()):
        yield
