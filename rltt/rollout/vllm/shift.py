"""The shift of Parallel Loop Transformers in vLLM, where a model sees packed tokens and no sequence.

shift(h)_i = h_{i-1} needs what an earlier step computed for another token. That is what a KV cache keeps, so an
attention layer does it: it sees two positions, and its keys and queries are such that all weight is on the earlier one.
Chunked prefill, prefix caching and preemption are then vLLM's own affair.

Shapes: N tokens of a batch, H hidden.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

SHARPNESS = 64.0
"""Distance of a logit from 0. exp(-2·64) is 0 beside 1 in every dtype: the softmax is exact."""


class Shift(nn.Module):
    """shift(h)_i = h_{i-1}, and 0 at position 0, for one loop boundary.

    The state is the value, cut into as many layers as it takes. A key is +1 at even positions and -1 at odd ones, in
    one channel; a query has the other sign. Heads are those of the model's own attention, so that all layers fit into
    the same pages.

    Args:
        first_layer: index of the first of the attention layers; vLLM wants one number in each name.
        heads, kv_heads: of the model's attention, on this rank. The whole state is shifted on each.
        head_size: channels of a head in the cache.
    """

    def __init__(
        self, vllm_config: VllmConfig, hidden_size: int, first_layer: int, heads: int, kv_heads: int, head_size: int
    ) -> None:
        super().__init__()
        self.hidden_size, self.heads, self.kv_heads, self.head_size = hidden_size, heads, kv_heads, head_size
        self.parts = nn.ModuleList(
            Attention(
                heads,
                head_size,
                scale=1.0,
                num_kv_heads=kv_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=2,  # the token itself is one of them
                prefix=f"model.layers.{first_layer + part}.shift.attn",
            )
            for part in range(shift_layers(hidden_size, kv_heads, head_size))
        )

    def forward(self, positions: Int[Tensor, " N"], state: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        sign = (1 - 2 * (positions % 2)).to(state.dtype)[:, None]
        channel = F.pad(sign, (0, self.head_size - 1))[:, None]  # [N, 1, D]
        key = channel.expand(-1, self.kv_heads, -1).flatten(1)
        query = (channel * -SHARPNESS).expand(-1, self.heads, -1).flatten(1)
        width = self.kv_heads * self.head_size
        values = F.pad(state, (0, len(self.parts) * width - self.hidden_size)).split(width, dim=-1)
        by_group = (-1, self.kv_heads, self.heads // self.kv_heads, self.head_size)
        shifted = [
            # All queries of a group of heads are the same: the first has the answer.
            part(query, key, value.contiguous()).view(by_group)[:, :, 0].flatten(1)
            for part, value in zip(self.parts, values, strict=True)
        ]
        return torch.where(positions[:, None] == 0, 0.0, torch.cat(shifted, dim=-1)[:, : self.hidden_size])


def shift_layers(hidden_size: int, kv_heads: int, head_size: int) -> int:
    """How many attention layers hold a state."""
    return math.ceil(hidden_size / (kv_heads * head_size))
