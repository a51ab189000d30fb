"""What is written and printed of a diagnosis: diagnostics.json, and tables for terminal and markdown."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from .recommend import Recommendation

Row = dict[str, Any]
"""A loop: `loop`, and each of `measures.MEASURES`."""

NONE = "–"


class Cell(NamedTuple):
    """A number as it is shown, and whether it is the largest of the refinement loops."""

    text: str
    largest: bool = False


@dataclass(frozen=True)
class Column:
    """A measure in a table: its heading, and how a number of it is shown."""

    measure: str
    heading: str
    digits: int | None = 2

    def show(self, value: float | None) -> str:
        """The number at a width to be read, or a dash."""
        if value is None:
            return NONE
        if self.digits is None or (value != 0 and abs(value) < 10**-self.digits):
            return f"{value:.3g}"
        return f"{value:.{self.digits}f}"


# Each of a terminal's width. The first has the columns of the paper's Table 3.
TABLE_3 = (
    Column("step_size", "δ^(r)"),
    Column("output_kl", "Δp^(r)"),
    Column("effective_rank", "Eff. rank", 1),
    Column("cos_theta", "cos θ^(r)"),
)
ATTENTION = (
    Column("attention_entropy", "att. entropy"),
    Column("attention_kl", "att. KL", 3),
    Column("head_effective_rank", "head rank"),
    Column("head_similarity", "head sim.", 3),
    Column("gate_mean", "gate", 3),
)
OTHERS = (
    Column("fixed_point_gap", "FP gap"),
    Column("offset_cost", "Ω^(r)"),
    Column("true_token_rank", "true token", 1),
    Column("output_entropy", "entropy"),
)
TABLES = {"Per-loop behavior": TABLE_3, "Attention": ATTENTION, "Fixed point, offset and outputs": OTHERS}
LENSES = {"output": "share of Δp", "attention": "share of att. KL", "peak": "peak tokens"}


@dataclass(frozen=True)
class Diagnosis:
    """All that was found.

    Attributes:
        about: model, data, numbers of samples and tokens, versions.
        loops: a row a loop.
        stderr: standard errors over samples of the same.
        shares: of each refinement loop (2 to R) under three lenses; None where there is nothing to share.
        peak_loop: the refinement loop at which most tokens change most; None with one loop.
        embedding_rank: effective rank of h^(0).
        similarity: [R, N, N] cosines between heads, mean over layers.
        recommendation: about the number of loops.
    """

    about: dict[str, Any]
    loops: list[Row]
    stderr: list[Row]
    shares: dict[str, list[float | None]]
    peak_loop: int | None
    embedding_rank: float
    similarity: list[list[list[float]]]
    recommendation: Recommendation

    def to_json(self) -> dict[str, Any]:
        """As in diagnostics.json."""
        evidence = {
            name: [row[name] for row in self.loops]
            for name in ("effective_rank", "output_kl", "attention_kl", "cos_theta", "offset_cost")
        }
        refinement = [row["loop"] for row in self.loops[1:]]
        return self.about | {
            "loops": self.loops,
            "stderr": self.stderr,
            "embedding_effective_rank": self.embedding_rank,
            "shares": [
                {"loop": loop} | {lens: shares[i] for lens, shares in self.shares.items()}
                for i, loop in enumerate(refinement)
            ],
            "peak_loop": self.peak_loop,
            "recommendation": asdict(self.recommendation) | {"evidence": evidence},
            "head_similarity_maps": self.similarity,
        }

    def tables(self) -> list[tuple[str, list[str], list[list[Cell]]]]:
        """Title, headings and cells of each table."""
        shown = []
        for title, columns in TABLES.items():
            known = [c for c in columns if c in TABLE_3 or any(row[c.measure] is not None for row in self.loops)]
            shown.append((title, ["Loop", *(c.heading for c in known)], self._cells(known)))
        if len(self.loops) > 1:
            cells = [
                [
                    Cell(f"r={i + 2}"),
                    *(Cell(NONE if self.shares[lens][i] is None else f"{self.shares[lens][i]:.1%}") for lens in LENSES),
                ]
                for i in range(len(self.loops) - 1)
            ]
            shown.append(("Where refinement concentrates", ["Loop", *LENSES.values()], cells))
        return shown

    def _cells(self, columns: Sequence[Column]) -> list[list[Cell]]:
        largest = {c.measure: _largest(self.loops[1:], c.measure) for c in columns}
        return [
            [
                Cell(f"r={row['loop']}"),
                *(Cell(c.show(row[c.measure]), largest=row is largest[c.measure]) for c in columns),
            ]
            for row in self.loops
        ]

    def markdown(self) -> str:
        """diagnostics.md."""
        about = self.about
        parts = [f"# Loops of {about['model']}", self.summary()]
        for title, headings, cells in self.tables():
            lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
            lines += [[f"<u>{cell.text}</u>" if cell.largest else cell.text for cell in row] for row in cells]
            parts += [f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        advice = self.recommendation
        parts += ["## Recommendation", self.advice(), "\n".join(f"- {limit}" for limit in advice.limits)]
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """What was measured, in a sentence."""
        about = self.about
        return f"{about['samples']} texts of {about['data']['path']}, {about['tokens']} tokens; means over the texts."

    def advice(self) -> str:
        """The recommendation in a sentence."""
        advice = self.recommendation
        return f"{advice.verdict}: {advice.reason}"

    def rich_tables(self) -> list[Table]:
        """The same tables for a terminal."""
        shown = []
        for title, headings, cells in self.tables():
            table = Table(title=title, title_justify="left")
            for heading in headings:
                table.add_column(heading, justify="left" if heading == "Loop" else "right")
            for row in cells:
                table.add_row(*(Text(cell.text, style="underline" if cell.largest else "") for cell in row))
            shown.append(table)
        return shown


def shares_of(values: Sequence[float | None]) -> list[float | None]:
    """Values of the refinement loops as shares of their sum; None where there is none, or it is 0."""
    known = [value for value in values if value is not None]
    total = math.fsum(known)
    if len(known) < len(values) or total <= 0:
        return [None] * len(values)
    return [value / total for value in known]


def _largest(rows: Sequence[Row], measure: str) -> Row | None:
    known = [row for row in rows if row[measure] is not None]
    return max(known, key=lambda row: row[measure]) if len(known) > 1 else None
