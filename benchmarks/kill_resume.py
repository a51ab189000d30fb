"""Kill a run at random moments until it is done, and compare it with one that nobody killed.

    python benchmarks/kill_resume.py                      20 kills of a short quickstart on the CPU
    python benchmarks/kill_resume.py --kills 5 train.max_steps=40

A process is killed (SIGKILL) after a random time, and the same command goes on; after the last kill it is let go. Then
weights, metrics, rollouts and evaluations have to be those of the whole run, to the bit. Prints where each kill fell.
"""

import argparse
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rltt.recipe import load_recipe

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
SHORT = [
    *("data.train.size=512", "data.eval.size=32", "pretrain.max_steps=30", "pretrain.check_every=10"),
    *("train.prompts_per_step=8", "train.max_steps=24", "train.per_device_train_batch_size=32"),
    *("train.updates_per_rollout=2", "train.save_steps=3", "evaluate.every=8"),
]


def train(overrides: list[str]) -> None:
    """One life of a run."""
    from rltt.train import run

    run.train(load_recipe(QUICKSTART, overrides))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="what the processes print; by default it is thrown away")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    # A process that has imported everything, and forks the lives: kills fall on the run, not on imports.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["rltt.train.run"])

    def live(name: str, seconds: float | None) -> tuple[int | None, float]:
        """The exit status of a life, None if it was killed, and how long it took."""
        overrides = [*SHORT, *options.overrides, f"run_dir={folder / name}"]
        life = processes.Process(target=quietly, args=(overrides, options.log))
        start = time.monotonic()
        life.start()
        life.join(seconds)
        if life.exitcode is None:
            life.kill()
            life.join()
        status = None if life.exitcode == -signal.SIGKILL else life.exitcode
        return status, time.monotonic() - start

    status, seconds = live("whole", None)
    if status != 0:
        sys.exit(f"the whole run ended with status {status}")
    print(f"whole run: {seconds:.1f} s")
    longest = seconds / 2
    killed = 0
    while killed < options.kills:
        status, lived = live("killed", dice.uniform(0.5, longest))
        if status is None:
            killed += 1
            print(f"kill {killed:>2} after {lived:5.1f} s: {where(folder / 'killed')}", flush=True)
        elif status == 0:  # done before its time: the next kills fall on another run
            report(folder)
            (folder / "killed").rename(folder / f"done-{killed}")
        else:
            sys.exit(f"a life ended with status {status}")
    status, _ = live("killed", None)
    if status != 0:
        sys.exit(f"the last life ended with status {status}")
    report(folder)


def quietly(overrides: list[str], log: Path | None) -> None:
    """Train with the output in a file."""
    import os

    target = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    train(overrides)


def where(path: Path) -> str:
    """What of a run is there."""
    if not (path / "summary.json").is_file():
        return "before the run directory"
    summary = json.loads((path / "summary.json").read_text())
    warm = len((path / "pretrain.jsonl").read_text().splitlines()) if (path / "pretrain.jsonl").is_file() else 0
    if not (path / "start").is_dir():
        return f"warm start, step {warm}"
    if (path / "policy").is_dir():
        return "after the last step"
    partial = any((path / "checkpoints").glob(".partial/*")) if (path / "checkpoints").is_dir() else False
    return f"RL, step {summary['steps']}" + (", in a save" if partial else "")


def report(folder: Path) -> None:
    """Compare, and end with status 1 if anything differs."""
    if wrong := differences(folder / "killed", folder / "whole"):
        sys.exit(f"differs from the whole run in {', '.join(wrong)} ({folder})")
    resumes = json.loads((folder / "killed" / "summary.json").read_text()).get("resumes", [])
    print(f"equal to the whole run: weights, metrics, rollouts, evaluations; gone on {len(resumes)} times")


def differences(found: Path, wanted: Path) -> list[str]:
    """Names of what is not the same."""
    from safetensors.torch import load_file

    wrong = []
    for name in ("start", "policy"):
        one, other = (load_file(path / name / "model.safetensors") for path in (found, wanted))
        if one.keys() != other.keys() or any(not weight.equal(other[key]) for key, weight in one.items()):
            wrong.append(f"{name}/")
    rollouts = [sorted(file.name for file in (path / "rollouts").iterdir()) for path in (found, wanted)]
    if rollouts[0] != rollouts[1]:
        wrong.append("names of rollouts")
    files = ("pretrain.jsonl", "metrics.jsonl", *(f"rollouts/{file}" for file in rollouts[1]))
    wrong += [name for name in files if rows(found / name) != rows(wanted / name)]
    summaries = [json.loads((path / "summary.json").read_text()) for path in (found, wanted)]
    wrong += [
        key
        for key in ("status", "steps", "pretrain_steps", "eval_before", "eval_after")
        if summaries[0].get(key) != summaries[1].get(key)
    ]
    return wrong


def rows(file: Path) -> list[dict[str, Any]]:
    """Rows without times."""
    if not file.is_file():
        return []
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: row[key] for key in row if "seconds/" not in key and key != "step_time"} for row in read]


if __name__ == "__main__":
    main()
