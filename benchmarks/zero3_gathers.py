"""How often ZeRO-3 gathers a shared layer for one forward and backward, against the number of loops.

    torchrun --standalone --nproc-per-node 2 benchmarks/zero3_gathers.py [SETTINGS…]

Counts what DeepSpeed's coordinator fetches of the block's matrices, divided by their number: 1 means that each was
gathered once. A micro-batch is a forward and backward; scoring is the forward that measures the rollout's parity.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from rltt.data.arithmetic import arithmetic_problems
from rltt.data.tokenizer import arithmetic_tokenizer
from rltt.models.configuration import OuroConfig
from rltt.models.looplm import OuroForCausalLM
from rltt.processes import is_main
from rltt.recipe import TrainSection
from rltt.train.config import RLTTConfig
from rltt.train.sharding import deepspeed_config
from rltt.train.trainer import RLTTTrainer

MICRO_BATCHES = 6
fetched: Counter[int] = Counter()
_FETCH = "_PartitionedParameterCoordinator__all_gather_params_"


def count_fetches() -> None:
    """Let the coordinator note each parameter that it gathers."""
    usual: Callable[..., Any] = getattr(PartitionedParameterCoordinator, _FETCH)

    def counted(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in params:
            if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                fetched[parameter.ds_id] += 1
        return usual(self, params, *args, **kwargs)

    setattr(PartitionedParameterCoordinator, _FETCH, counted)


class Counting(RLTTTrainer):
    """Counts gathers in each part of a step."""

    def gathers(self) -> float:
        block = [p.ds_id for p in self.policy.model.layers.parameters() if len(p.ds_shape) == 2 and not p.ds_persist]
        return sum(fetched[index] for index in block) / len(block)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.scored = 0.0
        before = self.gathers()
        loss = super().training_step(*args, **kwargs)
        self.counts = [*getattr(self, "counts", []), (self.scored, self.gathers() - before - self.scored)]
        return loss

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        before = self.gathers()
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.scored = self.gathers() - before
        return batch


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


def run(loops: int, settings: dict[str, Any], checkpointing: bool) -> list[tuple[float, float]]:
    """(scoring, micro-batch) of the second step, when DeepSpeed has seen the order of the layers."""
    torch.manual_seed(0)
    tokenizer = arithmetic_tokenizer()
    config = OuroConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        total_ut_steps=loops,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = OuroForCausalLM(config)
    deepspeed = deepspeed_config(TrainSection(sharding="zero3"), model.num_parameters())
    assert deepspeed is not None
    deepspeed["zero_optimization"] |= {"stage3_param_persistence_threshold": 128} | settings
    args = RLTTConfig(
        "unused",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        credit="uniform",
        loss_type="grpo",
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        log_level="error",
        deepspeed=deepspeed,
    )
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in arithmetic_problems(1, 32, "train")]})
    trainer = Counting(model, letters, args, data, processing_class=tokenizer)
    trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if "Printer" not in str(c)]
    trainer.train()
    return trainer.counts[MICRO_BATCHES:]


def main(names: list[str]) -> None:
    count_fetches()
    variants: dict[str, tuple[dict[str, Any], bool]] = {
        "bounds = the model (rltt)": ({}, False),
        "same, checkpointing": ({}, True),
        # What DeepSpeed's defaults of 1e9 come to when the block is larger than that.
        "bounds below the block": ({"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}, False),
        "reuse distance alone 0": ({"stage3_max_reuse_distance": 0}, False),
    }
    if is_main():
        columns = "".join(f"{f'batch {n + 1}':>9}" for n in range(MICRO_BATCHES))
        print(f"{'settings':26}{'loops':>6}{'scoring':>9}{columns}")
    for name in names or variants:
        settings, checkpointing = variants[name]
        for loops in (2, 4, 8):
            counts = run(loops, settings, checkpointing)
            if is_main():
                cells = "".join(f"{batch:9.1f}" for _, batch in counts)
                print(f"{name:26}{loops:6}{counts[0][0]:9.1f}{cells}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
