"""What a recipe amounts to before anything is loaded: updates, completions, tokens, memory, and what looks wrong.

Pure arithmetic on the recipe and on the checkpoint's configuration; nothing here needs torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rltt.processes import share
from rltt.recipe import LoraSection, PretrainSection, Recipe, TrainSection

FP32, BF16 = 4, 2
"""Bytes a number. Without DeepSpeed weights are fp32 whatever they are computed in; DeepSpeed keeps bf16 copies."""

ADAM_BYTES = 8
"""Adam's two moments of a trained parameter, fp32."""

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
    processes: int
    micro_batch: int
    """Completions in a forward and backward on one process."""
    accumulation: int
    """Micro-batches of an update on one process."""
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
    trained: int
    """Parameters with a gradient: all, or those of LoRA adapters, which come on top of `parameters`."""
    loops: int
    processes: int
    sharding: str
    offload: str
    value_bytes: int
    """Bytes of a weight that is computed with."""
    kv_per_token: int
    kv_windows: int
    """KV cache of a sequence that does not grow with it: the windows of a Parallel Loop Transformer's later loops."""
    sequences: int
    """Completions of a rollout; 0 without RL."""
    sequence_tokens: int
    """Longest prompt (when data.max_prompt_length bounds it) and completion together."""

    @property
    def _zero(self) -> bool:
        return self.sharding in ("zero2", "zero3")

    @property
    def weights(self) -> float:
        """Bytes of the policy's weights on each process, adapters included."""
        total = self.value_bytes * (self.parameters + (self.trained if self.has_adapters else 0))
        return total / self.processes if self.sharding == "zero3" else total

    @property
    def has_adapters(self) -> bool:
        """Whether only LoRA adapters are trained."""
        return self.trained != self.parameters

    @property
    def training_state(self) -> float:
        """Bytes of gradients and Adam's moments on each process, and of DeepSpeed's fp32 copy of the weights."""
        if not self._zero:
            return self.trained * (FP32 + ADAM_BYTES)
        return self.trained * (self.value_bytes + FP32 + ADAM_BYTES) / self.processes

    @property
    def policy(self) -> float:
        """Bytes on each process's device for the weights and what trains them."""
        return {
            "none": self.weights + self.training_state,
            "optimizer": self.weights,
            "parameters": 0,
        }[self.offload]

    @property
    def contents(self) -> str:
        """What `policy` is made of, in words."""
        kind = "fp32" if self.value_bytes == FP32 else "bf16"
        return {
            "none": f"{kind} weights, gradients and Adam",
            "optimizer": f"{kind} weights",
            "parameters": "and the layers at work",
        }[self.offload]

    @property
    def offloaded(self) -> float:
        """Bytes in the CPU's memory for each process."""
        return self.weights + self.training_state - self.policy

    @property
    def reference(self) -> float:
        """Bytes of the frozen reference on each process's device. It is there also with beta = 0."""
        if self.has_adapters:  # the policy with its adapters off
            return 0
        if self.offload == "parameters":
            return 0
        return self.value_bytes * self.parameters / (self.processes if self.sharding == "zero3" else 1)

    @property
    def kv_rollout(self) -> int:
        """KV cache when a rollout is generated at once and no completion ends early."""
        return (self.kv_per_token * self.sequence_tokens + self.kv_windows) * self.sequences


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
            if run.processes > 1:
                batches = f"{run.processes:,} processes, each {batches}"
            yield "optimizer updates", f"{run.updates:,} from {run.rollouts:,} rollouts"
            yield "a rollout", f"{run.prompts_per_rollout:,} prompts, {run.completions_per_rollout:,} completions"
            yield "an update", f"{run.completions_per_update:,} completions = {batches}"
            yield "the whole run", f"{run.completions:,} completions, at most {run.max_tokens:,} generated tokens"
            if run.epochs is not None:
                yield "passes over the data", f"{run.epochs:.2f}"
        if memory := self.memory:
            yield "parameters", f"{memory.parameters:,}, run {memory.loops} times"
            if memory.has_adapters:
                yield "trained", f"{memory.trained:,} parameters of LoRA adapters"
            each = "" if memory.processes == 1 else f" on each of {memory.processes} processes, {memory.sharding}"
            yield "policy memory", f"{_size(memory.policy)}{each} ({memory.contents})"
            if memory.offloaded:
                yield "CPU memory", f"{_size(memory.offloaded)} for each process, offloaded"
            if self.schedule:
                sequences = f"{memory.sequences:,} sequences of {memory.sequence_tokens:,} tokens"
                kind = "fp32" if memory.value_bytes == FP32 else "bf16"
                none = "none: the policy with its adapters off" if memory.has_adapters else "offloaded"
                yield "reference memory", f"{_size(memory.reference)} ({kind}, frozen)" if memory.reference else none
                windows = f" and {_size(memory.kv_windows)} of windows a sequence" if memory.kv_windows else ""
                size = f"{_size(memory.kv_per_token)} a token{windows}"
                yield "KV cache", f"{size}, {_size(memory.kv_rollout)} for {sequences}"
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
    at hand; unknown, fp32 is assumed, and the KV cache is an upper bound. `processes` is how many there are in all.

    Raises:
        RecipeError: the processes cannot take equal shares of an update.
    """
    schedule = _schedule(recipe, train_rows, processes) if recipe.rewards else None
    pretrain = recipe.pretrain
    return Plan(
        schedule=schedule,
        memory=None if config is None else _memory(recipe, schedule, config, precision, processes),
        pretrain_rows=pretrain.max_steps * pretrain.batch_size if pretrain else None,
        warnings=tuple(_warnings(recipe, schedule, config, train_rows)),
    )


def count_parameters(config: Mapping[str, Any], *, looped: bool) -> int:
    """Parameters of a Llama-like decoder, counted from its configuration.

    Exact for LoopLM (`model_type: ouro`), Parallel Loop Transformers, and Llama without biases; others are off by a few
    vectors a layer.
    """
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    queries, keys = heads * _head_dim(config), _kv_heads(config) * _head_dim(config)
    norms = 4 if config.get("model_type") == "ouro" else 2
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"] + norms * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    match config.get("model_type"):
        case "iquestpltcoder" if config["plt_gate_use_hidden_states"]:
            gates = layers * (heads * (hidden + 1) + hidden)
        case "iquestpltcoder" | "iquestloopcoder":
            gates = layers * heads * (_head_dim(config) + 1)
        case _:
            gates = hidden + 1 if looped else 0
    return embeddings + layers * layer + hidden + gates


def lora_parameters(lora: LoraSection, config: Mapping[str, Any], loops: int) -> int:
    """Parameters of the adapters on a Llama-like decoder: r·(in + out) for each linear layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * _head_dim(config), _kv_heads(config) * _head_dim(config)
    ends = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": queries + hidden}
    ends |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + inner)
    layer = lora.r * sum(size for name, size in ends.items() if name in (lora.target_modules or ends))
    return layer * config["num_hidden_layers"] * (loops if lora.per_loop else 1)


def kv_bytes_per_token(config: Mapping[str, Any], *, loops: int, value_bytes: int) -> int:
    """KV cache of one token, when `loops` loops of every layer keep their own keys and values."""
    slots = loops * config["num_hidden_layers"]
    return slots * 2 * _kv_heads(config) * _head_dim(config) * value_bytes


def _schedule(recipe: Recipe, train_rows: int | None, processes: int) -> Schedule:
    train, group = recipe.train, recipe.rollout.num_generations
    prompts = train.prompts_per_step * train.updates_per_rollout
    rollouts = math.ceil(train.max_steps / (train.updates_per_rollout * train.num_iterations))
    micro_batch, accumulation = share(
        train.prompts_per_step * group,
        train.per_device_train_batch_size or group,
        "train.prompts_per_step * rollout.num_generations",
        processes,
    )
    return Schedule(
        updates=train.max_steps,
        rollouts=rollouts,
        prompts_per_rollout=prompts,
        completions_per_rollout=prompts * group,
        completions_per_update=train.prompts_per_step * group,
        processes=processes,
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_tokens=rollouts * prompts * group * recipe.rollout.max_completion_length,
        epochs=rollouts * prompts / train_rows if train_rows else None,
    )


def _memory(
    recipe: Recipe, schedule: Schedule | None, config: Mapping[str, Any], precision: str | None, processes: int
) -> Memory:
    loops = recipe.policy.loops or next((config[field] for field in LOOP_FIELDS if config.get(field)), 1)
    compute = recipe.train.precision if recipe.train.precision != "auto" else precision
    parameters = count_parameters(config, looped=loops > 1)
    lora, train = recipe.policy.lora, recipe.train
    computed_in = BF16 if compute == "bf16" else FP32
    global_loops, window = _kept_by_loops(recipe, config, loops)
    return Memory(
        parameters=parameters,
        trained=parameters if lora is None else lora_parameters(lora, config, loops),
        loops=loops,
        processes=processes,
        sharding=train.sharding,
        offload=train.offload,
        value_bytes=computed_in if train.sharding in ("zero2", "zero3") else FP32,
        kv_per_token=kv_bytes_per_token(config, loops=global_loops, value_bytes=computed_in),
        kv_windows=window * kv_bytes_per_token(config, loops=loops - global_loops, value_bytes=computed_in),
        sequences=schedule.completions_per_rollout if schedule else 0,
        sequence_tokens=_sequence_tokens(recipe),
    )


def _kept_by_loops(recipe: Recipe, config: Mapping[str, Any], loops: int) -> tuple[int, int]:
    """How many loops keep keys and values of all positions, and of how many positions each of the others does."""
    convert = recipe.policy.convert
    if convert is not None and convert.family == "plt":
        return 1, convert.window + 1
    match config.get("model_type"):
        case "iquestpltcoder":
            return 1, config["plt_window_size"][0] + 1
        case "iquestloopcoder":
            return 1, config["loop_window_size"]
        case _:
            return loops, 0


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


def _size(count: float) -> str:
    """`count` bytes in the largest binary unit that leaves a whole number before the point."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
