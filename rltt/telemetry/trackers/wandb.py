"""Weights & Biases. Its own environment variables decide where to (WANDB_MODE=offline, WANDB_PROJECT, …)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltt.telemetry.trackers.tracker import COLUMNS, Level, Metrics, exit_distribution, known, rollout_table
from rltt.telemetry.trackers.trackio import project_of


class WandbTracker:
    """Logs to a W&B run that has the name of the run directory.

    Steps are a metric, and not W&B's own count, which never goes back: a run that goes on makes some of them again.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.wandb: Any = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project_of(run)),
            name=run.resolve().name,
            dir=str(run),
            config=dict(config),
            # No prompt for an account in the middle of a script: without one W&B logs offline.
            settings=wandb.Settings(silent=True),
            mode=None if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") else "offline",
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        row: dict[str, Any] = {"step": step} | known(metrics)
        if exits := exit_distribution(metrics):
            edges = [t + 0.5 for t in range(len(exits) + 1)]
            row["exit_distribution"] = self.wandb.Histogram(np_histogram=(exits, edges))
        self.run.log(row)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.wandb.Table(columns=list(COLUMNS), data=rollout_table(rows))
        self.run.log({"step": step, "rollouts": table})

    def alert(self, title: str, text: str, level: Level) -> None:
        self.run.alert(title=title, text=text, level=self.wandb.AlertLevel(level.upper()))

    def finish(self) -> None:
        self.run.finish()
