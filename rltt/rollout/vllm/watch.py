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

START = 600.0
"""Seconds that a new start may take at least, however short the deadline of a rollout is."""


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
    restart: Callable[[], Any] | None,
    seconds: float,
    caught: tuple[type[Exception], ...],
    end: Callable[[str], None] = end_process,
) -> T:
    """`sample()` within a deadline; if the engine dies or hangs, once more after `restart()`.

    Args:
        restart: None where it cannot be started anew.

    Raises:
        EngineError: it does so again, or cannot be started anew.
    """
    try:
        with deadline(seconds, end):
            return sample()
    except caught as error:
        if restart is None:
            raise EngineError(f"the rollout engine failed: {_text(error)}\n{_GO_ON}") from error
        first = _text(error)
    caught = (*caught, UserError)
    warnings.warn(f"the rollout engine failed: {first}; it is started anew", EngineRestarted, stacklevel=2)
    try:
        with deadline(max(seconds, START), end):
            restart()
        with deadline(seconds, end):
            return sample()
    except caught as error:
        again = f"the rollout engine failed: {first}\nand after a new start: {_text(error)}"
        raise EngineError(f"{again}\n{_GO_ON}") from error


_GO_ON = "what was learned up to the last checkpoint is kept; start the run again to go on from it"


def _text(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
