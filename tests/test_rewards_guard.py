"""A reward function that hangs, crashes or talks nonsense: what it costs, what is said, and that nothing is left."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rltt.data.problems import Problem
from rltt.errors import RecipeError, RewardError
from rltt.recipe import RewardEntry
from rltt.recipe import check as check_section
from rltt.rewards import load_rewards
from rltt.rewards.call import KINDS
from rltt.rewards.guard import FailureReport
from rltt.rewards.preflight import preflight
from rltt.rewards.registry import NamedReward, check_columns, use_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# A completion says what happens; any other is worth its length.
REWARDS = '''
import asyncio, ctypes, os, subprocess, sys, time

def act(text):
    match text:
        case "spin":
            while True: pass
        case "sleep": time.sleep(3600)
        case "leave a child":
            child = subprocess.Popen(["sleep", "3600"])
            print("child", child.pid, flush=True)
            time.sleep(3600)
        case "raise": raise ValueError("no idea")
        case "sys.exit": sys.exit(3)
        case "os._exit": os._exit(3)
        case "segfault": ctypes.string_at(0)
        case "none": return None
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "text": return "good"
    return float(len(text))

def score(completions, gold=None, log_metric=None, log_extra=None, **kwargs):
    """Grades."""
    rewards = [act(text) for text in completions]
    if log_metric: log_metric("letters", sum(map(len, completions)) / len(completions))
    if log_extra: log_extra("upper", [text.upper() for text in completions])
    return [*rewards, 1.0] if "too many" in completions else rewards

async def later(completions, **kwargs):
    if "sleep" in completions:
        await asyncio.sleep(3600)
    if "stubborn" in completions:
        while True:
            try: await asyncio.sleep(3600)
            except asyncio.CancelledError: pass
    return [act(text) for text in completions]

def where(completions, **kwargs):
    return [os.getpid()] * len(completions)

def scaled(completions, factor, offset=0, **kwargs):
    return [factor * len(text) + offset for text in completions]

def words(completions, completion_ids, tokenizer, **kwargs):
    return [len(tokenizer.decode(ids).split()) for ids in completion_ids]

def steps(completions, trainer_state, **kwargs):
    assert "transformers" not in sys.modules
    return [trainer_state.global_step] * len(completions)

def slow(completions, **kwargs):
    time.sleep(0.3 * len(completions))
    return [1.0] * len(completions)

def broken(completions, **kwargs):
    return [1 / 0 for _ in completions]

def messages_only(completions, **kwargs):
    return [len(messages[-1]["content"]) for messages in completions]
'''

# How each failure is called, and what the console says of it.
FAULTS = {
    "spin": ("timeout", "passed its timeout of 0.4 s"),
    "sleep": ("timeout", "passed its timeout of 0.4 s"),
    "raise": ("raised", "failed: ValueError: no idea"),
    "sys.exit": ("raised", "failed: SystemExit: 3"),
    "os._exit": ("died", "ended its worker process"),
    "segfault": ("died", "ended its worker process"),
    "none": ("none", "returned None"),
    "nan": ("not_finite", "returned nan"),
    "inf": ("not_finite", "returned inf"),
    "text": ("not_finite", "returned str 'good', not a number"),
    "too many": ("wrong_length", "returned 2 rewards for 1 completions"),
}


@dataclass
class Called:
    """A reward function, with everything that it says kept."""

    reward: NamedReward
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    reports: list[FailureReport] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reward.guard.report = self.reports.append
        self.reward.guard.say = self.said.append

    def __call__(self, *completions: str, **columns: Any) -> list[float | None]:
        columns.setdefault("trainer_state", None)
        columns.setdefault("completion_ids", [[1]] * len(completions))
        rewards = self.reward.func(
            prompts=["p"] * len(completions),
            completions=list(completions),
            log_metric=lambda name, value: self.metrics.append((name, value)),
            log_extra=lambda column, values: self.extras.setdefault(column, []).extend(values),
            **columns,
        )
        return asyncio.run(rewards) if asyncio.iscoroutine(rewards) else rewards

    @property
    def shares(self) -> dict[str, float]:
        prefix = f"reward/{self.reward.name}/"
        return {name.removeprefix(prefix): value for name, value in self.metrics if name.startswith(prefix)}


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    loaded = []

    def load_one(name: str, **keys: Any) -> Called:
        entry = check_section(RewardEntry, {"use": f"{tmp_path / 'mine.py'}:{name}", **keys}, source="test")
        (reward,) = load_rewards([entry])
        loaded.append(reward)
        return Called(reward)

    yield load_one
    for reward in loaded:
        pool = getattr(reward.guard.calls, "_pool", None)
        if pool is not None:
            pids = [pool._nursery.pid, *(worker.pid for worker in pool._workers)] if pool._nursery else []
            pool.close()
            assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_error", ["skip", "zero", "fail"])
def test_every_failure_under_every_policy(load, fault, on_error):
    kind, problem = FAULTS[fault]
    score = load("score", on_error=on_error, timeout=0.4)
    completions = ["a", "bb", fault, "dddd"]
    if on_error == "fail":
        if fault == "too many":
            problem = "returned 5 rewards for 4 completions"
        with pytest.raises(RewardError) as caught:
            score(*completions)
        assert str(caught.value).startswith(f"reward function 'score' {problem}")
        if fault != "too many":  # nothing tells which one that is
            assert f"for completion 2 of 4: {fault!r}" in str(caught.value)
        assert ("in act\n" in str(caught.value)) == (kind == "raised")
        assert ("set on_error: skip" in str(caught.value)) == (kind == "none")
        return
    failed = None if on_error == "skip" else 0.0
    assert score(*completions) == [1.0, 2.0, failed, 4.0]
    assert score.shares == {name: 0.25 * (name == kind) for name in KINDS}
    (report,) = score.reports
    assert (report.reward, report.kind, report.completion) == ("score", kind, fault)
    assert problem in report.detail
    assert ("in act\n" in report.traceback) == (kind == "raised")
    assert problem in score.said[-1] or problem in score.said[0]
    said = len(score.said)
    assert score(*completions) == [1.0, 2.0, failed, 4.0]
    assert (len(score.said), len(score.reports)) == (said, 2)  # later ones only count


@pytest.mark.parametrize("fault", ["raise", "none", "nan", "too many"])
def test_the_same_policies_hold_in_the_trainers_process(load, fault):
    assert load("score", isolate=False)("a", fault, "ccc") == [1.0, None, 3.0]
    assert load("score", isolate=False, on_error="zero")("a", fault, "ccc") == [1.0, 0.0, 3.0]
    with pytest.raises(RewardError, match="reward function 'score'"):
        load("score", isolate=False, on_error="fail")("a", fault, "ccc")


def test_order_is_kept_among_many_faults(load):
    score = load("score", timeout=0.5)
    completions = ["x" * (number % 7 + 1) if number % 50 else "os._exit" for number in range(200)]
    completions[17], completions[120] = "spin", "sleep"
    start = time.monotonic()
    rewards = score(*completions)
    assert time.monotonic() - start < 8
    assert rewards == [None if text in FAULTS else float(len(text)) for text in completions]
    assert {name: share * 200 for name, share in score.shares.items() if share} == {"died": 4.0, "timeout": 2.0}


def test_isolate_decides_where_a_function_runs(load):
    assert load("where")("a") != [os.getpid()]
    assert load("where", isolate=False)("a") == [os.getpid()]


def test_a_healthy_function_is_called_with_the_whole_batch(load):
    slow = load("slow", timeout=2)
    start = time.monotonic()
    assert slow("a", "b") == [1.0, 1.0]
    assert time.monotonic() - start >= 0.6
    assert slow.said == []


def test_one_that_is_slow_for_a_batch_goes_on_one_by_one(load):
    slow = load("slow", timeout=0.5, on_error="fail")
    assert slow("a", "b", "c", "d") == [1.0] * 4
    assert slow.shares == dict.fromkeys(KINDS, 0.0)
    assert "From now on 'slow' is called with one completion at a time" in slow.said[0]
    assert slow("a", "b", "c", "d") == [1.0] * 4
    assert len(slow.said) == 1


def test_what_a_killed_call_started_is_killed(load, capfd):
    score = load("score", timeout=0.5)
    assert score("a", "leave a child") == [1.0, None]
    children = [int(line.split()[1]) for line in capfd.readouterr().out.splitlines() if line.startswith("child")]
    assert len(children) == 2  # of the batch, and of the completion alone
    deadline = time.monotonic() + 3
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


@pytest.mark.parametrize("on_error", ["skip", "zero"])
def test_nothing_learnable_ends_the_run(load, on_error):
    with pytest.raises(RewardError, match=r"(?s)no idea, for .* 'raise'.*in act.*All 2 completions .* failed"):
        load("score", on_error=on_error)("raise", "raise")
    assert load("score")("none", "none") == [None, None]  # does not apply


def test_what_is_logged_in_a_worker_arrives(load):
    score = load("score")
    score("a", "bbb")
    assert ("letters", 2.0) in score.metrics
    assert score.extras == {"upper": ["A", "BBB"]}
    score.metrics.clear(), score.extras.clear()
    score("a", "raise", "bbb")
    assert [value for name, value in score.metrics if name == "letters"] == [1.0, 3.0]
    assert score.extras == {"upper": ["A", None, "BBB"]}


@pytest.mark.parametrize("isolate", [True, False])
def test_a_function_that_names_the_tokenizer_gets_it(load, tokenizer, isolate):
    words = load("words", isolate=isolate)
    assert words.reward.columns == ()
    use_tokenizer([words.reward], tokenizer)
    ids = [tokenizer("How many")["input_ids"], tokenizer("How many shells")["input_ids"]]
    assert words("", "", completion_ids=ids) == [2.0, 3.0]


def test_trainer_state_reaches_a_worker(load):
    from transformers import TrainerState

    assert load("steps")("a", trainer_state=TrainerState(global_step=7)) == [7.0]


def test_arguments_of_the_recipe(load):
    scaled = load("scaled", args={"factor": 3, "offset": 1})
    assert scaled("ab", "a") == [7.0, 4.0]
    assert scaled.reward.columns == ()
    with pytest.raises(RewardError, match=r"args.facto is not a parameter .*; did you mean 'factor'"):
        load("scaled", args={"facto": 3})
    with pytest.raises(RewardError, match=r"args.log_metric is what the trainer passes"):
        load("score", args={"log_metric": 3})
    with pytest.raises(RewardError, match=r"args.offset is also a column"):
        check_columns([scaled.reward], ["prompt", "offset"])
    assert load("later")("a") == [1.0]


@pytest.mark.parametrize("fault", ["sleep", "stubborn", "raise", "none", "nan"])
def test_coroutines_have_the_same_policies(load, fault):
    kind = FAULTS.get(fault, ("timeout", ""))[0]
    for on_error, failed in (("skip", None), ("zero", 0.0)):
        later = load("later", timeout=0.3, on_error=on_error)
        start = time.monotonic()
        if fault == "stubborn":  # asyncio.run would wait for it; TRL's loop does not

            async def graded(later=later):
                return await later.reward.func(prompts=[], completions=["a", "stubborn", "ccc"], log_metric=record)

            def record(name, value, later=later):
                later.metrics.append((name, value))

            loop = asyncio.new_event_loop()
            assert loop.run_until_complete(graded()) == [1.0, failed, 3.0]
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False
        else:
            assert later("a", fault, "ccc") == [1.0, failed, 3.0]
        assert time.monotonic() - start < 2
        assert later.shares[kind] == pytest.approx(1 / 3)
    with pytest.raises(RewardError, match="for completion 1 of 3: 'sleep'"):
        load("later", timeout=0.3, on_error="fail")("a", "sleep", "ccc")


def test_keys_that_would_do_nothing_are_refused(load):
    with pytest.raises(RecipeError, match="timeout: has no effect unless isolate is true"):
        load("score", isolate=False, timeout=3)
    with pytest.raises(RecipeError, match="has no effect unless the function is your own"):
        check_section(RewardEntry, {"use": "math", "timeout": 3}, source="test")
    with pytest.raises(RewardError, match="isolate has no effect on an `async def`"):
        load("later", isolate=False)


def test_a_file_that_no_worker_can_load_is_told(tmp_path):
    (tmp_path / "mine.py").write_text(f"import os\nassert os.getpid() == {os.getpid()}\n" + REWARDS)
    (reward,) = load_rewards([check_section(RewardEntry, {"use": f"{tmp_path / 'mine.py'}:score"}, source="test")])
    with pytest.raises(RewardError, match=r"mine.py:score do not start.*isolate: false"):
        reward.func(completions=["a"])


PROBLEMS = [Problem("1+1", "2", None, {"level": 1}, "x:1"), Problem("2+2", "4", None, {"level": 2}, "x:2")]


def test_functions_are_tried_before_a_run(load):
    for name in ("score", "later", "words"):  # the last one waits for its tokenizer
        preflight([load(name).reward], PROBLEMS, None)
    for isolate in (True, False):
        with pytest.raises(RewardError, match=r"(?s)'broken' failed: ZeroDivisionError.*before the run.*in broken"):
            preflight([load("broken", isolate=isolate).reward], PROBLEMS, None)
    messages = load("messages_only").reward
    preflight([messages], PROBLEMS, None)
    preflight([messages], PROBLEMS, None, chat=True)
    with pytest.raises(RewardError, match="'messages_only' failed: TypeError"):
        preflight([messages], PROBLEMS, None, chat=False)
    with pytest.raises(RewardError, match="needs the column 'factor'"):
        preflight([load("scaled").reward], PROBLEMS, None)


def test_two_ranks_have_pools_of_their_own(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "ranks.py").write_text(
        "import json, os\n"
        "import torch.distributed\n"
        "from rltt.recipe import RewardEntry\n"
        "from rltt.rewards import load_rewards\n"
        "torch.distributed.init_process_group('gloo')\n"
        f"entry = RewardEntry(use={str(tmp_path / 'mine.py') + ':score'!r}, timeout=0.5)\n"
        "(reward,) = load_rewards([entry])\n"
        "rank = torch.distributed.get_rank()\n"
        "rewards = reward.func(completions=['x' * (rank + 1)] * 20 + ['spin', 'os._exit'])\n"
        "pool = reward.guard.calls.pool\n"
        "pids = [pool._nursery.pid, *(worker.pid for worker in pool._workers)]\n"
        f"open({str(tmp_path)!r} + f'/rank{{rank}}.json', 'w').write(json.dumps([rewards, pids, pool.size]))\n"
        "torch.distributed.barrier()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(tmp_path / "ranks.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rewards for rewards, _, _ in ranks] == [[float(rank + 1)] * 20 + [None, None] for rank in (0, 1)]
    assert [size for _, _, size in ranks] == [max(1, min(4, len(os.sched_getaffinity(0)) // 2))] * 2
    assert not set(ranks[0][1]) & set(ranks[1][1])
    assert not any(alive(pid) for _, pids, _ in ranks for pid in pids)
