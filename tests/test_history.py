"""A run's metrics read back: what is there, and what is refused with its line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltt.errors import DataError
from rltt.telemetry import HeldOut, read_history

ROWS = [{"step": 1, "kl": 0.0, "grad_norm": None}, {"step": 2, "kl": 1e-3, "eval/solve_rate": 0.5, "eval/stderr": 0.1}]


def written(folder: Path, *lines: Any, end: str = "\n") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return file


def test_a_run_directory_is_read_with_its_recipe_and_its_evaluations(tmp_path: Path) -> None:
    written(tmp_path, *ROWS)
    (tmp_path / "recipe.yaml").write_text("train: {learning_rate: 1e-6, max_steps: 140}\nrewards: [math]\n")
    (tmp_path / "summary.json").write_text(
        '{"eval_before": {"solve_rate": 0.4, "stderr": 0.02}, "eval_after": {"solve_rate": 0.6, "stderr": null}}'
    )
    history = read_history(tmp_path)
    assert history.rows == ROWS
    assert history.settings == {"train.learning_rate": 1e-6, "train.max_steps": 140, "rewards": ["math"]}
    assert (history.total_steps, history.last_step) == (140, 2)
    assert history.held_out == [HeldOut(0, 0.4, 0.02), HeldOut(2, 0.5, 0.1), HeldOut(2, 0.6, None)]
    assert history.series("grad_norm") == ([], [])
    assert history.names == {"kl", "eval/solve_rate", "eval/stderr"}
    assert history.up_to(1).held_out == [HeldOut(0, 0.4, 0.02)]


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    for half in ('{"step": 3, "kl', '{"step": 3, "é'.encode()[:-1].decode("latin-1")):
        assert read_history(written(tmp_path, *ROWS, half, end="")).rows == ROWS
    cut_inside_a_character = written(tmp_path, *ROWS).read_bytes() + '{"step": 3, "é'.encode()[:-1]
    (tmp_path / "metrics.jsonl").write_bytes(cut_inside_a_character)
    assert read_history(tmp_path).rows == ROWS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 3, "kl', ":3: not JSON"),
        ("[3]", ":3: found [3]"),
        ({"kl": 1.0}, ":3: step is missing; it must be a whole number from 0"),
        ({"step": 2}, ":3: step 2 after step 2; steps must ascend"),
        ({"step": 3, "kl": "big"}, ':3: kl is "big"; a metric is a number or null'),
    ],
)
def test_anything_else_is_refused_with_its_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read_history(written(tmp_path, *ROWS, line))
    assert message in str(error.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics.jsonl: no such file; a run that has made no step has none yet"):
        read_history(tmp_path)
    with pytest.raises(DataError, match=r"metrics.jsonl: holds no step"):
        read_history(written(tmp_path, end=""))


def test_a_trainer_state_is_read_with_its_evaluations(tmp_path: Path) -> None:
    log = [
        {"step": 0, "eval_reward": 0.3, "eval_runtime": 1.0},
        {"step": 1, "loss": 0.0, "learning_rate": 1e-6, "reward": 0.25, "kl": float("nan")},
        {"step": 1, "eval_reward": 0.35},
        {"step": 1, "train_runtime": 2.0, "train_loss": 0.0},
    ]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": log, "max_steps": 20}))
    for path in (file, tmp_path):
        history = read_history(path, trl=True)
        assert history.rows == [{"step": 1, "loss": 0.0, "lr": 1e-6, "reward": 0.25, "kl": None, "eval/reward": 0.35}]
        assert history.total_steps == 20
        assert history.before == HeldOut(0, 0.3, None)
    with pytest.raises(DataError, match="read it with --trl"):
        read_history(file)
    file.write_text(json.dumps({"log_history": log[:1]}))
    with pytest.raises(DataError, match=r"log_history has no training step"):
        read_history(file, trl=True)


def test_nothing_of_it_needs_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, rltt.telemetry; assert 'torch' not in sys.modules"], check=True, timeout=60
    )
