"""The folder of a run: everything that one needs to read, compare and repeat it.

    recipe.yaml       the resolved recipe, every default written out
    versions.json     packages, Python, git revision
    metrics.jsonl     one object a step
    verdict.json      whether the policy moves, as of the last step: verdict, cause, confidence, evidence, change
    pretrain.jsonl    the same for the warm start, or for `rltt pretrain`
    reward_failures.jsonl   each completion on which a reward function failed, with the traceback; only if there is one
    kept_rows.json    the training rows that data.filter has kept; only with it
    rollouts/         the completions of each step: prompt, completion, gold, rewards, advantage
    start/            the policy that RL started from, where it is not simply the checkpoint of the recipe
    checkpoints/      every train.save_steps steps, to go on from; those of a warm start in checkpoints/pretrain/
    resumes/<n>/      what the n-th resume has cut off: rows, rollouts and policies beyond the step that it went on from
    policy/           the policy at the end, in HF format
    summary.json      evaluation before and after, steps, seconds, status

Files appear whole or not at all, and nothing that is there is ever overwritten.
A run that goes on keeps these files; see resume.py.
"""

import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

from safetensors import SafetensorError

from .. import __version__
from ..errors import UnwrittenError, UserError
from ..files import write_text
from ..processes import is_main
from ..recipe import Recipe
from ..rewards.guard import FailureReport
from ..telemetry import Verdict

Status = Literal["running", "finished", "interrupted", "failed", "preempted"]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "math-verify", "deepspeed", "vllm")


MAX_NONES = 1000
"""Nones of reward functions that are kept: one that applies to some rows alone gives them at every step."""


class RunDirectory:
    """Writes a run. Of several processes only the main one writes, except for failures of reward functions.

    Args:
        recipe: the resolved recipe; its `run_directory` is created.
        resumed: the summary of the run in that folder, when it goes on.

    Raises:
        UserError: the folder holds files already, cannot be written, or another process is running in it.
    """

    def __init__(self, recipe: Recipe, resumed: dict[str, Any] | None = None) -> None:
        if resumed is None:
            check_free(recipe.run_directory)
        self.path = recipe.run_directory
        self.resumed = resumed
        self.started = time.time() - (resumed or {}).get("seconds", 0.0)
        self.summary: dict[str, Any] = (resumed or {"name": recipe.name, "steps": 0}) | {"status": "running"}
        self.summary.pop("error", None)
        self._lock: IO[str] | None = None
        self._nones = 0
        if not is_main():
            return
        try:
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            if resumed is None:
                write_text(self.path / "versions.json", json.dumps(_versions(), indent=2) + "\n")
            self._lock = lock(self.path / "versions.json")
            write_text(self.path / "recipe.yaml", recipe.to_yaml())
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the run directory: {error}") from error
        self._write_summary()

    def note_resume(self, step: int) -> None:
        """Note in the summary that the run goes on from a step, and what it was after an earlier end."""
        if not is_main():
            return
        versions = json.loads((self.path / "versions.json").read_text(encoding="utf-8"))
        changed = {key: now for key, now in _versions().items() if versions.get(key) != now}
        entry = {"step": step, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | ({"versions": changed} if changed else {})
        if "eval_after" in self.summary:
            entry["eval_after"] = self.summary.pop("eval_after")
        self.update_summary(steps=step, resumes=[*self.summary.get("resumes", []), entry])

    def remove_partial(self) -> None:
        """Remove what a killed process left half written."""
        for left in self.path.rglob(".*.partial"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """What has been logged so far."""
        if not (self.path / file).is_file():
            return []
        return [json.loads(line) for line in (self.path / file).read_text(encoding="utf-8").splitlines()]

    def log_metrics(self, row: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Append one step. NaN and infinities, which JSON does not have, become null."""
        if not is_main():
            return
        with written(self.path / file) as path, path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(finite(row)) + "\n")

    def write_verdict(self, verdict: Verdict) -> None:
        """The verdict of the last step, in place of the one before."""
        if not is_main():
            return
        with written(self.path / "verdict.json") as path:
            write_text(path, json.dumps(verdict.to_dict(), indent=2, ensure_ascii=False) + "\n")

    def write_rollouts(self, rows: list[dict[str, Any]]) -> None:
        """The completions of one rollout, in a file named after the first step that uses them."""
        if not is_main():
            return
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        with written(self.path / "rollouts" / f"step_{rows[0]['step']:06d}.jsonl") as path:
            write_text(path, "\n".join(lines) + "\n")

    def log_reward_failure(self, report: FailureReport) -> None:
        """Append one failure of a reward function; of those that gave None the first ones, for it may be an answer."""
        if report.kind == "none":
            self._nones += 1
            if self._nones > MAX_NONES:
                return
        with written(self.path / "reward_failures.jsonl") as path, path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(report), ensure_ascii=False, default=str) + "\n")

    def save_policy(
        self, model: Any, tokenizer: Any, name: str = "policy", weights: dict[str, Any] | None = None
    ) -> None:
        """Save in HF format, into a folder that appears when it is complete.

        Args:
            weights: those of the model where it does not hold them itself; None: its own.
        """
        if not is_main():
            return
        partial, final = self.path / f".{name}.partial", self.path / name
        with written(partial):
            if partial.exists():
                shutil.rmtree(partial)
            model.save_pretrained(partial, state_dict=weights)
            model.config.save_pretrained(partial)  # adapters do not bring it, and the depth is in it
            tokenizer.save_pretrained(partial)
        if final.exists():
            raise UserError(f"{final}: exists already and is not overwritten; the new one is in {partial}")
        os.replace(partial, final)

    def update_summary(self, **values: Any) -> None:
        """Add to summary.json, which is on disk and whole at any time."""
        self.summary |= values | {"seconds": round(time.time() - self.started, 1)}
        self._write_summary()

    def close(self, status: Status, **values: Any) -> None:
        """Write the final status."""
        try:
            self.update_summary(status=status, **values)
        finally:
            if self._lock is not None:
                self._lock.close()

    def _write_summary(self) -> None:
        if not is_main():
            return
        with written(self.path / "summary.json") as path:
            write_text(path, json.dumps(self.summary, indent=2) + "\n")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Tell which file could not be written, and that nothing but the last steps is lost.

    Raises:
        UnwrittenError: in place of the system's error.
    """
    try:
        yield path
    except (OSError, SafetensorError) as error:
        raise UnwrittenError(
            f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}; "
            "see to it, and start the run again to go on from its last checkpoint"
        ) from error


def record_failure(path: Path, error: str, since: float) -> None:
    """Write why the processes of a run ended, which the one that writes may not have known or lived to write.

    Args:
        since: when they were started, in seconds since the epoch: an older summary is another run's.
    """
    file = path / "summary.json"
    if file.exists() and file.stat().st_mtime >= since:
        summary = json.loads(file.read_text(encoding="utf-8"))
        write_text(file, json.dumps(summary | {"status": "failed", "error": error}, indent=2) + "\n")


def is_preempted(path: Path, since: float) -> bool:
    """Whether the run has saved itself after a SIGTERM, since then."""
    file = path / "summary.json"
    if not file.exists() or file.stat().st_mtime < since:
        return False
    return bool(json.loads(file.read_text(encoding="utf-8"))["status"] == "preempted")


def checkpoints_of(path: Path) -> Path:
    """Where a run directory keeps the checkpoints made on the way."""
    return path / "checkpoints"


def check_free(path: Path) -> None:
    """Refuse a folder that is in use: asked before anything is loaded.

    Raises:
        UserError: the folder holds files, or the path is a file.
    """
    if not is_main():  # the main process may have begun to write by now
        return
    if path.is_file():
        raise UserError(f"{path}: is a file; the run needs a folder (run_dir=…)")
    if path.exists() and any(path.iterdir()):
        raise UserError(
            f"{path}: holds a run already, which is not overwritten; give another folder "
            f"(run_dir={_free_name(path)}) or remove this one"
        )


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A step with None for NaN and infinities."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def lock(file: Path) -> IO[str]:
    """Hold a run by one of its files; the system lets go of it when this process ends, however it ends.

    Raises:
        UserError: another process holds it.
    """
    opened = file.open("r+", encoding="utf-8")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{file.parent}: another process is running in it; wait for it, or end it") from None
    except OSError:  # a file system without locks: nothing to hold
        pass
    return opened


def _free_name(path: Path) -> Path:
    return next(candidate for n in range(2, 10_000) if not (candidate := path.with_name(f"{path.name}-{n}")).exists())


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"rltt": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"git": _git_revision()}


def _git_revision() -> str | None:
    """Commit of the repository that the run was started in, marked when it had changes; None outside of one."""
    try:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return revision.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
