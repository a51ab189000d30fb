"""The three ways to call a reward function: in worker processes, in this process, or on an event loop.

Each can call it once for a whole batch, or once for each completion. What the function takes beside TRL's keywords
(the recipe's `args`, the tokenizer) is added here.
"""

import asyncio
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from rltt.errors import RewardError
from rltt.rewards.call import Failure, Result, invoke, invoke_async, timed_out
from rltt.rewards.pool import Pool, Reply

TOKENIZER_NAMES = ("tokenizer", "processing_class")
LOGGERS = ("log_metric", "log_extra")

Keywords = Mapping[str, Any]


class Calls(Protocol):
    """How a function is called."""

    def batch(self, keywords: Keywords) -> Result: ...
    def each(self, rows: Sequence[Keywords]) -> list[Result]: ...


class InProcess:
    """In this process: for functions that hold something which cannot be in a worker, such as a model on the GPU."""

    def __init__(self, function: Callable[..., Any], added: dict[str, Any]) -> None:
        self.function = function
        self.added = added

    def batch(self, keywords: Keywords) -> Result:
        return invoke(self.function, _without(keywords, LOGGERS) | self.added)

    def each(self, rows: Sequence[Keywords]) -> list[Result]:
        return [self.batch(row) for row in rows]


class OnEventLoop:
    """Coroutine functions, awaited with a timeout; the completions of `each` at the same time."""

    def __init__(self, function: Callable[..., Any], added: dict[str, Any], timeout: float) -> None:
        self.function = function
        self.added = added
        self.timeout = timeout

    async def batch(self, keywords: Keywords) -> Result:
        return await invoke_async(self.function, _without(keywords, LOGGERS) | self.added, self.timeout)

    async def each(self, rows: Sequence[Keywords]) -> list[Result]:
        return await asyncio.gather(*(self.batch(row) for row in rows))


class Isolated:
    """In worker processes, which load the function themselves and are killed when a call passes the timeout.

    Args:
        use: what the function is called in a recipe, with an absolute path.
        added: keywords for each call, the tokenizer among them when the function takes one.
        takes_state: whether the function names `trainer_state`, whose history is not sent for nothing. It gets the
            fields of the state, not its methods.
    """

    def __init__(self, use: str, added: dict[str, Any], timeout: float, takes_state: bool) -> None:
        self.use = use
        self.added = added
        self.timeout = timeout
        self.left_out = LOGGERS if takes_state else (*LOGGERS, "trainer_state")
        self._pool: Pool | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def batch(self, keywords: Keywords) -> Result:
        return self.each([keywords])[0]

    def each(self, rows: Sequence[Keywords]) -> list[Result]:
        added = _without(self.added, TOKENIZER_NAMES)
        if (state := rows[0].get("trainer_state")) is not None and "trainer_state" not in self.left_out:
            # Its fields alone: a worker would import transformers to unpickle the object, and its timeout is running.
            added["trainer_state"] = SimpleNamespace(**vars(state))
        try:
            replies = self.pool.map([_without(row, self.left_out) | added for row in rows])
        except RuntimeError as error:  # the function could be loaded here, but not in a worker
            raise RewardError(
                f"reward {self.use!r}: {error}. If it cannot be loaded in other processes: isolate: false."
            ) from error
        return [self._result(reply) for reply in replies]

    @property
    def pool(self) -> Pool:
        """The workers, which start when first used."""
        if self._pool is None:
            tokenizers = {name: self.added[name] for name in TOKENIZER_NAMES if name in self.added}
            file = ""
            if tokenizers:
                # Read once, by the process that the workers are forks of.
                self._folder = tempfile.TemporaryDirectory(prefix="rltt-reward-")
                path = Path(self._folder.name) / "tokenizer.pickle"
                path.write_bytes(pickle.dumps(tokenizers))
                file = str(path)
            self._pool = Pool("rltt.rewards.isolated:prepare", deadline=self.timeout, foreign=(self.use, file))
        return self._pool

    def _result(self, reply: Reply) -> Result:
        if reply.status == "ok":
            return pickle.loads(reply.value)  # from our own worker
        if reply.status == "timeout":
            return Result(timed_out(self.timeout))
        if reply.status == "died":
            return Result(Failure("died", "ended its worker process, twice (a crash, os._exit, or no memory)"))
        return Result(Failure("raised", f"failed in its worker: {reply.detail}"))


def give_tokenizer(calls: Any, names: Sequence[str], tokenizer: Any) -> None:
    """Let a function that names the tokenizer have it; before its first call."""
    if isinstance(calls, Isolated) and calls._pool is not None:
        raise RewardError(f"reward {calls.use!r} is in use already, and cannot be given another tokenizer.")
    calls.added.update(dict.fromkeys(names, tokenizer))


def _without(keywords: Keywords, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name not in names}
