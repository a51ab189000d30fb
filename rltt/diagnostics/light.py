"""Some of the measures, of a policy that is in training: those that a run can afford every few steps."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models.looped import LoopedForCausalLM
from .forward import attention_by, block_of_states, run_loops
from .measures import OUTPUTS, measure_states

LIGHT = ("step_size", "cos_theta", "effective_rank", "fixed_point_gap", *OUTPUTS)
"""All of states and outputs that every family has; none of attention, which costs the most."""


@torch.no_grad()
def measure_lightly(model: LoopedForCausalLM, ids: Int[Tensor, " S"]) -> dict[str, Float[Tensor, " R"]]:
    """The measures of `LIGHT` by loop, at the model's own depth; all of them NaN where a state is not finite.

    The forward runs in the type of the weights. Nothing of the model changes, and no random number is drawn.

    Args:
        ids: of one text, at least 2 tokens.
    """
    training, loops = model.training, model.loop_spec.loops
    ids = ids.to(model.device)
    model.eval()  # no dropout, no gradient checkpointing
    try:
        # SDPA takes fp32, which FlashAttention does not.
        with attention_by(model, "sdpa"), torch.autocast(model.device.type, enabled=False):
            states = run_loops(model, ids[None], loops)
            if not states.finite:
                return {name: torch.full((loops,), math.nan, dtype=torch.float64) for name in LIGHT}
            images = [image[0] for image in block_of_states(model, states, loops)]
            found, _ = measure_states(model, ids, states.of(0, len(ids)), images)
    finally:
        model.train(training)
    return {name: found[name] for name in LIGHT}
