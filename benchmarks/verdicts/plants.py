"""Faults planted in a run from outside: what a bug in an engine, a checkpoint or a configuration would do."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from rltt.train.trainer import RLTTTrainer

Plant = Callable[[RLTTTrainer], None]


class RoundToBf16(TrainerCallback):
    """Rounds the weights after each update to what bf16 can hold."""

    def on_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())


def bf16_weights(trainer: RLTTTrainer) -> None:
    """The weights are held in bf16, as when a checkpoint is trained in the dtype that it was saved in.

    They are rounded after each update instead of stored so: a CPU computes with bf16 weights five times slower.
    """
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.copy_(weight.bfloat16())
    trainer.add_callback(RoundToBf16())


def reference_is_policy(trainer: RLTTTrainer) -> None:
    """The KL is measured to the policy as it is now."""
    trainer.ref_model = trainer.model


def other_temperature(temperature: float) -> Plant:
    """The engine samples at another temperature than the one that is scored."""

    def plant(trainer: RLTTTrainer) -> None:
        trainer.generation_config.temperature = temperature

    return plant


def shallow_rollout(trainer: RLTTTrainer) -> None:
    """The engine samples from the first loop, training scores the last."""
    generate = trainer._generate_single_turn

    def shallow(*args: Any, **kwargs: Any) -> Any:
        deep = trainer.policy.loop_spec.loops
        trainer.policy.set_loops(1)
        try:
            return generate(*args, **kwargs)
        finally:
            trainer.policy.set_loops(deep)

    trainer._generate_single_turn = shallow


def same_state_in_every_loop(trainer: RLTTTrainer) -> None:
    """Every loop shows the last one's state, as when the depth is cached at construction."""
    backbone = trainer.policy.model
    forward = backbone.forward

    def same(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.loop_states = (output.loop_states[-1],) * len(output.loop_states)
        return output

    backbone.forward = same


def collapsed_gate(trainer: RLTTTrainer) -> None:
    """The gate lets nearly everything out after the first loop."""
    gate = trainer.policy.model.early_exit_gate
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.fill_(6.0)


def entropy_penalty(trainer: RLTTTrainer) -> None:
    """The objective pays for certainty."""
    trainer.entropy_coef = -1.0
