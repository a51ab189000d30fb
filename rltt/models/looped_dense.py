"""Dense decoders turned into loops (Closing the Loop, arXiv 2610.00673, section 4).

The layers are transformers' own, so at T = 1 a converted model is the dense model, bit for bit.
"""

from typing import ClassVar

from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .configuration import LoopedLlamaConfig, LoopedQwen3Config
from .looped import LoopedForCausalLM, LoopedModel


class LoopedLlamaModel(LoopedModel):
    config: LoopedLlamaConfig
    config_class = LoopedLlamaConfig
    layer_class = LlamaDecoderLayer
    _no_split_modules: ClassVar[list[str]] = ["LlamaDecoderLayer"]


class LoopedLlamaForCausalLM(LoopedForCausalLM):
    config: LoopedLlamaConfig
    config_class = LoopedLlamaConfig
    model_class = LoopedLlamaModel
    _no_split_modules: ClassVar[list[str]] = ["LlamaDecoderLayer"]


class LoopedQwen3Model(LoopedModel):
    config: LoopedQwen3Config
    config_class = LoopedQwen3Config
    layer_class = Qwen3DecoderLayer
    _no_split_modules: ClassVar[list[str]] = ["Qwen3DecoderLayer"]


class LoopedQwen3ForCausalLM(LoopedForCausalLM):
    config: LoopedQwen3Config
    config_class = LoopedQwen3Config
    model_class = LoopedQwen3Model
    _no_split_modules: ClassVar[list[str]] = ["Qwen3DecoderLayer"]
