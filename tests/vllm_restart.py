"""Faults of a real engine: `python vllm_restart.py POLICY OUT`.

Its model hangs in the second rollout and raises in the third, after which it cannot be started anew. Prints one JSON
object: the rows of the steps, what was warned of, the error that ended the run, and the steps of the checkpoints.
"""

import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm
from datasets import Dataset

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer
from rltt.errors import UserError
from rltt.train.checkpoint import checkpoints_in, verify

vllm.LLM = partial(vllm.LLM, enforce_eager=True)  # compiling takes longer than all the faults together


def score(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


def hang(*_: Any, **__: Any) -> Any:
    while True:
        time.sleep(0.1)


def die(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FaultyTrainer(RLTTTrainer):
    """Its engine's model fails in the second and in the third rollout, and a second new start fails too."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if fault := {1: hang, 2: die}.get(self.state.global_step):
            self.vllm_generation.engine_model.forward = fault
        return super()._generate_single_turn(*args, **kwargs)

    def _restart_engine(self) -> None:
        if self.state.global_step == 2:
            vllm.LLM = die
        super()._restart_engine()


POLICY, OUT = sys.argv[1:]
trainer = FaultyTrainer(
    load_policy(POLICY),
    score,
    RLTTConfig(
        OUT,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_timeout=5,
        credit="uniform",
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="steps",
        save_steps=100,
    ),
    Dataset.from_dict({"prompt": ["ada has 3 apples and gets 4 more .", "2 + 3 ="] * 8}),
    processing_class=load_tokenizer(POLICY),
)
error = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        trainer.train()
    except UserError as ended:
        error = f"{type(ended).__name__}: {ended}"
said = [str(warning.message) for warning in caught if type(warning.message).__name__ == "EngineRestarted"]
rows = [row for row in trainer.state.log_history if "loss" in row]
saved = checkpoints_in(Path(OUT))
for checkpoint in saved:
    verify(checkpoint.path)
print(json.dumps({"rows": rows, "said": said, "error": error, "saved": [checkpoint.step for checkpoint in saved]}))
