"""Going on with a run that ended before its time: which run, which changes of its recipe, and from where.

What a run wrote beyond the checkpoint that it goes on from is set aside in `resumes/<n>/`, so that each file has each
step once, and nothing is lost.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_text
from ..processes import is_main, of_main
from ..recipe import Recipe, load_recipe
from ..telemetry.history import flat
from .checkpoint import checkpoints_in, last_whole
from .run_directory import RunDirectory, check_free, lock

FREE = frozenset(
    {
        *("run_dir", "train.max_steps", "train.save_steps", "train.save_total_limit"),
        "train.max_nonfinite_steps",
        *("evaluate.every", "evaluate.before", "evaluate.after"),
        *("rollout.parity_check_rollouts", "rollout.vllm_server", "rollout.vllm_gpu_memory_utilization"),
        *("rollout.vllm_timeout", "telemetry.tracker", "telemetry.diagnose_every"),
    }
)
"""Keys that may change while a run goes on: they decide how long, and what is looked at, but not what is learned."""

_USED_UP = "the run began with it; start a new run from its policy"
_COUNTED = "steps are counted in it, and the place in the data with them"
FIXED = {
    **dict.fromkeys(("policy", "data", "pretrain"), _USED_UP),
    "objective.credit": "learned credit weights are part of the checkpoint",
    **dict.fromkeys(("rollout.num_generations", "train.prompts_per_step"), _COUNTED),
    **dict.fromkeys(("train.updates_per_rollout", "train.num_iterations"), _COUNTED),
    "train.seed": _USED_UP,
}
"""Keys, and sections, that cannot change while a run goes on, and why."""


def unfinished(
    recipe: Recipe, resume: bool, accept: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """The summary of the run that this recipe goes on with, or None when it begins a new one.

    Only the main process finds out; the others are told when they are connected.

    Args:
        resume: the user has asked to go on; otherwise it happens when the run directory holds an unfinished run of
            the same recipe.
        accept: keys that may differ from the recipe of that run.

    Raises:
        UserError: there is nothing to go on with, the run is under way, or the recipe has changed in more than the
            keys of `accept` and `FREE`.
    """
    if not is_main():
        return None
    path = recipe.run_directory
    files = (path / "summary.json", path / "recipe.yaml", path / "versions.json")
    if not all(file.is_file() for file in files):
        if resume:
            raise UserError(f"{path}: holds no run to go on with; leave --resume out to begin one")
        check_free(path)
        if accept:
            raise UserError(f"--accept-change {accept[0]}: {path} holds no run yet")
        return None
    lock(files[2]).close()  # told now, not after a model has loaded
    summary: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    if summary["status"] == "finished" and not resume:
        check_free(path)
    changes = differences(load_recipe(files[1]), recipe)
    check_changes(path, changes, accept)
    if summary["status"] == "finished" and "train.max_steps" not in changes:
        raise UserError(f"{path}: the run has finished its {summary['steps']} steps; raise train.max_steps to go on")
    say(f"{path}: holds a run that was {_how_it_ended(summary)} at step {summary['steps']}; going on with it")
    for key, (was, now) in changes.items():
        if key != "run_dir":
            say(f"  {key}: {was!r} is now {now!r}")
    return summary


def differences(was: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Values of the keys, such as train.max_steps, in which two recipes differ."""
    old, new = flat(was.model_dump()), flat(now.model_dump())
    missing = object()
    return {
        key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key, missing) != new.get(key, missing)
    }


def check_changes(path: Path, changes: Mapping[str, tuple[Any, Any]], accept: Sequence[str]) -> None:
    """Refuse changes of a recipe that the user has not accepted, or that no run can go on with.

    Raises:
        UserError: names each of them, with both values and what can be done.
    """
    idle = [key for key in accept if key not in changes]
    if idle:
        raise UserError(f"--accept-change {idle[0]}: the recipe says the same of it as the run in {path}")
    fixed, open_ = [], []
    for key, (was, now) in changes.items():
        reason = _fixed(key, was, now)
        line = f"{key}: was {was!r}, is {now!r}"
        if reason is not None:
            fixed.append(f"{line} ({reason})")
        elif key not in FREE and key not in accept:
            open_.append(line)
    if fixed or open_:
        keys = [line.partition(":")[0] for line in open_]
        hints = ["begin a new run (run_dir=…), or put the recipe back as it was"]
        if not fixed:
            hints.append("or go on with the change: " + " ".join(f"--accept-change {key}" for key in keys))
        raise UserError(
            "\n".join([f"{path}: holds a run of another recipe:", *(f"  {line}" for line in (*fixed, *open_)), *hints])
        )


def _fixed(key: str, was: Any, now: Any) -> str | None:
    if key == "objective.credit" and "learned" not in (was, now):
        return None
    return next((why for fixed, why in FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)


def _how_it_ended(summary: Mapping[str, Any]) -> str:
    status = str(summary["status"])
    return "killed" if status == "running" else status


def rewind(run: RunDirectory, folder: Path, files: Sequence[str], say: Callable[[str], None]) -> str | None:
    """Put a run that goes on back to its newest whole checkpoint, and return that; None begins training at step 0.

    Args:
        folder: of the checkpoints.
        files: what training writes to the run directory a row at a time, each with its `step`.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    if run.resumed is None:
        return None
    found: str | None = of_main(_rewind(run, folder, files, say) if is_main() else None)
    return found


def _rewind(run: RunDirectory, folder: Path, files: Sequence[str], say: Callable[[str], None]) -> str | None:
    checkpoint, damage = last_whole(folder)
    for line in damage:
        say(f"damaged checkpoint, not used: {line}")
    step = 0 if checkpoint is None else checkpoint.step
    for newer in checkpoints_in(folder):
        if newer.step > step:
            newer.path.rename(_free(newer.path.with_name(f"{newer.path.name}.damaged")))
    aside = cut_back(run, step, files)
    run.note_resume(step)
    said = f"going on from step {step}" + (f" ({checkpoint.path})" if checkpoint else ", no checkpoint was made yet")
    say(said + (f"; what was written beyond it is in {aside}" if aside else ""))
    return None if checkpoint is None else str(checkpoint.path)


def cut_back(run: RunDirectory, step: int, files: Sequence[str]) -> Path | None:
    """Set aside what was written beyond a step, and return where, or None if there was nothing.

    The rows of `files`, the rollouts that later steps begin with, and the policy that an interruption left.
    """
    aside = run.path / "resumes" / str(len(run.summary.get("resumes", [])) + 1)

    def beside(name: str) -> Path:
        place = aside / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    for name in files:
        kept, tail = _split(run.path / name, step)
        if tail:
            with beside(name).open("a", encoding="utf-8") as out:
                out.write(tail)
            if kept:
                write_text(run.path / name, kept)
            else:
                (run.path / name).unlink()
    for file in sorted((run.path / "rollouts").glob("step_*.jsonl")):
        if int(file.stem.removeprefix("step_")) > step:
            os.replace(file, beside(f"rollouts/{file.name}"))
    if (run.path / "policy").is_dir():
        os.rename(run.path / "policy", _free(beside("policy")))
    run.remove_partial()
    return aside if aside.is_dir() else None


def _split(file: Path, step: int) -> tuple[str, str]:
    """Rows up to a step, and the rest: later rows, and a line that broke off."""
    if not file.is_file():
        return "", ""
    kept: list[str] = []
    tail: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            later = json.loads(line)["step"] > step
        except json.JSONDecodeError:
            later = True
        (tail if later else kept).append(line)
    return "".join(kept), "".join(tail)


def _free(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}.{time.time_ns()}")
