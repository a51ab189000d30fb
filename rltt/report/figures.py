"""Charts as SVG inside a page, whose colours they take, and as PNG files."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIZE = (3.9, 2.5)
"""Inches. Small, so that a chart is as wide as a phone and its letters stay as large as the page's."""


@dataclass(frozen=True)
class Palette:
    """Colours of a chart.

    Attributes:
        ink: letters and axes.
        grid: lines behind the curves.
        series: one for each run, or each loop; used again from the start when there are more.
    """

    ink: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        """The colour of a series."""
        return self.series[index % len(self.series)]


# Okabe and Ito's, which also the colour-blind can tell apart.
LIGHT = Palette("#1f2328", "#d8dee4", ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195"))
# Stand-ins that no picture has by itself: each becomes a variable of the page, light or dark.
_PAGE = Palette("#010203", "#010204", tuple(f"#0102{number:02x}" for number in range(16, 16 + len(LIGHT.series))))
_VARIABLES = {_PAGE.ink: "var(--ink)", _PAGE.grid: "var(--grid)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(_PAGE.series)
}


@dataclass(frozen=True)
class Chart:
    """Something to draw.

    Attributes:
        name: for the file of its PNG.
        title: above it.
        note: under it: what is healthy.
        draw: draws it.
        legend: label and number of the series, as far as they need telling apart.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Axes, Palette], None]
    legend: Sequence[tuple[str, int]] = ()


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element that takes the width of its place and the colours of its page."""
    # Ids are hashed from what is drawn; two charts of one page must not share theirs.
    with matplotlib.rc_context({"svg.hashsalt": chart.name, "svg.fonttype": "none"}):
        out = io.StringIO()
        _figure(chart, _PAGE).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" ', 1)


def png(chart: Chart, path: Path) -> None:
    """The chart as a PNG file, with its title and legend."""
    figure = _figure(chart, LIGHT)
    axes = figure.axes[0]
    axes.set_title(chart.title, fontsize=10, color=LIGHT.ink)
    if len(chart.legend) > 1:
        for label, index in chart.legend:
            axes.plot([], [], color=LIGHT.of(index), label=label)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="png", dpi=130, facecolor="white")


def _figure(chart: Chart, palette: Palette) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step", fontsize=9, color=palette.ink)
    axes.tick_params(which="both", labelsize=8, colors=palette.ink)
    axes.grid(color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(palette.grid)
    chart.draw(axes, palette)
    return figure
