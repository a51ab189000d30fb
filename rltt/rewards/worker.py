"""The other side of `pool.py`: one nursery process that forks workers, and the loop that a worker runs.

The nursery imports the task once (sympy and math-verify take a second) and then only forks, so replacing a killed
worker costs milliseconds. It has one thread and no torch, which is what makes forking safe here and would not in the
training process.
"""

import importlib
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# A power tower can ask for all the memory there is before its time is up.
MEMORY_LIMIT = 4 * 2**30
# A deadline of our own graders counts CPU time, so that a busy machine makes no healthy answer late; one that sleeps or
# waits for the CPU has so many times as long. That of a user's function, which may wait for a service, is by the clock.
PATIENCE = 4.0
DONE = object()


def nursery(control_fd: int, task: str, deadline: float, foreign: tuple[str, ...] | None = None) -> None:
    """Fork a worker for each socket that arrives on `control_fd`; end, after the workers, when it is closed.

    With `foreign`, the task is what `task` makes of these strings: a user's code (see `Pool`).
    """
    module_name, function_name = task.split(":")
    module = importlib.import_module(module_name)
    function = getattr(module, function_name)
    if foreign is not None:
        function = function(*foreign)
    warming = module.warm_up() if hasattr(module, "warm_up") else iter(())
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    if foreign is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    while True:
        # What the module does to warm up, it does between forks, so that the first workers need not wait for it.
        while not select.select([control], [], [], 0)[0] and next(warming, DONE) is not DONE:
            pass
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            os.setpgid(0, 0)  # a group of its own: what it starts is killed with it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(Connection(fds[0]), function, deadline, by_the_clock=foreign is not None)
            os._exit(0)
        os.close(fds[0])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def serve(connection: Connection, function: Callable[[Any], Any], deadline: float, by_the_clock: bool) -> None:
    """Answer batches of items one by one until the other side hangs up.

    The kernel ends the process (default action of SIGPROF and SIGALRM) when an item passes its deadline: also in the
    midst of a C function, which a Python signal handler would not, and when the training process is gone already.
    """
    connection.send(os.getpid())
    while True:
        try:
            batch = connection.recv()
        except (EOFError, ConnectionResetError):  # reset: the other side was killed
            return
        for item in batch:
            if not by_the_clock:
                signal.setitimer(signal.ITIMER_PROF, deadline)
            signal.setitimer(signal.ITIMER_REAL, deadline if by_the_clock else PATIENCE * deadline)
            try:
                reply = (True, function(item))
            except Exception as error:
                reply = (False, f"{type(error).__name__}: {str(error)[:500]}")
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                connection.send(reply)
            except BrokenPipeError:
                return
