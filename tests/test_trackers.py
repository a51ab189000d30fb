"""Trackers: what arrives in Trackio and TensorBoard, what a resumed run leaves there, and trackers that fail."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rltt.errors import RecipeError
from rltt.recipe import load_recipe
from rltt.telemetry.trackers import Guarded, NoTracker, require_tracker
from rltt.telemetry.trackers.tracker import exit_distribution, rollout_table
from rltt.telemetry.trackers.trackio import TrackioTracker, project_of
from rltt.train import run


def logged(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The rows that Trackio has of a run, with the step of each."""
    import trackio

    database = Path(trackio.TRACKIO_DIR) / f"{project_of(path)}.db"
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "select step, metrics from metrics where run_name = ? order by id", (name or path.name,)
        ).fetchall()
    return [{"step": step} | json.loads(metrics) for step, metrics in rows]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_trackio_has_every_number_of_a_run(tiny_run: Path) -> None:
    rows = logged(tiny_run)
    for row in written(tiny_run):
        sent = next(found for found in rows if found["step"] == row["step"] and "loss" in found)
        numbers = {name: value for name, value in row.items() if value is not None}
        assert {name: sent[name] for name in numbers} == pytest.approx(numbers)
        exits = sent["exit_distribution"]
        assert exits["_type"] == "trackio.histogram"
        assert sum(exits["values" if "values" in exits else "histogram"]) == pytest.approx(1, abs=1e-4)
    summary = json.loads((tiny_run / "summary.json").read_text())
    assert rows[0]["step"] == 0
    assert rows[0]["eval/solve_rate"] == summary["eval_before"]["solve_rate"]
    assert rows[-1]["eval/solve_rate"] == summary["eval_after"]["solve_rate"]


def test_trackio_has_rollouts_as_a_table(tiny_run: Path) -> None:
    tables = [row["rollouts"] for row in logged(tiny_run) if "rollouts" in row]
    assert len(tables) == 3
    first = json.loads((tiny_run / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    cells = tables[0]["_value"][0]
    assert cells == {name: first[name] for name in ("prompt", "completion", "gold", "reward", "solved", "advantage")}


def test_steps_that_a_resumed_run_makes_again_are_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "again"
    rows = [{"step": step, "kl": step / 10} for step in (1, 2, 3)]
    first = TrackioTracker(path, {}, [])
    for row in rows:
        first.log(int(row["step"]), row)
    first.finish()
    second = TrackioTracker(path, {}, rows[:2])  # went on from a checkpoint at step 2
    second.log(3, {"step": 3, "kl": 7.0})
    second.finish()
    assert [(row["step"], row["kl"]) for row in logged(path)] == [(1, 0.1), (2, 0.2), (3, 7.0)]


def test_alerts_reach_trackio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import trackio

    tracker = TrackioTracker(tmp_path / "told", {}, [])
    tracker.log(4, {"kl": 0.0})
    tracker.alert("stalled: too easy", "mixed_groups 0.02", "warn")
    tracker.finish()
    (alert,) = trackio.Api().alerts(project_of(tmp_path / "told"), run="told")
    assert (alert["title"], alert["text"], alert["level"]) == ("stalled: too easy", "mixed_groups 0.02", "warn")
    assert capsys.readouterr().out == ""  # Trackio would explain itself and print the alert


def test_tensorboard(tiny_recipe: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = run.train(
        load_recipe(
            tiny_recipe, [f"run_dir={tmp_path / 'board'}", "telemetry.tracker=tensorboard", "evaluate.every=null"]
        )
    )
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("kl")] == [
        (row["step"], pytest.approx(row["kl"])) for row in written(path)
    ]
    assert len(events.Histograms("exit_distribution")) == 3
    assert "rollouts/text_summary" in events.Tags()["tensors"]
    assert not (tmp_path / ".trackio").exists()


def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on() -> None:
    class Broken(NoTracker):
        def log(self, step: int, metrics: Any) -> None:
            raise OSError("no space left")

    said: list[str] = []
    with Guarded("trackio", Broken, said.append) as tracker:
        for step in range(5):
            tracker.log(step, {"kl": 0.0})
        tracker.alert("title", "text", "info")
    assert "tracker trackio failed (log): OSError: no space left" in said[0]
    assert said[1:] == ["tracker trackio: 5 calls failed in all; the run directory has every number"]


def test_a_tracker_that_does_not_start_is_told_of() -> None:
    said: list[str] = []

    def start() -> NoTracker:
        raise ConnectionError("no route")

    with Guarded("wandb", start, said.append) as tracker:
        tracker.log(1, {})
    assert len(said) == 1
    assert "wandb failed (start): ConnectionError: no route" in said[0]


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltt.telemetry.trackers.open.find_spec", lambda name: None)
    recipe = load_recipe(tiny_recipe, [f"run_dir={tmp_path / 'no'}", "telemetry.tracker=wandb"])
    with pytest.raises(RecipeError, match=r"telemetry.tracker: wandb is not installed; pip install wandb"):
        run.train(recipe)
    assert not (tmp_path / "no").exists()
    require_tracker("none")


def test_exit_distribution_and_table() -> None:
    assert exit_distribution({"loop1/exit_prob": 0.25, "loop2/exit_prob": 0.75, "loop3/kl": 1.0}) == [0.25, 0.75]
    assert exit_distribution({"kl": 1.0}) == []
    chat = [{"role": "user", "content": "2+2?"}]
    answer = [{"role": "assistant", "content": "4"}]
    row = {"prompt": chat, "completion": answer, "gold": 4, "reward": None, "solved": 1.0, "advantage": 0.5}
    assert rollout_table([row] * 40)[0] == ["2+2?", "4", "4", None, 1.0, 0.5]
    assert len(rollout_table([row] * 40)) == 16
