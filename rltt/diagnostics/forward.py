"""Runs a looped model of any family and hands over what the measures need, without a change to the model.

States are caught at the final norm, which every loop passes. Queries and keys are caught in an attention function of
our own, which otherwise is SDPA. Sequences of a batch are padded on the right, where a causal model does not see it: so
there is no mask, and what lies beyond a sequence's length is cut off.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..models.looped import LoopedForCausalLM
from ..models.plt import PLTModel
from .attention import LayerAttention

WATCHED = "rltt_watched"

# Receives loop and layer (from 0), sequence of the batch, its attention, and that of the loop before.
Seen = Callable[[int, int, int, LayerAttention, LayerAttention | None], None]


@dataclass(frozen=True)
class LoopStates:
    """States of a batch.

    Attributes:
        handed: h^(0), the embeddings, to h^(R): what each loop hands to the next, R + 1 tensors [B, S, H].
        normed: what the head reads of each loop, R tensors [B, S, H].
    """

    handed: list[Float[Tensor, "B S H"]]
    normed: list[Float[Tensor, "B S H"]]

    @property
    def finite(self) -> bool:
        """Whether no state holds a NaN or an infinity."""
        return all(bool(torch.isfinite(state).all()) for state in self.handed)

    def of(self, sequence: int, length: int) -> "LoopStates":
        """The states [S, H] of one sequence of the batch, without its padding."""
        return LoopStates(*([h[sequence, :length] for h in states] for states in (self.handed, self.normed)))


def run_loops(model: LoopedForCausalLM, ids: Int[Tensor, "B S"], loops: int, **kwargs: Any) -> LoopStates:
    """The states of every loop."""
    embeddings = model.get_input_embeddings()(ids)
    states = LoopStates([embeddings], [])
    with _caught(model, states):
        model.model(inputs_embeds=embeddings, use_cache=False, loops=loops, **kwargs)
    return states


def block_of_states(model: LoopedForCausalLM, states: LoopStates, loops: int) -> list[Float[Tensor, "B S H"]]:
    """f_θ(h^(r)) for r = 1 to `loops`: the shared block on the state itself, nothing mixed in or shifted.

    What enters loop r + 1 is replaced by h^(r). In a Parallel Loop Transformer the block then attends as a later loop
    does, to the keys and values that loop 1 made of this text. With one adapter a loop there is none after the last,
    and the image of its state is left out.
    """
    depth = loops + (not model.model.loop_adapters)
    calls = 0

    def replace(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        nonlocal calls
        calls += 1
        return None if calls == 1 else (states.handed[calls - 1], *inputs[1:])

    images = LoopStates([], [])
    handle = model.model.layers[0].register_forward_pre_hook(replace)
    try:
        with _caught(model, images):
            model.model(inputs_embeds=states.handed[0], use_cache=False, loops=depth)
    finally:
        handle.remove()
    return images.handed[1:]


@contextmanager
def _caught(model: LoopedForCausalLM, states: LoopStates) -> Iterator[None]:
    """Within, what each loop hands on and what the head reads of it is appended to `states`."""
    normed_each = model.loop_spec.norm_each_loop

    def note(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        states.normed.append(output)
        states.handed.append(output if normed_each else inputs[0])

    handle = model.model.norm.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


# --------------------------------------------------------------------------------------------------------- attention


@dataclass
class AttentionWatch:
    """Collects what the attention of a layer in a loop is made of, and hands it on when the layer is done.

    Of the loop before it keeps queries and keys, S numbers a channel, and no attention weights.
    """

    lengths: list[int]
    window: int | None
    seen: Seen
    parts: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    gate: Tensor | None = None
    before: dict[tuple[int, int], LayerAttention] = field(default_factory=dict)
    loops: dict[int, int] = field(default_factory=dict)

    def finish(self, layer: int) -> None:
        """The layer has attended in one more loop."""
        loop = self.loops.get(layer, 0)
        self.loops[layer] = loop + 1
        query, key, scaling = self.parts[0]
        own_key = self.parts[1][1] if len(self.parts) > 1 else None
        for b, length in enumerate(self.lengths):
            now = LayerAttention(
                query[b, :, :length],
                key[b, :, :length],
                scaling,
                None if own_key is None else own_key[b, :, :length],
                None if self.gate is None else self.gate[b, :length],
                None if own_key is None else self.window,
            )
            self.seen(loop, layer, b, now, self.before.get((layer, b)))
            self.before[layer, b] = now
        self.parts, self.gate = [], None


def _watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    watch: AttentionWatch,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    watch.parts.append((query, key, scaling))
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(WATCHED, _watched_attention)
AttentionMaskInterface.register(WATCHED, sdpa_mask)


@contextmanager
def watching(model: LoopedForCausalLM, lengths: list[int], seen: Seen) -> Iterator[dict[str, Any]]:
    """Within, a forward that gets these keywords calls `seen` for each layer in each loop.

    Args:
        lengths: tokens of each sequence of the batch.
    """
    watch = AttentionWatch(lengths, model.loop_spec.window, seen)

    def attended(layer: int, *_: Any) -> None:
        watch.finish(layer)

    def gated(_: nn.Module, __: Any, gate: Tensor) -> None:
        watch.gate = gate

    handles = [
        layer.get_submodule("self_attn").register_forward_hook(partial(attended, i))
        for i, layer in enumerate(model.model.layers)
    ]
    if isinstance(model.model, PLTModel):
        handles += [gate.register_forward_hook(gated) for gate in model.model.gates]
    try:
        with attention_by(model, WATCHED):
            yield {"watch": watch}
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attention_by(model: LoopedForCausalLM, implementation: str) -> Iterator[None]:
    """Within, the model attends by another of transformers' attention functions."""
    config, usual = model.config, model.config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = usual
