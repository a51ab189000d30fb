"""The looped families as native vLLM models.

The layers' projections are shared by all loops; what each loop has of its own is the attention's KV cache: one
`Attention` object for each loop t and layer i, under the name `model.layers.{t·L+i}.self_attn.attn`, which is
`LoopSpec.kv_slot`. Weight names on the wire are those of the checkpoint, as TRL's weight sync sends them.

The readout is that of the training path: the last loop, or with `early_exit_threshold` below 1 each token's own exit,
by the same fp32 gate and the same function. All loops run for every token.

Shapes: N tokens of a batch (vLLM packs sequences), H hidden, T loops, L layers.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from ...models.exit_gate import ExitGate
from ...models.looped import InputMixing, read_out
from ...models.spec import LoopSpec
from .cpu import attention_head_size, keep_weights_syncable
from .shift import Shift, shift_layers


class LoopedAttention(LlamaAttention):
    """Llama's attention with one KV cache for each loop, and Qwen3's norms of queries and keys where they belong."""

    def __init__(self, vllm_config: VllmConfig, layer: int, qk_norm: bool) -> None:
        config = vllm_config.model_config.hf_config
        spec = LoopSpec.from_config(config)
        bias = getattr(config, "attention_bias", False)
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=vllm_config.quant_config,
            bias=bias,
            bias_o_proj=bias,
            cache_config=vllm_config.cache_config,
            prefix=f"model.layers.{layer}.self_attn",
        )
        # What Llama's class made, vLLM has registered under the name of the first loop: make it again for every loop.
        del vllm_config.compilation_config.static_forward_context[self.attn.layer_name]
        del self.attn
        self.cache_head_dim = attention_head_size(self.head_dim)
        self.loops = nn.ModuleList(
            Attention(
                self.num_heads,
                self.cache_head_dim,
                self.scaling,
                num_kv_heads=self.num_kv_heads,
                cache_config=vllm_config.cache_config,
                quant_config=vllm_config.quant_config,
                per_layer_sliding_window=None if loop < spec.global_kv_loops else spec.window,
                prefix=f"model.layers.{spec.kv_slot(loop, layer)}.self_attn.attn",
            )
            for loop in range(spec.loops)
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if qk_norm else None

    def forward(self, positions: Int[Tensor, " N"], hidden: Float[Tensor, "N H"], loop: int) -> Float[Tensor, "N H"]:
        return self.output(self.attend(loop, *self.project(positions, hidden)))

    def project(self, positions: Int[Tensor, " N"], hidden: Float[Tensor, "N H"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [N, heads · channels] each, normed and rotated."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view(q.shape)
            k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return q, k, v

    def attend(self, loop: int, query: Tensor, key: Tensor | None, value: Tensor | None) -> Float[Tensor, "N D"]:
        """Attention over the cache of a loop; without keys and values it is read as that loop has written it."""
        key, value = (None if heads is None else self._fill(heads) for heads in (key, value))
        return self._cut(self.loops[loop](self._fill(query), key, value))

    def output(self, attended: Float[Tensor, "N D"]) -> Float[Tensor, "N H"]:
        output, _ = self.o_proj(attended)
        return output

    def _fill(self, heads: Float[Tensor, "N D"]) -> Tensor:
        """Zeros after each head's channels, up to a head size that the attention kernel knows."""
        missing = self.cache_head_dim - self.head_dim
        if not missing:
            return heads
        return F.pad(heads.view(heads.shape[0], -1, self.head_dim), (0, missing)).flatten(1)

    def _cut(self, heads: Tensor) -> Float[Tensor, "N D"]:
        if self.cache_head_dim == self.head_dim:
            return heads
        return heads.view(heads.shape[0], -1, self.cache_head_dim)[..., : self.head_dim].flatten(1)


class LoopedDenseLayer(nn.Module):
    """A Llama-family decoder layer: x ← x + Attn(N_in x); x ← x + MLP(N_post x)."""

    qk_norm = False
    attention_class: type[LoopedAttention] = LoopedAttention

    def __init__(self, vllm_config: VllmConfig, layer: int) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = self.attention_class(vllm_config, layer, self.qk_norm)
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=vllm_config.quant_config,
            bias=getattr(config, "mlp_bias", False),
            prefix=f"model.layers.{layer}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Int[Tensor, " N"], hidden: Float[Tensor, "N H"], loop: int) -> Float[Tensor, "N H"]:
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden), loop)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LoopedQwen3Layer(LoopedDenseLayer):
    qk_norm = True


class OuroLayer(LoopedDenseLayer):
    """LoopLM's layer, with a norm before and after: x ← x + N_in2(Attn(N_in x)); x ← x + N_post2(MLP(N_post x))."""

    def __init__(self, vllm_config: VllmConfig, layer: int) -> None:
        super().__init__(vllm_config, layer)
        config = vllm_config.model_config.hf_config
        self.input_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Int[Tensor, " N"], hidden: Float[Tensor, "N H"], loop: int) -> Float[Tensor, "N H"]:
        hidden = hidden + self.input_layernorm_2(self.self_attn(positions, self.input_layernorm(hidden), loop))
        return hidden + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden)))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class LoopedModel(nn.Module):
    """Embeddings, L shared layers applied T times, final norm, exit gate; compiled with the loops unrolled."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", layer_class: type[LoopedDenseLayer]) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.spec = LoopSpec.from_config(config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
        )
        self.layers = nn.ModuleList(layer_class(vllm_config, index) for index in range(self.spec.layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # In fp32 whatever the engine's dtype: the exit decision and 1-w would be rounded away (see exit_gate.py).
        self.early_exit_gate = ExitGate(config.hidden_size).float() if self.spec.exit_gate else None
        self.input_mixing = InputMixing().float() if self.spec.input.kind == "mix" else None
        boundaries = self.spec.loops - 1 if self.spec.input.shift else 0
        self.shifts = nn.ModuleList(self._shift(vllm_config, boundary) for boundary in range(boundaries))

    def _shift(self, vllm_config: VllmConfig, boundary: int) -> Shift:
        """The shift between two loops, whose attention layers are numbered after those of the loops."""
        hidden = vllm_config.model_config.hf_config.hidden_size
        attention = self.layers[0].get_submodule("self_attn")
        assert isinstance(attention, LoopedAttention)
        heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.cache_head_dim
        first = self.spec.kv_slots + boundary * shift_layers(hidden, kv_heads, size)
        return Shift(vllm_config, hidden, first, heads, kv_heads, size)

    def forward(
        self,
        input_ids: Int[Tensor, " N"] | None,
        positions: Int[Tensor, " N"],
        intermediate_tensors: None = None,
        inputs_embeds: Float[Tensor, "N H"] | None = None,
    ) -> Float[Tensor, "N H"]:
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = embeddings
        loop_states: list[Tensor] = []
        for loop in range(self.spec.loops):
            if loop:
                hidden = self.loop_input(loop, positions, embeddings, hidden)
            for layer in self.layers:
                hidden = layer(positions, hidden, loop)
            normed = self.norm(hidden)
            hidden = normed if self.spec.norm_each_loop else hidden
            loop_states.append(normed)
        if not self.spec.readout.adaptive or self.early_exit_gate is None:
            return loop_states[-1]
        gate_logits = torch.stack([self.early_exit_gate(state) for state in loop_states], dim=-1)
        return read_out(loop_states, gate_logits, self.spec.readout.threshold)

    def loop_input(
        self, loop: int, positions: Int[Tensor, " N"], embeddings: Float[Tensor, "N H"], state: Float[Tensor, "N H"]
    ) -> Float[Tensor, "N H"]:
        """What enters a loop after the first (`LoopSpec.input`)."""
        if self.input_mixing is not None:
            return self.input_mixing(embeddings, state)
        if self.spec.input.shift:
            mix = self.spec.input
            return mix.embedding_scale * embeddings + mix.state_scale * self.shifts[loop - 1](positions, state)
        return state


class LoopedForCausalLM(nn.Module):
    """A looped backbone and its head, as vLLM's runner calls it."""

    layer_class: type[LoopedDenseLayer]
    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper
    packed_modules_mapping = {  # noqa: RUF012  (vLLM's protocol)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        keep_weights_syncable()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = LoopedModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), layer_class=self.layer_class
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Int[Tensor, " N"]) -> Float[Tensor, "N H"]:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Int[Tensor, " N"] | None,
        positions: Int[Tensor, " N"],
        intermediate_tensors: None = None,
        inputs_embeds: Float[Tensor, "N H"] | None = None,
    ) -> Float[Tensor, "N H"]:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Float[Tensor, "N H"]) -> Float[Tensor, "N V"] | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a whole checkpoint or, in a weight sync, single tensors under the checkpoint's names.

        Raises:
            ValueError: a name that the model does not have. (That a checkpoint lacks none, vLLM's loader checks.)
        """
        # `credit.` are weights of the objective, which the policy carries while it is trained.
        loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=["credit."])
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)


class OuroForCausalLM(LoopedForCausalLM):
    layer_class = OuroLayer


class LoopedLlamaForCausalLM(LoopedForCausalLM):
    layer_class = LoopedDenseLayer


class LoopedQwen3ForCausalLM(LoopedForCausalLM):
    layer_class = LoopedQwen3Layer
