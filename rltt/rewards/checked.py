"""A reward function wrapped so that no wrong answer of it trains in silence.

TRL checks only the number of rewards: an `inf` makes the update zero without a word, and an exception does not say
which function or which completion it came from.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from rltt.errors import RewardError
from rltt.rewards.extract import completion_text

SNIPPET = 200


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` under the name `name`, its result checked: one finite number or None for each completion.

    A coroutine function stays one, so that TRL awaits it beside others. Whatever is wrong raises `RewardError` with the
    name of the function, the number of the completion and its beginning; the function's own exception is chained to it.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def call_async(*, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
            try:
                rewards = await function(completions=completions, **kwargs)
            except Exception as error:
                raise _failure(name, error, completions) from error
            return check_rewards(name, rewards, completions)

        wrapper: Callable[..., Any] = call_async
    else:

        def call(*, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
            try:
                rewards = function(completions=completions, **kwargs)
            except Exception as error:
                raise _failure(name, error, completions) from error
            return check_rewards(name, rewards, completions)

        wrapper = call
    wrapper.__name__ = wrapper.__qualname__ = name  # TRL names the metrics after it
    wrapper.__doc__ = function.__doc__
    return wrapper


def check_rewards(name: str, rewards: Any, completions: Sequence[Any]) -> list[float | None]:
    """The rewards as floats and Nones, or `RewardError`."""
    if inspect.iscoroutine(rewards):
        rewards.close()
        raise RewardError(f"reward function {name!r} returned a coroutine; declare it with `async def`.")
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__len__") or not hasattr(rewards, "__iter__"):
        raise RewardError(
            f"reward function {name!r} returned {_shown(rewards)}, not a list with one number for each of the "
            f"{len(completions)} completions."
        )
    if len(rewards) != len(completions):
        raise RewardError(
            f"reward function {name!r} returned {len(rewards)} rewards for {len(completions)} completions; "
            "return one for each, or None where it does not apply."
        )
    return [_number(name, index, reward, completions) for index, reward in enumerate(rewards)]


def _number(name: str, index: int, reward: Any, completions: Sequence[Any]) -> float | None:
    if reward is None:
        return None
    try:
        value = reward.item() if hasattr(reward, "item") else reward  # an element of a tensor or an array
    except (ValueError, RuntimeError):  # that has several elements itself
        value = reward
    if not isinstance(value, Real):
        problem = f"{_shown(reward)}, not a number or None"
    elif not math.isfinite(value):
        problem = f"{value}, which would make the whole update useless"
    else:
        return float(value)
    raise RewardError(f"reward function {name!r} returned {problem}, {_where(index, completions)}.")


def _failure(name: str, error: Exception, completions: Sequence[Any]) -> RewardError:
    index = _completion_in_hand(error, completions)
    where = "" if index is None else f", {_where(index, completions)}"
    return RewardError(f"reward function {name!r} failed: {type(error).__name__}: {error}{where}.")


def _completion_in_hand(error: Exception, completions: Sequence[Any]) -> int | None:
    """Which completion the function was at: the last one that a variable of the innermost frame refers to."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    positions = {id(completion): index for index, completion in reversed(list(enumerate(completions)))}
    for frame in reversed(frames[1:]):  # the first is ours
        at = [positions[id(value)] for value in frame.f_locals.values() if id(value) in positions]
        if at:
            return max(at)
    return None


def _where(index: int, completions: Sequence[Any]) -> str:
    text = completion_text(completions[index])
    return f"for completion {index} of {len(completions)}: {text[:SNIPPET]!r}{'…' if len(text) > SNIPPET else ''}"


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {repr(value)[:60]}"
