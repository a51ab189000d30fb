"""What a worker process of a user's reward function runs (see `calls.py`, `Isolated`)."""

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltt.rewards.call import invoke
from rltt.rewards.outcome import Outcome
from rltt.rewards.registry import resolve_reward


def prepare(use: str, tokenizer_file: str) -> Callable[[dict[str, Any]], bytes]:
    """Load the function as the trainer did, once; what comes back answers one call."""
    function = resolve_reward(use)
    given = pickle.loads(Path(tokenizer_file).read_bytes()) if tokenizer_file else {}  # our own

    def answer(keywords: dict[str, Any]) -> bytes:
        # Also `sys.exit()` is this call's failure alone. Pickled here, where it can still be told what cannot be.
        return pickle.dumps(invoke(function, keywords | given, catch=BaseException))

    return answer


class NoOutcome(str):
    """In words, what a gold check gave in place of an outcome, which may be nothing that can be sent."""

    @classmethod
    def describing(cls, value: object) -> "NoOutcome":
        return cls(f"{type(value).__name__} {repr(value)[:40]}")


def prepare_gold_check(use: str) -> Callable[[str], tuple[Any, str]]:
    """What answers one gold: what the function's `check_golds` gives for it, and the traceback when it raises."""
    check: Any = resolve_reward(use).check_golds  # type: ignore[attr-defined]

    def answer(gold: str) -> tuple[Any, str]:
        try:
            found = list(check([gold]))
        except BaseException as error:  # also sys.exit()
            return None, f"{type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
        return [one if isinstance(one, Outcome) else NoOutcome.describing(one) for one in found], ""

    return answer
