"""`rltt train` from a recipe to its run directory: what is written, how a run can end, and what is refused."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.diagnostics.light import LIGHT
from rltt.diagnostics.measures import measure_batch
from rltt.errors import DataError, PolicyError, RewardError, UserError
from rltt.models.configuration import LoopedLlamaConfig
from rltt.models.load import load_policy
from rltt.models.looped_dense import LoopedLlamaForCausalLM
from rltt.recipe import load_recipe
from rltt.train import run
from rltt.train.loop_telemetry import held_out_texts

pytestmark = pytest.mark.usefixtures("quick_collections")

RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data:
  train: {path: arithmetic, difficulty: 1, size: 64}
  eval: {path: arithmetic, difficulty: 1, size: 8, split: test}
rewards: ["my_rewards.py:letters", math]
rollout: {num_generations: 2, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 2, learning_rate: 1.0e-3}
evaluate: {num_generations: 2}
"""
WARM = "pretrain={max_steps: 2, batch_size: 8}"

# The runs end in step 2: the first rewards of that step are asked for when one step is done.
REWARDS = """\
def letters(completions, **kwargs):
    return [sum(map(ord, text)) % 7 / 3 for text in completions]

def in_step_2(trainer_state):
    return trainer_state is not None and trainer_state.global_step == 1

def interrupts(completions, trainer_state=None, **kwargs):
    if in_step_2(trainer_state):
        raise KeyboardInterrupt
    return letters(completions)

def fails(completions, trainer_state=None, **kwargs):
    if in_step_2(trainer_state):
        raise ValueError("no idea")
    return letters(completions)

def fails_on_some(completions, trainer_state=None, **kwargs):
    if any(sum(map(ord, text)) % 3 == 0 for text in completions) and in_step_2(trainer_state):
        raise ValueError("every third")
    return letters(completions)

def perfect(completions, **kwargs):
    return [1.0] * len(completions)

def answers_later(completions, trainer_state=None, **kwargs):
    return [None] * len(completions) if in_step_2(trainer_state) else letters(completions)

def needs_steps(completions, steps, **kwargs):
    return [0.0] * len(completions)
"""

STEP_KEYS = {
    *("step", "reward", "solve_rate", "mixed_groups", "kl", "grad_norm", "entropy", "lr", "loss"),
    *("completions/mean_length", "completions/clipped_ratio"),
    *("seconds/rollout", "seconds/reward", "seconds/update"),
    *("verdict/code", "verdict/confidence"),
    *(f"loop{t}/{name}" for t in (1, 2) for name in ("logp", "kl_to_last", "exit_prob", "credit", "entropy")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe lies, with its reward file beside it."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    """A jsonl file. NaN and infinities, which Python would read, are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{file} holds {constant}")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def summary_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "summary.json").read_text())


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if not key.startswith("seconds/") and key != "step_time"} for row in rows]


@dataclass
class Done:
    """A finished run, and the weights that were in memory when it ended."""

    path: Path
    recipe: Any
    trained: dict[str, Tensor]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return rows_of(self.path / "metrics.jsonl")


def trained(folder: Path, path: Path, *overrides: str) -> Done:
    recipe = load_recipe(folder / "tiny.yaml", [*overrides, f"run_dir={path}"])
    weights: dict[str, Tensor] = {}
    save = run.save_trained

    def remember(trainer: Any, *rest: Any) -> None:
        save(trainer, *rest)
        weights.update({name: weight.clone() for name, weight in trainer.model.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "save_trained", remember)
        assert run.train(recipe) == path
    return Done(path, recipe, weights)


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with a warm start."""
    return trained(folder, tmp_path_factory.mktemp("runs") / "tiny", WARM)


# ------------------------------------------------------------------------------------------------------- what is there


def test_the_run_directory_holds_what_it_should_and_no_leftovers(done: Done) -> None:
    files = {"recipe.yaml", "verdict.json", "versions.json", "metrics.jsonl", "pretrain.jsonl", "summary.json"}
    assert {path.name for path in done.path.iterdir() if path.is_file()} == files
    assert {path.name for path in done.path.iterdir() if path.is_dir()} - {"checkpoints"} == {
        *("rollouts", "start", "policy")
    }
    assert not list(done.path.rglob("*.partial"))
    assert not list(done.path.rglob("*.bin"))


def test_each_step_has_one_row_of_finite_numbers(done: Done) -> None:
    assert [row["step"] for row in done.metrics] == [1, 2]
    for row in done.metrics:
        assert row.keys() >= STEP_KEYS
        assert next(iter(row)) == "step"
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in row.values())
        assert row["lr"] == 1e-3
        assert row["grad_norm"] > 0
        assert sum(row[f"loop{t}/exit_prob"] for t in (1, 2)) == pytest.approx(1)
    assert done.metrics[0]["kl"] == 0
    assert done.metrics[1]["kl"] > 0


def test_the_warm_start_has_rows_of_its_own(done: Done) -> None:
    rows = rows_of(done.path / "pretrain.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0].keys() >= {"loss", "lr", "grad_norm", "loop1/loss", "loop2/loss", "loop1/exit_prob"}
    assert summary_of(done.path)["pretrain_steps"] == 2


def test_rollouts_are_readable_and_carry_the_gold(done: Done) -> None:
    files = sorted((done.path / "rollouts").iterdir())
    assert [file.name for file in files] == ["step_000001.jsonl", "step_000002.jsonl"]
    golds = {problem.where: (problem.prompt, problem.gold) for problem in run.load_split(done.recipe.data)[0]}
    for step, (file, metrics) in enumerate(zip(files, done.metrics, strict=True), start=1):
        rows = rows_of(file)
        assert len(rows) == 4 * 2
        for row in rows:
            assert (row["prompt"], row["gold"]) == golds[row["row"]]
            assert row["step"] == step
            assert set(row["rewards"]) == {"letters", "math"}
            assert row["reward"] == pytest.approx(sum(row["rewards"].values()))
            assert row["solved"] == float(row["rewards"]["letters"] >= 1)
            assert math.isfinite(row["advantage"])
        assert metrics["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 8)
        assert metrics["solve_rate"] == pytest.approx(sum(row["solved"] for row in rows) / 8)
        mixed = [first["solved"] != second["solved"] for first, second in zip(rows[::2], rows[1::2], strict=True)]
        assert metrics["mixed_groups"] == sum(mixed) / 4


def test_the_written_recipe_gives_the_same_recipe(done: Done) -> None:
    assert load_recipe(done.path / "recipe.yaml") == done.recipe
    versions = json.loads((done.path / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert versions.keys() >= {"rltt", "transformers", "trl", "python", "git"}


def test_the_summary_has_both_evaluations(done: Done) -> None:
    summary = summary_of(done.path)
    assert (summary["name"], summary["status"], summary["steps"]) == ("tiny", "finished", 2)
    assert summary["seconds"] > 0
    for moment in ("eval_before", "eval_after"):
        assert summary[moment]["n"] == 8
        assert 0 <= summary[moment]["solve_rate"] <= 1
        assert 0 <= summary[moment]["stderr"] < 0.5


def test_the_saved_policy_is_the_trained_one(done: Done) -> None:
    saved, start = (load_file(done.path / name / "model.safetensors") for name in ("policy", "start"))
    model = AutoModelForCausalLM.from_pretrained(done.path / "policy")
    assert model.loop_spec.loops == 2
    assert done.trained.keys() == saved.keys() == start.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, done.trained[name]), name
    moved = {name for name in saved if not torch.equal(saved[name], start[name])}
    gate = {name for name in saved if "early_exit_gate" in name}  # the credit of exit_pdf is detached
    assert moved == saved.keys() - gate
    tokenizer = PreTrainedTokenizerFast.from_pretrained(done.path / "policy")
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


def test_the_same_seed_gives_the_same_run(done: Done, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()  # an empty folder is free
    again = trained(folder, tmp_path / "again", WARM)
    assert without_times(again.metrics) == without_times(done.metrics)
    assert all(torch.equal(weight, done.trained[name]) for name, weight in again.trained.items())
    for key in ("eval_before", "eval_after"):
        assert summary_of(again.path)[key] == summary_of(done.path)[key]


def test_evaluation_changes_nothing_in_training(done: Done, folder: Path, tmp_path: Path) -> None:
    evaluate = "evaluate={every: 2, before: false, after: false}"
    every = trained(folder, tmp_path / "every", WARM, evaluate, "train.max_steps=3")
    first, second, third = every.metrics
    assert not {"eval/solve_rate", "eval/stderr"} & (first.keys() | third.keys())
    assert 0 <= second.pop("eval/solve_rate") <= 1
    assert second.pop("eval/stderr") >= 0
    assert without_times([first, second]) == without_times(done.metrics)
    assert not summary_of(every.path).keys() & {"eval_before", "eval_after"}


def test_measuring_the_loops_changes_nothing_in_training(done: Done, folder: Path, tmp_path: Path) -> None:
    watched = trained(folder, tmp_path / "watched", WARM, "telemetry.diagnose_every=2", "train.max_steps=3")
    first, second, third = watched.metrics
    names = {f"loop{t}/{name}" for t in (1, 2) for name in LIGHT} - {"loop1/cos_theta", "loop1/output_kl"}
    assert not names & (first.keys() | third.keys())
    found = {name: second.pop(name) for name in names}
    assert second.pop("seconds/diagnose") > 0
    assert without_times([first, second]) == without_times(done.metrics)
    # The policy of two steps is that of the run that was not watched.
    policy = load_policy(str(done.path / "policy"))
    problems = run.load_split(done.recipe.data)[1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(done.path / "policy")
    texts = [
        torch.tensor([*tokenizer(p.prompt)["input_ids"], *tokenizer(p.response)["input_ids"], tokenizer.eos_token_id])
        for p in problems
    ]
    assert len(texts) == 8
    measured = [measure_batch(policy.eval(), [text], 2)[0].by_loop for text in texts]
    for name, value in found.items():
        loop, measure = re.fullmatch(r"loop(\d)/(\w+)", name).groups()
        expected = sum(text[measure][int(loop) - 1].item() for text in measured) / 8
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_texts_to_measure_on_without_responses_are_prompt_and_gold(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"{n} plus {n} is", "gold": str(2 * n), "row": str(n)} for n in range(20)]
    texts = held_out_texts(Dataset.from_list(rows), tokenizer, positions=5)
    assert len(texts) == 8
    whole = [*tokenizer(rows[1]["prompt"])["input_ids"], *tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    assert texts[0].tolist() == whole[:5]
    assert held_out_texts(Dataset.from_list(rows), tokenizer, positions=50)[0].tolist() == whole


def test_plain_grpo_with_checkpoints(folder: Path, tmp_path: Path) -> None:
    options = ("objective.credit=final", "train.save_steps=1", "train.save_total_limit=null", "data.eval=null")
    done = trained(folder, tmp_path / "grpo", *options, "evaluate={}", "train.per_device_train_batch_size=4")
    assert [(row["loop1/credit"], row["loop2/credit"]) for row in done.metrics] == [(0, 1)] * 2
    assert "eval_before" not in summary_of(done.path)
    assert (done.path / "start").is_dir()  # a new policy: nobody else has it
    assert not (done.path / "pretrain.jsonl").exists()
    last = load_policy(str(done.path / "checkpoints" / "checkpoint-2"))
    assert all(torch.equal(weight, done.trained[name]) for name, weight in last.state_dict().items())
    first = load_policy(str(done.path / "checkpoints" / "checkpoint-1"))
    assert not torch.equal(first.lm_head.weight, last.lm_head.weight)


def test_learned_credit_is_reported_and_not_part_of_the_policy(folder: Path, tmp_path: Path) -> None:
    objective = "objective={credit: learned, loss_type: reinforce, credit_learning_rate: 0.1}"
    done = trained(folder, tmp_path / "learned", objective, "data.eval=null", "evaluate={}")
    credit = summary_of(done.path)["credit"]
    assert sum(credit) == pytest.approx(1)
    assert credit[0] != credit[1]
    assert not [name for name in load_file(done.path / "policy" / "model.safetensors") if "credit" in name]
    assert load_policy(str(done.path / "policy")).credit is None


def test_one_rollout_can_serve_several_updates(folder: Path, tmp_path: Path) -> None:
    options = ("train.updates_per_rollout=2", "train.num_iterations=2", "train.max_steps=6")
    done = trained(folder, tmp_path / "several", *options, "data.eval=null", "evaluate={}")
    rollouts = {file.name: rows_of(file) for file in (done.path / "rollouts").iterdir()}
    assert {name: len(rows) for name, rows in rollouts.items()} == {"step_000001.jsonl": 16, "step_000005.jsonl": 16}
    assert [row["step"] for row in done.metrics] == [1, 2, 3, 4, 5, 6]
    for row in done.metrics:
        assert row.keys() >= {"loss", "kl", "grad_norm", "entropy", "lr", "loop1/logp", "loop2/exit_prob"}
        assert (row["seconds/rollout"] > 0) == (row["step"] in (1, 5))
        assert row["seconds/update"] > 0
        # What is measured once a rollout stands in each row that uses it.
        rollout = rollouts["step_000001.jsonl" if row["step"] < 5 else "step_000005.jsonl"]
        assert row["reward"] == pytest.approx(sum(entry["reward"] for entry in rollout) / len(rollout))
        assert row.keys() >= {"solve_rate", "mixed_groups", "completions/mean_length", "completions/clipped_ratio"}


def test_a_step_without_any_reward_has_null_for_it(folder: Path, tmp_path: Path) -> None:
    options = ("rewards=[my_rewards.py:answers_later]", "train.max_steps=3", "data.eval=null", "evaluate={}")
    done = trained(folder, tmp_path / "null", *options)
    first, second, third = done.metrics
    assert (second["reward"], second["solve_rate"], second["grad_norm"]) == (None, None, 0)
    assert first["grad_norm"] > 0
    assert third["grad_norm"] > 0
    rows = rows_of(done.path / "rollouts" / "step_000002.jsonl")
    assert {(row["reward"], row["solved"], row["advantage"]) for row in rows} == {(None, None, 0)}


# ------------------------------------------------------------------------------------------------------------- its end


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_ctrl_c_leaves_a_usable_run(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "interrupted"
    rewards = "rewards=[{use: my_rewards.py:interrupts, isolate: false}]"
    ended = command("train", str(folder / "tiny.yaml"), rewards, f"run_dir={path}")
    assert ended.exit_code == 130
    assert "Traceback" not in ended.stderr
    summary = summary_of(path)
    assert (summary["status"], summary["steps"]) == ("interrupted", 1)
    assert "eval_before" in summary
    assert "eval_after" not in summary
    assert len(rows_of(path / "metrics.jsonl")) == 1
    assert [file.name for file in (path / "rollouts").iterdir()] == ["step_000001.jsonl"]
    policy, start = (load_policy(str(path / name)) for name in ("policy", "start"))
    assert not torch.equal(policy.lm_head.weight, start.lm_head.weight)


def test_what_a_reward_function_fails_on_is_counted_and_kept(folder: Path, tmp_path: Path) -> None:
    rewards = "rewards=[{use: my_rewards.py:fails_on_some}]"
    ended = command(
        "train", str(folder / "tiny.yaml"), rewards, "train.prompts_per_step=32", f"run_dir={tmp_path / 'r'}"
    )
    assert ended.exit_code == 0, ended.output
    shares = [row["reward/fails_on_some/raised"] for row in rows_of(tmp_path / "r" / "metrics.jsonl")]
    failures = rows_of(tmp_path / "r" / "reward_failures.jsonl")
    assert shares == [0, pytest.approx(len(failures) / 64)]
    assert 0 < len(failures) < 64
    assert {(row["step"], row["reward"], row["kind"]) for row in failures} == {(2, "fails_on_some", "raised")}
    for row in failures:
        assert row["row"].startswith("arithmetic-1[train]:")
        assert row["gold"].isdigit()
        assert "in fails_on_some" in row["traceback"]
    rollouts = rows_of(tmp_path / "r" / "rollouts" / "step_000002.jsonl")
    unrewarded = [row["completion"] for row in rollouts if row["reward"] is None]
    assert unrewarded == [row["completion"] for row in failures]
    assert all(row["advantage"] == 0 for row in rollouts if row["reward"] is None)
    assert ended.output.count("ValueError: every third, for completion") == 1
    assert "All reward functions returned None" not in ended.output


def test_a_bug_in_a_reward_function_is_told_before_a_run_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "buggy.py").write_text("def score(completions, **kwargs):\n    return [undefined]\n")
    monkeypatch.setattr(run, "load", None)
    recipe = load_recipe(folder / "tiny.yaml", [f"rewards=['{tmp_path}/buggy.py:score']", f"run_dir={tmp_path / 'r'}"])
    with pytest.raises(RewardError, match=r"(?s)'score' failed: NameError.*before the run began.*in score"):
        run.train(recipe)
    assert not (tmp_path / "r").exists()


def test_a_failure_is_recorded_and_keeps_what_was_learned(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "failed"
    ended = command("train", str(folder / "tiny.yaml"), "rewards=[my_rewards.py:fails]", f"run_dir={path}")
    assert ended.exit_code == 2
    assert "error: reward function 'fails' failed: ValueError: no idea" in ended.stderr
    summary = summary_of(path)
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert summary["error"].startswith("RewardError: reward function 'fails' failed: ValueError: no idea")
    policy, start = (load_policy(str(path / name)) for name in ("policy", "start"))
    assert not torch.equal(policy.lm_head.weight, start.lm_head.weight)


def test_an_interrupted_warm_start_keeps_what_was_learned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure", interrupt)
    warm = "pretrain={max_steps: 4, batch_size: 8, stop_at_solve_rate: 0.5, check_every: 2}"
    path = tmp_path / "early"
    with pytest.raises(KeyboardInterrupt):
        run.train(load_recipe(folder / "tiny.yaml", [warm, f"run_dir={path}"]))
    assert summary_of(path)["status"] == "interrupted"
    assert len(rows_of(path / "pretrain.jsonl")) >= 1
    load_policy(str(path / "policy"))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_a_real_ctrl_c_ends_the_process_with_130(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "real"
    # A background job of some shells starts with SIGINT ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom rltt.cli.main import app; app()"
    )
    overrides = ("train.max_steps=100000", "data.eval=null", "evaluate={}", f"run_dir={path}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(folder / "tiny.yaml"), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        limit = time.monotonic() + 120
        while not (path / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "step      1/100000" in stdout
    summary = summary_of(path)
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 1
    load_policy(str(path / "policy"))


def test_a_dry_run_writes_nothing_and_says_what_it_amounts_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load", None)
    done = command("train", str(folder / "tiny.yaml"), "--dry-run", f"run_dir={tmp_path / 'dry'}", WARM)
    assert done.exit_code == 0, done.output
    assert "a rollout             4 prompts, 8 completions" in done.stdout
    assert "pretraining           at most 16 rows" in done.stdout
    assert "16 completions, at most 128 generated tokens" in done.stdout
    assert list(tmp_path.iterdir()) == []
    done = command("train", str(folder / "tiny.yaml"), "--dry-run", "data.train.size=3")
    assert "warning: data: 3 training rows cannot fill one rollout of 4 prompts" in done.stdout


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_run_is_never_overwritten(done: Done, folder: Path) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in done.path.parent.rglob("*")}

    before = files()
    with pytest.raises(UserError, match=r"tiny: holds a run already.*\(run_dir=.*/tiny-2\)"):
        run.train(done.recipe)
    with pytest.raises(UserError, match="holds a run already"):
        run.pretrain(done.recipe)
    assert files() == before


@pytest.fixture
def beside(folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The recipe again, with files that cannot work beside it."""
    for name in ("tiny.yaml", "my_rewards.py"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "malformed.jsonl").write_text('{"prompt": "1 + 1?", "gold": "2"}\n{"prompt": "2 + 2?", "gold": null}\n')
    (tmp_path / "few.jsonl").write_text('{"prompt": "Ann has 1 book.", "gold": "1"}\n' * 3)
    (tmp_path / "a_file").write_text("")
    return tmp_path


BEFORE_ANY_MODEL = [
    (["data.train=malformed.jsonl"], DataError, r"malformed\.jsonl:2: field 'gold' should be text or a number"),
    (["data.train=missing.jsonl"], DataError, r"missing\.jsonl does not exist; the nearest name"),
    (
        ["data.train={path: few.jsonl}", "data.columns={gold: label}"],
        DataError,
        "no such column: found 'prompt', 'gold'",
    ),
    (["data.eval=null", "evaluate={}", "data.train=few.jsonl", "data.holdout=3"], DataError, "none are left to train"),
    (["data.eval.split=train"], DataError, "evaluation rows are also trained on"),
    (["rewards=[my_reward.py:letters]"], RewardError, r"there is no file .*; did you mean .*my_rewards\.py\?"),
    (["rewards=[my_rewards.py:letter]"], RewardError, "has no function 'letter'; did you mean 'letters'"),
    (["rewards=[mth]"], RewardError, "reward 'mth' is not known; did you mean 'math'"),
    (["run_dir=a_file"], UserError, "a_file: is a file; the run needs a folder"),
]


@pytest.mark.parametrize(
    ("overrides", "error", "message"), BEFORE_ANY_MODEL, ids=[case[2][:40] for case in BEFORE_ANY_MODEL]
)
def test_bad_input_is_told_before_any_model_loads(
    beside: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], error: type[UserError], message: str
) -> None:
    monkeypatch.chdir(beside)
    monkeypatch.setattr(run, "load", None)
    recipe = load_recipe("tiny.yaml", overrides)
    with pytest.raises(error, match=message):
        run.train(recipe)
    assert not Path("runs").exists()


BEFORE_TRAINING = [
    (["rewards=[my_rewards.py:needs_steps]"], RewardError, "reward function 'needs_steps' needs the column 'steps'"),
    (
        ["policy.new.max_position_embeddings=20"],
        DataError,
        r"arithmetic-1\[train\]:\d+: the prompt has \d+ tokens and with",
    ),
    (["data.max_prompt_length=2"], DataError, "data.max_prompt_length is 2, and all 64 prompts are longer"),
    (["data.train=few.jsonl"], UserError, "one rollout takes 4 prompts, but the training data has 3"),
    (
        ["policy={path: ./dense}"],
        PolicyError,
        r"model type 'llama' is not a looped model; `rltt convert`, or `convert`",
    ),
    (["policy={path: ./gateless}"], PolicyError, "credit 'exit_pdf' needs an exit gate"),
    (["policy={path: ./nowhere}"], PolicyError, "nowhere: no such folder"),
    (["data.train=few.jsonl", "train.prompts_per_step=2", WARM], DataError, "needs a response in every row"),
]


@pytest.mark.parametrize(
    ("overrides", "error", "message"), BEFORE_TRAINING, ids=[case[2][:40] for case in BEFORE_TRAINING]
)
def test_what_cannot_work_is_told_before_a_run_is_written(
    beside: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    error: type[UserError],
    message: str,
) -> None:
    monkeypatch.chdir(beside)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    dense = LlamaForCausalLM(LlamaConfig(**sizes))
    gateless = LoopedLlamaForCausalLM(LoopedLlamaConfig(**sizes, total_ut_steps=2, use_exit_gate=False))
    for name, model in (("dense", dense), ("gateless", gateless)):
        if any(name in override for override in overrides):
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
    recipe = load_recipe("tiny.yaml", overrides)
    with pytest.raises(error, match=message):
        run.train(recipe)
    assert not Path("runs").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="runs: cannot write the run directory"):
        run.train(load_recipe(folder / "tiny.yaml", [f"run_dir={tmp_path / 'runs'}"]))


def test_a_run_directory_that_cannot_be_made_is_named(beside: Path) -> None:
    """Root may write anywhere, but no one into a file."""
    with pytest.raises(UserError, match="cannot write the run directory"):
        run.train(load_recipe(beside / "tiny.yaml", [f"run_dir={beside / 'a_file' / 'run'}"]))


def test_a_stalled_run_ends_where_the_recipe_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that says yes to everything is seen after five rollouts, and believed when it is seen three times."""
    changes = ["rewards=[{use: 'my_rewards.py:perfect'}]", "telemetry.on_stalled=stop", "train.max_steps=40"]
    done = trained(folder, tmp_path / "stalled", *changes)
    assert len(done.metrics) == summary_of(done.path)["steps"] == 7
    verdict = json.loads((done.path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["cause"], verdict["step"]) == ("stalled", "reward_constant", 7)
    assert "the run ends here (telemetry.on_stalled: stop)" in capsys.readouterr().out


def test_every_metric_of_a_step_stands_in_the_table(done: Done, folder: Path, tmp_path: Path) -> None:
    """docs/metrics.md, with `{t}` for a loop and `{name}` for a reward function."""
    table = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    watching = ("evaluate={every: 1, num_generations: 2}", "telemetry.diagnose_every=1")
    watched = trained(folder, tmp_path / "watched", *watching)
    logged = {name for row in done.metrics + watched.metrics for name in row}
    assert {"eval/stderr", "loop2/output_kl"} <= logged
    plain = {re.sub(r"^(rewards?)/\w+/", r"\1/{name}/", re.sub(r"^loop\d+/", "loop{t}/", name)) for name in logged}
    assert plain - documented == set()
    every_verdict_reads = {"kl", "solve_rate", "mixed_groups", "grad_norm", "reward_logp_corr", "update/changed"}
    assert every_verdict_reads <= documented
