"""Each reward function is tried once before any model is loaded: a bug should not cost a warm start to be found."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rltt.data.problems import Problem
from rltt.errors import RewardError
from rltt.rewards.call import Failure, Result
from rltt.rewards.calls import OnEventLoop
from rltt.rewards.guard import Guard, joined, rows_of
from rltt.rewards.registry import NamedReward, check_columns

ROWS = 2


def preflight(
    rewards: Sequence[NamedReward], problems: Sequence[Problem], trainer_state: Any, chat: bool | None = None
) -> None:
    """Call each function on the golds of two rows as completions, bare and boxed.

    A failure on some of them is the run's business. `chat` says whether completions will be messages; None, that only
    the tokenizer knows, and then a function has to work with either text or messages.

    Raises:
        RewardError: a function needs a column that the data has not, or failed on every one of them.
    """
    rows = list(problems[:ROWS])
    names = ["prompt", "gold", "row", *(["response"] if all(row.response is not None for row in problems) else [])]
    check_columns(rewards, dict.fromkeys([*names, *(name for row in problems for name in row.columns)]))
    for reward in rewards:
        # Those that need a tokenizer would have to wait for the policy; the built-in verifier has tests of its own.
        if reward.tokenizer_names or reward.guard is None or not reward.guard.counted:
            continue
        failures = []
        for messages in (False, True) if chat is None else (chat,):
            failure = _fails(reward.guard, _keywords(rows, trainer_state, messages))
            if failure is None:
                break
            failures.append(failure)
        else:
            raise RewardError(
                f"reward function {reward.name!r} {failures[0].problem}, on the golds of {len(rows)} rows as "
                f"completions, before the run began.\n{failures[0].traceback}".rstrip()
            )


def _fails(guard: Guard, keywords: dict[str, Any]) -> Failure | None:
    """The first failure, if every completion failed. None as a reward is an answer here: it may not apply to these."""
    count = len(keywords["completions"])
    calls = guard.calls
    if isinstance(calls, OnEventLoop):
        waiting = calls

        async def both() -> list[Result]:
            result = await waiting.batch(keywords)
            return await waiting.each(rows_of(keywords)) if isinstance(result.values, Failure) else [result]

        results = asyncio.run(both())
    else:
        try:
            results = [calls.batch(keywords)]
            if isinstance(results[0].values, Failure):
                results = calls.each(rows_of(keywords))
        except RuntimeError as error:
            raise RewardError(f"reward function {guard.name!r}: {error}") from error
    values = joined(results, count)
    failures = [value for value in values if isinstance(value, Failure) and value.kind != "none"]
    return failures[0] if len(failures) == count else None


def _keywords(rows: Sequence[Problem], trainer_state: Any, messages: bool) -> dict[str, Any]:
    doubled = [row for row in rows for _ in range(2)]
    texts = [text for row in rows for text in (row.gold, rf"\boxed{{{row.gold}}}")]
    columns: dict[str, list[Any]] = {
        "gold": [row.gold for row in doubled],
        "row": [row.where for row in doubled],
        **{name: [row.columns.get(name) for row in doubled] for name in {n for row in rows for n in row.columns}},
    }
    if all(row.response is not None for row in rows):
        columns["response"] = [row.response for row in doubled]

    def shaped(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if messages else text

    return columns | {
        "prompts": [shaped("user", row.prompt) for row in doubled],
        "completions": [shaped("assistant", text) for text in texts],
        # No tokenizer yet: the bytes stand in for tokens.
        "completion_ids": [list(text.encode()) for text in texts],
        "trainer_state": trainer_state,
    }
