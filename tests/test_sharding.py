"""`train.sharding` as a DeepSpeed configuration, and launches of two processes: one voice, one error."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from rltt.data import build_dataset, load_split
from rltt.diagnostics.light import LIGHT, measure_lightly
from rltt.errors import RecipeError, UserError
from rltt.launch import Layout, first_error
from rltt.models.load import load_policy, load_tokenizer
from rltt.processes import share
from rltt.recipe import Recipe, TrainSection, check, load_recipe
from rltt.train.loop_telemetry import held_out_texts
from rltt.train.run_directory import record_failure
from rltt.train.sharding import deepspeed_config, join_processes

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


def recipe(**sections: Any) -> Recipe:
    base = {"name": "r", "policy": {"path": "x"}, "data": {"train": "x"}, "rewards": ["math"]}
    return check(Recipe, base | sections, source="recipe")


# ----------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"offload": "optimizer"}, r"train\.offload: has no effect unless sharding is zero2 or zero3"),
        ({"sharding": "none", "deepspeed": "x.json"}, r"train\.deepspeed: has no effect unless sharding is zero2"),
        ({"sharding": "zero2", "offload": "parameters"}, r"train\.offload: 'parameters' needs sharding: zero3"),
        ({"sharding": "zero3", "offload": "optimizer", "deepspeed": "x.json"}, r"offloading is part of that file"),
        ({"sharding": "zero1"}, r"train\.sharding"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(train=train)


def test_sharding_none_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    join_processes(TrainSection(sharding="none"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    join_processes(TrainSection())
    with pytest.raises(RecipeError, match="'none' is for one process, but 2 were launched; choose ddp, zero2 or zero3"):
        join_processes(TrainSection(sharding="none"))


def test_processes_take_equal_shares() -> None:
    assert share(256, 8, "x", 1) == (8, 32)
    assert share(256, 8, "x", 4) == (8, 8)
    assert share(256, 256, "x", 4) == (64, 1)  # a recipe for one process means the same on four
    with pytest.raises(RecipeError, match="x: the 256 rows of an update cannot be shared equally by 3 processes"):
        share(256, 8, "x", 3)
    with pytest.raises(RecipeError, match="x: per_device_train_batch_size = 48 does not divide the 128 rows"):
        share(256, 48, "x", 2)


# --------------------------------------------------------------------------------------------------------- DeepSpeed


@needs_deepspeed
def test_the_configuration_says_what_the_recipe_says() -> None:
    assert deepspeed_config(TrainSection(), 10) is None
    assert deepspeed_config(TrainSection(sharding="none"), 10) is None
    two, three = (deepspeed_config(TrainSection(sharding=kind), 10) for kind in ("zero2", "zero3"))
    assert two is not None
    assert three is not None
    assert (two["zero_optimization"]["stage"], three["zero_optimization"]["stage"]) == (2, 3)
    # Shared layers may stay gathered from one loop to the next.
    assert three["zero_optimization"]["stage3_max_reuse_distance"] == 10
    assert three["zero_optimization"]["stage3_max_live_parameters"] == 10
    assert "offload_optimizer" not in three["zero_optimization"]
    for offload, keys in (("optimizer", {"offload_optimizer"}), ("parameters", {"offload_optimizer", "offload_param"})):
        config = deepspeed_config(TrainSection(sharding="zero3", offload=offload), 10)
        assert config is not None
        found = {key for key, value in config["zero_optimization"].items() if "offload" in key}
        assert found == keys
        assert all(config["zero_optimization"][key]["device"] == "cpu" for key in keys)


@needs_deepspeed
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "holds a list; a DeepSpeed file is a mapping"),
        ("{}", r"zero_optimization\.stage is 0, but train\.sharding is zero3; make them agree"),
        ('{"zero_optimization": {"stage": 2}}', r"stage is 2, but train\.sharding is zero3"),
        ('{"zero_optimization": {"stage": 3}, "train_batch_size": 8}', r'"auto": train\.prompts_per_step decides'),
        ('{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}', r'"auto": train\.max_grad_norm decides'),
        ('{"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}', "has 'optimizer'; remove it"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_of_ones_own_has_to_fit(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "own.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RecipeError, match=rf"train\.deepspeed: .*own\.json.*{message}"):
        deepspeed_config(TrainSection(sharding="zero3", deepspeed=str(file)), 10)


@needs_deepspeed
def test_a_file_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    own = {
        "zero_optimization": {"stage": 3, "sub_group_size": 7},
        "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": 1,
    }
    (tmp_path / "own.json").write_text(json.dumps(own))
    config = deepspeed_config(TrainSection(sharding="zero3", deepspeed=str(tmp_path / "own.json")), 10)
    assert config is not None
    assert config.items() >= own.items()
    assert config["train_batch_size"] == "auto"


# ---------------------------------------------------------------------------------------------------------- launches


def test_lines_for_schedulers() -> None:
    arguments = ["train", "my recipe.yaml", "a=1"]
    standalone = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node"
    assert Layout(8).torchrun(arguments) == f"{standalone} 8 -m rltt train 'my recipe.yaml' a=1"
    assert Layout(8).accelerate(arguments).startswith("accelerate launch --num_processes 8 --multi_gpu --module rltt")
    several = Layout(8, nodes=2, node_rank=1, main_address="n0")
    for option in ("--nnodes 2", "--node-rank 1", "--nproc-per-node 8", "--master-addr n0", "--master-port 29500"):
        assert option in several.torchrun(arguments)
    for option in ("--num_processes 16", "--num_machines 2", "--machine_rank 1", "--main_process_ip n0"):
        assert option in several.accelerate(arguments)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(2, nodes=2), "--main-address: missing"),
        (Layout(2, nodes=2, node_rank=2, main_address="x"), "--node-rank: found 2; with --nodes 2 it is 0 to 1"),
    ],
)
def test_launches_that_cannot_be_are_refused(layout: Layout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout.check()


def test_a_launch_within_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="launched as one of several already"):
        Layout(2).check()


def test_a_dry_run_shows_the_launch(tmp_path: Path) -> None:
    from rltt.cli.main import app

    quickstart = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
    shown = CliRunner().invoke(app, ["train", str(quickstart), "--dry-run", "--num-processes", "2"]).output
    assert "2 processes, each 1 micro-batches of 128" in shown
    assert f"torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m rltt train {quickstart}" in shown
    for options, message in [
        (["--nodes", "2"], "--num-processes: missing"),
        (["--num-processes", "2", "train.sharding=none"], "'none' is for one process, but --num-processes asks for 2"),
        (["--num-processes", "3", "--dry-run"], "cannot be shared equally by 3 processes"),
    ]:
        result = CliRunner().invoke(app, ["train", str(quickstart), *options])
        assert result.exit_code == 2
        assert message in result.output


REWARD = """
import os
def score(completions, trainer_state=None, **kwargs):
    if os.environ["RANK"] == "1" and trainer_state is not None and trainer_state.global_step == 1:
        {fault}
    return [float(len(text) % 2) for text in completions]
"""


def run_two(tmp_path: Path, tiny_ouro: Path, fault: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of two steps in two processes, in the second of which something happens in the second step."""
    (tmp_path / "reward.py").write_text(REWARD.format(fault=fault))
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: two
run_dir: {tmp_path / "run"}
policy: {{path: {tiny_ouro}}}
data: {{train: {{path: arithmetic, size: 64}}, eval: {{path: arithmetic, size: 8, split: test}}}}
rewards: [{{use: reward.py:score, isolate: false, on_error: fail}}]
objective: {{credit: final, beta: 0.01}}
rollout: {{num_generations: 4, max_completion_length: 8}}
train: {{prompts_per_step: 4, max_steps: 2, learning_rate: 1.0e-3}}
evaluate: {{every: 1, num_generations: 2, before: false}}
"""
    )
    command = [sys.executable, "-m", "rltt", "train", "recipe.yaml", "--num-processes", "2", *overrides]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@needs_deepspeed
def test_two_processes_speak_and_write_as_one(tmp_path: Path, tiny_ouro: Path) -> None:
    # credit: final leaves the exit gate without a gradient, which must not be waited for.
    done = run_two(tmp_path, tiny_ouro, "pass", "train.sharding=zero3", "telemetry.diagnose_every=1")
    assert done.returncode == 0, done.stderr[-4000:]
    for once in ("same as:", "policy: Ouro", "step 1/2", "step 2/2", "held-out after:", "finished:"):
        assert done.stdout.count(once) == 1, done.stdout
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all("eval/solve_rate" in row for row in rows)
    rollout = (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert len(rollout) == 16  # of both processes
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval_after"]["n"] == 8

    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_ouro, run / "policy"))
    assert {name: weight.shape for name, weight in before.items()} == {n: w.shape for n, w in after.items()}
    assert any((before[name] != weight).any() for name, weight in after.items())
    assert not list(tmp_path.glob("rltt-launch-*"))

    # What each loop does was measured on gathered weights, half of the texts by each process.
    policy, tokenizer = load_policy(str(run / "policy")), load_tokenizer(str(run / "policy"))
    recipe = load_recipe(run / "recipe.yaml", [])
    dataset, _ = build_dataset(load_split(recipe.data)[1], recipe.data, tokenizer)
    measured = [measure_lightly(policy, text) for text in held_out_texts(dataset, tokenizer, 64)]
    for name in LIGHT:
        expected = torch.stack([text[name] for text in measured]).mean(0)
        found = [rows[1].get(f"loop{t}/{name}", math.nan) for t in (1, 2, 3)]
        torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_one_failing_process_ends_the_launch_with_its_error(tmp_path: Path, tiny_ouro: Path) -> None:
    done = run_two(tmp_path, tiny_ouro, "raise RuntimeError('planted')")
    assert done.returncode == 2
    message = "process 1: error: reward function 'score' failed: RuntimeError: planted"
    assert done.stderr.count(message) == 1
    assert "Connection" not in done.stderr  # what the other one saw of it
    assert "finished" not in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"].startswith(message)


def test_the_error_that_came_first_is_the_one_that_is_shown(tmp_path: Path) -> None:
    def failed(rank: int, exit_code: int) -> ProcessFailure:
        return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file="none")

    for rank, at, text in [(0, 3.0, "lost the connection"), (2, 1.0, "error: the cause"), (1, 2.0, "lost it too")]:
        report = {"rank": rank, "time": at, "status": 2 if rank == 2 else 1, "text": text}
        (tmp_path / f"error-{rank}.json").write_text(json.dumps(report))
    three = {rank: failed(rank, 1) for rank in range(3)}
    assert first_error(ChildFailedError("x", three), tmp_path) == (2, "process 2: error: the cause")
    # A process that was killed could leave nothing, and is why the others failed; SIGTERM is the launcher's own.
    three[1] = failed(1, -9)
    three[0] = failed(0, -15)
    status, text = first_error(ChildFailedError("x", three), tmp_path)
    assert status == 137
    assert text.startswith("error: process 1 was ended by SIGKILL; often the machine's memory was full")


def test_a_failed_launch_is_written_to_its_own_run_only(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    record_failure(tmp_path, "gone", since=0.0)  # the run had not begun
    assert not summary.exists()
    summary.write_text('{"status": "running", "steps": 3}')
    record_failure(tmp_path, "gone", since=summary.stat().st_mtime + 1)  # an earlier run's
    assert json.loads(summary.read_text())["status"] == "running"
    record_failure(tmp_path, "gone", since=summary.stat().st_mtime)
    assert json.loads(summary.read_text()) == {"status": "failed", "steps": 3, "error": "gone"}
