"""The sections of a recipe, their keys and defaults, and which values cannot work together.

Keys carry TRL's names where TRL has one. A key that would do nothing is a conflict as well: it is always a mistake.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rltt.errors import RecipeError
from rltt.recipe.section import (
    DATA_FILE_SUFFIXES,
    Count,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Problem,
    Section,
    Share,
    Whole,
)
from rltt.recipe.yaml_dialect import dump_yaml


class NewPolicy(Section):
    """Kind and size of a policy that is made from scratch, with the built-in tokenizer for arithmetic problems."""

    family: Literal["looplm", "plt"] = "looplm"
    """'looplm' (Ouro), or 'plt': a Parallel Loop Transformer, which has no exit gate."""
    hidden_size: Count = 96
    """Width of the residual stream."""
    intermediate_size: Count = 256
    """Width inside the MLP."""
    num_hidden_layers: Count = 2
    """Layers in the looped span, which every loop runs again."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count | None = None
    """Key/value heads; null: as many as query heads."""
    max_position_embeddings: Annotated[int, Field(ge=2)] = 256
    """Longest sequence, prompt and completion together."""
    initializer_range: Positive = 0.1
    """Standard deviation of the first weights; transformers' usual 0.02 learns slowly in small models."""
    window: Count = 64
    """Positions before its own that a later loop of a 'plt' sees of that loop; of loop 1 it sees all."""

    def problems(self) -> Iterator[Problem]:
        if self.family != "plt":
            yield from self.idle("window", unless="family is 'plt'")
        # Rotary embeddings rotate pairs of channels, so a head has an even number of them.
        if self.hidden_size % (2 * self.num_attention_heads):
            yield "hidden_size", f"must be a multiple of 2 * num_attention_heads = {2 * self.num_attention_heads}"
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            yield "num_key_value_heads", f"must divide num_attention_heads = {self.num_attention_heads}"


class ConvertSection(Section):
    """How a dense Llama- or Qwen3-family checkpoint is made to loop while it is loaded."""

    family: Literal["looped", "plt"] = "looped"
    """'looped': every loop a whole decoder; 'plt': a Parallel Loop Transformer, from Llama-family checkpoints only."""
    mixing: Literal["scalar", "identity"] = "scalar"
    """Input of loop t > 1: 'scalar' w*E + (1-w)*h with one learned w, 'identity' h alone. A 'plt' keeps w as it is."""
    mixing_init: Fraction = 0.99
    """First value of w."""
    norm_each_loop: bool = True
    """Apply the final norm at the end of every loop, not only the last."""
    window: Count = 64
    """Positions before its own that a later loop of a 'plt' sees of that loop; of loop 1 it sees all."""

    def problems(self) -> Iterator[Problem]:
        if self.family == "plt":
            yield from self.idle("mixing", unless="family is 'looped'")
        else:
            yield from self.idle("window", unless="family is 'plt'")
        if self.mixing != "scalar":
            yield from self.idle("mixing_init", unless="mixing is 'scalar'")


class LoraSection(Section):
    """Low-rank adapters on the linear layers of the shared block; the model under them stays as it is."""

    r: Count = 16
    """Rank."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / r."""
    target_modules: list[str] | None = None
    """Names of linear layers, such as q_proj; null: all of the block's."""
    per_loop: bool = False
    """One adapter for each loop in place of one for all."""


class PolicySection(Section):
    """Which model is trained, and how deep it loops."""

    path: LocalPath | None = None
    """Hub id, local folder, or package:NAME/FILE.gguf for a GGUF file in an installed package."""
    new: NewPolicy | None = None
    """Make a small policy from scratch instead of loading one."""
    loops: Count | None = None
    """Depth in training and rollout; null: the checkpoint's own."""
    convert: ConvertSection | None = None
    """Convert a dense checkpoint into a looped one on load."""
    lora: LoraSection | None = None
    """Train LoRA adapters in place of all weights; {} takes every default."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel, by transformers' name."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""

    def problems(self) -> Iterator[Problem]:
        if (self.path is None) == (self.new is None):
            yield "path", "give either policy.path (a checkpoint) or policy.new (one from scratch), not both"
        if self.new:
            yield from self.idle("trust_remote_code", "revision", "convert", unless="policy.path is given")
        if self.loops is None and (self.new or self.convert):
            yield "loops", "missing; a new or converted model has no depth of its own: give one, such as 4"


class DataSource(Section):
    """Rows of one data set; a plain string is its path."""

    shorthand = "path"

    path: LocalPath
    """Hub id, a .jsonl, .json, .csv or .parquet file, or the word arithmetic for the built-in generator."""
    config: str | None = None
    """Configuration of a Hub data set."""
    split: str | None = None
    """Split of a Hub data set or of the generated problems; null: train, or test where it is evaluated on."""
    limit: Count | None = None
    """Take only so many rows, evenly spread over the source."""
    difficulty: Annotated[int, Field(ge=1, le=5)] = 1
    """How hard the generated problems are (arithmetic)."""
    size: Count = 2048
    """How many problems are generated (arithmetic)."""

    @property
    def is_arithmetic(self) -> bool:
        """Whether the rows come from the built-in generator."""
        return self.path == "arithmetic"

    @property
    def is_file(self) -> bool:
        """Whether the path names a local file rather than a Hub data set."""
        return self.path.lower().endswith(DATA_FILE_SUFFIXES)

    def problems(self) -> Iterator[Problem]:
        if not self.is_arithmetic:
            yield from self.idle("difficulty", "size", unless="path is 'arithmetic'")
        if self.is_file:
            yield from self.idle("split", unless="path is a data set on the Hub, or 'arithmetic'")
        if self.is_file or self.is_arithmetic:
            yield from self.idle("config", unless="path is a data set on the Hub")


class DataFilter(Section):
    """Which prompts are trained on, by how often the policy solves them; `rltt probe` measures that."""

    solve_rate: list[Annotated[float, Field(ge=0, le=1)]]
    """Lowest and highest share of solved completions of a prompt that is kept, both included, such as [0.1, 0.9]."""
    unprobed: Literal["stop", "keep", "drop"] = "stop"
    """Prompts that no probe has sampled: end the run before it begins, train on them, or leave them out."""

    def problems(self) -> Iterator[Problem]:
        if len(self.solve_rate) != 2 or self.solve_rate[0] > self.solve_rate[1]:
            yield "solve_rate", f"found {self.solve_rate}; expected [lowest, highest], such as [0.1, 0.9]"
        elif self.solve_rate == [0, 1] and self.unprobed != "drop":
            yield "solve_rate", "[0, 1] keeps every prompt; narrow it, or remove data.filter"


class DataSection(Section):
    """Prompts and golds."""

    train: DataSource
    """Rows to train on."""
    eval: DataSource | None = None
    """Rows to evaluate on."""
    holdout: Whole = 0
    """Rows taken off the training source for evaluation, in place of eval."""
    columns: dict[Literal["prompt", "gold", "response"], str] = Field(default_factory=dict)
    """Which column of the source holds the prompt, the gold and the response."""
    gold: Literal["auto", "hash", "boxed", "text"] = "auto"
    r"""Where the gold is in its column: after the last '####', in the last \boxed{}, all of it."""
    bad_gold: Literal["stop", "drop", "keep"] = "stop"
    """Rows whose gold a reward cannot grade: end the run before it begins, leave them out, or train on them."""
    prompt_template: str = "{prompt}"
    """Text of a user turn; {prompt} is replaced by the row's prompt."""
    system_prompt: str | None = None
    """System turn before the prompt; needs a chat template."""
    chat_template: bool | None = None
    """Use the chat template; null: when the tokenizer has one."""
    max_prompt_length: Count | None = None
    """Drop, and report, prompts of more tokens than this."""
    filter: DataFilter | None = None
    """Train only on prompts of some solve rates; the warm start and the evaluation take all."""

    def problems(self) -> Iterator[Problem]:
        if self.holdout and self.eval:
            yield "holdout", "the rows for evaluation already come from data.eval; remove one of the two"
        counts = [self.train.limit, self.train.size if self.train.is_arithmetic else None]
        rows = min((count for count in counts if count is not None), default=None)
        if rows is not None and self.holdout >= rows:
            yield "holdout", f"{self.holdout} of the {rows} rows of data.train leave none to train on"
        if "{prompt}" not in self.prompt_template:
            yield "prompt_template", f"found {self.prompt_template!r}; it must contain {{prompt}}"
        if self.chat_template is False:
            yield from self.idle("system_prompt", unless="a chat template is used (data.chat_template)")


class RewardEntry(Section):
    """One reward function; a plain string is its `use`."""

    shorthand = "use"

    use: LocalPath
    """Registered name such as math, file.py:function, or package.module:function."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    solved_at: float = 1.0
    """Raw value from which a completion counts as solved; the first reward alone decides that."""
    on_error: Literal["skip", "zero", "fail"] = "skip"
    """A completion on which the function fails, or gives None or NaN: left out, reward 0, or the end of the run."""
    timeout: Positive = 10.0
    """Seconds that one call may take."""
    isolate: bool = True
    """Call the function in processes that can be killed; false: in the trainer's, for models on the GPU."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""

    def problems(self) -> Iterator[Problem]:
        if self.use == "math":
            yield from self.idle("timeout", "isolate", unless="the function is your own ('math' has its own workers)")
        elif not self.isolate:
            yield from self.idle("timeout", unless="isolate is true: a call in the trainer cannot be ended")
        module, colon, function = self.use.rpartition(":")
        if self.use.endswith(".py"):
            yield "use", f"found {self.use!r}; name the function in the file, such as {self.use}:score"
        elif colon and not (module and function.isidentifier()):
            yield "use", f"found {self.use!r}; write it as file.py:function or package.module:function"


# Which loss reads which of the ratio's options; the remaining loss, 'reinforce', has no ratio.
_CLIPPED_LOSSES = ("grpo", "dr_grpo", "dapo", "luspo")
_LEVELLED_LOSSES = (*_CLIPPED_LOSSES, "cispo", "sapo")


class ObjectiveSection(Section):
    """What is optimised: credit over the loops, policy term, KL."""

    credit: Literal["final", "uniform", "progressive", "exit_pdf", "learned"] = "exit_pdf"
    """Weight of each loop's policy term; 'final' is plain GRPO."""
    credit_alpha: NonNegative = 1.0
    """Exponent of the weights t^alpha (credit: progressive)."""
    credit_learning_rate: Positive = 1e-2
    """Learning rate of the T logits behind the weights (credit: learned)."""
    detach_exit: bool = True
    """No gradient from the weights to the exit gate (credit: exit_pdf)."""
    loss_type: Literal["reinforce", "grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"] = "grpo"
    """Policy term and reduction, by TRL's name; 'reinforce' is -A log p."""
    beta: NonNegative = 0.0
    """Weight of the KL of the last loop to the frozen reference."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that advantages are divided by."""
    epsilon: Share = 0.2
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: NonNegative | None = None
    """The ratio is clipped above at 1 + epsilon_high; null: epsilon. With cispo: the cap itself."""
    delta: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio where the advantage is negative."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio for each token or for each completion."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut out of the loss."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _no_bnpo(cls, value: Any) -> Any:
        if value == "bnpo":
            raise ValueError("'bnpo' depends on the micro-batch size by design; use 'dapo', which does not")
        return value

    def problems(self) -> Iterator[Problem]:
        if self.credit != "progressive":
            yield from self.idle("credit_alpha", unless="credit is 'progressive'")
        if self.credit != "learned":
            yield from self.idle("credit_learning_rate", unless="credit is 'learned'")
        if self.credit != "exit_pdf":
            yield from self.idle("detach_exit", unless="credit is 'exit_pdf'")
        if self.credit == "learned" and self.loss_type not in ("reinforce", "cispo"):
            # The ratio is exactly 1 on policy in every loop, so its weighted mean does not depend on the weights.
            yield (
                "credit",
                f"'learned' weights get no gradient from loss_type '{self.loss_type}'; use reinforce or cispo",
            )
        if self.loss_type not in _CLIPPED_LOSSES:
            yield from self.idle("epsilon", "delta", unless=f"loss_type is one of {', '.join(_CLIPPED_LOSSES)}")
        if self.loss_type not in (*_CLIPPED_LOSSES, "cispo"):
            yield from self.idle("epsilon_high", unless=f"loss_type is one of {', '.join(_CLIPPED_LOSSES)}, cispo")
        if self.loss_type not in _LEVELLED_LOSSES:
            levelled = ", ".join(_LEVELLED_LOSSES)
            yield from self.idle("importance_sampling_level", unless=f"loss_type is one of {levelled}")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            # TRL falls back to epsilon = 0.2, and every on-policy gradient, whose ratio is 1, shrinks to a fifth.
            yield "epsilon_high", "'cispo' caps the ratio itself at this value; set it to 1 or more (5.0 is usual)"


class RolloutSection(Section):
    """How completions are sampled."""

    engine: Literal["hf", "vllm"] = "hf"
    """Who generates: 'hf' is generate() on the policy itself, 'vllm' a vLLM engine."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt: the group."""
    temperature: Positive = 1.0
    """Sampling temperature, applied to the log-probs as well."""
    max_completion_length: Count = 512
    """Tokens after which a completion is cut."""
    parity_tolerance: Positive | None = None
    """Largest log-prob difference between rollout and training at a check; null: 1e-4 in fp32, 0.5 in bf16."""
    parity_check_rollouts: Count = 10
    """Rollouts from one parity check to the next. The first is always checked, and every one is measured."""
    resample_uniform: bool = False
    """Replace groups whose completions all have the same reward by groups of fresh prompts (dynamic sampling)."""
    resample_budget: Positive = 2.0
    """Fresh prompts for a rollout at most, as a multiple of the prompts that it takes (resample_uniform)."""
    vllm_server: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Address of an `rltt serve` on other GPUs; null: the engine runs inside the training process (engine: vllm)."""
    vllm_gpu_memory_utilization: Fraction = 0.3
    """Share of the GPU's memory for an engine inside the training process (engine: vllm)."""
    vllm_tensor_parallel_size: Count = 1
    """Training processes that one engine inside of them is spread over (engine: vllm)."""
    vllm_timeout: Positive = 3600.0
    """Seconds that a rollout may take until the engine counts as hung and is started anew, once (engine: vllm)."""

    def problems(self) -> Iterator[Problem]:
        colocated = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
        if not self.resample_uniform:
            yield from self.idle("resample_budget", unless="resample_uniform is true")
        if self.engine != "vllm":
            yield from self.idle("vllm_server", "vllm_timeout", *colocated, unless="engine is 'vllm'")
        elif self.vllm_server is not None:
            yield from self.idle(*colocated, unless="the engine runs inside the training process (no vllm_server)")


class TrainSection(Section):
    """Optimisation. A step is one optimizer update."""

    prompts_per_step: Count = 32
    """Prompts in one optimizer update, each with its group."""
    updates_per_rollout: Count = 1
    """Optimizer updates that one rollout is split into."""
    num_iterations: Count = 1
    """Passes over each rollout."""
    max_steps: Count = 140
    """Optimizer updates in all."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "constant"
    """Shape of the learning rate over the run, by transformers' name."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    adam_beta1: Share = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Share = 0.999
    """AdamW's decay of the gradient's square."""
    max_grad_norm: Positive = 1.0
    """Gradient norm above which the gradient is scaled down."""
    per_device_train_batch_size: Count | None = None
    """Completions in one forward and backward; null: rollout.num_generations."""
    max_nonfinite_steps: Count = 5
    """Updates in a row with a NaN or infinite gradient, all of them skipped, that end the run."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward to save memory."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type; weights are fp32 always, 'auto' is bf16 autocast on a GPU, fp32 on a CPU."""
    sharding: Literal["none", "ddp", "zero2", "zero3"] = "ddp"
    """How processes share the work: a whole copy each (ddp), or DeepSpeed's ZeRO-2 or 3; none: one process only."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep the optimizer's state, or weights and optimizer, in the CPU's memory (sharding: zero2, zero3)."""
    deepspeed: LocalPath | None = None
    """DeepSpeed's own JSON, in place of the one made from sharding and offload."""
    seed: Whole = 0
    """Seed of everything random in the run."""
    save_steps: Count | None = 25
    """Steps between checkpoints, of RL and of LoopLM training; a killed run goes on from the last. null: none."""
    save_total_limit: Count | None = 2
    """Checkpoints kept, the last and the best in held-out solve rate always among them; null: all."""

    def problems(self) -> Iterator[Problem]:
        if self.lr_scheduler_type == "constant":
            yield from self.idle("warmup_steps", unless="lr_scheduler_type is another, such as constant_with_warmup")
        if self.save_steps is None:
            yield from self.idle("save_total_limit", unless="save_steps is given")
        if self.sharding not in ("zero2", "zero3"):
            yield from self.idle("offload", "deepspeed", unless="sharding is zero2 or zero3")
        elif self.offload == "parameters" and self.sharding != "zero3":
            yield "offload", "'parameters' needs sharding: zero3; with zero2 each process uses all of its weights"
        elif self.deepspeed is not None:
            yield from self.idle("offload", unless="train.deepspeed is not given: offloading is part of that file")


class EvaluateSection(Section):
    """When and how the policy is evaluated, on data.eval or the rows of data.holdout."""

    every: Count | None = None
    """Steps between evaluations; null: none during training."""
    num_generations: Count = 4
    """Completions sampled for each prompt."""
    temperature: NonNegative | None = None
    """Null: rollout.temperature; 0: greedy."""
    batch_size: Count = 64
    """Completions generated at once."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""


class TelemetrySection(Section):
    """What a run says of itself."""

    tracker: Literal["trackio", "tensorboard", "wandb", "none"] = "trackio"
    """Where the numbers are sent besides the run directory; Trackio's page opens with `rltt dashboard`."""
    on_stalled: Literal["warn", "stop"] = "warn"
    """When the verdict is that the policy will not move: say so, or end the run as well."""
    diagnose_every: Count | None = 10
    """Steps between measures of what each loop does, on 8 rows of data.eval or data.holdout; null: none."""


class PretrainSection(Section):
    """The LoopLM objective: the warm start of a train recipe, or the whole job of `rltt pretrain`.

    A policy without an exit gate has no distribution over loops to learn: all weight is on the last loop.
    """

    max_steps: Count = 200
    """Optimizer updates at most."""
    batch_size: Count = 64
    """Rows in one update."""
    per_device_train_batch_size: Count | None = None
    """Rows in one forward and backward; null: batch_size."""
    learning_rate: Positive = 3e-3
    """Peak learning rate, reached after warmup, then cosine to 0."""
    warmup_steps: Whole = 20
    """Steps over which the learning rate rises from 0."""
    beta: NonNegative = 0.1
    """Weight of KL(p || uniform), which keeps the exit gate open. Nothing without a gate."""
    epsilon: Share = 0.0
    """Share of the loss spread evenly over the loops."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    adam_beta2: Share = 0.95
    """AdamW's decay of the gradient's square."""
    max_grad_norm: Positive = 1.0
    """Gradient norm above which the gradient is scaled down."""
    stop_at_solve_rate: Fraction | None = None
    """End the warm start when sampled training prompts are solved this often."""
    check_every: Count = 25
    """Steps between the checks of stop_at_solve_rate."""

    def problems(self) -> Iterator[Problem]:
        if self.batch_size % (self.per_device_train_batch_size or 1):
            yield "per_device_train_batch_size", f"must divide batch_size = {self.batch_size}"
        if self.stop_at_solve_rate is None:
            yield from self.idle("check_every", unless="stop_at_solve_rate is given")


class Recipe(Section):
    """A whole run, of `rltt train` or of `rltt pretrain`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run."""
    run_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder that the run writes; null: runs/<name>."""
    policy: PolicySection
    """Which model is trained."""
    data: DataSection
    """Prompts and golds."""
    rewards: list[RewardEntry] = Field(default_factory=list)
    """Reward functions; their weighted sum counts."""
    objective: ObjectiveSection = ObjectiveSection()
    """What is optimised."""
    rollout: RolloutSection = RolloutSection()
    """How completions are sampled."""
    train: TrainSection = TrainSection()
    """Optimisation."""
    evaluate: EvaluateSection = EvaluateSection()
    """When and how the policy is evaluated."""
    telemetry: TelemetrySection = TelemetrySection()
    """What a run says of itself."""
    pretrain: PretrainSection | None = None
    """LoopLM training before RL, or alone."""

    @property
    def run_directory(self) -> Path:
        """The folder that the run writes."""
        return Path(self.run_dir or f"runs/{self.name}")

    def to_yaml(self) -> str:
        """The recipe with every default written out; loading it gives an equal recipe."""
        return dump_yaml(self.model_dump())

    def require(self, job: Literal["train", "pretrain"]) -> None:
        """Check what `job` needs beyond what every recipe needs; raise `RecipeError` naming all that is missing."""
        problems = self._train_problems() if job == "train" else self._pretrain_problems()
        if lines := [f"recipe '{self.name}': {key}: {message}" for key, message in problems]:
            raise RecipeError("\n".join(lines))

    def problems(self) -> Iterator[Problem]:
        completions = self.train.prompts_per_step * self.rollout.num_generations
        if completions % (self.train.per_device_train_batch_size or 1):
            yield (
                "train.per_device_train_batch_size",
                f"{self.train.per_device_train_batch_size} does not divide the {completions} completions of an update"
                " (train.prompts_per_step * rollout.num_generations)",
            )
        if self.data.eval is None and not self.data.holdout:
            for key, message in self.evaluate.idle(
                "every", "num_generations", "temperature", "batch_size", unless="data.eval or data.holdout is given"
            ):
                yield f"evaluate.{key}", message
            if self.telemetry.diagnose_every is not None:
                for key, message in self.telemetry.idle("diagnose_every", unless="data.eval or data.holdout is given"):
                    yield f"telemetry.{key}", message
        if self.policy.lora:
            yield from self._lora_problems(self.policy.lora)
        if self.policy.new:
            for key in ("system_prompt", "chat_template"):
                if getattr(self.data, key):
                    yield f"data.{key}", "the built-in tokenizer of policy.new has no chat template; remove the key"
        for index, reward in enumerate(self.rewards):
            if index and reward.solved_at != 1.0:
                yield f"rewards[{index}].solved_at", "has no effect: the first reward alone decides what is solved"
            if (reward.use, reward.args) in [(earlier.use, earlier.args) for earlier in self.rewards[:index]]:
                yield (
                    f"rewards[{index}].use",
                    f"'{reward.use}' is listed twice; list it once, with the sum of the weights",
                )

    def _lora_problems(self, lora: LoraSection) -> Iterator[Problem]:
        if lora.per_loop and self.rollout.engine == "vllm":
            yield (
                "policy.lora.per_loop",
                "one adapter a loop cannot be merged into weights that all loops share, which is what vLLM gets; use"
                " rollout.engine: hf, or one adapter",
            )
        if self.train.sharding == "zero3" and self.train.gradient_checkpointing:
            yield (
                "train.gradient_checkpointing",
                "with policy.lora and sharding: zero3 it has to be the reentrant kind, which gives shared layers wrong"
                " gradients; turn one of the three off, or use zero2",
            )
        if self.objective.credit == "learned":
            yield "objective.credit", "'learned' weights are not part of LoRA checkpoints and would be lost on resume"
        if not self.objective.detach_exit:
            yield "objective.detach_exit", "false has no effect with policy.lora: the exit gate is frozen"

    def _train_problems(self) -> Iterator[Problem]:
        if not self.rewards:
            yield "rewards", "training needs at least one, such as [math]"
        family = (self.policy.new and self.policy.new.family) or (self.policy.convert and self.policy.convert.family)
        if family == "plt" and self.objective.credit == "exit_pdf":
            yield (
                "objective.credit",
                "'exit_pdf' weighs the loops by an exit gate, which a Parallel Loop Transformer does not have;"
                " set it to uniform, progressive, learned or final",
            )
        if self.policy.new:
            longest = (self.data.max_prompt_length or 1) + self.rollout.max_completion_length
            if longest > self.policy.new.max_position_embeddings:
                yield (
                    "rollout.max_completion_length",
                    f"prompt and completion can reach {longest} tokens, more than"
                    f" policy.new.max_position_embeddings = {self.policy.new.max_position_embeddings}",
                )

    def _pretrain_problems(self) -> Iterator[Problem]:
        if self.pretrain is None:
            yield "pretrain", "missing; add the section (pretrain: {} takes every default)"
        elif self.pretrain.stop_at_solve_rate is not None:
            yield "pretrain.stop_at_solve_rate", "only the warm start of `rltt train` samples; set it to null"
        if self.data.filter is not None:
            yield "data.filter", "has no effect on pretraining, which takes all rows; remove the key"
