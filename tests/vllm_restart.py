"""A real engine that dies, or hangs, in the second rollout: `python vllm_restart.py POLICY OUT dies|hangs|dies-twice`.

Prints one JSON object: the rows of the steps, what was warned of, and the error that ended the run, if one did.
"""

import json
import sys
import time
import warnings
from typing import Any

from datasets import Dataset

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer
from rltt.errors import UserError


def score(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


class FaultyTrainer(RLTTTrainer):
    """Its engine fails in the second rollout."""

    faults = 1

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1 and self.faults:
            self.break_engine()
        return super()._generate_single_turn(*args, **kwargs)

    def break_engine(self) -> None:
        self.faults -= 1

        def generate(*_: Any, **__: Any) -> Any:
            if FAULT == "hangs":
                while True:
                    time.sleep(0.1)
            raise RuntimeError("CUDA error: planted")

        if FAULT == "hangs":
            self.args.vllm_timeout = 10.0
        self.vllm_generation.llm.generate = generate

    def _restart_engine(self) -> None:
        super()._restart_engine()
        self.args.vllm_timeout = 3600.0
        if FAULT == "dies-twice":
            self.break_engine()


POLICY, OUT, FAULT = sys.argv[1:]
trainer = FaultyTrainer(
    load_policy(POLICY),
    score,
    RLTTConfig(
        OUT,
        use_vllm=True,
        vllm_mode="colocate",
        credit="uniform",
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="steps",
        save_steps=1,
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
print(json.dumps({"rows": rows, "said": said, "error": error}))
