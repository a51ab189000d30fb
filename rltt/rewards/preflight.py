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
from rltt.rewards.samples import Sample, columns_of, keywords_of

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
            failure = _fails(reward.guard, keywords_of(_samples(rows), trainer_state, messages))
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
        results = [calls.batch(keywords)]
        if isinstance(results[0].values, Failure):
            results = calls.each(rows_of(keywords))
    values = joined(results, count)
    failures = [value for value in values if isinstance(value, Failure) and value.kind != "none"]
    return failures[0] if len(failures) == count else None


def _samples(rows: Sequence[Problem]) -> list[Sample]:
    """The golds of the rows as completions, bare and boxed."""
    # As in a dataset: `response` is a column where every row has one.
    left_out = () if all(row.response is not None for row in rows) else ("response",)
    return [
        Sample(row.where, text, row.prompt, {k: v for k, v in columns_of(row).items() if k not in left_out})
        for row in rows
        for text in (row.gold, rf"\boxed{{{row.gold}}}")
    ]
