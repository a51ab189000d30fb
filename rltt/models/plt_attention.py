"""Attention of a Parallel Loop Transformer (LoopCoder-v2, arXiv 2606.18023, section 2.2).

Loop 1 is ordinary causal attention, and its keys and values are kept. In each later loop a layer attends twice with one
query: to the keys and values of loop 1 at all positions, and to its own in a sliding window. A gate, one scalar a head,
weighs the two: eq. (1).

Shapes: B sequences, S positions, R loops, H hidden, N heads, M key-value heads, D channels of a head, K keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from .configuration import IQuestLoopCoderConfig, IQuestPLTCoderConfig
from .norm import RMSNorm
from .plt_cache import PLTCache
from .spec import LoopSpec

PLTConfig = IQuestPLTCoderConfig | IQuestLoopCoderConfig
KeysValues = tuple[Float[Tensor, "B M K D"], Float[Tensor, "B M K D"]]


class InputGate(nn.Module):
    """g = σ(f_gate(RMSNorm(x))) of the layer's input x, before the layer's own norm."""

    def __init__(self, hidden_size: int, heads: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.gate_norm = RMSNorm(hidden_size, eps=eps)

    def forward(self, layer_input: Float[Tensor, "B S H"], query: Float[Tensor, "B N S D"]) -> Float[Tensor, "B S N"]:
        return torch.sigmoid(F.linear(self.gate_norm(layer_input), self.weight, self.bias))


class QueryGate(nn.Module):
    """g_n = σ(w_n·q_n + b_n) of each head's query q_n, after its rotation."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim))
        self.bias = nn.Parameter(torch.empty(heads))

    def forward(self, layer_input: Float[Tensor, "B S H"], query: Float[Tensor, "B N S D"]) -> Float[Tensor, "B S N"]:
        return torch.sigmoid(torch.einsum("bnsd,nd->bsn", query, self.weight) + self.bias)


def make_gate(config: PLTConfig, heads: int | None = None) -> InputGate | QueryGate:
    """The gate of one layer, as `LoopSpec.attention_gate` says; of `heads` heads where they are split over devices."""
    heads = config.num_attention_heads if heads is None else heads
    if LoopSpec.from_config(config).attention_gate == "input":
        return InputGate(config.hidden_size, heads, config.rms_norm_eps)
    return QueryGate(heads, config.head_dim)


class PLTAttention(LlamaAttention):
    """Llama's attention in loop 1, gated between loop 1's keys and a window of its own in the others."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B S H"],
        *,
        layer_input: Float[Tensor, "B S H"],
        loop: int | None,
        gate: nn.Module,
        shared: KeysValues | None,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        window: int,
        window_mask: Tensor | None,
        past_key_values: PLTCache | None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B S H"], KeysValues]:
        """The layer's output, and loop 1's keys and values with those of the cache.

        Args:
            hidden_states: the normed layer input.
            layer_input: what the gate reads.
            loop: from 0. None: the S rows are not positions but all R loops of one position.
            shared: what loop 1 returned; None in loop 1, and where it is among the rows.
            window: positions that a later loop sees; `window_mask` says the same with padding and the cache.
        """
        rows = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if loop is None:
            assert past_key_values is not None
            shared = past_key_values.update(key[:, :, :1], value[:, :, :1], self.layer_idx)
            attended = self._attend(query, shared, attention_mask, is_causal=False, **kwargs)  # in loop 1 that is all
            local = self._attend_windows(query, key, value, window_mask, past_key_values, **kwargs)
            g = gate(layer_input, query)[:, 1:, :, None]
            attended = torch.cat([attended[:, :1], g * attended[:, 1:] + (1 - g) * local], dim=1)
        elif loop == 0:
            shared = (key, value)
            if past_key_values is not None:
                shared = past_key_values.update(key, value, self.layer_idx)
            attended = self._attend(query, shared, attention_mask, **kwargs)
        else:
            assert shared is not None
            if past_key_values is not None:
                key, value = past_key_values.update_window(key, value, self.layer_idx, loop)
            y_global = self._attend(query, shared, attention_mask, **kwargs)
            y_local = self._attend(query, (key, value), window_mask, sliding_window=window, **kwargs)
            g = gate(layer_input, query)[..., None]
            attended = g * y_global + (1 - g) * y_local  # eq. (1)
        return self.o_proj(attended.reshape(*rows, -1)), shared

    def _attend(
        self, query: Float[Tensor, "B N S D"], keys_values: KeysValues, mask: Tensor | None, **kwargs: Any
    ) -> Float[Tensor, "B S N D"]:
        interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        return interface(self, query, *keys_values, mask, dropout=dropout, scaling=self.scaling, **kwargs)[0]

    def _attend_windows(
        self,
        query: Float[Tensor, "B N R D"],
        key: Float[Tensor, "B M R D"],
        value: Float[Tensor, "B M R D"],
        mask: Bool[Tensor, "B 1 1 w"] | None,
        cache: PLTCache,
        **kwargs: Any,
    ) -> Float[Tensor, "B R-1 N D"]:
        """Local attention of all loops but the first at one position: each is a row of its own in the batch."""

        def by_loop(heads: Float[Tensor, "B M R D"]) -> Float[Tensor, "R-1 B M 1 D"]:
            return heads[:, :, 1:].permute(2, 0, 1, 3).unsqueeze(3)

        keys, values = cache.update_windows(by_loop(key), by_loop(value), self.layer_idx)
        if mask is not None and len(mask) > 1:
            mask = mask.repeat(cache.loops - 1, 1, 1, 1)
        local = self._attend(by_loop(query).flatten(0, 1), (keys.flatten(0, 1), values.flatten(0, 1)), mask, **kwargs)
        return local.view(cache.loops - 1, -1, *local.shape[2:]).transpose(0, 1)


def sequence_ids(
    padding_mask: Int[Tensor, "B S"] | None, position_ids: Int[Tensor, "B S"], cached: bool
) -> Int[Tensor, "B S"] | None:
    """Which sequence each position, cached ones included, belongs to; None when a row is one sequence without padding.

    Padding has an id of its own. Rows that pack several sequences are known, as by transformers, by positions that do
    not follow one another, where there is neither a padding mask nor a cache.

    Raises:
        ValueError: a mask of another shape than [B, S]: the windows and the shift need to know what is padding.
    """
    if padding_mask is None:
        return None if cached else find_packed_sequence_indices(position_ids)
    if padding_mask.dim() != 2:
        raise ValueError(f"a Parallel Loop Transformer takes a padding mask [B, S], found {tuple(padding_mask.shape)}")
    return None if padding_mask.all() else padding_mask.long()


def window_mask(
    ids: Int[Tensor, "B P"] | None, queries: int, past: int, kept: int, window: int, device: torch.device
) -> Bool[Tensor, "B 1 Q K"] | None:
    """Where a query sees a key: in its own sequence, not ahead, at most `window` positions with its own.

    Args:
        ids: of `sequence_ids`, for P = past + queries positions.
        kept: how many keys lie before the new ones, those of positions past - kept to past - 1; some may be negative.

    Returns:
        [B or 1, 1, queries, kept + queries]; None where everything is seen.
    """
    if ids is None and queries == 1 and past >= kept:
        return None
    key = torch.arange(past - kept, past + queries, device=device)
    query = torch.arange(past, past + queries, device=device)[:, None]
    seen = ((key <= query) & (key > query - window) & (key >= 0))[None]
    if ids is not None:
        key_ids = F.pad(ids, (kept, 0), value=-1)[:, past:]
        seen = seen & (key_ids[:, None, :] == key_ids[:, kept:, None])
    return seen[:, None]
