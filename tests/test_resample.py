"""rollout.resample_uniform: uniform groups give way to fresh prompts, within a budget, at a cost that is told."""

import json
import signal
from pathlib import Path
from typing import Any

import killed
import pytest
import torch
from datasets import Dataset
from killed import both_ended, ended
from transformers import PreTrainedTokenizerFast

from rltt.data.arithmetic import arithmetic_problems
from rltt.errors import RecipeError, UserError
from rltt.models.load import load_policy
from rltt.recipe import load_recipe
from rltt.train.config import RLTTConfig
from rltt.train.trainer import RLTTTrainer

pytestmark = pytest.mark.usefixtures("quick_collections")

ROWS, PROMPTS, GROUP = 40, 8, 4


def odd_rows_are_mixed(completions: list[str], row: list[int], **_: Any) -> list[float]:
    """The groups of even rows are all right; of an odd row every other completion is."""
    return [1.0 if number % 2 == 0 else float(index % 2) for index, number in enumerate(row)]


def all_right(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 96 for text in completions]


@pytest.fixture
def train(tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    """Trains, and returns the trainer and the rows that each rollout was trained on."""

    def run(reward: Any, rows: int = ROWS, start: bool = True, **options: Any) -> tuple[RLTTTrainer, list[Any]]:
        problems = arithmetic_problems(1, rows, "train")
        data = Dataset.from_dict(
            {"prompt": [p.prompt for p in problems], "gold": [p.gold for p in problems], "row": list(range(rows))}
        )
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": PROMPTS * GROUP // 8,
            "num_generations": GROUP,
            "max_completion_length": 8,
            "max_steps": 1,
            "learning_rate": 1e-3,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "seed": 0,
            "disable_tqdm": True,
        }
        written: list[Any] = []
        trainer = RLTTTrainer(
            load_policy(str(tiny_ouro)),
            reward,
            RLTTConfig(**settings | options),
            data,
            processing_class=tokenizer,
            rollout_writer=written.append,
        )
        if start:
            trainer.train()
        return trainer, written

    return run


def logged(trainer: RLTTTrainer) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def test_uniform_groups_are_replaced_and_the_cost_is_told(train: Any) -> None:
    plain, dealt = train(odd_rows_are_mixed)
    trainer, (rollout,) = train(odd_rows_are_mixed, resample_uniform=True)
    (row,), (without,) = logged(trainer), logged(plain)
    kept = [entry["row"] for entry in rollout]
    assert len(kept) == PROMPTS * GROUP
    assert len(set(kept)) == PROMPTS
    assert all(number % 2 for number in kept)
    # Groups that were mixed stay where they were.
    before = [entry["row"] for entry in dealt[0]]
    even = sum(number % 2 == 0 for number in before) / GROUP
    assert 0 < even < PROMPTS
    assert [new for old, new in zip(before, kept, strict=True) if old % 2] == [old for old in before if old % 2]
    assert row["resample/uniform_before"] == even / PROMPTS
    assert row["resample/replaced"] == even
    assert row["resample/prompts"] >= even
    assert row["resample/rounds"] >= 1
    # What a run tells of its progress is measured on the prompts as they were dealt; the signal on what is trained on.
    for name in ("solve_rate", "reward", "rewards/odd_rows_are_mixed/mean", "reward_std", "completions/mean_length"):
        assert row[name] == without[name], name
    assert (without["mixed_groups"], row["mixed_groups"]) == (1 - even / PROMPTS, 1.0)
    assert row["frac_reward_zero_std"] == 0.0
    # Prompts and gold belong together, advantages to their rewards, log-probs to their tokens.
    problems = arithmetic_problems(1, ROWS, "train")
    for index, entry in enumerate(rollout):
        assert entry["prompt"] == problems[entry["row"]].prompt
        assert entry["gold"] == problems[entry["row"]].gold
        assert entry["reward"] == index % 2
        assert (entry["advantage"] > 0) == (entry["reward"] > 0)
    assert row["parity/max"] < 1e-5
    assert row["num_tokens"] > 1.2 * without["num_tokens"]


def test_the_budget_is_the_end_of_it(train: Any) -> None:
    trainer, (rollout,) = train(all_right, resample_uniform=True, resample_budget=1.5)
    _, dealt = train(all_right)
    (row,) = logged(trainer)
    assert row["resample/prompts"] == 1.5 * PROMPTS
    assert row["resample/rounds"] == 2  # eight, and the four that are left
    assert row["resample/replaced"] == 0
    assert row["mixed_groups"] == 0
    assert [entry["row"] for entry in rollout] == [entry["row"] for entry in dealt[0]]
    assert row["resample/uniform_before"] == 1


def test_nothing_changes_where_every_group_is_mixed(train: Any) -> None:
    (plain, before), (trainer, after) = (train(letters, resample_uniform=on, max_steps=2) for on in (False, True))
    assert [row["resample/prompts"] for row in logged(trainer)] == [0, 0]
    assert before == after
    for name, weight in plain.policy.state_dict().items():
        assert torch.equal(weight, trainer.policy.state_dict()[name]), name


def test_the_updates_of_one_rollout_share_its_fresh_groups(train: Any) -> None:
    options = {"steps_per_generation": 8, "num_iterations": 2, "max_steps": 4, "per_device_train_batch_size": 8}
    trainer, rollouts = train(odd_rows_are_mixed, resample_uniform=True, **options)
    assert len(rollouts) == 1
    assert [entry["row"] % 2 for entry in rollouts[0]] == [1] * 2 * PROMPTS * GROUP
    assert "old_loop_log_probs" in trainer._buffered_inputs[0]
    # The ratio of the first update is 1: old log-probs are those of the fresh tokens.
    assert logged(trainer)[0]["clip_ratio/region_mean"] == 0
    assert logged(trainer)[0]["kl"] < 1e-12


def test_fresh_prompts_are_those_that_a_rollout_does_not_have(train: Any) -> None:
    """Of nine rows eight are dealt: the ninth is the only fresh one."""
    trainer, (rollout,) = train(all_right, rows=PROMPTS + 1, resample_uniform=True)
    (row,) = logged(trainer)
    assert row["resample/prompts"] == 1
    assert len({entry["row"] for entry in rollout}) == PROMPTS


def test_what_cannot_be_resampled_is_refused(train: Any, tiny_recipe: Path) -> None:
    with pytest.raises(UserError, match="a rollout takes 8 prompts, and the training data has no more than these 8"):
        train(all_right, rows=PROMPTS, start=False, resample_uniform=True)
    with pytest.raises(UserError, match=r"resample_budget: 0.1 of the 8 prompts of a rollout is not one prompt"):
        train(all_right, start=False, resample_uniform=True, resample_budget=0.1)
    with pytest.raises(ValueError, match="resample_budget must be above 0"):
        train(all_right, start=False, resample_budget=0.0)
    with pytest.raises(RecipeError, match=r"rollout.resample_budget: has no effect unless resample_uniform is true"):
        load_recipe(tiny_recipe, ["rollout.resample_budget=1.0"])


# ---------------------------------------------------------------------------------------------- resumed, and in several

RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data: {train: {path: arithmetic, difficulty: 1, size: 24}}
rewards: [{use: "halves.py:halves", isolate: false}]
objective: {credit: final}
rollout: {num_generations: 2, max_completion_length: 8, resample_uniform: true}
train:
  {prompts_per_step: 4, max_steps: 6, learning_rate: 1.0e-2, per_device_train_batch_size: 4, updates_per_rollout: 2,
   save_steps: 1}
telemetry: {tracker: none}
"""
# By the prompt's own name, so that several processes come to the rewards of one; half of the groups are uniform. A
# group of two may lie in two processes, one completion in each.
HALVES = """\
import os
def halves(completions, row, **kwargs):
    numbers = [int(name.rpartition(":")[2]) for name in row]
    first = int(os.environ.get("RANK", "0"))
    return [float(i % 2) if number % 2 else 1.0 for i, number in enumerate(numbers, first)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resample")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "halves.py").write_text(HALVES)
    return folder


def metrics_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if "seconds/" not in key and key != "step_time"} for row in rows]


def rows_of(path: Path) -> list[list[str]]:
    files = sorted((path / "rollouts").iterdir())
    return [[json.loads(line)["row"] for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    assert ended(killed.train, folder / "tiny.yaml", [f"run_dir={path}"]) == 0
    return path


def test_a_killed_run_goes_on_with_the_same_fresh_prompts(folder: Path, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed"
    life = (killed.train, folder / "tiny.yaml", [f"run_dir={path}"])
    trainer = "rltt.train.trainer:RLTTTrainer"
    lives = [(f"{trainer}._compute_loss", 7), ("rltt.train.resample:Resampler._move", 2)]
    for function, count in lives:  # inside a rollout of two updates; among the rounds of one
        assert ended(*life, (function, count, signal.SIGKILL)) == -signal.SIGKILL
    assert ended(*life) == 0
    assert metrics_of(path) == metrics_of(whole)
    assert sum(row["resample/replaced"] for row in metrics_of(whole)) > 4
    for file in (whole / "rollouts").iterdir():
        assert (path / "rollouts" / file.name).read_text() == file.read_text()
    weights = [(run / "policy" / "model.safetensors").read_bytes() for run in (path, whole)]
    assert weights[0] == weights[1]


def test_two_processes_resample_as_one(folder: Path, whole: Path, tmp_path: Path) -> None:
    """Groups of two in shares of eight completions each; the same groups are replaced by the same prompts."""
    assert both_ended(killed.train, folder / "tiny.yaml", [f"run_dir={tmp_path / 'two'}"]) == [0, 0]
    assert rows_of(tmp_path / "two") == rows_of(whole)
    one, two = metrics_of(whole), metrics_of(tmp_path / "two")
    for name in ("resample/prompts", "resample/rounds", "resample/replaced", "solve_rate", "reward", "mixed_groups"):
        assert [row[name] for row in two] == [row[name] for row in one], name
    assert max(row["parity/max"] for row in two if "parity/max" in row) < 1e-5
