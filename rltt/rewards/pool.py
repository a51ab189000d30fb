"""A pool of worker processes in which nothing can hang: each item has a deadline, and a dead worker is replaced.

`multiprocessing.Pool` and `concurrent.futures` know no deadline for one item, and break or wait forever when a worker
is killed. Here a worker answers item by item; when it dies, the item in hand is known, the rest of its batch goes back
to the queue, and the nursery (see `worker.py`) forks a new one.

    pool = Pool("rltt.rewards.grade:grade", workers=4, deadline=5.0)
    replies = pool.map([(gold, completion), ...])  # in order; one Reply each
    pool.close()
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from rltt.rewards.worker import PATIENCE

DEADLINE = 5.0
MAX_BATCH = 32
# A worker ends itself at the deadline. If it cannot (stopped, swapped out), we kill it this much later.
GRACE = 2.0
# How long the first worker may take to import its task.
START_TIMEOUT = 120.0
# An item whose worker died early (out of memory, killed by someone) is tried again this often.
RETRIES = 1

# Enters `worker.py` with the parent's import path, but past `rltt/__init__.py`: what that imports is the trainer's
# business, and a worker must stay small and free of torch.
_BOOT = """
import sys, types
sys.path[:] = {path!r}
package = types.ModuleType("rltt")
package.__path__ = [{package!r}]
sys.modules["rltt"] = package
from rltt.rewards.worker import nursery
nursery({fd}, {task!r}, {deadline!r})
"""
# A user's own function may import anything, rltt and torch among it, and take as much memory as it needs.
_BOOT_FOREIGN = """
import sys
sys.path[:] = {path!r}
from rltt.rewards.worker import nursery
nursery({fd}, {task!r}, {deadline!r}, {foreign!r})
"""


@dataclass(frozen=True)
class Reply:
    """What came of one item: `value` when `ok`, else `detail` says what happened."""

    status: Literal["ok", "raised", "timeout", "died"]
    value: Any = None
    detail: str = ""


@dataclass
class _Worker:
    connection: Connection
    pid: int
    batch: deque[int] = field(default_factory=deque)  # item numbers sent and not yet answered, the one in hand first
    since: float = 0.0  # when the item in hand was begun


def default_workers() -> int:
    """Four, or fewer where there are fewer cores; the processes of one launch on this machine share them."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Pool:
    """Calls `task` (`package.module:function`, of one picklable argument) in `workers` processes.

    Starts when first used; may be used from several threads (one call at a time has the workers) and after a fork (the
    child starts its own). `deadline` is in seconds of CPU time for each item, or `worker.PATIENCE` times as many by the
    clock.

    With `foreign`, `task` is called with these strings in the nursery, and what it returns answers the items: a user's
    code, which may print, has no limit of memory, and whose deadline is by the clock alone.
    """

    def __init__(
        self,
        task: str,
        workers: int | None = None,
        deadline: float = DEADLINE,
        foreign: tuple[str, ...] | None = None,
    ):
        self.task = task
        self.foreign = foreign
        self.size = workers or default_workers()
        self.deadline = deadline
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._nursery: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._workers: list[_Worker] = []

    @property
    def _patience(self) -> float:
        """The seconds by the clock after which a worker that goes on ends itself."""
        return self.deadline if self.foreign is not None else PATIENCE * self.deadline

    def map(self, items: Sequence[Any]) -> list[Reply]:
        """One reply for each item, in their order."""
        with self._lock:
            try:
                return self._map(items)
            except BaseException:
                # Interrupted: answers to this call must not be taken for answers to the next one.
                for worker in list(self._workers):
                    self._discard(worker)
                raise

    def _map(self, items: Sequence[Any]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(items)
        tries = [0] * len(items)
        size = max(1, min(MAX_BATCH, len(items) // (4 * self.size)))
        queue = deque(list(range(start, min(start + size, len(items)))) for start in range(0, len(items), size))
        while queue or any(worker.batch for worker in self._workers):
            self._hand_out(queue, items)
            busy = [worker for worker in self._workers if worker.batch]
            overdue_in = min(worker.since for worker in busy) + self._patience + GRACE - time.monotonic()
            ready = set(wait([worker.connection for worker in busy], timeout=max(0.0, overdue_in)))
            for worker in busy:
                if worker.connection in ready:
                    if self._receive(worker, replies):
                        continue
                elif time.monotonic() - worker.since < self._patience + GRACE:
                    continue
                seconds = time.monotonic() - worker.since
                self._discard(worker)
                lost, *rest = worker.batch
                if seconds >= 0.9 * self.deadline:  # our clock and the worker's timer start a moment apart
                    replies[lost] = Reply("timeout", detail=f"passed the deadline of {self.deadline:g} s")
                elif tries[lost] < RETRIES:
                    tries[lost] += 1
                    rest.append(lost)
                else:
                    replies[lost] = Reply("died", detail="the worker process died on it, twice")
                if rest:
                    queue.appendleft(rest)
        return replies  # type: ignore[return-value]  # each was filled above

    def _hand_out(self, queue: deque[list[int]], items: Sequence[Any]) -> None:
        """Give each idle worker a batch, with as many workers as there is work for."""
        idle = [worker for worker in self._workers if not worker.batch]
        while queue and (idle or len(self._workers) < self.size):
            worker = idle.pop() if idle else self._start_worker()
            batch = queue.popleft()
            try:
                worker.connection.send([items[number] for number in batch])
            except (BrokenPipeError, ConnectionResetError):  # it died while idle
                self._discard(worker)
                queue.appendleft(batch)
                continue
            worker.batch = deque(batch)
            worker.since = time.monotonic()

    def _receive(self, worker: _Worker, replies: list[Reply | None]) -> bool:
        """Take one answer from a worker; False when it is dead."""
        try:
            ok, value = worker.connection.recv()
        except (EOFError, OSError):
            return False
        replies[worker.batch.popleft()] = Reply("ok", value) if ok else Reply("raised", detail=value)
        worker.since = time.monotonic()
        return True

    def _start_worker(self) -> _Worker:
        for _ in range(2):  # a second time with a new nursery, should someone have killed the first
            if self._nursery is None:
                self._start_nursery()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                theirs.close()
                connection = Connection(ours.detach())
                if not connection.poll(START_TIMEOUT):
                    raise EOFError
                worker = _Worker(connection, pid=connection.recv())
                self._workers.append(worker)
                return worker
            except (EOFError, OSError):
                self._stop_nursery()
        named = self.task if self.foreign is None else self.foreign[0]
        raise RuntimeError(f"the worker processes for {named} do not start; their error output is above")

    def _start_nursery(self) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parents[1])
        boot = (_BOOT if self.foreign is None else _BOOT_FOREIGN).format(
            path=sys.path,
            package=package,
            fd=theirs.fileno(),
            task=self.task,
            deadline=float(self.deadline),
            foreign=self.foreign,
        )
        # A fresh interpreter, not a fork (threads, CUDA) nor a spawn (which would import the user's script again). In a
        # session of its own, so that Ctrl-C reaches the trainer alone, which then closes the pool.
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if self.foreign is None else None,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours

    def _discard(self, worker: _Worker) -> None:
        with contextlib.suppress(ProcessLookupError):  # dead already
            os.killpg(worker.pid, signal.SIGKILL)  # and the processes that it started
        worker.connection.close()
        self._workers.remove(worker)

    def _stop_nursery(self) -> None:
        if self._nursery is None or self._control is None:
            return
        self._control.close()
        try:
            self._nursery.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._nursery = self._control = None

    def close(self) -> None:
        """End all processes, and wait until they are gone. The pool starts again when it is used again."""
        with self._lock:
            for worker in list(self._workers):
                self._discard(worker)
            self._stop_nursery()
