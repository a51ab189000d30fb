"""Tasks for the workers of `test_rewards_pool.py`, which find them by name: so they need a module of their own."""

import os
import signal
import sys
import time


def act(item):
    """Do what the item says."""
    match item:
        case "spin":
            while True:
                pass
        case "spin in C":
            9**9**9  # one call that no Python signal handler interrupts
        case "ignore signals and sleep":
            for number in range(1, signal.NSIG):
                if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, 32, 33):
                    signal.signal(number, signal.SIG_IGN)
            time.sleep(3600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            os._exit(1)
        case "raise":
            raise ZeroDivisionError("no")
        case "eat memory":
            return len(bytes(64 * 2**30))
        case "import the grader":
            import rltt.rewards.grade  # noqa: F401

            return sorted(sys.modules)
        case ("kill once", path):
            if not os.path.exists(path):
                open(path, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return "alive"
    return item
