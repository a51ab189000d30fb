"""What is written and said at each step of a run."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..evaluate import EvalResult
from ..recipe import Recipe
from ..telemetry import LiveVerdict
from .console import PRETRAIN_LINE, RL_LINE, format_line
from .run_directory import RunDirectory, finite

ROLLOUT_METRICS = (
    *("reward", "solve_rate", "mixed_groups", "frac_reward_zero_std", "reward_logp_corr", "completions/", "resample/"),
)
"""Beginnings of the names of what is measured once a rollout."""


class MetricsCallback(TrainerCallback):
    """metrics.jsonl and the console's line, one for each step, with the evaluation of that step where there is one."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        console: Console,
        evaluate: Callable[[int], EvalResult] | None,
        verdict: LiveVerdict,
        evaluated: Callable[[float], None],
        track: Callable[[int, Mapping[str, float | None]], None],
    ) -> None:
        self.track = track
        self.verdict = verdict
        self.recipe = recipe
        self.evaluated = evaluated
        self.run = run
        self.console = console
        self.evaluate = evaluate
        self.evaluation: dict[str, float | None] = {}
        self.of_rollout: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A run that goes on may be inside a rollout, which its last row tells of.
        for row in self.run.rows()[-1:]:
            self.of_rollout = {key: value for key, value in row.items() if key.startswith(ROLLOUT_METRICS)}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # transformers logs a step after this, so its row can carry the evaluation.
        if self.evaluate is not None and state.global_step % (self.recipe.evaluate.every or 1) == 0:
            result = self.evaluate(state.global_step)
            self.evaluated(result.solve_rate)
            self.evaluation = held_out_metrics(result.to_dict())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:  # the summary at the end of training
            return
        row = metrics_row(state.global_step, logs) | self.evaluation
        self.evaluation = {}
        # Several updates can share a rollout (updates_per_rollout, num_iterations): each row tells of its rollout.
        self.of_rollout |= {key: value for key, value in row.items() if key.startswith(ROLLOUT_METRICS)}
        row |= self.of_rollout
        line = format_line(state.global_step, state.max_steps, row, RL_LINE)
        self.console.print(line, highlight=False, soft_wrap=True)
        row |= self.verdict.update(finite(row))
        control.should_training_stop |= self.verdict.stop
        self.run.log_metrics(row)
        self.track(state.global_step, finite(row))
        self.run.update_summary(steps=state.global_step)


class PretrainMetricsCallback(TrainerCallback):
    """pretrain.jsonl for each step, and a line every tenth."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self.run = run
        self.console = console

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        row = metrics_row(state.global_step, logs)
        self.run.log_metrics(row, "pretrain.jsonl")
        if state.global_step % 10 == 0:
            line = format_line(state.global_step, state.max_steps, row, PRETRAIN_LINE)
            self.console.print(line, highlight=False, soft_wrap=True)


def metrics_row(step: int, logs: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics: `step` first, and `lr` for transformers' `learning_rate`."""
    row = {"lr" if key == "learning_rate" else key: value for key, value in logs.items()}
    return {"step": step} | row


def held_out_metrics(result: Mapping[str, Any]) -> dict[str, float | None]:
    """An evaluation, as `EvalResult.to_dict` gives it, as metrics of a step."""
    return {"eval/solve_rate": result["solve_rate"], "eval/stderr": result["stderr"]}


def show(trainer: Trainer, *callbacks: TrainerCallback) -> None:
    """Let these callbacks speak in place of transformers' printing of whole dictionaries."""
    trainer.remove_callback(PrinterCallback)
    for callback in callbacks:
        trainer.add_callback(callback)
