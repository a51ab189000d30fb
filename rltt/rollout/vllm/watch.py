"""An engine that dies or hangs: one new start, and then an end that says so."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from ...errors import UserError

T = TypeVar("T")

GRACE = 60.0
"""Seconds from the deadline until a process that is stuck in the engine's C++ or CUDA code is ended."""


class EngineError(UserError):
    """The rollout engine died or hung, and a new start did not help."""


class EngineHangError(Exception):
    """The rollout engine did not answer within its deadline."""


class EngineRestarted(UserWarning):
    """The rollout engine died or hung, and was started anew."""


@contextmanager
def deadline(seconds: float, end: Callable[[str], None], grace: float = GRACE) -> Iterator[None]:
    """Raise `EngineHangError` in the main thread when what is inside takes longer; outside of that thread, do nothing.

    Args:
        seconds: until then.
        end: called from another thread, with a message, when the exception has not got through for `grace` seconds
            more. It should end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise EngineHangError(f"no answer within {seconds:g} s")

    last = threading.Timer(
        seconds + grace, end, [f"no answer within {seconds:g} s, and it cannot be interrupted: the process is ended"]
    )
    last.daemon = True
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    last.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        last.cancel()
        signal.signal(signal.SIGALRM, before)


def end_process(message: str) -> None:
    """End this process although its main thread is stuck."""
    print(f"error: the rollout engine: {message}; the last checkpoint can be gone on from", file=sys.stderr, flush=True)
    os._exit(1)


def failures() -> tuple[type[Exception], ...]:
    """What engines die of. Mistakes of the recipe, such as a missing server or weight, are not among them."""
    from vllm.v1.engine.exceptions import VLLMServerError

    # requests' exceptions are OSErrors; vLLM's engine in this process dies of what its worker raised.
    return (RuntimeError, OSError, AssertionError, EngineHangError, VLLMServerError)


def with_one_restart(
    sample: Callable[[], T],
    restart: Callable[[], Any],
    seconds: float,
    caught: tuple[type[Exception], ...],
    end: Callable[[str], None] = end_process,
) -> T:
    """`sample()` within a deadline; if the engine dies or hangs, once more after `restart()`.

    Raises:
        EngineError: it does so again, or cannot be started anew.
    """
    try:
        with deadline(seconds, end):
            return sample()
    except caught as error:
        first = _text(error)
    warnings.warn(f"the rollout engine failed: {first}; it is started anew", EngineRestarted, stacklevel=2)
    try:
        restart()
        with deadline(seconds, end):
            return sample()
    except caught as error:
        raise EngineError(
            f"the rollout engine failed: {first}\nand after a new start: {_text(error)}\n"
            "what was learned up to the last checkpoint is kept; start the run again to go on from it"
        ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
