"""What a worker process of a user's reward function runs (see `calls.py`, `Isolated`)."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltt.rewards.call import invoke
from rltt.rewards.registry import resolve_reward


def prepare(use: str, tokenizer_file: str) -> Callable[[dict[str, Any]], bytes]:
    """Load the function as the trainer did, once; what comes back answers one call."""
    function = resolve_reward(use)
    given = pickle.loads(Path(tokenizer_file).read_bytes()) if tokenizer_file else {}  # our own

    def answer(keywords: dict[str, Any]) -> bytes:
        # Also `sys.exit()` is this call's failure alone. Pickled here, where it can still be told what cannot be.
        return pickle.dumps(invoke(function, keywords | given, catch=BaseException))

    return answer
