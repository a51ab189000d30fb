"""`rltt dashboard`: Trackio's page over run directories, whatever tracker they were trained with.

A run that was logged to Trackio while it ran is there already. Any other is read from its run directory, and followed
while it grows.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urlencode

from rltt.errors import UserError
from rltt.telemetry.live import LEVELS
from rltt.telemetry.run_files import RunFiles, lines_of, title_of
from rltt.telemetry.trackers.trackio import TrackioTracker, project_of, quiet, runs_of

SECONDS = 2.0
"""Between two looks at the run directories."""

ROLLOUTS = 20
"""Rollouts of a run that are brought over as tables, evenly spread."""


class Imported:
    """A run that is brought to Trackio from its run directory, again from the start where it has begun anew."""

    def __init__(self, path: Path, project: str, name: str) -> None:
        self.path, self.project, self.name = path, project, name
        self.rows = 0
        self.verdict: tuple[Any, Any] = ("undecided", None)

    def catch_up(self) -> None:
        """Bring over what is new."""
        files = RunFiles(self.path)
        rows = files.history.rows
        if len(rows) == self.rows:
            return
        goes_on = 0 < self.rows < len(rows)
        tracker = TrackioTracker(self.path, files.config, (), self.project, self.name, replace=not goes_on)
        before = files.history.before
        if before is not None and not goes_on:
            tracker.log(0, {"eval/solve_rate": before.solve_rate, "eval/stderr": before.stderr})
        new = rows[self.rows :] if goes_on else rows
        for row in new:
            tracker.log(int(row["step"] or 0), row)
        steps = [step for step in files.rollout_steps if not goes_on or step >= (new[0]["step"] or 0)]
        for step in steps[:: max(1, len(steps) // ROLLOUTS)]:
            tracker.log_rollouts(step, files.rollout(step))
        self._tell(tracker, files.verdict)
        tracker.finish()
        self.rows = len(rows)

    def _tell(self, tracker: TrackioTracker, verdict: dict[str, Any]) -> None:
        found = (verdict["verdict"], verdict["cause"])
        if found != self.verdict:
            self.verdict = found
            tracker.alert(title_of(verdict), "\n".join(lines_of(verdict)), LEVELS.get(verdict["verdict"], "info"))


def place(runs: Sequence[Path]) -> tuple[str, dict[Path, str]]:
    """Where Trackio's files lie for these runs (TRACKIO_DIR is set), the project, and the name of each run there.

    Runs of one folder are in the files beside them. Runs of several folders are brought together for this page alone.
    """
    parents = {run.resolve().parent for run in runs}
    if len(parents) == 1:
        os.environ.setdefault("TRACKIO_DIR", str(parents.pop() / ".trackio"))
        return project_of(runs[0]), {run: run.resolve().name for run in runs}
    os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="rltt-dashboard-")
    return "comparison", {run: f"{run.resolve().parent.name}/{run.resolve().name}" for run in runs}


def to_import(runs: Sequence[Path], project: str, names: dict[Path, str]) -> list[Imported]:
    """The runs that Trackio does not have from the training process itself."""
    there = {run.name for run in runs_of(project)}
    found = []
    for run in runs:
        tracker = RunFiles(run).config.get("telemetry", {}).get("tracker")
        if tracker != "trackio" or names[run] not in there:
            found.append(Imported(run, project, names[run]))
    return found


WATCHED = "^(solve_rate|kl|mixed_groups|grad_norm)$"
"""The metrics to look at first, as Trackio's page takes them."""


def page_address(root: str, project: str, names: Sequence[str], metrics: str | None = None) -> str:
    """The page on which these runs are selected, and where it is given only the metrics that match an expression."""
    query = {"project": project, "runs": ",".join(names)} | ({"metric_filter": metrics} if metrics else {})
    return f"{root.rstrip('/')}/?{urlencode(query, safe=',/')}"


def serve(runs: Sequence[Path], host: str, port: int | None, open_browser: bool, say: Any) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: the port is taken.
    """
    project, names = place(runs)
    import trackio

    imported = to_import(runs, project, names)
    for run in imported:
        run.catch_up()
    with ExitStack() as until_end:
        try:
            with quiet():
                server, address, *_ = trackio.show(
                    project=project, open_browser=False, block_thread=False, host=host, server_port=port
                )
        except OSError as error:
            raise UserError(f"--port {port}: {error}") from error
        until_end.callback(server.close)
        shown = list(names.values())
        page = page_address(address, project, shown)
        say(f"{len(runs)} run{'s' if len(runs) > 1 else ''}, every metric: {page}")
        say(f"solve rate, KL, mixed groups, gradient norm: {page_address(address, project, shown, WATCHED)}")
        say("Ctrl-C ends it")
        if open_browser:
            import webbrowser

            webbrowser.open(page)
        while True:
            sleep(SECONDS)
            for run in imported:
                run.catch_up()
