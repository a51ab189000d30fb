"""`rltt watch`: a run in the terminal, while it grows."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rltt.telemetry.history import History
from rltt.telemetry.run_files import RunFiles, lines_of, require_one_run, title_of
from rltt.telemetry.trackers.tracker import last_message

SECONDS = 1.0
"""Between two looks at the run directory."""

STYLES = {"moving": "green", "plateaued": "green", "stalled": "yellow", "unstable": "red", "undecided": "dim"}
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 32
"""Width of a curve."""

# Metric, label, format.
WATCHED = (
    ("solve_rate", "solve rate", "{:.3f}"),
    ("eval/solve_rate", "held-out", "{:.3f}"),
    ("mixed_groups", "mixed groups", "{:.2f}"),
    ("kl", "KL", "{:.2e}"),
    ("grad_norm", "gradient norm", "{:.3f}"),
    ("reward", "reward", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("completions/clipped_ratio", "truncated", "{:.1%}"),
    ("parity/max", "parity", "{:.1e}"),
    ("step_time", "seconds a step", "{:.1f}"),
)


def watch(path: Path, console: Console, once: bool = False) -> None:
    """Show a run until it ends, or until Ctrl-C.

    Args:
        once: show it as it is, and return.

    Raises:
        UserError: the path is no run directory, or its metrics are not what a run writes.
    """
    require_one_run(path)
    if once or not console.is_terminal:
        console.print(screen(RunFiles(path)))
        return
    with Live(screen(RunFiles(path)), console=console, auto_refresh=False) as live:
        while (run := RunFiles(path)).status == "running":
            live.update(screen(run), refresh=True)
            time.sleep(SECONDS)
        live.update(screen(run), refresh=True)


def screen(run: RunFiles) -> RenderableType:
    """All that is shown of a run at one moment."""
    history = run.history
    if not len(history):
        return Panel(f"{run.status}; no step was made yet", title=run.name, title_align="left")
    parts: list[RenderableType] = [_head(run), _curves(history)]
    if (loops := _loops(history)) is not None:
        parts.append(loops)
    if run.rollout_steps:
        parts.append(_rollout(run))
    return Group(*parts)


def _head(run: RunFiles) -> Panel:
    history, verdict = run.history, run.verdict
    total = f"/{history.total_steps}" if history.total_steps else ""
    seconds = run.summary.get("seconds")
    took = "" if seconds is None else f", {seconds / 60:.1f} min"
    body = Text(f"{run.status}, step {history.last_step}{total}{took}\n")
    body.append(title_of(verdict), style=f"bold {STYLES[verdict['verdict']]}")
    for line in lines_of(verdict):
        body.append(f"\n  {line}")
    for label, result in (("before", history.before), ("after", history.after)):
        if result is not None:
            error = "" if result.stderr is None else f" ± {result.stderr:.3f}"
            body.append(f"\nheld-out {label}: {result.solve_rate:.3f}{error}")
    return Panel(body, title=run.name, title_align="left", border_style=STYLES[verdict["verdict"]])


def _curves(history: History) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "", "last", "least", "most"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for metric, label, form in WATCHED:
        values = history.series(metric)[1]
        if values:
            numbers = [form.format(value) for value in (values[-1], min(values), max(values))]
            table.add_row(label, Text(sparkline(values), style="cyan"), *numbers)
    return table


def _loops(history: History) -> Table | None:
    """What the last step says of each loop."""
    last = history.rows[-1]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "log-prob", "entropy", "KL to last", "credit", "exit"):
        table.add_column(name, justify="left" if name in ("", "exit") else "right", no_wrap=True)
    t = 1
    while last.get(f"loop{t}/logp") is not None:
        numbers = [_number(last.get(f"loop{t}/{name}")) for name in ("logp", "entropy", "kl_to_last", "credit")]
        exits = last.get(f"loop{t}/exit_prob")
        bar = "" if exits is None else f"{'█' * round(20 * exits):<20} {exits:.2f}"
        table.add_row(f"loop {t}", *numbers, Text(bar, style="cyan"))
        t += 1
    return table if t > 1 else None


def _rollout(run: RunFiles) -> Table:
    """One right and one wrong completion of the last rollout."""
    step = run.rollout_steps[-1]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, min_width=len(f"step {step}, wrong"))
    table.add_column(overflow="ellipsis", no_wrap=True)
    rows = run.rollout(step)
    for solved, label, style in ((1.0, "right", "green"), (0.0, "wrong", "yellow")):
        row = next((row for row in rows if row["solved"] == solved), None)
        if row is not None:
            text = " → ".join(" ".join(last_message(row[name]).split()) for name in ("prompt", "completion"))
            table.add_row(Text(f"step {step}, {label}", style=style), Text(text))
    return table


def sparkline(values: Sequence[float], width: int = SPARK) -> str:
    """A curve in one line of text; where there are more values than letters, each is the mean of some."""
    if len(values) > width:
        cuts = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(values), max(values)
    if low == high:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
