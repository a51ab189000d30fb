"""Parallel Loop Transformers in vLLM: LoopCoder-V2 here, IQuest-Coder-Loop v1 by vLLM's own model.

Loop 1's `Attention` has the only cache of all positions. A later loop queries it without keys of its own, and has a
second one with a sliding window. The runner is vLLM's, as it is: loops run one after another, shift.py moves states.

Shapes: N tokens of a batch (vLLM packs sequences), H hidden.
"""

from collections.abc import Iterable

from jaxtyping import Float, Int
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.iquest_loopcoder import IQuestLoopCoderForCausalLM as NativeIQuestLoopCoderForCausalLM
from vllm.model_executor.utils import set_weight_attrs

from ...models.plt_attention import make_gate
from .cpu import keep_weights_syncable
from .models import LoopedAttention, LoopedDenseLayer, LoopedForCausalLM


class PLTAttention(LoopedAttention):
    """Attention gated between loop 1's keys and values and a window of the loop's own: LoopCoder-v2, eq. (1)."""

    def __init__(self, vllm_config: VllmConfig, layer: int, qk_norm: bool) -> None:
        super().__init__(vllm_config, layer, qk_norm)
        config = vllm_config.model_config.hf_config
        self.plt_gate = make_gate(config, config.num_attention_heads // get_tensor_model_parallel_world_size())
        for parameter in (self.plt_gate.weight, self.plt_gate.bias):  # a row a head
            set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})

    def gated(
        self, positions: Int[Tensor, " N"], layer_input: Float[Tensor, "N H"], normed: Float[Tensor, "N H"], loop: int
    ) -> Float[Tensor, "N H"]:
        """What a layer adds to its input."""
        query, key, value = self.project(positions, normed)
        if loop == 0:
            return self.output(self.attend(0, query, key, value))
        by_head = (-1, self.num_heads, self.head_dim)
        y_global = self.attend(0, query, None, None).view(by_head)
        y_local = self.attend(loop, query, key, value).view(by_head)
        g = self.plt_gate(layer_input[None], query.view(by_head).transpose(0, 1)[None])[0, ..., None]
        return self.output((g * y_global + (1 - g) * y_local).flatten(1))


class PLTLayer(LoopedDenseLayer):
    attention_class = PLTAttention
    self_attn: PLTAttention

    def forward(self, positions: Int[Tensor, " N"], hidden: Float[Tensor, "N H"], loop: int) -> Float[Tensor, "N H"]:
        hidden = hidden + self.self_attn.gated(positions, hidden, self.input_layernorm(hidden), loop)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class IQuestPLTCoderForCausalLM(LoopedForCausalLM):
    """LoopCoder-V2."""

    layer_class = PLTLayer


class IQuestLoopCoderForCausalLM(NativeIQuestLoopCoderForCausalLM):
    """vLLM's own model, with what a trainer needs of it."""

    packed_modules_mapping = LoopedForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        keep_weights_syncable()
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's; `credit.` are weights of the objective, which the policy carries while it is trained."""
        return super().load_weights((name, weight) for name, weight in weights if not name.startswith("credit."))
