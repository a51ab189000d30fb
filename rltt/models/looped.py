"""A block of decoder layers applied T times: the machinery that all looped families share.

A family (looplm.py, looped_dense.py, plt.py) names its decoder layer and its configuration; the loop, the key-value
slots, the exit gate, the readout and the scoring of every loop live here.

Shapes: B sequences, S positions, T loops, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import ModelOutput
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import can_return_tuple

from ..errors import PolicyError
from ..objective.credit import LearnedCredit
from ..objective.logprobs import LoopScores, loop_log_probs
from .configuration import LoopedConfig
from .exit_gate import ExitGate, exit_log_pdf, exit_loop
from .norm import RMSNorm
from .spec import LoopSpec


@dataclass
class LoopedModelOutput(ModelOutput):
    """What the backbone returns.

    Attributes:
        last_hidden_state: [B, S, H], normed, of the loop that is read out.
        past_key_values: the cache, with `LoopSpec.kv_slots` slots.
        loop_states: T tensors [B, S, H], the normed state after each loop.
        gate_logits: [B, S, T] fp32, or None without a gate.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    loop_states: tuple[Tensor, ...] | None = None
    gate_logits: Tensor | None = None


@dataclass
class LoopedCausalLMOutput(ModelOutput):
    """What the language model returns: `logits` (and `loss`) of the loop that is read out, or `scores`.

    Attributes:
        loss: cross entropy of the loop that is read out, when `labels` are given.
        logits: [B, S, V]; None when scoring.
        past_key_values: the cache.
        scores: log-probs of the labels at every loop, when `score` is given.
        credit: [T] learned credit weights, when scoring a model that has them.
        exit_log_pdf: [B, S, T] fp32 log exit probabilities, when `score` is given and there is a gate.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    scores: LoopScores | None = None
    exit_log_pdf: Tensor | None = None
    credit: Tensor | None = None


@dataclass(frozen=True)
class Score:
    """A request to score `labels` at every loop instead of returning logits.

    Attributes:
        temperature: what logits are divided by; that of the rollout.
        last_only: score the last loop alone (T is then 1 in the result), as a reference needs.
        grad_loops: loops (from 0) whose log-probs carry a gradient; None means all. The others are telemetry.
        compact: score only positions with a label. False scores every row where TRL's kernel does (off Triton).
    """

    temperature: float = 1.0
    last_only: bool = False
    grad_loops: tuple[int, ...] | None = None
    compact: bool = True


class LoopCache:
    """One loop's view of the shared cache: layer i of loop t uses slot t·L + i (`LoopSpec.kv_slot`)."""

    def __init__(self, cache: Cache, offset: int) -> None:
        self.cache = cache
        self.offset = offset

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, self.offset + layer_idx, *args, **kwargs)


class LoopedPreTrainedModel(PreTrainedModel):
    """What transformers has to know about looped models."""

    config: LoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @property
    def loop_spec(self) -> LoopSpec:
        """The spec of the model as it is now."""
        return LoopSpec.from_config(self.config)

    def set_loops(self, loops: int) -> None:
        """Change the depth T. The configuration holds its only copy, so rollout, scoring and saving follow."""
        if loops < 1:
            raise ValueError(f"a looped model needs at least 1 loop, found {loops}")
        self.config.total_ut_steps = loops

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """As in transformers, but reentrant checkpointing is refused.

        Shared layers run T times in one backward. Reentrant checkpointing then fails in DDP and ZeRO-2, and in ZeRO-3
        it gives a wrong gradient without an error.
        """
        kwargs = dict(gradient_checkpointing_kwargs or {})
        if kwargs.setdefault("use_reentrant", False):
            raise ValueError("gradient checkpointing with use_reentrant=True gives wrong gradients for looped models")
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, InputMixing):
            w = torch.tensor(self.config.loop_mixing_init)
            initialization.constant_(module.logit, torch.logit(w).item())


class InputMixing(nn.Module):
    """z = w·E + (1-w)·h with one learned scalar w = σ(logit): Closing the Loop, eq. (1)."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(()))

    def forward(self, embeddings: Float[Tensor, "B S H"], state: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        # In fp32: with w = 0.99, bf16 would round 1-w to 0.0117.
        w = torch.sigmoid(self.logit.float())
        return torch.lerp(state.float(), embeddings.float(), w).to(state.dtype)


class LoopedModel(LoopedPreTrainedModel):
    """Embeddings, L shared layers applied T times, final norm, exit gate."""

    layer_class: type[nn.Module]

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        spec = self.loop_spec
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.early_exit_gate = ExitGate(config.hidden_size) if spec.exit_gate else None
        self.input_mixing = InputMixing() if spec.input.kind == "mix" else None
        self.gradient_checkpointing = False
        # Loops that have a LoRA adapter of their own (adapters.py): their layers are told which loop it is.
        self.loop_adapters = 0
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B S"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B S"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B S H"] | None = None,
        use_cache: bool | None = None,
        loops: int | None = None,
        **kwargs: Any,
    ) -> LoopedModelOutput:
        """Run the loops.

        Args:
            loops: fixed depth for this call; None uses the configuration's. Exit probabilities are over these loops.
        """
        if loops is not None and loops < 1:
            raise ValueError(f"a looped model needs at least 1 loop, found {loops}")
        if kwargs.pop("output_hidden_states", False) or kwargs.pop("output_attentions", False):
            raise ValueError("looped models give the state after each loop instead: `loop_states` of `model.model(…)`")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = self.new_cache(loops)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = self.default_positions(inputs_embeds, attention_mask, seen)

        # Mask, positions and rotary tables are the same in every loop.
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        rotary = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        spec = self.loop_spec
        depth = spec.loops if loops is None else loops
        if self.loop_adapters and depth > self.loop_adapters:
            raise PolicyError(f"the policy has adapters for {self.loop_adapters} loops, found depth {depth}")
        loop_states = self.run_loops(
            inputs_embeds,
            depth,
            attention_mask=mask,
            padding_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=rotary,
            **kwargs,
        )

        gate_logits = None
        if self.early_exit_gate is not None:
            gate_logits = torch.stack([self.early_exit_gate(h) for h in loop_states], dim=-1)
        return LoopedModelOutput(
            last_hidden_state=read_out(loop_states, gate_logits, spec.readout.threshold),
            past_key_values=past_key_values,
            loop_states=tuple(loop_states),
            gate_logits=gate_logits,
        )

    def run_loops(
        self,
        embeddings: Float[Tensor, "B S H"],
        loops: int,
        *,
        past_key_values: Cache | None,
        padding_mask: Tensor | None,
        **kwargs: Any,
    ) -> list[Float[Tensor, "B S H"]]:
        """The normed state after each loop.

        Args:
            past_key_values: the cache of all loops, if there is one.
            padding_mask: the caller's attention mask; the layers' own is among `kwargs`.
            kwargs: what every layer receives in every loop.
        """
        spec = self.loop_spec
        state = embeddings
        loop_states = []
        for loop in range(loops):
            hidden = self.loop_input(embeddings, state) if loop else embeddings
            cache = None if past_key_values is None else LoopCache(past_key_values, loop * spec.layers)
            which = {"adapter": loop} if self.loop_adapters else {}
            for layer in self.layers:
                hidden = layer(hidden, past_key_values=cache, **which, **kwargs)
            normed = self.norm(hidden)
            state = normed if spec.norm_each_loop else hidden
            loop_states.append(normed)
        return loop_states

    def default_positions(
        self, embeddings: Float[Tensor, "B S H"], padding_mask: Tensor | None, seen: int
    ) -> Int[Tensor, "_ S"]:
        """Positions where the caller gives none. Rotary attention sees differences only: padding may be counted."""
        return torch.arange(seen, seen + embeddings.shape[1], device=embeddings.device)[None]

    def new_cache(self, loops: int | None = None) -> Cache:
        """An empty cache for `loops` loops; None is the configuration's depth."""
        return DynamicCache()  # without a config: it then grows to T·L slots on demand

    def loop_input(self, embeddings: Float[Tensor, "B S H"], state: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        """What enters a loop after the first (`LoopSpec.input`)."""
        return state if self.input_mixing is None else self.input_mixing(embeddings, state)


def read_out(
    loop_states: list[Float[Tensor, "B S H"]], gate_logits: Float[Tensor, "B S T"] | None, threshold: float
) -> Float[Tensor, "B S H"]:
    """The state that the head reads: the last loop's, or each token's own exit below a threshold of 1."""
    if threshold >= 1.0 or gate_logits is None:
        return loop_states[-1]
    index = exit_loop(gate_logits, threshold)[None, ..., None].expand(1, *loop_states[0].shape)
    return torch.stack(loop_states).gather(0, index).squeeze(0)


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """A looped backbone with a language-model head that reads every loop."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^credit\."]
    model_class: type[LoopedModel]

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # A trainer's learned credit weights live here to be sharded, reduced, clipped and saved with the policy.
        self.credit: LearnedCredit | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B S"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B S"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B S H"] | None = None,
        labels: Int[Tensor, "B S"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loops: int | None = None,
        score: Score | None = None,
        **kwargs: Any,
    ) -> LoopedCausalLMOutput:
        """Logits of the loop that is read out, or with `score` the labels' log-probs at every loop.

        Args:
            labels: [B, S], -100 where nothing is scored; shifted inside, as everywhere in transformers.
            loops: fixed depth for this call; None uses the configuration's.
            score: score `labels` at each loop without ever holding T·S·V logits.
        """
        if score is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            loops=loops,
            **kwargs,
        )
        if score is not None:
            if labels is None:
                raise ValueError("score needs labels: the tokens to score, -100 elsewhere")
            scores = loop_log_probs(
                outputs.loop_states[-1:] if score.last_only else outputs.loop_states,
                self.lm_head.weight,
                labels,
                temperature=score.temperature,
                grad_loops=score.grad_loops,
                compact=score.compact,
            )
            gate = outputs.gate_logits
            return LoopedCausalLMOutput(
                scores=scores,
                exit_log_pdf=None if gate is None else exit_log_pdf(gate),
                credit=None if self.credit is None else self.credit(),
            )

        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return LoopedCausalLMOutput(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # transformers would make a cache of `num_hidden_layers` slots; a looped model has T times as many.
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} has one slot a layer and cannot hold "
                f"the {self.loop_spec.kv_slots} slots of this looped model; use 'dynamic'"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.model.new_cache()
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
