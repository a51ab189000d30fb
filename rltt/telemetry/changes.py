"""What to change in the recipe: a key and a value, as an override that `rltt train` takes as it is printed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltt.telemetry.signals import KL_AIM, Signals

BOXED_TEMPLATE = r"{prompt}\nPut your final answer in \\boxed{}."


@dataclass(frozen=True)
class Change:
    """A change to the recipe.

    Attributes:
        override: `key=value`, to be put after `rltt train recipe.yaml`; None where no key can mend it.
        advice: what it is for, and what else to look at.
    """

    override: str | None
    advice: str

    def __str__(self) -> str:
        return self.advice if self.override is None else f"{self.override}   ({self.advice})"


def nice(value: float) -> float:
    """The nearest of …, 1, 2, 5, 10, … on a logarithmic scale."""
    power = 10.0 ** math.floor(math.log10(value))
    best = min((1, 2, 5, 10), key=lambda digit: abs(math.log(value / (digit * power))))
    return float(f"{best * power:.0e}")


def raise_learning_rate(s: Signals) -> Change | None:
    """KL grows like the square of the learning rate while it is small, so this is the rate that reaches `KL_AIM`."""
    rate = s.learning_rate
    if rate is None or s.kl is None:
        return None
    factor = math.sqrt(KL_AIM / max(s.kl.at_end, 1e-12))
    new = nice(rate * min(max(factor, 2.0), 1e4))
    return Change(f"train.learning_rate={new:g}", f"now {rate:g}; at this rate the policy would leave its start")


def lower_learning_rate(s: Signals, factor: float = 10.0) -> Change | None:
    """A rate that takes smaller steps."""
    rate = s.learning_rate
    if rate is None:
        return None
    return Change(f"train.learning_rate={nice(rate / factor):g}", f"now {rate:g}; the updates are too large")


def easier(settings: Mapping[str, Any]) -> Change:
    """Prompts that some completions solve."""
    difficulty = settings.get("data.train.difficulty")
    if "pretrain.stop_at_solve_rate" in settings and (settings["pretrain.stop_at_solve_rate"] or 1.0) < 0.2:
        return Change("pretrain.stop_at_solve_rate=0.3", "RL needs a start that solves some of its prompts")
    if settings.get("data.train.path") == "arithmetic" and difficulty is not None and difficulty > 1:
        return Change("data.train.difficulty=1", f"now {difficulty}; RL needs prompts that are sometimes solved")
    if "pretrain.max_steps" in settings:
        return Change(
            f"pretrain.max_steps={4 * settings['pretrain.max_steps']}",
            "a longer warm start; RL needs a start that solves some of its prompts",
        )
    group = settings.get("rollout.num_generations", 8)
    return Change(
        f"rollout.num_generations={4 * group}",
        f"now {group}: larger groups find the rare solutions; easier prompts, or a warm start, do more",
    )


def harder(settings: Mapping[str, Any]) -> Change:
    """Prompts that some completions do not solve."""
    difficulty = settings.get("data.train.difficulty")
    if (settings.get("pretrain.stop_at_solve_rate") or 0.0) > 0.5:
        return Change("pretrain.stop_at_solve_rate=0.3", "the warm start leaves RL nothing to learn")
    if settings.get("data.train.path") == "arithmetic" and difficulty is not None and difficulty < 5:
        return Change(f"data.train.difficulty={difficulty + 1}", f"now {difficulty}; RL needs prompts that still fail")
    group = settings.get("rollout.num_generations", 8)
    return Change(
        f"rollout.num_generations={4 * group}",
        f"now {group}: larger groups find the rare failures; harder prompts do more",
    )
