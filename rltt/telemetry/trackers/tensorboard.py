"""TensorBoard: event files in `tensorboard/` of the run directory (`tensorboard --logdir runs`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltt.telemetry.trackers.tracker import COLUMNS, Level, Metrics, exit_distribution, known, rollout_table


class TensorBoardTracker:
    """Writes event files.

    Args:
        run: the run directory.
        recipe: its text.
        step: the last step that the run has made; what an earlier process wrote beyond it is dropped.
    """

    def __init__(self, run: Path, recipe: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)
        self.step = step
        if not step:
            self.writer.add_text("recipe", f"```yaml\n{recipe}\n```")

    def log(self, step: int, metrics: Metrics) -> None:
        self.step = step
        for name, value in known(metrics).items():
            self.writer.add_scalar(name, value, step)
        if exits := exit_distribution(metrics):
            # A histogram of loops: as many of a thousand tokens leave at loop t as its probability says.
            counts = [1000 * probability for probability in exits]
            loops = range(1, len(exits) + 1)
            self.writer.add_histogram_raw(
                "exit_distribution",
                min=1,
                max=len(exits),
                num=sum(counts),
                sum=sum(count * t for count, t in zip(counts, loops, strict=True)),
                sum_squares=sum(count * t**2 for count, t in zip(counts, loops, strict=True)),
                bucket_limits=[t + 0.5 for t in loops],
                bucket_counts=counts,
                global_step=step,
            )

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        for cells in rollout_table(rows):
            texts = [str(cell).replace("\n", " ").replace("|", r"\|") for cell in cells]
            lines.append("| " + " | ".join(texts) + " |")
        self.writer.add_text("rollouts", "\n".join(lines), step)

    def alert(self, title: str, text: str, level: Level) -> None:
        self.writer.add_text("alerts", f"**{level}: {title}**\n\n```\n{text}\n```", self.step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()
