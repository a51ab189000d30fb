"""An engine that dies or hangs is started anew once, and then ends the run."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from rltt.rollout.vllm.watch import EngineError, EngineHangError, EngineRestarted, deadline, with_one_restart

CAUGHT = (RuntimeError, EngineHangError)


class Engine:
    """Behaves as told, one word for each time it is asked."""

    def __init__(self, *behaviour: str) -> None:
        self.behaviour = list(behaviour)
        self.restarts = 0

    def sample(self) -> str:
        match self.behaviour.pop(0):
            case "dies":
                raise RuntimeError("CUDA error: an illegal memory access\nsecond line")
            case "hangs":
                while True:
                    time.sleep(0.01)
            case answer:
                return answer

    def restart(self) -> None:
        self.restarts += 1


def run(engine: Engine, end: Callable[[str], None] = pytest.fail) -> str:
    return with_one_restart(engine.sample, engine.restart, 0.1, CAUGHT, end)


def test_a_sound_engine_is_left_alone() -> None:
    engine = Engine("answer")
    assert run(engine) == "answer"
    assert engine.restarts == 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "failed: RuntimeError: CUDA error: an illegal memory access; it is started anew"),
        ("hangs", r"failed: EngineHangError: no answer within 0\.1 s; it is started anew"),
    ],
)
def test_it_is_started_anew_once(fault: str, message: str) -> None:
    engine = Engine(fault, "answer")
    with pytest.warns(EngineRestarted, match=message):
        assert run(engine) == "answer"
    assert engine.restarts == 1


@pytest.mark.filterwarnings("ignore::rltt.rollout.vllm.watch.EngineRestarted")
def test_the_second_time_ends_the_run() -> None:
    engine = Engine("dies", "hangs", "answer")
    with pytest.raises(EngineError) as caught:
        run(engine)
    first, second, last = str(caught.value).splitlines()
    assert first == "the rollout engine failed: RuntimeError: CUDA error: an illegal memory access"
    assert second == "and after a new start: EngineHangError: no answer within 0.1 s"
    assert "start the run again to go on" in last
    assert engine.restarts == 1


def test_other_errors_are_not_the_engines() -> None:
    def wrong() -> str:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        with_one_restart(wrong, pytest.fail, 1.0, CAUGHT)


STUCK = """
import ctypes
from rltt.rollout.vllm.watch import deadline, end_process
with deadline(0.1, end_process, grace=0.2):
    while True:  # the exception is lost, as in C++ code that goes on
        try:
            ctypes.CDLL(None).sleep(1)
        except BaseException:
            pass
"""


def test_a_process_that_cannot_be_interrupted_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: the rollout engine: no answer within 0.1 s, and it cannot be interrupted" in done.stderr


def test_the_alarm_of_others_comes_back() -> None:
    def other(*_: object) -> None: ...

    before = signal.signal(signal.SIGALRM, other)
    try:
        with deadline(5, pytest.fail):
            assert signal.getsignal(signal.SIGALRM) is not other
        assert signal.getsignal(signal.SIGALRM) is other
    finally:
        signal.signal(signal.SIGALRM, before)
