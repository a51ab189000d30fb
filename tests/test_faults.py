"""Updates that are not finite, memory that runs out while scoring, updates that round to nothing."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback

from rltt.data.arithmetic import arithmetic_problems
from rltt.models.load import load_policy
from rltt.train.checkpoint import checkpoints_in
from rltt.train.config import RLTTConfig
from rltt.train.faults import (
    SAMPLED_WEIGHTS,
    FewerAtOnce,
    NonFiniteError,
    NonFiniteWarning,
    OutOfMemoryInStepError,
    ScoringMemory,
    VanishingUpdates,
    sample_weights,
)
from rltt.train.trainer import RLTTTrainer

pytestmark = pytest.mark.usefixtures("quick_collections")

Make = Callable[..., RLTTTrainer]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


@pytest.fixture
def make(tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Make:
    problems = arithmetic_problems(1, 8, "train")
    data = Dataset.from_dict({"prompt": [p.prompt for p in problems], "gold": [p.gold for p in problems]})

    def make(trainer_class: type[RLTTTrainer] = RLTTTrainer, model: Any = None, **options: Any) -> RLTTTrainer:
        args = RLTTConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 6,
                "max_steps": 3,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "constant",
                "save_strategy": "no",
                "gradient_checkpointing": False,
                "report_to": [],
                "use_cpu": True,
                "disable_tqdm": True,
                **options,
            }
        )
        return trainer_class(
            load_policy(str(tiny_ouro)) if model is None else model, letters, args, data, processing_class=tokenizer
        )

    return make


def rows(trainer: RLTTTrainer) -> list[dict[str, Any]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def poisoned(steps: set[int], gradient_only: bool = False) -> type[RLTTTrainer]:
    """A trainer whose loss, or whose gradient alone, is NaN in these updates."""

    class Poisoned(RLTTTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss = super()._compute_loss(model, inputs)
            if self.state.global_step + 1 not in steps:
                return loss
            if gradient_only:
                loss.register_hook(lambda gradient: gradient * math.inf)
                return loss
            return loss * math.nan

    return Poisoned


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(make: Make, gradient_only: bool) -> None:
    trainer = make(poisoned({2}, gradient_only))
    history: list[dict[str, torch.Tensor]] = []
    moments: list[list[float]] = []

    class Remember(TrainerCallback):
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            history.append({name: weight.clone() for name, weight in trainer.model.state_dict().items()})
            moments.append([state["step"].item() for state in trainer.optimizer.state.values()])

    trainer.add_callback(Remember())
    with pytest.warns(
        NonFiniteWarning, match=r"step 2: the loss or the gradient is not finite \(first in model\."
    ) as said:
        trainer.train()
    assert len([warning for warning in said if warning.category is NonFiniteWarning]) == 1
    first, second, third = history
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)
    assert all(weight.isfinite().all() for weight in third.values())
    assert {*moments[1]} == {1.0}
    assert {*moments[2]} == {2.0}  # Adam's moments were not touched either
    assert [row["nonfinite_steps"] for row in rows(trainer)] == [0, 1, 1]
    assert math.isnan(rows(trainer)[1]["loss"])
    assert math.isnan(rows(trainer)[1]["grad_norm"])
    assert [row["update/changed"] > 0 for row in rows(trainer)] == [True, False, True]


def test_several_in_a_row_end_the_run_with_a_checkpoint_to_go_on_from(make: Make, tmp_path: Path) -> None:
    trainer = make(poisoned({2, 3, 4, 5}), max_steps=6, max_nonfinite_steps=3)
    with (
        pytest.warns(NonFiniteWarning),
        pytest.raises(NonFiniteError, match=r"step 4: .* 3 times in a row.*checkpoint-4"),
    ):
        trainer.train()
    assert [checkpoint.step for checkpoint in checkpoints_in(tmp_path / "out")] == [4]
    resumed = make(max_steps=6, max_nonfinite_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert rows(resumed)[-1]["nonfinite_steps"] == 3
    scattered = make(poisoned({1, 2, 4, 5}), max_steps=6, max_nonfinite_steps=3)
    with pytest.warns(NonFiniteWarning):
        scattered.train()
    assert rows(scattered)[-1]["nonfinite_steps"] == 4


# ------------------------------------------------------------------------------------------------------------- memory


class SmallMemory:
    """An allocator that has room for a few sequences in a forward pass without a gradient, or in any."""

    def __init__(self, model: nn.Module, room: int, with_gradient: bool = False) -> None:
        self.sizes: list[int] = []
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            size = len(kwargs["input_ids"]) if kwargs.get("score") is not None else 0
            if size and (with_gradient or not torch.is_grad_enabled()):
                self.sizes.append(size)
                if size > room:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
            return original(*args, **kwargs)

        model.forward = forward  # type: ignore[method-assign]


def test_scoring_takes_fewer_sequences_when_memory_runs_out(make: Make) -> None:
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    plain = make(**options)
    plain.train()
    trainer = make(**options)
    policy, reference = SmallMemory(trainer.model, room=3), SmallMemory(trainer.ref_model, room=3)
    with pytest.warns(FewerAtOnce, match=r"while 8 sequences were scored at once; 4 from now on.*lower\s") as said:
        trainer.train()
    assert len([warning for warning in said if warning.category is FewerAtOnce]) == 1
    assert policy.sizes == [8, 4, 2, 2, 2, 2] + [2, 2, 2, 2] * 2  # found out once, and kept
    assert reference.sizes == [2, 2, 2, 2] * 3
    assert [row["kl"] for row in rows(trainer)] == pytest.approx([row["kl"] for row in rows(plain)], abs=1e-6)
    assert [row["loss"] for row in rows(trainer)] == pytest.approx([row["loss"] for row in rows(plain)], abs=1e-5)


@pytest.mark.filterwarnings("ignore::rltt.train.faults.FewerAtOnce")
def test_memory_that_does_not_suffice_for_one_sequence_ends_the_run(make: Make) -> None:
    trainer = make(max_steps=1)
    SmallMemory(trainer.ref_model, room=0)
    message = (
        r"(?s)step 1: the device's memory is full: CUDA out of memory. Tried to allocate 2.00 GiB.\n.*lower train.per"
    )
    with pytest.raises(OutOfMemoryInStepError, match=message):
        trainer.train()
    trainer = make(max_steps=1)
    SmallMemory(trainer.model, room=0, with_gradient=True)
    with pytest.raises(OutOfMemoryInStepError, match=r"batch_size \(4 now\)"):
        trainer.train()


def test_other_errors_are_not_taken_for_missing_memory() -> None:
    def fails(size: int) -> None:
        raise RuntimeError("index out of range")

    with pytest.raises(RuntimeError, match="index out of range"):
        ScoringMemory().fit(fails, 8)


# -------------------------------------------------------------------------------------------------- vanishing updates


def test_the_share_of_changed_weights_is_what_a_comparison_of_all_finds(make: Make) -> None:
    trainer = make(max_steps=1)
    before = [weight.detach().clone() for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.train()
    after = [weight.detach() for weight in trainer.model.parameters() if weight.requires_grad]
    changed = sum((old != new).sum().item() for old, new in zip(before, after, strict=True))
    assert rows(trainer)[0]["update/changed"] == pytest.approx(changed / sum(map(torch.numel, before)))
    assert 0.5 < rows(trainer)[0]["update/changed"] < 1  # rows of tokens that no one used stay


def test_of_large_models_a_sample_is_compared() -> None:
    model = nn.Sequential(nn.Linear(2000, 1000), nn.Linear(10, 10))
    sample = sample_weights(model, lambda weight: weight.requires_grad)
    sizes = {tuple(weight.shape): len(indices) for weight, indices in sample}
    assert sum(sizes.values()) == pytest.approx(SAMPLED_WEIGHTS, rel=1e-3)
    assert sizes[1000, 2000] > 0.99 * SAMPLED_WEIGHTS
    again = sample_weights(model, lambda weight: weight.requires_grad)
    assert all(torch.equal(one[1], other[1]) for one, other in zip(sample, again, strict=True))


def test_weights_in_16_bits_whose_updates_vanish_are_told(make: Make, tiny_ouro: Path) -> None:
    narrow = load_policy(str(tiny_ouro)).to(torch.bfloat16)
    trainer = make(model=narrow, learning_rate=1e-6, bf16=True, parity_tolerance=10.0)
    pattern = r"step 1: the update changed \d+\.\d% of the weights\. They are bfloat16.*rate 1e-06 rounds to nothing"
    with pytest.warns(VanishingUpdates, match=pattern) as said:
        trainer.train()
    assert len([warning for warning in said if warning.category is VanishingUpdates]) == 1
    shares = [row["update/changed"] for row in rows(trainer)]
    assert max(shares) < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error", VanishingUpdates)
        wide = make(learning_rate=1e-6, bf16=True, parity_tolerance=10.0)  # bf16 over fp32 weights
        wide.train()
    assert {weight.dtype for weight in wide.model.parameters()} == {torch.float32}
    assert min(row["update/changed"] for row in rows(wide)) > 0.5
