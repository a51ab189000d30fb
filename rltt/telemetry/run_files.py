"""A run directory, read to be shown: by the dashboard, the report and `rltt watch`."""

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rltt.errors import UserError
from rltt.recipe.yaml_dialect import parse_yaml
from rltt.telemetry.history import History, read_history
from rltt.telemetry.verdict import judge

Rollout = dict[str, Any]
"""One completion, as `RLTTTrainer` writes it: prompt, completion, gold, rewards, reward, solved, advantage."""


@dataclass(frozen=True)
class RunFiles:
    """What a run directory holds at the moment of asking.

    Attributes:
        path: the run directory.
    """

    path: Path

    @property
    def name(self) -> str:
        """Name of the folder, which is unique among the runs beside it."""
        return self.path.resolve().name

    @cached_property
    def history(self) -> History:
        """The metrics; one without a step where none was made yet."""
        if not (self.path / "metrics.jsonl").is_file():
            return History([], str(self.path / "metrics.jsonl"))
        return read_history(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return self._json("summary.json")

    @cached_property
    def versions(self) -> dict[str, Any]:
        """versions.json."""
        return self._json("versions.json")

    @cached_property
    def recipe(self) -> str:
        """The resolved recipe, as text."""
        file = self.path / "recipe.yaml"
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved recipe."""
        found = parse_yaml(self.recipe, source=str(self.path / "recipe.yaml"))
        return found if isinstance(found, dict) else {}

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """verdict.json; where a run has none, the verdict on its metrics. Keys: see `Verdict`."""
        return self._json("verdict.json") or judge(self.history).to_dict()

    @property
    def status(self) -> str:
        """How the run stands: that of summary.json, and `killed` where nothing runs in a folder that says `running`."""
        status = str(self.summary.get("status", "unknown"))
        return "killed" if status == "running" and not self._held() else status

    @cached_property
    def rollout_steps(self) -> list[int]:
        """Steps with a file of completions."""
        return sorted(int(file.stem.removeprefix("step_")) for file in (self.path / "rollouts").glob("step_*.jsonl"))

    def rollout(self, step: int) -> Sequence[Rollout]:
        """The completions of a step."""
        file = self.path / "rollouts" / f"step_{step:06d}.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found if isinstance(found, dict) else {}

    def _held(self) -> bool:
        """Whether a process is running in the folder: it holds versions.json."""
        file = self.path / "versions.json"
        if not file.is_file():
            return False
        with file.open(encoding="utf-8") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def title_of(verdict: dict[str, Any]) -> str:
    """A verdict in one line: `stalled (97%): too easy`."""
    if verdict["verdict"] == "undecided":
        return "undecided"
    sure = f"{verdict['verdict']} ({verdict['confidence']:.0%})"
    return sure if verdict["cause"] is None else f"{sure}: {verdict['cause'].replace('_', ' ')}"


def lines_of(verdict: dict[str, Any]) -> list[str]:
    """What a verdict rests on, and what to change."""
    lines = [
        f"{item['metric']} {item['value']:.3g} (steps {item['steps'][0]}-{item['steps'][1]}): {item['meaning']}"
        for item in verdict["evidence"]
    ]
    if change := verdict["change"]:
        override, advice = change["override"], change["advice"]
        lines.append("change: " + (advice if override is None else f"{override}   ({advice})"))
    return lines


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return (path / "recipe.yaml").is_file() and (path / "summary.json").is_file()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories, from run directories and folders of them.

    Raises:
        UserError: a path is neither.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if is_run(path) else sorted(run for run in path.glob("*") if is_run(run))
        if not inside:
            what = "holds no runs" if path.is_dir() else "no such folder"
            raise UserError(f"{path}: {what}; a run directory has recipe.yaml and summary.json, as `rltt train` writes")
        found += [run for run in inside if run not in found]
    return found


def require_one_run(path: Path) -> RunFiles:
    """A run directory.

    Raises:
        UserError: the path is none.
    """
    if not is_run(path):
        runs = sorted(run for run in path.glob("*") if is_run(run)) if path.is_dir() else []
        hint = f"; the runs in it: {', '.join(str(run) for run in runs[:5])}" if runs else ""
        raise UserError(f"{path}: is not a run directory, which has recipe.yaml and summary.json{hint}")
    return RunFiles(path)
