"""One call of a reward function: the numbers that it returned, or what went wrong. The same in every process.

An exception, a wrong length, a NaN: none of them may train in silence, and none says by itself which completion it
came from. What is done about a failure is decided in `guard.py`.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

Kind = Literal["raised", "timeout", "died", "none", "not_finite", "wrong_length"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reward.

    - `raised`: the function raised an exception.
    - `timeout`: the call passed its deadline.
    - `died`: the process of the call ended (a crash, `os._exit`, no memory).
    - `none`: None, which is TRL's "does not apply".
    - `not_finite`: NaN, an infinity, or no number at all.
    - `wrong_length`: not one reward for each completion.

    `problem` continues the sentence "reward function 'score' …". `index` is the completion in hand, when it is known.
    """

    kind: Kind
    problem: str
    traceback: str = ""
    index: int | None = None


@dataclass
class Result:
    """What one call came to: a value or a failure for each completion, or one failure of the whole call.

    `metrics` and `extras` are what the function logged, to be replayed in the trainer.
    """

    values: list[float | Failure] | Failure
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, list[Any]]] = field(default_factory=list)


def invoke(function: Callable[..., Any], keywords: Mapping[str, Any], catch: type[BaseException] = Exception) -> Result:
    """Call a function; `keywords` has `completions` and all else but the loggers."""
    result = Result([])
    try:
        rewards = function(**keywords, **_loggers(result))
    except catch as error:
        return Result(_raised(error, keywords["completions"]))
    result.values = judge(rewards, len(keywords["completions"]))
    return result


async def invoke_async(function: Callable[..., Any], keywords: Mapping[str, Any], timeout: float) -> Result:
    """Await a coroutine function for at most `timeout` seconds. One that blocks the event loop cannot be ended."""
    result = Result([])
    task = asyncio.ensure_future(function(**keywords, **_loggers(result)))
    try:
        # Unlike `wait_for`, this does not wait for a function that ignores its cancellation.
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()
    if not done:
        return Result(timed_out(timeout))
    if task.cancelled():
        return Result(Failure("raised", "failed: CancelledError: it cancelled itself"))
    if (error := task.exception()) is not None:
        if not isinstance(error, Exception):
            raise error
        return Result(_raised(error, keywords["completions"]))
    result.values = judge(task.result(), len(keywords["completions"]))
    return result


def timed_out(timeout: float) -> Failure:
    """The failure of a call that passed its deadline."""
    return Failure("timeout", f"passed its timeout of {timeout:g} s")


def judge(rewards: Any, count: int) -> list[float | Failure] | Failure:
    """One float or failure for each of `count` completions, or what is wrong with the whole."""
    if inspect.iscoroutine(rewards):
        rewards.close()
        return Failure("wrong_length", "returned a coroutine; declare it with `async def`")
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__len__") or not hasattr(rewards, "__iter__"):
        return Failure(
            "wrong_length",
            f"returned {_shown(rewards)}, not a list with one number for each of the {count} completions",
        )
    if len(rewards) != count:
        return Failure(
            "wrong_length",
            f"returned {len(rewards)} rewards for {count} completions; return one for each, or None where it does"
            " not apply",
        )
    values = [_number(reward) for reward in rewards]
    return [replace(value, index=i) if isinstance(value, Failure) else value for i, value in enumerate(values)]


def _number(reward: Any) -> float | Failure:
    if reward is None:
        return Failure("none", "returned None")
    try:
        value = reward.item() if hasattr(reward, "item") else reward  # an element of a tensor or an array
    except (ValueError, RuntimeError):  # that has several elements itself
        value = reward
    if not isinstance(value, Real):
        return Failure("not_finite", f"returned {_shown(reward)}, not a number or None")
    if not math.isfinite(value):
        return Failure("not_finite", f"returned {value}, which would make the whole update useless")
    return float(value)


def _loggers(result: Result) -> dict[str, Callable[..., None]]:
    """TRL's `log_metric` and `log_extra`, kept with the result."""

    def log_metric(name: str, value: float) -> None:
        result.metrics.append((name, float(value)))

    def log_extra(column: str, values: list[Any]) -> None:
        result.extras.append((column, list(values)))

    return {"log_metric": log_metric, "log_extra": log_extra}


def _raised(error: BaseException, completions: Sequence[Any]) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next  # only the function's own frames
    text = "".join(traceback.format_exception(type(error), error, trace))
    problem = f"failed: {type(error).__name__}: {str(error)[:500]}"
    return Failure("raised", problem, text, _completion_in_hand(error, completions))


def _completion_in_hand(error: BaseException, completions: Sequence[Any]) -> int | None:
    """Which completion the function was at: the last one that a variable of the innermost frame refers to."""
    if len(completions) == 1:
        return 0
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    positions = {id(completion): index for index, completion in reversed(list(enumerate(completions)))}
    for frame in reversed([frame for frame in frames if frame.f_code.co_filename != __file__]):
        at = [positions[id(value)] for value in frame.f_locals.values() if id(value) in positions]
        if at:
            return max(at)
    return None


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {repr(value)[:60]}"
