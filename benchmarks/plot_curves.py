"""Plot solve rate and KL of several runs, a line for each group with its seeds' spread.

python benchmarks/plot_curves.py out.png RLTT=runs/a,runs/b GRPO=runs/c,runs/d
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

METRICS = {"solve_rate": "solve rate of rollouts", "kl": "KL to the reference"}
WINDOW = 5
"""Steps of the moving mean: one rollout of 256 completions is noisy."""


def column(run: str, metric: str) -> list[float]:
    """A metric of a run, step by step, as a moving mean."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    values = [row[metric] for row in rows]
    windows = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main(out: str, groups: list[str]) -> None:
    """Draw one panel a metric and save the figure."""
    figure, axes = plt.subplots(1, len(METRICS), figsize=(9, 3.2), layout="constrained")
    for axis, (metric, label) in zip(axes, METRICS.items(), strict=True):
        for group in groups:
            name, _, runs = group.partition("=")
            lines = list(zip(*(column(run, metric) for run in runs.split(",")), strict=True))
            steps = range(1, len(lines) + 1)
            (drawn,) = axis.plot(steps, [sum(values) / len(values) for values in lines], label=name)
            low, high = [min(values) for values in lines], [max(values) for values in lines]
            axis.fill_between(steps, low, high, alpha=0.2, color=drawn.get_color(), linewidth=0)
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
