"""What can go wrong in an update or while scoring, and how a run lives through it.

a gradient with NaN or infinity   the update is skipped and counted; several in a row end the run, saved
no memory for scoring             fewer sequences at once from then on
updates that round to nothing     measured as update/changed, and said where weights are in 16 bits
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import UserError
from .checkpoint import CheckpointedTrainer

T = TypeVar("T")

SAMPLED_WEIGHTS = 1_000_000
VANISHING = 0.5
"""Share of changed weights below which 16-bit weights are told to be the reason. bf16: 0.15 at a learning rate of 1e-5,
0.02 at 1e-6, for weights of a standard deviation of 0.02."""


class NonFiniteError(UserError):
    """The gradient was not finite several times in a row."""


class OutOfMemoryInStepError(UserError):
    """The GPU has no room for one step."""


class NonFiniteWarning(UserWarning):
    """An update was skipped because its gradient was not finite."""


class VanishingUpdates(UserWarning):
    """Most of what the optimizer does is rounded away."""


class FewerAtOnce(UserWarning):
    """Scoring takes fewer sequences at once than asked for, as memory ran out."""


# ----------------------------------------------------------------------------------------------- non-finite gradients


class GuardedTrainer(CheckpointedTrainer):
    """Skips updates whose loss or gradient is not finite.

    Attributes:
        max_nonfinite_steps: so many of them in a row end training, with a checkpoint.
        nonfinite_steps: all of them so far.
    """

    max_nonfinite_steps = 5
    nonfinite_steps = 0
    _in_a_row = 0
    _loss_is_finite = True
    _skipped = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self._loss_is_finite = self._loss_is_finite and bool(loss.isfinite())
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        finite = self._loss_is_finite and (norm is None or math.isfinite(float(norm)))
        self._loss_is_finite = True
        if self.args.world_size > 1:  # a loss is its process's own, but an update everyone's
            wrong = self.accelerator.reduce(torch.tensor(float(not finite), device=self.args.device), reduction="sum")
            finite = not wrong.item()
        self._skipped = not finite
        self._in_a_row = 0 if finite else self._in_a_row + 1
        if not finite:
            self._skip(model)
        return norm

    def _skip(self, model: nn.Module) -> None:
        step = self.state.global_step + 1
        if self.is_deepspeed_enabled:
            if not self.optimizer.step_was_skipped:
                raise NonFiniteError(
                    f"step {step}: the loss or the gradient is not finite, and DeepSpeed has used it; the last "
                    "checkpoint is from before. With bf16 its check_grad_overflow has to stay true"
                )
            # The schedule goes on, as it does without DeepSpeed: steps that were skipped have their learning rates.
            self.optimizer.optimizer.overflow = False
        culprits = [name for name, weight in model.named_parameters() if _is_wrong(weight.grad)]
        if self.nonfinite_steps == 0:
            warnings.warn(
                f"step {step}: the loss or the gradient is not finite"
                + (f" (first in {culprits[0]}, in {len(culprits)} parameters)" if culprits else "")
                + "; the update is skipped, and counted in nonfinite_steps",
                NonFiniteWarning,
                stacklevel=2,
            )
        self.nonfinite_steps += 1
        self.optimizer.zero_grad(set_to_none=True)  # the optimizer passes over weights without a gradient

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._in_a_row >= self.max_nonfinite_steps:
            self.ended_early = True
            self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            NonFiniteError: `max_nonfinite_steps` updates in a row had to be skipped; the policy before them is saved.
        """
        self._in_a_row = 0
        result = super().train(*args, **kwargs)
        if self._in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(
                f"step {self.state.global_step}: the loss or the gradient was not finite {self._in_a_row} times in a "
                f"row; these updates were skipped, and the policy as it was before them is in checkpoint-"
                f"{self.state.global_step}. A lower train.learning_rate or train.max_grad_norm, or precision: fp32, "
                "may help"
            )
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in transformers, with `nonfinite_steps`; a skipped update's loss and gradient norm are NaN."""
        if "loss" in logs:
            logs["nonfinite_steps"] = self.nonfinite_steps
            if self._skipped:  # transformers has put the last finite loss in its place
                logs["loss"] = logs["grad_norm"] = math.nan
        super().log(logs, start_time)

    def process_state(self) -> dict[str, Any]:
        """What is counted."""
        return {**super().process_state(), "nonfinite_steps": self.nonfinite_steps}

    def load_process_state(self, state: dict[str, Any]) -> None:
        """Take `process_state` back."""
        super().load_process_state(state)
        self.nonfinite_steps = state["nonfinite_steps"]


def _is_wrong(gradient: Tensor | None) -> bool:
    return gradient is not None and not bool(gradient.isfinite().all())


# --------------------------------------------------------------------------------------------------- memory for scoring


class ScoringMemory:
    """Finds out how many sequences can be scored at once, by trying.

    Attributes:
        limit: sequences at once that memory was found to suffice for; None: all that were asked for so far.
    """

    def __init__(self) -> None:
        self.limit: int | None = None

    def fit(self, score: Callable[[int], T], size: int) -> T:
        """`score(size)`; when memory runs out, with half as many sequences at once, from then on.

        Raises:
            OutOfMemoryError: torch's, for a single sequence.
        """
        while True:
            size = min(size, self.limit or size)
            try:
                return score(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            # Not in the handler: the traceback holds the tensors that did not fit.
            first, self.limit = self.limit is None, (size + 1) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if first:
                warnings.warn(
                    f"memory ran out while {size} sequences were scored at once; {self.limit} from now on, and "
                    "fewer if need be. The update, which needs more, is not changed: if it fails, lower "
                    "train.per_device_train_batch_size",
                    FewerAtOnce,
                    stacklevel=3,
                )


# -------------------------------------------------------------------------------------------------- vanishing updates


class UpdateShare(TrainerCallback):
    """Measures `update/changed`: the share of trained weights that an optimizer step gave another value.

    A fixed random sample of a million weights is compared before and after. Weights in 16 bits lose small updates to
    rounding (objective: a step of the learning rate's size), which no loss curve shows.

    Args:
        trainer: whose weights; every process counts those that it holds.
        report: receives the share.
    """

    def __init__(self, trainer: Any, report: Callable[[float], None]) -> None:
        self.trainer = trainer
        self.report = report
        self.sample: list[tuple[nn.Parameter, Tensor]] | None = None
        self.before: list[Tensor] = []
        self.said = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Not right before the optimizer's step: DeepSpeed makes it inside of backward.
        if self.sample is None:
            self.sample = sample_weights(self.trainer.model, self._measurable)
        self.before = self._values()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.sample:
            return
        changed = sum((old != new).sum().item() for old, new in zip(self.before, self._values(), strict=True))
        counts = torch.tensor([float(changed), float(sum(map(len, self.before)))], device=args.device)
        changed, total = self.trainer.accelerator.reduce(counts, reduction="sum").tolist()
        self.report(changed / total)
        rate = max(group["lr"] for group in self.trainer.optimizer.param_groups)
        narrow = {weight.dtype for weight, _ in self.sample if weight.dtype in (torch.bfloat16, torch.float16)}
        if narrow and not self.said and rate > 0 and changed > 0 and changed / total < VANISHING:
            self.said = True
            dtype = str(narrow.pop()).removeprefix("torch.")
            warnings.warn(
                f"step {state.global_step + 1}: the update changed {changed / total:.1%} of the weights. They are "
                f"{dtype}, in which a step of the learning rate {rate:g} rounds to nothing; load the policy in float32 "
                "(bf16=True then computes in bfloat16 over it)",
                VanishingUpdates,
                stacklevel=2,
            )

    def _measurable(self, weight: nn.Parameter) -> bool:
        # DeepSpeed's 16-bit weights are copies of fp32 ones, which lose nothing.
        copies = self.trainer.is_deepspeed_enabled and weight.dtype != torch.float32
        return weight.requires_grad and not copies

    @torch.no_grad()
    def _values(self) -> list[Tensor]:
        assert self.sample is not None
        return [_held(weight).flatten()[indices] for weight, indices in self.sample]


def sample_weights(model: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[nn.Parameter, Tensor]]:
    """Parameters, and positions in each: all of them, or a fixed random sample of `SAMPLED_WEIGHTS`."""
    weights = [weight for weight in model.parameters() if wanted(weight) and _held(weight).numel()]
    total = sum(_held(weight).numel() for weight in weights)
    generator = torch.Generator().manual_seed(0)
    sample = []
    for weight in weights:
        size = _held(weight).numel()
        if total <= SAMPLED_WEIGHTS:
            indices = torch.arange(size)
        else:
            indices = torch.randint(size, (math.ceil(size / total * SAMPLED_WEIGHTS),), generator=generator)
        sample.append((weight, indices.to(_held(weight).device)))
    return sample


def _held(weight: nn.Parameter) -> Tensor:
    """The part of a weight that this process holds: all of it, but for ZeRO-3."""
    held: Tensor = getattr(weight, "ds_tensor", weight).detach()
    return held
