"""The page of a report: verdicts, evaluations, curves of all runs, then each run by itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rltt import __version__
from rltt.errors import UserError
from rltt.files import write_text
from rltt.report.charts import compared, evaluations, of_run
from rltt.report.figures import LIGHT, Chart, png, svg
from rltt.telemetry.history import HeldOut
from rltt.telemetry.run_files import RunFiles, lines_of, title_of
from rltt.telemetry.trackers.tracker import last_message

SAMPLES = 2
"""Completions of each kind: early or late, right or wrong."""

LONGEST = 4000
"""Characters of a prompt or completion that are shown."""


@dataclass(frozen=True)
class Sample:
    """A completion that the page shows."""

    step: int
    kind: str
    prompt: str
    completion: str
    gold: str
    reward: float | None
    advantage: float | None


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write the report on run directories as one HTML file.

    Raises:
        UserError: a path is no run directory, or `out` cannot be written.
    """
    runs = [RunFiles(path) for path in paths]
    check_writable(out)
    write_text(out, render(runs))


def write_pngs(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write each chart of the report as a PNG file, and return them."""
    runs = [RunFiles(path) for path in paths]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in [*_overview(runs), *(chart for index, run in enumerate(runs) for chart in _alone(run, index))]:
        path = folder / f"{chart.name.replace('/', '-')}.png"
        png(chart, path)
        written.append(path)
    return written


def check_writable(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is drawn.

    Raises:
        UserError: it is a folder, or in none.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"{out}: cannot be written; name a file in a folder that exists")


def render(runs: Sequence[RunFiles]) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    template = environment.from_string(files("rltt.report").joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=", ".join(run.name for run in runs),
        cards=[_card(run) for run in runs],
        overview=[_figure(chart) for chart in _overview(runs)],
        runs=[
            {
                "name": run.name,
                "charts": [_figure(chart) for chart in _alone(run, index)],
                "samples": samples(run),
                "recipe": run.recipe,
                "versions": run.versions,
            }
            for index, run in enumerate(runs)
        ],
        series=list(enumerate(LIGHT.series)),
        rltt=__version__,
    )


def _overview(runs: Sequence[RunFiles]) -> list[Chart]:
    first = evaluations(runs)
    return [*([first] if first else []), *compared(runs)]


def _alone(run: RunFiles, index: int) -> list[Chart]:
    return list(of_run(run, index))


def _figure(chart: Chart) -> dict[str, Any]:
    legend = chart.legend if len(chart.legend) > 1 else ()
    return {"title": chart.title, "note": chart.note, "svg": Markup(svg(chart)), "legend": legend}


def _card(run: RunFiles) -> dict[str, Any]:
    """What is said of a run at the top."""
    history, verdict = run.history, run.verdict
    before, after = history.before, history.after
    facts = {
        "status": run.status,
        "steps": f"{history.last_step}" + (f" of {history.total_steps}" if history.total_steps else ""),
        "time": duration(run.summary.get("seconds")),
    }
    change = verdict["change"]
    return {
        "name": run.name,
        "kind": verdict["verdict"],
        "title": title_of(verdict),
        "lines": [line for line in lines_of(verdict) if not line.startswith("change: ")],
        "override": change["override"] if change else None,
        "advice": change["advice"] if change else None,
        "missing": verdict.get("missing", []),
        "facts": {name: value for name, value in facts.items() if value},
        "error": run.summary.get("error"),
        "before": held_out(before),
        "after": held_out(after),
        "gain": gain(before, after),
    }


def held_out(result: HeldOut | None) -> str | None:
    """`0.398 ± 0.024`."""
    if result is None:
        return None
    return f"{result.solve_rate:.3f}" + ("" if result.stderr is None else f" ± {result.stderr:.3f}")


def gain(before: HeldOut | None, after: HeldOut | None) -> str | None:
    """The difference and its standard error, the two evaluations taken as independent."""
    if before is None or after is None:
        return None
    difference = after.solve_rate - before.solve_rate
    if before.stderr is None or after.stderr is None:
        return f"{difference:+.3f}"
    return f"{difference:+.3f} ± {math.hypot(before.stderr, after.stderr):.3f}"


def samples(run: RunFiles) -> list[Sample]:
    """Right and wrong completions from the first rollout and the last."""
    steps = run.rollout_steps
    found = []
    for when, step in [("early", steps[0]), ("late", steps[-1])][: len(steps)] if steps else []:
        rows = run.rollout(step)
        for solved, kind in ((1.0, "right"), (0.0, "wrong")):
            chosen = [row for row in rows if row["solved"] == solved]
            for row in chosen[:: max(1, len(chosen) // SAMPLES)][:SAMPLES]:
                prompt, completion = (last_message(row[name])[:LONGEST] for name in ("prompt", "completion"))
                gold = str(row.get("gold"))
                kinds = f"{when}, {kind}"
                found.append(Sample(step, kinds, prompt, completion, gold, row["reward"], row["advantage"]))
    return found


def number(value: float | None) -> str:
    """Three significant digits, and a dash for nothing."""
    return "–" if value is None else f"{value:.3g}"


def duration(seconds: float | None) -> str | None:
    """`2 h 05 min`, `3 min 20 s`, `12 s`."""
    if seconds is None:
        return None
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
