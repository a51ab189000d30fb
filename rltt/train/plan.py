"""What a recipe amounts to before anything is loaded: updates, completions, tokens, memory, and what looks wrong.

Pure arithmetic on the recipe and on the checkpoint's configuration; nothing here needs torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rltt.recipe import PretrainSection, Recipe, TrainSection

ADAM_BYTES = 16
"""Bytes a parameter of the policy: weight, gradient and Adam's two moments, all fp32."""

REFERENCE_BYTES = 4
"""Bytes a parameter of the frozen reference, in fp32. It is there also with beta = 0: the KL is always measured."""

TIMID_LEARNING_RATE = 1e-6
TIMID_COMPLETIONS = 256
"""Four published runs with this learning rate and this many completions a step moved no metric in up to 421 steps."""

LOOP_FIELDS = ("total_ut_steps", "num_loops", "loop_num", "plt_num_loops")
"""Where the configurations of looped models keep their depth."""


@dataclass(frozen=True)
class Schedule:
    """How much is sampled and trained on. An update is one optimizer step."""

    updates: int
    rollouts: int
    prompts_per_rollout: int
    completions_per_rollout: int
    completions_per_update: int
    micro_batch: int
    accumulation: int
    max_tokens: int
    """Tokens generated in the whole run if no completion ends early."""
    epochs: float | None
    """Passes over the training prompts; None when the number of rows is not known."""

    @property
    def completions(self) -> int:
        """Completions sampled for training in the whole run."""
        return self.rollouts * self.completions_per_rollout


@dataclass(frozen=True)
class Memory:
    """Bytes that can be told from a configuration. Activations and logits come on top."""

    parameters: int
    loops: int
    kv_per_token: int
    sequences: int
    """Completions of a rollout; 0 without RL."""
    sequence_tokens: int
    """Longest prompt (when data.max_prompt_length bounds it) and completion together."""

    @property
    def optimizer(self) -> int:
        """Weights, gradients and Adam's moments of the policy."""
        return self.parameters * ADAM_BYTES

    @property
    def reference(self) -> int:
        """The frozen reference."""
        return self.parameters * REFERENCE_BYTES

    @property
    def kv_rollout(self) -> int:
        """KV cache when a rollout is generated at once and no completion ends early."""
        return self.kv_per_token * self.sequences * self.sequence_tokens


@dataclass(frozen=True)
class Plan:
    """The arithmetic of one run. `render()` is for the console."""

    schedule: Schedule | None
    """None when the recipe has no rewards, and so can only pretrain."""
    memory: Memory | None
    """None when the configuration of the checkpoint is not known."""
    pretrain_rows: int | None
    """Rows that LoopLM training (alone, or as a warm start) sees at most; None without it."""
    warnings: tuple[str, ...]

    def render(self) -> str:
        """The plan as aligned lines of plain text, warnings last."""
        lines = list(self._lines())
        width = max(len(label) for label, _ in lines)
        facts = [f"{label:<{width}}  {value}" for label, value in lines]
        return "\n".join(facts + [f"warning: {warning}" for warning in self.warnings])

    def _lines(self) -> Iterator[tuple[str, str]]:
        if self.pretrain_rows is not None:
            yield "pretraining", f"at most {self.pretrain_rows:,} rows"
        if run := self.schedule:
            batches = f"{run.accumulation:,} micro-batches of {run.micro_batch:,}"
            yield "optimizer updates", f"{run.updates:,} from {run.rollouts:,} rollouts"
            yield "a rollout", f"{run.prompts_per_rollout:,} prompts, {run.completions_per_rollout:,} completions"
            yield "an update", f"{run.completions_per_update:,} completions = {batches}"
            yield "the whole run", f"{run.completions:,} completions, at most {run.max_tokens:,} generated tokens"
            if run.epochs is not None:
                yield "passes over the data", f"{run.epochs:.2f}"
        if memory := self.memory:
            yield "parameters", f"{memory.parameters:,}, run {memory.loops} times"
            yield "policy memory", f"{_size(memory.optimizer)} (fp32 weights, gradients and Adam)"
            if self.schedule:
                sequences = f"{memory.sequences:,} sequences of {memory.sequence_tokens:,} tokens"
                yield "reference memory", f"{_size(memory.reference)} (fp32, frozen)"
                yield "KV cache", f"{_size(memory.kv_per_token)} a token, {_size(memory.kv_rollout)} for {sequences}"
        else:
            yield "memory", "not known without the checkpoint's configuration"


def plan(
    recipe: Recipe,
    config: Mapping[str, Any] | None,
    train_rows: int | None,
    *,
    precision: Literal["fp32", "bf16"] | None = None,
    processes: int = 1,
) -> Plan:
    """Work out what `recipe` amounts to.

    `config` is the checkpoint's configuration as transformers writes it (`config.to_dict()`), `train_rows` the number
    of prompts to train on; either may be unknown. `precision` is what `train.precision: auto` comes to on the device
    at hand; unknown, fp32 is assumed, and the KV cache is an upper bound.
    """
    schedule = _schedule(recipe, train_rows) if recipe.rewards else None
    pretrain = recipe.pretrain
    return Plan(
        schedule=schedule,
        memory=None if config is None else _memory(recipe, schedule, config, precision),
        pretrain_rows=pretrain.max_steps * pretrain.batch_size if pretrain else None,
        warnings=tuple(_warnings(recipe, schedule, config, train_rows)),
    )


def count_parameters(config: Mapping[str, Any], *, looped: bool) -> int:
    """Parameters of a Llama-like decoder, counted from its configuration.

    Exact for LoopLM (`model_type: ouro`) and for Llama without biases; others are off by a few vectors a layer.
    """
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    queries, keys = heads * _head_dim(config), _kv_heads(config) * _head_dim(config)
    norms = 4 if config.get("model_type") == "ouro" else 2
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"] + norms * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    exit_gate = hidden + 1 if looped else 0
    return embeddings + layers * layer + hidden + exit_gate


def kv_bytes_per_token(config: Mapping[str, Any], *, loops: int, value_bytes: int) -> int:
    """KV cache of one token: every loop of every layer keeps its own keys and values."""
    slots = loops * config["num_hidden_layers"]
    return slots * 2 * _kv_heads(config) * _head_dim(config) * value_bytes


def _schedule(recipe: Recipe, train_rows: int | None) -> Schedule:
    train, group = recipe.train, recipe.rollout.num_generations
    prompts = train.prompts_per_step * train.updates_per_rollout
    rollouts = math.ceil(train.max_steps / (train.updates_per_rollout * train.num_iterations))
    micro_batch = train.per_device_train_batch_size or group
    return Schedule(
        updates=train.max_steps,
        rollouts=rollouts,
        prompts_per_rollout=prompts,
        completions_per_rollout=prompts * group,
        completions_per_update=train.prompts_per_step * group,
        micro_batch=micro_batch,
        accumulation=train.prompts_per_step * group // micro_batch,
        max_tokens=rollouts * prompts * group * recipe.rollout.max_completion_length,
        epochs=rollouts * prompts / train_rows if train_rows else None,
    )


def _memory(recipe: Recipe, schedule: Schedule | None, config: Mapping[str, Any], precision: str | None) -> Memory:
    loops = recipe.policy.loops or next((config[field] for field in LOOP_FIELDS if config.get(field)), 1)
    compute = recipe.train.precision if recipe.train.precision != "auto" else precision
    return Memory(
        parameters=count_parameters(config, looped=loops > 1),
        loops=loops,
        kv_per_token=kv_bytes_per_token(config, loops=loops, value_bytes=2 if compute == "bf16" else 4),
        sequences=schedule.completions_per_rollout if schedule else 0,
        sequence_tokens=_sequence_tokens(recipe),
    )


def _warnings(
    recipe: Recipe, schedule: Schedule | None, config: Mapping[str, Any] | None, train_rows: int | None
) -> Iterator[str]:
    if recipe.pretrain:
        yield from _endless_warmup("pretrain", recipe.pretrain)
    if schedule is None:
        return
    yield from _endless_warmup("train", recipe.train)
    if train_rows is not None and train_rows < schedule.prompts_per_rollout:
        yield (
            f"data: {train_rows} training rows cannot fill one rollout of {schedule.prompts_per_rollout} prompts;"
            " lower train.prompts_per_step or train.updates_per_rollout"
        )
    rate, completions = recipe.train.learning_rate, schedule.completions_per_update
    if rate <= TIMID_LEARNING_RATE and completions <= TIMID_COMPLETIONS:
        yield (
            "objective: a run at 1e-6 with 32 prompts a step is unlikely to move the policy;"
            f" this one has a learning rate of {rate:g} and {completions} completions an update"
        )
    positions = (config or {}).get("max_position_embeddings")
    if positions is not None and _sequence_tokens(recipe) > positions:
        yield (
            f"rollout.max_completion_length: prompt and completion can reach {_sequence_tokens(recipe)} tokens;"
            f" the model has {positions} positions"
        )


def _endless_warmup(name: str, section: TrainSection | PretrainSection) -> Iterator[str]:
    # Not an error: `train.max_steps=2` on a long recipe is how people try one out.
    if section.warmup_steps >= section.max_steps:
        yield f"{name}: the warmup of {section.warmup_steps} steps does not end within {section.max_steps} steps"


def _sequence_tokens(recipe: Recipe) -> int:
    return (recipe.data.max_prompt_length or 0) + recipe.rollout.max_completion_length


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _size(count: int) -> str:
    """`count` bytes in the largest binary unit that leaves a whole number before the point."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
