"""LoopLM, the Ouro architecture (Scaling Latent Reasoning via Looped Language Models, arXiv 2510.25741).

Upstream's weight names and field names, so that `ByteDance/Ouro-1.4B` and its kin load with no remote code. Four norms
a layer; the normed state of a loop feeds the gate, the head at that depth, and the next loop.
"""

from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from .configuration import OuroConfig
from .looped import LoopedForCausalLM, LoopedModel


class OuroDecoderLayer(GradientCheckpointingLayer):
    """x ← x + N_in2(Attn(N_in1 x)); x ← x + N_post2(MLP(N_post1 x))."""

    def __init__(self, config: OuroConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **kwargs)
        hidden = hidden + self.input_layernorm_2(attended)
        return hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))


class OuroModel(LoopedModel):
    config: OuroConfig
    config_class = OuroConfig
    layer_class = OuroDecoderLayer
    _no_split_modules: ClassVar[list[str]] = ["OuroDecoderLayer"]


class OuroForCausalLM(LoopedForCausalLM):
    config: OuroConfig
    config_class = OuroConfig
    model_class = OuroModel
    _no_split_modules: ClassVar[list[str]] = ["OuroDecoderLayer"]
