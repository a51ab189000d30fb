"""Who grades: verified math, and reward functions of the user's own. Nothing in here imports torch.

outcome.py   what became of one graded completion
extract.py   which part of a completion is its final answer
grade.py     one completion against one gold, in a worker process
pool.py      worker processes with a deadline for each item; worker.py is their side of it
math.py      verify_math, and math_reward with TRL's signature
registry.py  from `use:` in a recipe to a function
checked.py   a user's function, with each call checked
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltt.rewards.math import math_reward, verify_math
    from rltt.rewards.outcome import Outcome
    from rltt.rewards.registry import NamedReward, load_rewards, resolve_reward

__all__ = ["NamedReward", "Outcome", "load_rewards", "math_reward", "resolve_reward", "verify_math"]

_HOME = {
    "NamedReward": "registry",
    "Outcome": "outcome",
    "load_rewards": "registry",
    "math_reward": "math",
    "resolve_reward": "registry",
    "verify_math": "math",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
