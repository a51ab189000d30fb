"""Runs in processes of their own that kill themselves at a chosen moment. Imported by tests and by those processes."""

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from datasets import Dataset

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer, processes
from rltt.data.arithmetic import arithmetic_problems
from rltt.recipe import load_recipe
from rltt.train import run

# Forked from one that has imported everything and started no thread.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["rltt.train.run", "deepspeed"])  # the latter where it is installed


def ended(target: Callable[..., None], *args: Any) -> int | None:
    """Exit status of a process that does something."""
    process = PROCESSES.Process(target=target, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def both_ended(target: Callable[..., None], *args: Any) -> list[int]:
    """Exit statuses of two processes that do something together. When one is killed, so is the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [PROCESSES.Process(target=one_of_two, args=(rank, port, target, *args)) for rank in range(2)]
    for process in both:
        process.start()
    multiprocessing.connection.wait([process.sentinel for process in both], 120)
    for process in both:
        process.join(0 if any(other.exitcode == -signal.SIGKILL for other in both) else 60)
        process.kill()  # as the launcher ends those that are left
        process.join()
    return [process.exitcode or 0 for process in both]


def train(recipe: Path, overrides: list[str], moment: tuple[str, int, int] | None = None, rank: int = 0) -> None:
    """Train, and send a signal to one process at the `moment`: the count-th call of a `module:Class.method`."""
    if moment is not None and rank == processes.rank():
        patch(*moment)
    run.train(load_recipe(recipe, overrides))


def one_of_two(rank: int, port: int, target: Callable[..., None], *args: Any) -> None:
    """Do something as one of two processes, as a launcher would have it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    target(*args)


def patch(function: str, count: int, number: int) -> None:
    module_name, _, path = function.partition(":")
    owner: Any = import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def half_a_row(recipe: Path, overrides: list[str]) -> None:
    """Die while the second row of metrics.jsonl is written."""
    rows = 0
    original = run.RunDirectory.log_metrics

    def half(self: Any, row: dict[str, Any], file: str = "metrics.jsonl") -> None:
        nonlocal rows
        rows += file == "metrics.jsonl"
        if rows == 2:
            with (self.path / file).open("a") as out:
                out.write('{"step": 99, "lo')
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, row, file)

    run.RunDirectory.log_metrics = half  # type: ignore[method-assign]
    train(recipe, overrides)


def own_script(policy: Path, out: Path, steps: int, resume: bool) -> None:
    """Train without a recipe, as a script of one's own does, with a checkpoint of each step."""
    problems = arithmetic_problems(1, 8, "train")
    args = RLTTConfig(
        str(out),
        credit="uniform",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=1,
        gradient_checkpointing=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = RLTTTrainer(
        load_policy(str(policy)),
        lambda completions, **_: [sum(map(ord, completion)) % 7 / 3 for completion in completions],
        args,
        Dataset.from_dict({"prompt": [problem.prompt for problem in problems]}),
        processing_class=load_tokenizer(str(policy)),
    )
    trainer.train(resume_from_checkpoint=resume)


def twice(recipe: Path, overrides: list[str]) -> None:
    """Be asked to end, and then once more before the step is done."""
    patch("rltt.train.trainer:RLTTTrainer._compute_loss", 3, signal.SIGTERM)
    patch("rltt.train.trainer:RLTTTrainer._compute_loss", 4, signal.SIGTERM)
    train(recipe, overrides)


def poisoned(recipe: Path, overrides: list[str], steps: set[int]) -> None:
    """Train, with a loss that is NaN on the last process in these steps."""
    compute_loss = run.RLTTTrainer._compute_loss

    def poison(self: Any, *args: Any) -> Any:
        loss = compute_loss(self, *args)
        wrong = self.state.global_step + 1 in steps and self.args.process_index == self.args.world_size - 1
        return loss * math.nan if wrong else loss

    run.RLTTTrainer._compute_loss = poison  # type: ignore[method-assign]
    train(recipe, overrides)
