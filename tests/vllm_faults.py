"""Faults planted in a real vLLM engine under a trainer: `python vllm_faults.py CHECKPOINT OUT FAULT…`.

Prints one JSON object: for each fault, what the parity gate said.
"""

import json
import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import vllm
from datasets import Dataset

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer
from rltt.errors import ParityError
from rltt.rollout.vllm.engine import ColocatedEngine

vllm.LLM = partial(vllm.LLM, enforce_eager=True)  # compiling takes longer than all the faults together
STALE = "model.layers.1.mlp.up_proj.weight"


def score(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


def make_trainer(folder: str, out: str) -> RLTTTrainer:
    torch.manual_seed(0)
    policy = load_policy(folder)
    with torch.no_grad():  # a freshly made model is nearly the same at each depth
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = RLTTConfig(
        out,
        use_vllm=True,
        vllm_mode="colocate",
        credit="uniform",
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        temperature=0.8,
        parity_check_rollouts=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": ["ada has 3 apples and gets 4 more .", "2 + 3 ="] * 8})
    return RLTTTrainer(policy, score, config, data, processing_class=load_tokenizer(folder))


def built_with(**changes: Any) -> None:
    """Let the engine be built from another configuration, or in another dtype, than the policy's."""
    start = ColocatedEngine._init_vllm

    def otherwise(self: ColocatedEngine) -> None:
        config = self.accelerator.unwrap_model(self.model).config
        self.compute_dtype = changes.pop("dtype", self.compute_dtype)
        usual = {name: getattr(config, name) for name in changes}
        for name, value in changes.items():
            setattr(config, name, value)
        start(self)
        for name, value in usual.items():
            setattr(config, name, value)

    ColocatedEngine._init_vllm = otherwise


def skip_one_weight(trainer: RLTTTrainer) -> None:
    """From the second sync on, one weight does not arrive."""
    engine = trainer.vllm_generation
    named, load, syncs = engine._iter_named_params, engine.engine_model.load_weights, []
    sync = engine.sync_weights

    def counted() -> None:
        syncs.append(1)
        sync()

    def without_one(weights: Any) -> Any:
        (name, weight), *_ = weights
        return (
            {"model.layers.1.mlp.gate_up_proj.weight"} if name == STALE and len(syncs) > 1 else load([(name, weight)])
        )

    assert STALE in [name for name, _ in named()]
    engine.sync_weights, engine.engine_model.load_weights = counted, without_one


def padded_prompts(trainer: RLTTTrainer) -> None:
    """The engine gets prompts with the padding of a batch."""
    generate = trainer.vllm_generation.generate

    def with_padding(prompts: list[list[int]], **kwargs: Any) -> Any:
        longest, pad = max(map(len, prompts)), trainer.processing_class.pad_token_id
        return generate(prompts=[[pad] * (longest - len(row)) + row for row in prompts], **kwargs)

    trainer.vllm_generation.generate = with_padding


def other_temperature(trainer: RLTTTrainer) -> None:
    trainer.vllm_generation.temperature = 1.0


def no_stop_tokens(trainer: RLTTTrainer) -> None:
    trainer.vllm_generation.generation_kwargs["stop_token_ids"] = []
    with torch.no_grad():  # likely enough to be seen
        trainer.policy.lm_head.weight[trainer.processing_class.eos_token_id] *= 3


def top_p(trainer: RLTTTrainer) -> None:
    trainer.vllm_generation.top_p = 0.7


AT_RUN_TIME = {
    "none": lambda trainer: None,
    "stale": skip_one_weight,
    "padding": padded_prompts,
    "temperature": other_temperature,
    "stop": no_stop_tokens,
    "top_p": top_p,
}
WHEN_BUILT = {
    "depth": {"total_ut_steps": 2},
    "exit": {"early_exit_threshold": 0.6},
    "bf16": {"dtype": torch.bfloat16},
}


def main(folder: str, out: str, faults: list[str]) -> None:
    report = {}
    if faults[0] in WHEN_BUILT:
        built_with(**WHEN_BUILT[faults[0]])
    trainer = make_trainer(folder, out)
    engine = trainer.vllm_generation
    start = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    for fault in faults:
        trainer.policy.load_state_dict(start)
        usual = dict(engine.__dict__), dict(engine.engine_model.__dict__)
        engine.generation_kwargs = dict(engine.generation_kwargs)
        trainer._last_loaded_step = -1
        AT_RUN_TIME.get(fault, AT_RUN_TIME["none"])(trainer)
        try:
            trainer.train()
            report[fault] = None
        except ParityError as error:
            report[fault] = str(error)
        engine.__dict__.clear()
        engine.__dict__.update(usual[0])
        engine.engine_model.__dict__.clear()
        engine.engine_model.__dict__.update(usual[1])
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
