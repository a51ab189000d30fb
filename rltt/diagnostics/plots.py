"""What is drawn of a diagnosis: curves over loops, maps of head against head, and gain against cost."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from ..report.figures import LIGHT
from .report import Diagnosis

PANELS = (
    ("step_size", "Step size δ"),
    ("cos_theta", "Update alignment cos θ"),
    ("effective_rank", "Effective rank"),
    ("fixed_point_gap", "Fixed-point gap"),
    ("offset_cost", "Offset cost Ω"),
    ("attention_entropy", "Attention entropy (nats)"),
    ("attention_kl", "Attention KL to the loop before (nats)"),
    ("head_effective_rank", "Effective rank of heads"),
    ("head_similarity", "Similarity of heads (cosine)"),
    ("gate_mean", "Gate: weight of loop 1's keys"),
    ("true_token_rank", "Rank of the true token"),
    ("output_kl", "Output KL Δp to the loop before (nats)"),
    ("output_entropy", "Output entropy (nats)"),
)
ACROSS = 4


def write_plots(diagnosis: Diagnosis, folder: Path) -> list[str]:
    """PNG files in `folder`; their names."""
    figures = {"curves.png": _curves(diagnosis), "head_similarity.png": _head_maps(diagnosis)}
    if len(diagnosis.loops) > 1:
        figures["gain_cost.png"] = _gain_and_cost(diagnosis)
    for name, figure in figures.items():
        figure.savefig(folder / name, format="png", dpi=130, facecolor="white")
    return list(figures)


def _curves(diagnosis: Diagnosis) -> Figure:
    panels = [(name, title) for name, title in PANELS if any(row[name] is not None for row in diagnosis.loops)]
    down = -(-len(panels) // ACROSS)
    figure = Figure(figsize=(3.0 * ACROSS, 2.2 * down), layout="constrained")
    for place, (name, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(down, ACROSS, place)
        _style(axes)
        axes.set_title(title, fontsize=9, color=LIGHT.ink)
        _line(axes, diagnosis, name, LIGHT.of(0))
        if name == "cos_theta":
            axes.axhline(0, color=LIGHT.ink, linewidth=0.7, linestyle=":")
        if place > len(panels) - ACROSS:
            axes.set_xlabel("loop", fontsize=9, color=LIGHT.ink)
    return figure


def _gain_and_cost(diagnosis: Diagnosis) -> Figure:
    """Output shift (gain) and, where there is a shift of positions, its cost: Figure 1 of the paper."""
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.add_subplot()
    _style(axes)
    axes.set_xlabel("loop", fontsize=9, color=LIGHT.ink)
    axes.set_ylabel("gain: output KL Δp (nats, log)", fontsize=9, color=LIGHT.of(0))
    axes.set_yscale("log")
    _line(axes, diagnosis, "output_kl", LIGHT.of(0))
    gains = [row["output_kl"] for row in diagnosis.loops if row["output_kl"]]
    if gains:  # wide enough for a few round numbers, which are written as they are
        axes.set_ylim(min(gains) / 2, max(gains) * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    costs = [row["offset_cost"] for row in diagnosis.loops]
    if any(cost is not None for cost in costs):
        beside = axes.twinx()
        _style(beside, grid=False)
        beside.spines["right"].set_visible(True)
        beside.spines["right"].set_color(LIGHT.grid)
        beside.set_ylabel("cost: offset Ω", fontsize=9, color=LIGHT.of(1))
        _line(beside, diagnosis, "offset_cost", LIGHT.of(1), marker="s")
        beside.set_ylim(0, 1.15 * max(cost for cost in costs if cost is not None))
    else:
        axes.set_title("no shift between loops, no offset cost", fontsize=9, color=LIGHT.ink)
    return figure


def _head_maps(diagnosis: Diagnosis) -> Figure:
    loops = len(diagnosis.similarity)
    across = min(loops, ACROSS)
    down = -(-loops // across)
    figure = Figure(figsize=(2.6 * across + 0.8, 2.7 * down), layout="constrained")
    maps = [
        [[math.nan if i == j else x for j, x in enumerate(row)] for i, row in enumerate(m)]
        for m in diagnosis.similarity
    ]
    every = [x for m in maps for row in m for x in row if not math.isnan(x)]
    image, axes = None, []
    for loop, similarity in enumerate(maps, start=1):
        place = figure.add_subplot(down, across, loop)
        image = place.imshow(similarity, vmin=min(every, default=0), vmax=max(every, default=1), cmap="viridis")
        mean = diagnosis.loops[loop - 1]["head_similarity"]
        place.set_title(f"r = {loop}" + ("" if mean is None else f", sim = {mean:.3f}"), fontsize=9, color=LIGHT.ink)
        place.tick_params(labelsize=7, colors=LIGHT.ink)
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.append(place)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7, colors=LIGHT.ink)
    figure.supxlabel("head", fontsize=9, color=LIGHT.ink)
    figure.supylabel("head", fontsize=9, color=LIGHT.ink)
    return figure


def _line(axes: Axes, diagnosis: Diagnosis, name: str, colour: str, marker: str = "o") -> None:
    """A measure over loops, with its standard errors."""
    known = [i for i, row in enumerate(diagnosis.loops) if row[name] is not None]
    errors = [diagnosis.stderr[i][name] or 0.0 for i in known]
    axes.errorbar(
        [i + 1 for i in known],
        [diagnosis.loops[i][name] for i in known],
        errors,
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1.4,
        capsize=2,
    )
    axes.set_xlim(0.7, len(diagnosis.loops) + 0.3)


def _style(axes: Axes, grid: bool = True) -> None:
    axes.tick_params(which="both", labelsize=8, colors=LIGHT.ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_axisbelow(True)
    if grid:
        axes.grid(color=LIGHT.grid, linewidth=0.7)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT.grid)
