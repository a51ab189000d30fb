"""Runs that end before their time, and go on: killed, asked to end, with another recipe."""

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed
import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("quick_collections")

RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data:
  train: {path: arithmetic, difficulty: 1, size: 16}
  eval: {path: arithmetic, difficulty: 1, size: 8, split: test}
rewards: ["my_rewards.py:letters", math]
objective: {credit: learned, loss_type: reinforce, credit_learning_rate: 0.1}
pretrain: {max_steps: 5, batch_size: 8, stop_at_solve_rate: 0.99, check_every: 2}
rollout: {num_generations: 2, max_completion_length: 8, parity_check_rollouts: 2}
train:
  {prompts_per_step: 4, max_steps: 9, learning_rate: 1.0e-2, per_device_train_batch_size: 4, updates_per_rollout: 2,
   save_steps: 3, lr_scheduler_type: cosine}
evaluate: {num_generations: 2, every: 4}
"""
REWARDS = """\
def letters(completions, **kwargs):
    return [sum(map(ord, text)) % 7 / 3 for text in completions]
"""
# Runs are killed in processes of their own, forked from one that has imported everything and started no thread.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["killed"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: row[key] for key in row if "seconds/" not in key and key != "step_time"} for row in rows]


def summary_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "summary.json").read_text())


def ended(target: Callable[..., None], *args: Any) -> int | None:
    process = PROCESSES.Process(target=target, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def assert_same(path: Path, whole: Path) -> None:
    """The run in `path` ended as the whole one: weights, rows, rollouts, evaluations."""
    for name in ("start", "policy"):
        found, wanted = (load_file(run / name / "model.safetensors") for run in (path, whole))
        assert found.keys() == wanted.keys()
        for key, weight in wanted.items():
            assert weight.equal(found[key]), f"{name}: {key}"
    for name in ("pretrain.jsonl", "metrics.jsonl"):
        assert rows_of(path / name) == rows_of(whole / name)
    rollouts = [sorted(file.name for file in (run / "rollouts").iterdir()) for run in (path, whole)]
    assert rollouts[0] == rollouts[1]
    for name in rollouts[1]:
        assert rows_of(path / "rollouts" / name) == rows_of(whole / "rollouts" / name)
    found, wanted = summary_of(path), summary_of(whole)
    for key in ("status", "steps", "pretrain_steps", "eval_before", "eval_after", "credit"):
        assert found[key] == wanted[key], key


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert ended(killed.train, folder / "tiny.yaml", [f"run_dir={path}"]) == 0
    return path


# The function, the call of it, at which the process dies; each life goes on where the one before died.
TRAINER = "rltt.train.trainer:RLTTTrainer"
LIVES = [
    ("loading", "rltt.train.run:load", 1),
    ("in the warm start, before its first checkpoint", "rltt.train.pretrain:LoopLMTrainer.compute_loss", 2),
    ("in the warm start, after it", "rltt.train.pretrain:LoopLMTrainer.compute_loss", 5),
    ("while start/ is saved", "rltt.train.run:RunDirectory.save_policy", 1),
    ("in the evaluation before", "rltt.train.run:measure", 1),
    ("in the first rollout", f"{TRAINER}._calculate_rewards", 1),
    ("in an update, between two micro-batches", f"{TRAINER}._compute_loss", 8),
    ("in an update, before the first checkpoint", f"{TRAINER}._compute_loss", 4),
    ("while a checkpoint is written", "rltt.train.checkpoint:write_manifest", 1),
    ("before a checkpoint gets its name", "rltt.train.checkpoint:publish", 1),
    ("before old checkpoints are removed", "rltt.train.checkpoint:rotate", 1),
    ("inside a rollout of two updates", f"{TRAINER}._compute_loss", 1),
    ("in a rollout", f"{TRAINER}._calculate_rewards", 1),
    ("in an update after that", f"{TRAINER}._compute_loss", 6),
    ("in an evaluation on the way", "rltt.train.run:measure", 1),
    ("before the policy is saved", "rltt.train.run:save_trained", 1),
    ("in the evaluation after", "rltt.train.run:measure", 1),
]


def test_a_run_that_is_killed_again_and_again_ends_as_the_whole_one(folder: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "killed"
    for what, function, count in LIVES:
        status = ended(killed.train, folder / "tiny.yaml", [f"run_dir={path}"], (function, count, signal.SIGKILL))
        assert status == -signal.SIGKILL, what
    assert ended(killed.half_a_row, folder / "tiny.yaml", [f"run_dir={path}", "train.max_steps=12"]) == -signal.SIGKILL
    assert ended(killed.train, folder / "tiny.yaml", [f"run_dir={path}"]) == 0
    assert_same(path, whole)
    assert not list(path.rglob("*.partial"))
    assert [entry["step"] for entry in summary_of(path)["resumes"]] == sorted(
        entry["step"] for entry in summary_of(path)["resumes"]
    )
