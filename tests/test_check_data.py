"""`rltt check-data` and `data.bad_gold`: what is found in the data before a run, and what a run does about it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.data.check import RepeatedPrompt, SharedPrompt, repeated_prompts, shared_prompts
from rltt.data.problems import Problem
from rltt.errors import DataError, RewardError
from rltt.recipe import RewardEntry
from rltt.rewards import Outcome, math_reward
from rltt.rewards.golds import BadGold, bad_golds, gold_checks, without_bad_golds

RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data: {train: train.jsonl}
rewards: [math]
rollout: {num_generations: 2, max_completion_length: 4}
train: {prompts_per_step: 2, max_steps: 1}
"""
WORDS = "Tom has {} apples ."
REWARDS = """\
from rltt.rewards import Outcome

def digits(completions, gold, **kwargs):
    return [float(answer in text) for text, answer in zip(completions, gold)]

def plain(completions, **kwargs):
    return [0.0] * len(completions)

def check_golds(golds):
    return [Outcome("right") if gold.isdigit() else Outcome("wrong", "not a whole number") for gold in golds]

digits.check_golds = check_golds

def breaks(completions, **kwargs):
    return [0.0] * len(completions)

def broken(golds):
    raise KeyError("no table")

breaks.check_golds = broken

def short(completions, **kwargs):
    return [0.0] * len(completions)

short.check_golds = lambda golds: []

def bare(completions, **kwargs):
    return [0.0] * len(completions)

bare.check_golds = lambda golds: [True for _ in golds]
"""


def rltt_command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_rows(path: Path, golds: list[str], prompt: str = WORDS) -> None:
    rows = [{"prompt": prompt.format(number), "gold": gold} for number, gold in enumerate(golds, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "train.jsonl", ["1", r"\frac{1}{2}", r"\frac{3}{", "4", "$$", "6"])
    return tmp_path


def test_bad_golds_are_named_by_row_and_make_the_status_1(folder):
    done = rltt_command("check-data", folder / "tiny.yaml")
    assert done.exit_code == 1, done.output
    assert "rows: 6 to train on, 0 to evaluate on" in done.stdout
    assert "bad golds: 2 (checked by math)" in done.stdout
    assert rf"{folder}/train.jsonl:3: gold '\\frac{{3}}{{' is bad_gold for math (" in done.stdout
    assert f"{folder}/train.jsonl:5: gold '$$' is bad_gold for math (" in done.stdout
    assert "train.jsonl:2" not in done.stdout


def test_good_golds_are_status_0(folder):
    done = rltt_command("check-data", folder / "tiny.yaml", "data.train=arithmetic")
    assert done.exit_code == 0, done.output
    assert "bad golds: none (checked by math)" in done.stdout


def test_json_has_everything_by_row(folder):
    rows = [
        {"prompt": "What is 2 + 2 ?", "gold": "4"},
        {"prompt": "What is  2 + 2 ?", "gold": "5"},
        {"prompt": "What is 3 ?", "gold": "3"},
        {"prompt": "What is 3 ?\n", "gold": " 3 "},
        {"prompt": "What is nothing ?", "gold": r"\boxed{}"},
        {"prompt": "What is 9 ?", "gold": r"\sqrt{"},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(folder / "eval.jsonl", ["3", "7"], prompt="What is {} ?")  # 1 and 2: not in training
    with (folder / "eval.jsonl").open("a") as out:
        out.write(json.dumps({"prompt": "What is 3 ?", "gold": "3"}) + "\n")
    done = rltt_command("check-data", folder / "tiny.yaml", f"data.eval={folder}/eval.jsonl", "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    train = f"{folder}/train.jsonl"
    assert (report["train_rows"], report["eval_rows"], report["checked_by"]) == (5, 3, ["math"])
    assert report["no_answer"] == [f"{train}:5"]
    assert [(bad["where"], bad["status"], bad["gold"]) for bad in report["bad_golds"]] == [
        (f"{train}:6", "bad_gold", r"\sqrt{")
    ]
    contradiction = {"prompt": "What is 2 + 2 ?", "rows": [f"{train}:1", f"{train}:2"], "golds": ["4", "5"]}
    assert report["contradictions"] == [contradiction]
    assert report["repeated"] == [
        contradiction,
        {"prompt": "What is 3 ?", "rows": [f"{train}:3", f"{train}:4"], "golds": ["3"]},
    ]
    assert report["shared"] == [
        {
            "prompt": "What is 3 ?",
            "train_rows": [f"{train}:3", f"{train}:4"],
            "eval_rows": [f"{folder}/eval.jsonl:3"],
        }
    ]
    shown = rltt_command("check-data", folder / "tiny.yaml", f"data.eval={folder}/eval.jsonl").stdout
    assert f"no answer: {train}:5, left out" in shown
    assert f"{train}:1, {train}:2: 'What is 2 + 2 ?' has '4' and '5'" in shown
    assert f"{folder}/eval.jsonl:3 is also {train}:3, {train}:4: 'What is 3 ?'" in shown


def test_malformed_rows_are_an_error_with_status_2(folder):
    (folder / "train.jsonl").write_text('{"prompt": "  ", "gold": "1"}\n{"prompt": "x", "gold": ""}\n')
    done = rltt_command("check-data", folder / "tiny.yaml")
    assert done.exit_code == 2
    assert "train.jsonl:1: field 'prompt' is empty" in done.stderr
    assert "train.jsonl:2: field 'gold' is empty" in done.stderr


def test_rewards_of_ones_own_take_part(folder):
    write_rows(folder / "train.jsonl", ["1", "two", "3", r"\frac{"])
    own = f"rewards=[math, '{folder}/my_rewards.py:digits', '{folder}/my_rewards.py:plain']"
    report = json.loads(rltt_command("check-data", folder / "tiny.yaml", own, "--json").stdout)
    digits = f"{folder}/my_rewards.py:digits"
    assert report["checked_by"] == ["math", digits]
    assert [(bad["where"].rpartition(":")[2], bad["reward"], bad["status"]) for bad in report["bad_golds"]] == [
        ("2", digits, "wrong"),
        ("4", "math", "bad_gold"),
        ("4", digits, "wrong"),
    ]
    done = rltt_command("check-data", folder / "tiny.yaml", f"rewards=['{folder}/my_rewards.py:plain']")
    assert done.exit_code == 0
    assert "bad golds: not checked; none of the recipe's rewards checks golds" in done.stdout


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("breaks", "its check_golds failed on gold '1': KeyError: 'no table'"),
        ("short", "its check_golds gave 0 outcomes for 1 gold, '1'"),
        ("bare", "its check_golds gave bool True; give an rltt.rewards.Outcome for each gold"),
    ],
)
def test_a_check_that_fails_is_told(folder, function, said):
    checks = gold_checks([RewardEntry(use=f"{folder}/my_rewards.py:{function}")])
    with pytest.raises(RewardError) as error:
        bad_golds([Problem("p", "1", None)], checks)
    assert f"my_rewards.py:{function}" in str(error.value)
    assert said in str(error.value)


def test_equal_golds_are_checked_once():
    asked: list[list[str]] = []

    def check(golds):
        asked.append(list(golds))
        return [Outcome("timeout", "5 s") if gold == "slow" else Outcome("right") for gold in golds]

    problems = [Problem("p", gold, None, where=f"f:{i}") for i, gold in enumerate(["1", "slow", "1", "slow"])]
    bad = [BadGold(f"f:{i}", "slow", "mine", "timeout", "5 s") for i in (1, 3)]
    assert bad_golds(problems, {"mine": check}) == bad
    assert asked == [["1", "slow"]]
    assert str(bad[0]) == "f:1: gold 'slow' is timeout for mine (5 s)"


def test_what_a_run_does_with_bad_golds():
    checks = {"math": math_reward.check_golds}
    problems = [Problem("p", gold, None, where=f"f:{i}") for i, gold in enumerate(["1", "$$", "2", "$$"])]
    said: list[str] = []
    with pytest.raises(DataError, match="2 of 4 training rows") as error:
        without_bad_golds(problems, checks, "stop", said.append)
    assert "f:1: gold '$$'" in str(error.value)
    assert "data.bad_gold to drop" in str(error.value)
    assert said == []
    assert without_bad_golds(problems, checks, "keep", said.append) == problems
    assert without_bad_golds(problems, checks, "drop", said.append) == [problems[0], problems[2]]
    kept, dropped = said
    assert "are kept" in kept
    assert "f:1: gold" in dropped
    assert "f:3: gold" in dropped
    with pytest.raises(DataError, match="would leave no row"):
        without_bad_golds(problems[1:2], checks, "drop", said.append)
    assert without_bad_golds(problems[:1], checks, "stop", said.append) == problems[:1]
    assert len(said) == 2


def test_a_run_stops_before_the_policy_loads(folder):
    # The checkpoint does not exist: had the run come to load it, the error would be another.
    done = rltt_command(
        "train", folder / "tiny.yaml", f"policy={{path: {folder}/nowhere, loops: 2}}", f"run_dir={folder}/run"
    )
    assert done.exit_code == 2
    assert "2 of 6 training rows have a gold that cannot be graded" in done.stderr
    assert f"{folder}/train.jsonl:3: gold" in done.stderr
    assert not (folder / "run").exists()


def test_bad_golds_of_the_evaluation_stop_a_run_too(folder):
    write_rows(folder / "eval.jsonl", ["7", "$$"], prompt="What is {} ?")
    done = rltt_command(
        *("train", folder / "tiny.yaml", "data.train=arithmetic"),
        *(f"data.eval={folder}/eval.jsonl", f"run_dir={folder}/run"),
    )
    assert done.exit_code == 2
    assert "1 of 2 evaluation rows" in done.stderr


@pytest.mark.parametrize(("policy", "rows"), [("drop", {1, 2, 4, 6}), ("keep", {1, 2, 3, 4, 5, 6})])
def test_a_run_that_drops_or_keeps_them(folder, policy, rows):
    run = folder / "run"
    done = rltt_command(
        *("train", folder / "tiny.yaml", f"run_dir={run}", f"data.bad_gold={policy}"),
        f"train={{prompts_per_step: {len(rows)}, max_steps: 1, per_device_train_batch_size: {len(rows)}}}",
    )
    assert done.exit_code == 0, done.output
    assert "train.jsonl:5: gold '$$' is bad_gold for math" in done.stdout
    assert done.stdout.count("have a gold that cannot be graded") == 1
    seen = [json.loads(line)["row"] for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert {int(row.rpartition(":")[2]) for row in seen} == rows


def test_the_key_is_refused_where_it_has_no_effect(folder):
    own = f"rewards=['{folder}/my_rewards.py:plain']"
    done = rltt_command("train", folder / "tiny.yaml", own, "data.bad_gold=drop", f"run_dir={folder}/run")
    assert done.exit_code == 2
    assert "data.bad_gold: drop has no effect: none of the rewards checks golds" in done.stderr


def test_prompts_that_occur_twice():
    a, b, c = (Problem(prompt, gold, None, where=where) for prompt, gold, where in ("a1x", "a2y", "b3z"))
    assert repeated_prompts([a, c]) == []
    assert repeated_prompts([a, c, b]) == [RepeatedPrompt("a", ("x", "y"), ("1", "2"))]
    assert shared_prompts([a, b], [c]) == []
    assert shared_prompts([a, c], [b]) == [SharedPrompt("a", ("x",), ("y",))]


def test_a_check_that_hangs_or_dies_costs_its_gold(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time\nfrom rltt.rewards import Outcome\n"
        "def score(completions, **kwargs): return [1.0] * len(completions)\n"
        "def check(golds):\n"
        "    if 'hang' in golds: time.sleep(3600)\n"
        "    if 'die' in golds: os._exit(1)\n"
        "    return [Outcome('right')] * len(golds)\n"
        "score.check_golds = check\n"
    )
    checks = gold_checks([RewardEntry(use=f"{tmp_path}/mine.py:score", timeout=0.5)])
    problems = [Problem("p", gold, None, where=gold) for gold in ("1", "hang", "2", "die")]
    assert [(bad.where, bad.status) for bad in bad_golds(problems, checks)] == [("hang", "timeout"), ("die", "error")]


def test_every_malformed_row_is_listed(folder):
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"question": "", "answer": "1"}) for _ in range(30)))
    done = rltt_command("check-data", folder / "tiny.yaml")
    assert done.exit_code == 2
    assert all(f"train.jsonl:{row}:" in done.stderr for row in range(1, 31))
