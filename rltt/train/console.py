"""What a run says while it runs: a progress bar, and one readable line a step."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# Label, metric, format. A metric that a step does not have is left out.
RL_LINE = (
    ("solve", "solve_rate", "{:.3f}"),
    ("mixed", "mixed_groups", "{:.2f}"),
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.2e}"),
    ("grad", "grad_norm", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("length", "completions/mean_length", "{:.1f}"),
    ("cut", "completions/clipped_ratio", "{:.0%}"),
    ("held-out", "eval/solve_rate", "{:.3f}"),
)
PRETRAIN_LINE = (
    ("loss", "loss", "{:.4f}"),
    ("lr", "lr", "{:.1e}"),
    ("p1", "loop1/exit_prob", "{:.2f}"),
    ("solve", "solve_rate", "{:.3f}"),
)


def format_line(step: int, steps: int, row: dict[str, Any], fields: tuple[tuple[str, str, str], ...]) -> str:
    """`step 12/150  solve 0.471  …`."""
    parts = [f"{label} {form.format(row[key])}" for label, key, form in fields if row.get(key) is not None]
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *parts])


class ProgressCallback(TrainerCallback):
    """A bar at the bottom, lines above it. On something that is not a terminal only the lines are printed."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.title = title

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.stop()
