"""The runs of the benchmark: where each starts, what is done to it, and the fault that this is.

Every scenario is run with three variants of policy and seed. The variants differ in everything that a threshold could
lean on: starting weights, size, depth, group size and prompts in a step.
"""

from dataclasses import dataclass, field
from typing import Any

from plants import (
    Plant,
    bf16_weights,
    collapsed_gate,
    entropy_penalty,
    other_temperature,
    reference_is_policy,
    same_state_in_every_loop,
    shallow_rollout,
)

STEPS = 80


@dataclass(frozen=True)
class Variant:
    """One policy, made once for each kind of start, and the size of its steps."""

    seed: int
    new: dict[str, int]
    loops: int
    prompts: int
    group: int
    split: str


SMALL = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4}
VARIANTS = (
    Variant(0, SMALL, 3, 16, 8, "tuning"),
    Variant(1, SMALL, 3, 16, 8, "held-out"),
    Variant(2, WIDE, 4, 32, 4, "held-out"),
)


@dataclass(frozen=True)
class Scenario:
    """A kind of run.

    Attributes:
        cause: the fault that was planted, by the verdict's name of it; None for a sound run.
        start: which warm start: `mid` solves about a third, `easy` nearly all, `unboxed` never boxes its answer.
        overrides: of the base recipe.
        data: what is done to the training rows; None: as they are.
        plant: what is done to the trainer.
        watched: the run evaluates held-out prompts on its way, as a careful user does.
    """

    name: str
    cause: str | None
    start: str = "mid"
    overrides: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    plant: Plant | None = None
    watched: bool = False


LR = "train.learning_rate"
REWARDS = "benchmarks/verdicts/rewards.py"
LOOSE = {"rollout.parity_tolerance": 100.0}

SCENARIOS = (
    Scenario("healthy", None),
    Scenario("healthy-grpo", None, overrides={"objective.credit": "final"}),
    Scenario("healthy-exit", None, overrides={"objective.credit": "exit_pdf", LR: 5e-4}),
    Scenario("healthy-slow", None, overrides={LR: 1e-4}),
    Scenario(
        "healthy-beta", None, overrides={"objective.beta": 0.01, LR: 5e-4, "objective.loss_type": "dapo"}, watched=True
    ),
    Scenario("fast", None, overrides={LR: 1e-3}),
    Scenario("low-start", None, start="low"),
    Scenario("good-start", None, start="good"),
    Scenario("two-updates", None, overrides={"train.updates_per_rollout": 2}),
    Scenario("cosine", None, overrides={"train.lr_scheduler_type": "cosine", "train.warmup_steps": 10, LR: 5e-4}),
    Scenario("reinforce", None, overrides={"objective.loss_type": "reinforce", "objective.credit": "progressive"}),
    Scenario("lr-2e-5", None, overrides={LR: 2e-5}),
    Scenario("noisy-golds", None, data="noisy_golds"),
    Scenario("cut-some", None, overrides={"rollout.max_completion_length": 12}),
    Scenario("temperature-slight", "rollout_mismatch", overrides=LOOSE, plant=other_temperature(1.1)),
    Scenario("lr-1e-7", "learning_rate_too_small", overrides={LR: 1e-7}),
    Scenario("lr-1e-6", "learning_rate_too_small", overrides={LR: 1e-6}),
    Scenario("lr-5e-6", "learning_rate_too_small", overrides={LR: 5e-6}),
    Scenario("bf16", "updates_vanish", overrides={LR: 1e-6}, plant=bf16_weights),
    Scenario("easy", "too_easy", start="easy"),
    Scenario("hard", "too_hard", overrides={"data.train.difficulty": 5, "rollout.max_completion_length": 32}),
    Scenario("hard-two-digits", "too_hard", overrides={"data.train.difficulty": 2}),
    Scenario("cut", "truncated", overrides={"rollout.max_completion_length": 8}),
    Scenario("cut-most", "truncated", overrides={"rollout.max_completion_length": 10}),
    Scenario("unboxed", "unparseable", start="unboxed"),
    Scenario("bad-golds", "bad_golds", data="bad_golds", overrides={"data.bad_gold": "keep"}),
    Scenario("always-one", "reward_constant", overrides={"rewards": [f"{REWARDS}:constant"]}),
    Scenario("always-half", "reward_constant", overrides={"rewards": [f"{REWARDS}:half"]}),
    Scenario("coin", "reward_unrelated", overrides={"rewards": [f"{REWARDS}:coin"]}),
    Scenario("shuffled-golds", "reward_unrelated", data="shuffled_golds"),
    Scenario("temperature", "rollout_mismatch", overrides=LOOSE, plant=other_temperature(2.5)),
    Scenario("depth", "rollout_mismatch", overrides=LOOSE, plant=shallow_rollout),
    Scenario("reference", "reference_wrong", plant=reference_is_policy),
    Scenario("gate", "gate_collapsed", overrides={"objective.credit": "exit_pdf"}, plant=collapsed_gate),
    Scenario("loops", "loops_identical", plant=same_state_in_every_loop),
    Scenario("explosion", "kl_explosion", overrides={LR: 3e-2}),
    Scenario("certainty", "entropy_collapse", overrides={LR: 1e-3}, plant=entropy_penalty),
    Scenario(
        "spikes",
        "gradient_spikes",
        overrides={"rewards": [f"{REWARDS}:outliers"], "objective.scale_rewards": "none", "train.max_grad_norm": 1e9},
    ),
    Scenario(
        "short",
        "held_out_falls",
        overrides={"rewards": ["math", {"use": f"{REWARDS}:short", "weight": 5.0}], LR: 1e-3},
        watched=True,
    ),
    Scenario(
        "nine",
        "held_out_falls",
        overrides={"rewards": ["math", {"use": f"{REWARDS}:same_answer", "weight": 5.0}], LR: 1e-3},
        watched=True,
    ),
    Scenario("overfit", "held_out_falls", overrides={"data.train.limit": 16, LR: 1e-3}, watched=True),
)
