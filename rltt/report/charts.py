"""What a report draws: for several runs side by side, and for each run by itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from rltt.report.figures import Chart, Palette
from rltt.telemetry import History
from rltt.telemetry.run_files import RunFiles

SMOOTH_FROM = 30
"""Steps from which a curve is smoothed; its numbers stay visible behind it."""


@dataclass(frozen=True)
class Curve:
    """A metric that is drawn for each run.

    Attributes:
        metric: its name in metrics.jsonl.
        title, note: see `Chart`.
        log: on a logarithmic axis.
        share: between 0 and 1.
        marks: heights of horizontal lines.
    """

    metric: str
    title: str
    note: str
    log: bool = False
    share: bool = False
    marks: Sequence[float] = field(default=())


COMPARED = (
    Curve(
        "solve_rate", "Solve rate", "of the rollouts; dots: held-out, ± standard error. 0.1 to 0.9, rising", share=True
    ),
    Curve("kl", "KL to the start", "nats a token; passes 0.005 (line), stays below 0.5", log=True, marks=(5e-3,)),
    Curve("grad_norm", "Gradient norm", "before clipping; no spikes of ten times the usual", log=True),
    Curve("mixed_groups", "Mixed groups", "only they carry a gradient; above 0.2 (line)", share=True, marks=(0.2,)),
    Curve("reward", "Reward", "mean of the weighted sum; rises"),
    Curve("entropy", "Entropy", "nats a token, last loop; falls slowly"),
    Curve("reward_logp_corr", "Reward and certainty", "correlation of reward and log-prob; 0.2 to 0.6"),
    Curve("completions/mean_length", "Length", "tokens of a completion"),
    Curve(
        "completions/clipped_ratio", "Truncated", "share cut at the limit; below 0.1 (line)", share=True, marks=(0.1,)
    ),
    Curve("parity/max", "Parity: largest difference", "nats; 6e-5 in fp32, 0.24 in bf16 are usual", log=True),
    Curve(
        "parity/kl", "Parity: KL", "nats a token, engine to training path; below 1e-3 (line)", log=True, marks=(1e-3,)
    ),
    Curve("step_time", "Time of a step", "seconds"),
)
LOOPS = (
    ("logp", "Log-prob at each loop", "nats a token, of the sampled tokens; rises with the loop"),
    ("entropy", "Entropy at each loop", "nats a token; falls with the loop"),
    ("kl_to_last", "KL to the last loop", "nats a token; falls with the loop, not 0 before the last"),
    ("credit", "Credit of each loop", "share; as objective.credit says"),
    ("effective_rank", "Effective rank at each loop", "of the states of held-out texts; see docs/diagnose.md"),
    ("output_kl", "Output shift of each loop", "nats a token to the loop before, held-out; 0: the loop does nothing"),
    ("true_token_rank", "Rank of the true token", "held-out, 1 is best; falls with the loop"),
)


def compared(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    """Curves of all runs, each in one chart; without those that no run has."""
    legend = [(run.name, index) for index, run in enumerate(runs)]
    for curve in COMPARED:
        if any(curve.metric in run.history.names for run in runs):
            yield Chart(curve.metric, curve.title, curve.note, _curve_of(curve, runs), legend)


def evaluations(runs: Sequence[RunFiles]) -> Chart | None:
    """Held-out solve rate before and after each run."""
    pairs = [(run.history.before, run.history.after) for run in runs]
    if not any(pair[0] and pair[1] for pair in pairs):
        return None

    def draw(axes: Axes, palette: Palette) -> None:
        for index, (before, after) in enumerate(pairs):
            for place, result, shade in ((index - 0.2, before, 0.45), (index + 0.2, after, 1.0)):
                if result is not None:
                    style: dict[str, Any] = {"color": palette.of(index), "alpha": shade, "ecolor": palette.ink}
                    axes.bar(place, result.solve_rate, 0.36, yerr=result.stderr, capsize=3, **style)
        axes.set_xticks(range(len(runs)), [run.name for run in runs], fontsize=8)
        axes.set_xlim(-0.7, len(runs) - 0.3)
        axes.set_xlabel("")
        axes.set_ylim(0, None)
        axes.grid(axis="x", visible=False)

    return Chart("evaluation", "Held-out solve rate", "before (pale) and after, ± standard error over problems", draw)


def of_run(run: RunFiles, index: int) -> Iterator[Chart]:
    """What is told of one run alone: its loops, its completions, its time."""
    history, prefix = run.history, f"run{index}-"
    loops = 0
    while f"loop{loops + 1}/logp" in history.names:
        loops += 1
    legend = [(f"loop {t + 1}", t) for t in range(loops)]
    for name, title, note in LOOPS:
        series = [(f"loop{t + 1}/{name}", t) for t in range(loops) if f"loop{t + 1}/{name}" in history.names]
        if series:
            yield Chart(f"{prefix}loops-{name}", title, note, _lines(history, series), legend)
    if (exits := exit_table(history))[1]:
        note = "mean over tokens; not all on one loop"
        yield Chart(f"{prefix}exits", "Exit distribution", note, _heat(*exits))
    lengths = [("completions/max_length", 1), ("completions/mean_length", 0), ("completions/min_length", 2)]
    if "completions/mean_length" in history.names:
        labels = [("longest", 1), ("mean", 0), ("shortest", 2)]
        yield Chart(f"{prefix}lengths", "Lengths", "tokens of a completion", _lines(history, lengths), labels)
    outcomes = sorted(name for name in history.names if name.startswith("reward/") and any(history.series(name)[1]))
    if outcomes:
        labels = [(name.removeprefix("reward/").replace("/", ": "), i) for i, name in enumerate(outcomes)]
        note = "share of the completions, as each reward function found them"
        yield Chart(f"{prefix}outcomes", "Outcomes of grading", note, _stack(history, outcomes, share=True), labels)
    seconds = [name for name in ("rollout", "reward", "score", "update") if f"seconds/{name}" in history.names]
    if seconds:
        names = [f"seconds/{name}" for name in seconds]
        labels = [(name, i) for i, name in enumerate(seconds)]
        yield Chart(f"{prefix}seconds", "Where the time goes", "seconds of a step", _stack(history, names), labels)


def exit_table(history: History) -> tuple[list[int], list[list[float]]]:
    """Steps, and for each loop the mean exit probability at each of them; empty without a gate."""
    rows: list[list[float]] = []
    steps: list[int] = []
    while f"loop{len(rows) + 1}/exit_prob" in history.names:
        steps, values = history.series(f"loop{len(rows) + 1}/exit_prob")
        rows.append(values)
    return steps, rows


def _curve_of(curve: Curve, runs: Sequence[RunFiles]) -> Callable[[Axes, Palette], None]:
    def draw(axes: Axes, palette: Palette) -> None:
        for index, run in enumerate(runs):
            _curve(axes, run.history, curve.metric, palette.of(index), positive=curve.log)
            if curve.metric == "solve_rate":
                for result in run.history.held_out:
                    style: dict[str, Any] = {"color": palette.of(index), "markersize": 4, "capsize": 2}
                    axes.errorbar(result.step, result.solve_rate, yerr=result.stderr, fmt="o", **style)
        for height in curve.marks:
            axes.axhline(height, color=palette.ink, linewidth=0.8, linestyle=":")
        # A metric that is 0 throughout has nothing to show on a logarithmic axis.
        if curve.log and any(value > 0 for run in runs for value in run.history.series(curve.metric)[1]):
            axes.set_yscale("log")
        if curve.share:
            axes.set_ylim(-0.02, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return draw


def _lines(history: History, series: Sequence[tuple[str, int]]) -> Callable[[Axes, Palette], None]:
    def draw(axes: Axes, palette: Palette) -> None:
        for name, index in series:
            _curve(axes, history, name, palette.of(index))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return draw


def _curve(axes: Axes, history: History, metric: str, colour: str, *, positive: bool = False) -> None:
    steps, values = history.series(metric)
    if positive:
        kept = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0]
        steps, values = [step for step, _ in kept], [value for _, value in kept]
    if len(values) < SMOOTH_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.6, marker="o" if len(values) == 1 else None)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(steps, smoothed(values), color=colour, linewidth=1.8)


def smoothed(values: Sequence[float], width: int = 9) -> list[float]:
    """Mean over the `width` values around each, over fewer at the ends."""
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _heat(steps: list[int], rows: list[list[float]]) -> Callable[[Axes, Palette], None]:
    def draw(axes: Axes, palette: Palette) -> None:
        highest = max(0.5, *map(max, rows))
        edges = (steps[0] - 0.5, steps[-1] + 0.5, 0.5, len(rows) + 0.5)
        picture = axes.imshow(
            rows,
            aspect="auto",
            origin="lower",
            extent=edges,
            vmin=0,
            vmax=highest,
            cmap="viridis",
            interpolation="nearest",
        )
        axes.grid(visible=False)
        axes.set_yticks(range(1, len(rows) + 1))
        axes.set_ylabel("loop", fontsize=9, color=palette.ink)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        assert axes.figure is not None
        bar = axes.figure.colorbar(picture, ax=axes, pad=0.02)
        bar.ax.tick_params(labelsize=8, colors=palette.ink)
        bar.outline.set_visible(False)

    return draw


def _stack(history: History, names: Sequence[str], *, share: bool = False) -> Callable[[Axes, Palette], None]:
    def draw(axes: Axes, palette: Palette) -> None:
        steps = [int(row["step"] or 0) for row in history.rows]
        columns = [[value or 0.0 for value in history.column(name)] for name in names]
        colours = [palette.of(index) for index in range(len(names))]
        axes.stackplot(steps, columns, colors=colours, alpha=0.85, linewidth=0)
        axes.set_ylim(0, 1 if share and max(map(sum, zip(*columns, strict=True))) <= 1.001 else None)
        axes.set_xlim(steps[0], steps[-1] if len(steps) > 1 else steps[0] + 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return draw
