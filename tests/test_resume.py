"""Runs that end before their time, and go on: killed, asked to end, with another recipe."""

import fcntl
import json
import math
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed
import pytest
from killed import both_ended, ended
from safetensors.torch import load_file
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.errors import UnwrittenError, UserError
from rltt.recipe import load_recipe
from rltt.train import run
from rltt.train.checkpoint import checkpoints_in
from rltt.train.resume import FIXED, FREE, differences

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
rewards: [{use: "my_rewards.py:letters", isolate: false}]
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


def assert_same(path: Path, whole: Path) -> None:
    """The run in `path` ended as the whole one: weights, rows, rollouts, evaluations."""
    for name in ("start", "policy"):
        files = [sorted(file.relative_to(run) for file in (run / name).rglob("*.safetensors")) for run in (path, whole)]
        assert files[0] == files[1] != []
        for file in files[1]:
            found, wanted = (load_file(run / file) for run in (path, whole))
            assert found.keys() == wanted.keys()
            for key, weight in wanted.items():
                assert weight.equal(found[key]), f"{file}: {key}"
    for name in ("pretrain.jsonl", "metrics.jsonl"):
        assert (path / name).is_file() == (whole / name).is_file()
        assert not (path / name).is_file() or rows_of(path / name) == rows_of(whole / name)
    rollouts = [sorted(file.name for file in (run / "rollouts").iterdir()) for run in (path, whole)]
    assert rollouts[0] == rollouts[1]
    for name in rollouts[1]:
        assert rows_of(path / "rollouts" / name) == rows_of(whole / "rollouts" / name)
    found, wanted = summary_of(path), summary_of(whole)
    for key in ("status", "steps", "pretrain_steps", "eval_before", "eval_after", "credit"):
        assert found.get(key) == wanted.get(key), key


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert ended(killed.train, folder / "tiny.yaml", [f"run_dir={path}"]) == 0
    return path


# The function, the call of it, at which the process dies; each life goes on where the one before died.
TRAINER = "rltt.train.trainer:RLTTTrainer"
LIVES = [
    ("in the warm start, after its first checkpoint", "rltt.train.pretrain:LoopLMTrainer.compute_loss", 5),
    ("in an update, before the first checkpoint", f"{TRAINER}._compute_loss", 4),
    ("while the second checkpoint is written", "rltt.train.checkpoint:write_manifest", 2),
    ("inside a rollout of two updates", f"{TRAINER}._compute_loss", 2),
    ("in a rollout", f"{TRAINER}._calculate_rewards", 2),
    ("before the policy is saved", "rltt.train.run:save_trained", 1),
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


def test_what_was_cut_off_is_kept(folder: Path, tmp_path: Path) -> None:
    """Killed in the second step, in the midst of a row, with no checkpoint: all of it is set aside."""
    path = tmp_path / "cut"
    overrides = [f"run_dir={path}", "pretrain=null", "data.eval=null", "evaluate={}"]
    assert ended(killed.half_a_row, folder / "tiny.yaml", overrides) == -signal.SIGKILL
    written = (path / "metrics.jsonl").read_text()
    assert written.endswith('{"step": 99, "lo')
    rollout = (path / "rollouts" / "step_000001.jsonl").read_text()
    (path / ".left.partial").write_text("")
    run.train(load_recipe(folder / "tiny.yaml", [*overrides, "train.max_steps=3"]))
    assert (path / "resumes" / "1" / "metrics.jsonl").read_text() == written
    assert (path / "resumes" / "1" / "rollouts" / "step_000001.jsonl").read_text() == rollout
    assert [row["step"] for row in rows_of(path / "metrics.jsonl")] == [1, 2, 3]
    assert not (path / ".left.partial").exists()
    assert summary_of(path)["resumes"][0]["step"] == 0


# ----------------------------------------------------------------------------------------------------------- SIGTERM


def test_sigterm_saves_at_the_end_of_the_step_and_exits_with_0(folder: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "asked"
    moment = (f"{TRAINER}._compute_loss", 5, signal.SIGTERM)  # in step 3, of which the rollout is half used
    overrides = ["train.save_steps=100", f"run_dir={path}"]
    assert ended(killed.train, folder / "tiny.yaml", overrides, moment) == 0
    assert summary_of(path)["status"] == "preempted"
    assert [checkpoint.step for checkpoint in checkpoints_in(path / "checkpoints")] == [3]
    assert not (path / "policy").exists()
    assert ended(killed.train, folder / "tiny.yaml", overrides) == 0
    assert_same(path, whole)


def test_sigterm_outside_of_training_ends_at_once(folder: Path, tmp_path: Path) -> None:
    moment = ("rltt.train.run:measure", 1, signal.SIGTERM)
    assert ended(killed.train, folder / "tiny.yaml", ["pretrain=null", f"run_dir={tmp_path / 'r'}"], moment) == 0
    assert summary_of(tmp_path / "r")["status"] == "preempted"
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_second_sigterm_does_not_wait(folder: Path, tmp_path: Path) -> None:
    overrides = ["pretrain=null", "data.eval=null", "evaluate={}", f"run_dir={tmp_path / 'r'}"]
    assert ended(killed.twice, folder / "tiny.yaml", overrides) == -signal.SIGTERM


# --------------------------------------------------------------------------------------------- two processes, adapters


ADAPTER = ["policy.lora={r: 4}", "objective={credit: uniform}"]
ADAPTER_A_LOOP = ["policy.lora={r: 4, per_loop: true}", "objective={credit: uniform}"]


@pytest.mark.parametrize("adapters", [ADAPTER, ADAPTER_A_LOOP], ids=["one adapter", "one a loop"])
def test_a_run_of_adapters_that_is_killed_ends_as_the_whole_one(
    folder: Path, tmp_path: Path, adapters: list[str]
) -> None:
    overrides = [*adapters, "pretrain=null", "data.eval=null", "evaluate={}", "train.max_steps=7"]
    assert ended(killed.train, folder / "tiny.yaml", [*overrides, f"run_dir={tmp_path / 'whole'}"]) == 0
    life = (killed.train, folder / "tiny.yaml", [*overrides, f"run_dir={tmp_path / 'cut'}"])
    for what, function, count in LIVES[2:4]:
        assert ended(*life, (function, count, signal.SIGKILL)) == -signal.SIGKILL, what
    assert ended(*life) == 0
    assert_same(tmp_path / "cut", tmp_path / "whole")
    saved = list((tmp_path / "cut" / "policy").rglob("adapter_model.safetensors"))
    assert len(saved) == (2 if adapters is ADAPTER_A_LOOP else 1)


LAYOUTS = {
    "ddp": ["train.sharding=ddp"],
    "zero3": ["train.sharding=zero3"],
    "ddp and an adapter a loop": [*ADAPTER_A_LOOP, "train.sharding=ddp"],
    "zero2 and adapters": [*ADAPTER, "train.sharding=zero2"],
    "zero3 and adapters": [*ADAPTER, "train.sharding=zero3"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_processes_that_are_cut_off_end_as_if_they_had_not_been(
    folder: Path, tmp_path: Path, layout: list[str]
) -> None:
    if "train.sharding=ddp" not in layout:
        pytest.importorskip("deepspeed")
    overrides = [*layout, "pretrain=null", "train.per_device_train_batch_size=2", "train.max_steps=7"]
    assert both_ended(killed.train, folder / "tiny.yaml", [*overrides, f"run_dir={tmp_path / 'whole'}"]) == [0, 0]
    path = tmp_path / "cut"
    life = (killed.train, folder / "tiny.yaml", [*overrides, f"run_dir={path}"])
    in_update = f"{TRAINER}._compute_loss"
    # One is killed in step 5, with a checkpoint of step 3.
    assert -signal.SIGKILL in both_ended(*life, (in_update, 10, signal.SIGKILL), 1)
    # One is asked to end in step 5: both save that step, whose rollout has another update to come.
    assert both_ended(*life, (in_update, 3, signal.SIGTERM), 1) == [0, 0]
    assert summary_of(path)["status"] == "preempted"
    assert checkpoints_in(path / "checkpoints")[-1].step == 5
    # The one that completes a checkpoint is killed meanwhile.
    moment = ("rltt.train.checkpoint:write_manifest", 1, signal.SIGKILL)
    assert both_ended(*life, moment, 0) == [-signal.SIGKILL, -signal.SIGKILL]
    assert both_ended(*life) == [0, 0]
    assert_same(path, tmp_path / "whole")


def test_two_processes_of_a_script_of_ones_own_go_on(tiny_ouro: Path, tmp_path: Path) -> None:
    """As torchrun starts them, without GPUs: accelerate then names a device to which torch loads nothing."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert both_ended(killed.own_script, tiny_ouro, whole, 4, False) == [0, 0]
    shutil.copytree(whole / "checkpoint-2", cut / "checkpoint-2")
    assert both_ended(killed.own_script, tiny_ouro, cut, 4, True) == [0, 0]
    found, wanted = (load_file(out / "checkpoint-4" / "model.safetensors") for out in (cut, whole))
    assert all(weight.equal(found[name]) for name, weight in wanted.items())


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_an_update_that_is_not_finite_on_one_process_is_skipped_on_both(
    folder: Path, tmp_path: Path, sharding: str
) -> None:
    if sharding != "ddp":
        pytest.importorskip("deepspeed")
    overrides = [f"run_dir={tmp_path / 'run'}", f"train.sharding={sharding}", "pretrain=null", "train.max_steps=6"]
    overrides += ["train.max_nonfinite_steps=2", "train.per_device_train_batch_size=2", "train.save_steps=100"]
    assert both_ended(killed.poisoned, folder / "tiny.yaml", overrides, {2, 4, 5}) == [1, 1]
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["nonfinite_steps"] for row in rows] == [0, 1, 1, 2, 3]
    assert [row["loss"] is None for row in rows] == [row["grad_norm"] is None for row in rows]
    assert [row["update/changed"] > 0 for row in rows] == [row["loss"] is not None for row in rows]
    assert [row["loss"] is None for row in rows] == [False, True, False, True, True]
    half_way = (1 + math.cos(math.pi * 3 / 6)) / 2
    assert rows[3]["lr"] / rows[0]["lr"] == pytest.approx(half_way)  # the schedule counts all steps
    assert re.search(
        r"NonFiniteError: step 5: .* 2 times in a row; .*checkpoint-5", summary_of(tmp_path / "run")["error"]
    )
    assert both_ended(killed.train, folder / "tiny.yaml", overrides) == [0, 0]
    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    weights = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


# ------------------------------------------------------------------------------------------------- which run goes on


@pytest.fixture
def quick(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Trains for a step or two, in this process."""

    def train(*overrides: str, resume: bool = False, accept: tuple[str, ...] = ()) -> Path:
        plain = ("pretrain=null", "data.eval=null", "evaluate={}", "train.save_steps=1", "train.max_steps=2")
        recipe = load_recipe(folder / "tiny.yaml", [*plain, f"run_dir={tmp_path / 'run'}", *overrides])
        return run.train(recipe, resume, accept)

    return train


def set_status(path: Path, **values: Any) -> None:
    (path / "summary.json").write_text(json.dumps(summary_of(path) | values))


def test_a_finished_run_goes_on_when_it_is_asked_to_and_has_more_steps(
    quick: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = quick()
    with pytest.raises(UserError, match="holds a run already, which is not overwritten"):
        quick()
    with pytest.raises(UserError, match=r"the run has finished its 2 steps; raise train.max_steps to go on"):
        quick(resume=True)
    capsys.readouterr()
    quick("train.max_steps=4", resume=True)
    told = capsys.readouterr().out
    assert "holds a run that was finished at step 2; going on with it" in told
    assert "train.max_steps: 2 is now 4" in told
    assert f"going on from step 2 ({path / 'checkpoints' / 'checkpoint-2'})" in told
    assert [row["step"] for row in rows_of(path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (path / "resumes" / "1" / "policy" / "model.safetensors").is_file()
    assert load_recipe(path / "recipe.yaml").train.max_steps == 4


def test_changes_of_the_recipe_are_refused_or_accepted_by_name(quick: Callable[..., Path]) -> None:
    path = quick()
    set_status(path, status="failed", steps=2)
    changed = ("train.learning_rate=0.02", "objective.beta=0.1", "train.max_steps=3", "train.save_steps=2")
    with pytest.raises(UserError) as caught:
        quick(*changed)
    assert str(caught.value).splitlines() == [
        f"{path}: holds a run of another recipe:",
        "  objective.beta: was 0.0, is 0.1",
        "  train.learning_rate: was 0.01, is 0.02",
        "begin a new run (run_dir=…), or put the recipe back as it was",
        "or go on with the change: --accept-change objective.beta --accept-change train.learning_rate",
    ]
    with pytest.raises(UserError, match=r"(?s)  objective\.beta: was.*--accept-change objective\.beta$"):
        quick(*changed, accept=("train.learning_rate",))
    with pytest.raises(UserError, match=r"--accept-change train.seed: the recipe says the same of it"):
        quick(*changed, accept=("train.seed",))
    for fixed in ("data.train.size=32", "train.prompts_per_step=2", "train.seed=1", "objective={credit: uniform}"):
        with pytest.raises(UserError, match=r"holds a run of another recipe:\n  .*: was .*, is .* \(.*\)") as caught:
            quick(fixed)
        assert "--accept-change" not in str(caught.value)
    quick(*changed, accept=("train.learning_rate", "objective.beta"))
    rows = rows_of(path / "metrics.jsonl")
    assert rows[2]["lr"] / rows[0]["lr"] == pytest.approx(2 * 0.25)  # cosine over three steps, of the new rate


def test_a_smaller_micro_batch_goes_on_inside_a_rollout(quick: Callable[..., Path]) -> None:
    path = quick("train.max_steps=3", "train.save_steps=1")
    set_status(path, status="failed")
    smaller = ("train.per_device_train_batch_size=2", "train.max_steps=4", "train.save_steps=1")
    quick(*smaller, accept=("train.per_device_train_batch_size",))
    assert [row["step"] for row in rows_of(path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(file.name for file in (path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000003.jsonl"]


def test_a_run_that_is_under_way_is_left_alone(quick: Callable[..., Path]) -> None:
    path = quick()
    set_status(path, status="running")
    with (path / "versions.json").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="run: another process is running in it; wait for it, or end it"):
            quick()
    quick()  # its process is gone


def test_there_has_to_be_a_run_to_go_on_with(folder: Path, tmp_path: Path) -> None:
    def message(*options: str) -> str:
        ended = CliRunner().invoke(app, ["train", str(folder / "tiny.yaml"), f"run_dir={tmp_path / 'none'}", *options])
        assert ended.exit_code == 2
        return ended.stderr

    assert "none: holds no run to go on with; leave --resume out to begin one" in message("--resume")
    assert "--accept-change train.seed: " in message("--accept-change", "train.seed")


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    quick: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = quick()
    set_status(path, status="running")
    damaged = path / "checkpoints" / "checkpoint-2" / "optimizer.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    quick()
    told = capsys.readouterr().out
    assert re.search(r"damaged checkpoint, not used: .*checkpoint-2/optimizer\.pt: has [\d,]+ bytes, but", told)
    assert "going on from step 1" in told
    assert [row["step"] for row in rows_of(path / "metrics.jsonl")] == [1, 2]
    assert (path / "checkpoints" / "checkpoint-2.damaged").is_dir()


def test_every_key_that_is_named_is_one(folder: Path) -> None:
    keys = differences(load_recipe(folder / "tiny.yaml"), load_recipe(folder / "tiny.yaml", ["name=other"]))
    assert keys == {"name": ("tiny", "other")}
    recipe = load_recipe(folder / "tiny.yaml").model_dump()
    for key in (*FREE, *FIXED):
        value: Any = recipe
        for part in key.split("."):
            value = value[part]


# --------------------------------------------------------------------------------------------------------- full disks


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


def test_a_disk_that_is_full_is_told_and_the_run_goes_on_later(folder: Path, tmp_path: Path) -> None:
    """Full when the first rollout is to be written, after the evaluation."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)):
        pytest.skip("needs the right to mount a tmpfs")
    overrides = ["pretrain=null", "train.max_steps=2", "evaluate.after=false", f"run_dir={disk / 'run'}"]
    recipe = load_recipe(folder / "tiny.yaml", overrides)
    measure = run.measure
    try:
        with pytest.MonkeyPatch.context() as patch:

            def fill(*arguments: Any) -> Any:
                result = measure(*arguments)
                with pytest.raises(OSError, match="No space left"):
                    (disk / "others").write_bytes(bytes(30_000_000))
                return result

            patch.setattr(run, "measure", fill)
            with pytest.raises(
                UnwrittenError, match=r"run/[\w/.]+: cannot be written: No space left on device; see to"
            ):
                run.train(recipe)
        (disk / "others").unlink()
        run.train(recipe)
        assert summary_of(disk / "run")["status"] == "finished"
        assert [row["step"] for row in rows_of(disk / "run" / "metrics.jsonl")] == [1, 2]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
