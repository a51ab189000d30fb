"""Parallel Loop Transformers (PLT, arXiv 2510.24824; LoopCoder-v2, arXiv 2606.18023, section 2.2).

Two changes take the cost out of looping. Later loops read the keys and values of loop 1 and keep only a window of their
own (plt_attention.py, plt_cache.py). And what enters loop r at position i is the embedding of that position with the
state of loop r-1 at position i-1, eq. (2): when a token is decoded, everything that its loops start from is there, and
all of them run in one pass over the layers.

Two published families, with their names of fields and weights: LoopCoder-V2, and IQuest-Coder-Loop v1, which hands the
state over as it is, without a shift, so that its loops run one after another.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import Cache, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from .configuration import IQuestLoopCoderConfig, IQuestPLTCoderConfig
from .looped import LoopedForCausalLM, LoopedModel, LoopedPreTrainedModel
from .norm import RMSNorm
from .plt_attention import InputGate, PLTAttention, PLTConfig, QueryGate, make_gate, sequence_ids, window_mask
from .plt_cache import PLTCache


class PLTDecoderLayer(GradientCheckpointingLayer):
    """x ← x + Attn(N_in x); x ← x + MLP(N_post x), with loop 1's keys and values beside x."""

    def __init__(self, config: PLTConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = PLTAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, shared = self.self_attn(self.input_layernorm(hidden), layer_input=hidden, **kwargs)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), shared


class PLTPreTrainedModel(LoopedPreTrainedModel):
    """What transformers has to know about Parallel Loop Transformers."""

    config: PLTConfig
    _no_split_modules: ClassVar[list[str]] = ["PLTDecoderLayer"]
    _supports_flash_attn = False  # windows need a mask of their own beside the padding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, InputGate | QueryGate):  # g = 0.5: an even blend of both attentions
            initialization.zeros_(module.weight)
            initialization.zeros_(module.bias)


class PLTModel(PLTPreTrainedModel, LoopedModel):
    """Embeddings, L shared layers applied R times over loop 1's keys and values, final norm."""

    config: PLTConfig
    layer_class = PLTDecoderLayer

    @property
    def gates(self) -> list[nn.Module]:
        """The attention gate of each layer, under the family's name for it."""
        raise NotImplementedError

    def run_loops(
        self,
        embeddings: Float[Tensor, "B S H"],
        loops: int,
        *,
        past_key_values: Cache | None,
        padding_mask: Int[Tensor, "B S"] | None,
        **kwargs: Any,
    ) -> list[Float[Tensor, "B S H"]]:
        """The normed state after each loop: section 2.2 of LoopCoder-v2."""
        spec, cache = self.loop_spec, self._own_cache(past_key_values, loops)
        positions = embeddings.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        ids = sequence_ids(padding_mask, kwargs["position_ids"], cached=cache is not None)
        assert spec.window is not None
        kept = 0 if cache is None else cache.kept
        seen = window_mask(ids, positions, past, kept, spec.window, embeddings.device) if loops > 1 else None
        kwargs |= {"window": spec.window, "window_mask": self._as_attention_takes_it(seen, embeddings.dtype)}
        follows = None if ids is None else F.pad(ids, (1, 0), value=-1)[:, past:-1] == ids[:, past:]

        at_once = spec.parallel_decode and self.config.parallel_decode and not self.loop_adapters
        if at_once and cache is not None and loops > 1 and positions == 1:
            return self._run_loops_at_once(embeddings, cache, follows, **kwargs)

        shared: list[Any] = [None] * spec.layers  # K_share, V_share of each layer, from loop 1
        loop_states: list[Tensor] = []
        before = None if cache is None else cache.states_before(embeddings)
        state, last_states = embeddings, []
        for loop in range(loops):
            hidden = embeddings
            if loop and spec.input.shift:  # B^(r) = a·E + b·shift(h^(r-1)), eq. (2)
                shifted = shift(state, None if before is None else before[:, loop - 1 : loop], follows)
                hidden = spec.input.embedding_scale * embeddings + spec.input.state_scale * shifted
            elif loop:
                hidden = state
            which = {"adapter": loop} if self.loop_adapters else {}
            for i, (layer, gate) in enumerate(zip(self.layers, self.gates, strict=True)):
                hidden, shared[i] = layer(
                    hidden, loop=loop, gate=gate, shared=shared[i], past_key_values=cache, **which, **kwargs
                )
            normed = self.norm(hidden)
            state = normed if spec.norm_each_loop else hidden
            loop_states.append(normed)
            last_states.append(state[:, -1:])
        if cache is not None and loops > 1:
            cache.last_states = torch.cat(last_states[:-1], dim=1)
        return loop_states

    def _run_loops_at_once(
        self,
        embeddings: Float[Tensor, "B 1 H"],
        cache: PLTCache,
        follows: Bool[Tensor, "B 1"] | None,
        **kwargs: Any,
    ) -> list[Float[Tensor, "B 1 H"]]:
        """All loops of one new position in one pass: in loop r it starts from h^(r-1) of the position before.

        Layer by layer, loop 1's row adds its keys and values to the shared ones before the other rows read them, so
        that each row sees what it would see if the loops ran one after another.
        """
        spec = self.loop_spec
        before = cache.states_before(embeddings)
        if follows is not None:
            before = before.masked_fill(~follows[..., None], 0.0)
        later = spec.input.embedding_scale * embeddings + spec.input.state_scale * before
        hidden = torch.cat([embeddings, later], dim=1)  # [B, R, H]: a row a loop
        for layer, gate in zip(self.layers, self.gates, strict=True):
            hidden, _ = layer(hidden, loop=None, gate=gate, shared=None, past_key_values=cache, **kwargs)
        normed = self.norm(hidden)
        cache.last_states = (normed if spec.norm_each_loop else hidden)[:, :-1]
        return list(normed.split(1, dim=1))

    def default_positions(
        self, embeddings: Float[Tensor, "B S H"], padding_mask: Tensor | None, seen: int
    ) -> Int[Tensor, "_ S"]:
        """Padding is not counted: a gate on the rotated query reads the position itself."""
        if padding_mask is None or padding_mask.dim() != 2:
            return super().default_positions(embeddings, padding_mask, seen)
        return (padding_mask.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]

    def new_cache(self, loops: int | None = None) -> PLTCache:
        spec = self.loop_spec
        assert spec.window is not None
        return PLTCache(spec.layers, spec.loops if loops is None else loops, spec.window)

    def _own_cache(self, cache: Cache | None, loops: int) -> PLTCache | None:
        if cache is not None and (not isinstance(cache, PLTCache) or cache.loops != loops):
            found = f"one for {cache.loops}" if isinstance(cache, PLTCache) else type(cache).__name__
            raise ValueError(f"past_key_values must be a PLTCache for {loops} loops, found {found}; use `new_cache()`")
        return cache

    def _as_attention_takes_it(self, seen: Bool[Tensor, "B 1 Q K"] | None, dtype: torch.dtype) -> Tensor | None:
        if seen is None or self.config._attn_implementation != "eager":
            return seen
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def shift(
    state: Float[Tensor, "B S H"],
    before: Float[Tensor, "B 1 H"] | None = None,
    follows: Bool[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B S H"]:
    """shift(h)_i = h_{i-1}, and 0 at the first position of a sequence.

    Args:
        before: the state at the position before the first; None is 0.
        follows: where the position before is of the same sequence; None is everywhere.
    """
    if before is None:
        before = torch.zeros_like(state[:, :1])
    shifted = torch.cat([before, state[:, :-1]], dim=1)
    return shifted if follows is None else shifted.masked_fill(~follows[..., None], 0.0)


class PLTForCausalLM(PLTPreTrainedModel, LoopedForCausalLM):
    """A Parallel Loop Transformer with a language-model head that reads every loop."""

    config: PLTConfig


class IQuestPLTCoderModel(PLTModel):
    config: IQuestPLTCoderConfig
    config_class = IQuestPLTCoderConfig

    def __init__(self, config: IQuestPLTCoderConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.get_submodule("self_attn").plt_gate = make_gate(config)
        self.post_init()

    @property
    def gates(self) -> list[nn.Module]:
        return [layer.get_submodule("self_attn.plt_gate") for layer in self.layers]


class IQuestPLTCoderForCausalLM(PLTForCausalLM):
    """LoopCoder-V2."""

    config: IQuestPLTCoderConfig
    config_class = IQuestPLTCoderConfig
    model_class = IQuestPLTCoderModel


class IQuestLoopCoderModel(PLTModel):
    config: IQuestLoopCoderConfig
    config_class = IQuestLoopCoderConfig

    def __init__(self, config: IQuestLoopCoderConfig) -> None:
        super().__init__(config)
        self.gate_projections = nn.ModuleList(make_gate(config) for _ in self.layers)
        self.post_init()

    @property
    def gates(self) -> list[nn.Module]:
        return list(self.gate_projections)


class IQuestLoopCoderForCausalLM(PLTForCausalLM):
    """IQuest-Coder-Loop v1."""

    config: IQuestLoopCoderConfig
    config_class = IQuestLoopCoderConfig
    model_class = IQuestLoopCoderModel
