"""A few steps at each of several learning rates, from the same start and on the same data.

Each is what `rltt train` would do at that rate, to the bit on a CPU: between two rates weights, optimizer, data order
and random numbers are put back.
"""

import copy
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import TrainerState, set_seed

from ..recipe import Recipe
from ..telemetry.changes import nice
from ..train.callbacks import metrics_row, show
from ..train.faults import NonFiniteError
from ..train.run import make_trainer, prepare, unscored_told_once, with_lora
from ..train.run_directory import finite
from ..train.trainer import RLTTTrainer
from .rate_report import HEAD, RateReport, Trial
from .solve_rates import refuse_layouts
from .start import probed, start_of


def default_rates(rate: float) -> list[float]:
    """The recipe's rate, and two above and below it, half an order of magnitude apart."""
    return sorted({rate, *(nice(rate * 10 ** (half / 2)) for half in (-2, -1, 1, 2))})


def probe_rates(recipe: Recipe, rates: Sequence[float] | None, steps: int, console: Console) -> RateReport:
    """Train `steps` updates at each rate, and report where they lead.

    Learning rates are constant here, whatever the recipe's schedule.

    Args:
        recipe: a train recipe.
        rates: None: `default_rates`.
        console: told what is done. Should not be that of the report.

    Raises:
        UserError: what `rltt train` refuses before it starts.
    """
    refuse_layouts(recipe)
    trials = []
    with tempfile.TemporaryDirectory(prefix="rltt-probe-") as folder:
        # The KL of a step is measured before its update: the last one only measures.
        alone = probed(recipe, folder, max_steps=steps + 1, lr_scheduler_type="constant")
        ready = prepare(alone, console)
        policy = with_lora(alone, start_of(alone, ready, console))
        trainer = make_trainer(ready.config, policy, ready.dataset, ready.rewards)
        show(trainer)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        before = copy.deepcopy(trainer.process_state())
        console.print(HEAD, highlight=False, soft_wrap=True, markup=False)
        for rate in rates or default_rates(recipe.train.learning_rate):
            back_to_start(trainer, start, before)
            trainer.args.learning_rate = rate
            trial = Trial(rate, _rows(trainer))
            console.print(f"{trial}", highlight=False, soft_wrap=True, markup=False)
            trials.append(trial)
    return RateReport(recipe, steps, tuple(trials))


def back_to_start(trainer: RLTTTrainer, start: dict[str, Tensor], before: dict[str, Any]) -> None:
    """Make a trainer what it was before it trained.

    Args:
        start: its model's state.
        before: its `process_state`.
    """
    trainer.model.load_state_dict(start)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.state = TrainerState()
    trainer.ended_early = False
    for metrics in trainer._metrics.values():
        metrics.clear()
    trainer.load_process_state(copy.deepcopy(before))
    trainer._last_loaded_step = -1  # a vLLM engine has other weights
    set_seed(trainer.args.seed)


def _rows(trainer: RLTTTrainer) -> list[dict[str, Any]]:
    """Train, and return the metrics of each step."""
    with unscored_told_once(), suppress(NonFiniteError):  # which is seen in the rows
        trainer.train()
    log = trainer.state.log_history
    return [finite(metrics_row(row["step"], row)) for row in log if "loss" in row]
