"""The worker pool: nothing hangs, nothing is lost, nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rltt.rewards import verify_math
from rltt.rewards.math import shared_pool
from rltt.rewards.pool import Pool

# Parsing this does not end.
BOMB = r"\boxed{\binom{10^{10}}{5 \cdot 10^{9}}}"
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pool():
    pool = Pool("pool_tasks:act", workers=2, deadline=0.5)
    yield pool
    pool.close()


def processes(pool: Pool) -> list[int]:
    nursery = [pool._nursery.pid] if pool._nursery else []
    return nursery + [worker.pid for worker in pool._workers]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_nothing_starts_before_it_is_needed_and_nothing_is_left(pool):
    assert processes(pool) == []
    assert [reply.value for reply in pool.map([1, 2, 3])] == [1, 2, 3]
    started = processes(pool)
    assert len(started) >= 2
    pool.close()
    assert not any(alive(pid) for pid in started)
    assert pool.map([4])[0].value == 4  # and it starts again


def test_results_keep_their_order():
    pool = Pool("pool_tasks:act", workers=3, deadline=5)
    items = list(range(2000))
    assert [reply.value for reply in pool.map(items)] == items
    assert pool.map([]) == []
    pool.close()


@pytest.mark.parametrize("bomb", ["spin", "spin in C", "ignore signals and sleep"])
def test_an_item_that_hangs_is_timed_out_alone(pool, bomb):
    pool.map([0])  # the start of the pool does not count
    replies = pool.map([1, 2, bomb, 3, 4, *list(range(50))])
    assert [reply.status for reply in replies[:5]] == ["ok", "ok", "timeout", "ok", "ok"]
    assert [reply.value for reply in replies[5:]] == list(range(50))
    assert replies[2].detail == "passed the deadline of 0.5 s"


def test_a_stopped_worker_is_killed(pool, monkeypatch):
    monkeypatch.setattr("rltt.rewards.pool.GRACE", 0.2)
    assert [reply.status for reply in pool.map([1, "stop", 2])] == ["ok", "timeout", "ok"]


def test_a_worker_that_dies_is_replaced(pool):
    replies = pool.map([1, "die", 2, "raise", 3])
    assert [reply.status for reply in replies] == ["ok", "died", "ok", "raised", "ok"]
    assert replies[3].detail == "ZeroDivisionError: no"


def test_an_item_that_takes_all_memory_fails_alone(pool):
    assert [reply.status for reply in pool.map([1, "eat memory", 2])] == ["ok", "raised", "ok"]


def test_an_item_whose_worker_was_killed_is_tried_again(pool, tmp_path):
    replies = pool.map([1, ("kill once", str(tmp_path / "killed")), 2])
    assert [reply.value for reply in replies] == [1, "alive", 2]


def test_idle_workers_and_the_nursery_may_be_killed(pool):
    pool.map(list(range(10)))
    for pid in processes(pool)[1:]:
        os.kill(pid, signal.SIGKILL)
    assert [reply.value for reply in pool.map([1, 2, 3])] == [1, 2, 3]
    for pid in processes(pool):
        os.kill(pid, signal.SIGKILL)
    assert [reply.value for reply in pool.map([1, 2, 3])] == [1, 2, 3]


def test_workers_killed_at_random_lose_nothing(pool, monkeypatch):
    monkeypatch.setattr("rltt.rewards.pool.RETRIES", 10)
    pool.map([0])
    stop = threading.Event()

    def kill_some():
        while not stop.wait(0.02):
            for worker in list(pool._workers)[:1]:
                os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        for _ in range(20):
            assert [reply.value for reply in pool.map(list(range(200)))] == list(range(200))
    finally:
        stop.set()
        killer.join()


def test_threads_share_it(pool):
    results = {}

    def work(name):
        results[name] = [reply.value for reply in pool.map([name] * 100)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [name] * 100 for name in range(8)}


def test_a_forked_child_starts_its_own(pool):
    pool.map([0])
    ours = processes(pool)
    child = os.fork()
    if child == 0:
        ok = pool.map([7])[0].value == 7 and not set(processes(pool)) & set(ours)
        pool.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.map([8])[0].value == 8
    assert processes(pool) == ours


def test_an_interrupted_call_does_not_spoil_the_next(pool):
    pool.map([0])
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.map(["spin", "spin", 1, 2])
    assert [reply.value for reply in pool.map([3, 4])] == [3, 4]


def test_a_task_that_cannot_be_imported_is_an_error():
    pool = Pool("pool_tasks:nonsense", workers=1)
    with pytest.raises(RuntimeError, match="worker processes for pool_tasks:nonsense do not start"):
        pool.map([1])
    pool.close()


def test_workers_have_no_torch():
    pool = Pool("pool_tasks:act", workers=1)
    modules = set(pool.map(["import the grader"])[0].value)
    pool.close()
    assert {"sympy", "rltt.rewards.grade"} <= modules
    assert not modules & {"torch", "transformers", "datasets", "trl"}


def run_script(tmp_path: Path, script: str) -> subprocess.CompletedProcess:
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_end_of_the_script_ends_the_workers(tmp_path):
    # No `if __name__ == "__main__"`: a script that a spawned worker would run again.
    done = run_script(
        tmp_path,
        "from rltt.rewards.pool import Pool\n"
        "pool = Pool('pool_tasks:act')\n"
        "print(pool.map(['right'])[0].value)\n"
        "print(pool._nursery.pid, *(worker.pid for worker in pool._workers))\n",
    )
    status, pids = done.stdout.splitlines()
    assert status == "right"
    assert not any(alive(int(pid)) for pid in pids.split())


def test_a_killed_script_leaves_no_workers(tmp_path):
    done = run_script(
        tmp_path,
        "import os, signal, threading\n"
        "from rltt.rewards.pool import Pool\n"
        "pool = Pool('pool_tasks:act', deadline=1.0)\n"
        "pool.map([0])\n"
        "print(pool._nursery.pid, *(worker.pid for worker in pool._workers), flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "pool.map(['spin'])\n",
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL
    assert len(pids) >= 2
    # The worker in the midst of the bomb goes at its deadline, however long it takes on a busy machine to come to it.
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_it_works_in_spawned_and_forked_processes(tmp_path):
    done = run_script(
        tmp_path,
        "import multiprocessing\n"
        "from rltt.rewards.pool import Pool\n"
        "pool = Pool('pool_tasks:act', workers=1)\n"
        "def work(number):\n"
        "    return pool.map([number])[0].value\n"
        "if __name__ == '__main__':\n"
        "    print(work(0))\n"
        "    for method in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(method).Pool(2) as processes:\n"
        "            print(method, processes.map(work, range(4)))\n",
    )
    assert done.stdout.splitlines() == ["0", "fork [0, 1, 2, 3]", "spawn [0, 1, 2, 3]"], done.stderr


def test_bombs_among_math_answers():
    """Towers of powers, nested brackets and a megabyte: each healthy answer is still graded."""
    bombs = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{" + "(" * 4000 + "1" + ")" * 4000 + "}", r"\boxed{" + "7" * 10**6 + "}"]
    completions = [rf"\boxed{{{number}}}" for number in range(600)]
    where = {100: bombs[0], 250: bombs[1], 400: bombs[2], 401: BOMB}
    for place, bomb in where.items():
        completions[place] = bomb
    pool = Pool("rltt.rewards.grade:grade", workers=2, deadline=1.0)
    replies = pool.map([(str(number), completion) for number, completion in enumerate(completions)])
    pool.close()
    # Their deadline is one of CPU time, so that they are graded on a busy machine too.
    healthy = [reply.value.status for number, reply in enumerate(replies) if number not in where]
    assert set(healthy) == {"right"}
    assert [replies[place].status for place in where] == ["ok", "ok", "ok", "timeout"]
    assert [replies[place].value.status for place in (100, 250, 400)] == ["unparseable"] * 3


def test_a_timeout_of_the_shared_pool_is_an_outcome(monkeypatch):
    pool = shared_pool()
    pool.close()
    monkeypatch.setattr(pool, "deadline", 1.0)
    outcomes = verify_math(["5", "5"], [BOMB, r"\boxed{5}"])
    assert [outcome.status for outcome in outcomes] == ["timeout", "right"]
    assert "deadline" in outcomes[0].detail
    pool.close()  # the next test starts it with its own deadline
