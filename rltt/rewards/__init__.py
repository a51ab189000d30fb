"""Who grades: verified math, and reward functions of the user's own. Nothing in here imports torch.

From a recipe to a function          registry.py  what `use:` names        preflight.py tried before a run
Before a run                         golds.py      are the golds gradable  trial.py     one function, shown at work
Completions to try one on            samples.py
A function that may fail             guard.py     what is done about it    call.py      one call, and what failed
The ways to call it                  calls.py     here, or in workers      isolated.py  what a worker runs
The doors to the math verifier       math.py      verify_math, the reward  outcome.py   what became of a completion
Worker processes                     pool.py      our side                 worker.py    theirs

One completion against one gold, in a worker, from the outside in:
extract.py   which part of a completion is its final answer
grade.py     gold and answer read, compared, judged
spelling.py  one spelling for LaTeX that means the same
answer.py    the shape of an answer: point, set, interval, matrix, equation, ...
compare.py   the rules for each shape; sets.py for sets of real numbers
plain.py     one value: a number, a word, a choice, an expression
quantity.py  numbers as people write them; units.py what stands behind them, clock.py times of day
value.py     whether two expressions are equal
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
