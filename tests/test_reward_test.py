"""`rltt reward test`: a reward function on real completions, before a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.data.problems import Problem
from rltt.errors import DataError, RewardError
from rltt.recipe import RewardEntry
from rltt.rewards.samples import Sample, read_samples, samples_of_golds, with_data
from rltt.rewards.trial import try_reward

REWARDS = """\
import asyncio, os, time

def ends(completions, gold, **kwargs):
    print("a line from the reward")
    return [1.0 if text.endswith(answer) else 0.0 for text, answer in zip(completions, gold)]

def divides(completions, **kwargs):
    return [1 / len(text) for text in completions]

def mixed(completions, **kwargs):
    return [None if text == "no" else float("nan") if text == "nan" else 2.0 for text in completions]

async def later(completions, gold, **kwargs):
    await asyncio.sleep(0.05)
    return [0.5] * len(completions)

def hangs(completions, **kwargs):
    if "hang" in completions:
        time.sleep(60)
    return [1.0] * len(completions)

def dies(completions, **kwargs):
    if "die" in completions:
        os._exit(1)
    return [1.0] * len(completions)

def best(completions, **kwargs):
    longest = max(map(len, completions))
    return [float(len(text) == longest) for text in completions]

def only_one(completions, **kwargs):
    return [1.0]

def level(completions, level, **kwargs):
    return [float(value) for value in level]

def length(completions, tokenizer, **kwargs):
    return [float(len(tokenizer(text)["input_ids"])) for text in completions]

def says(completions, **kwargs):
    return [float(completion[-1]["content"] == "yes") for completion in completions]

def prompted(completions, prompts, **kwargs):
    return [float(prompt in text) for prompt, text in zip(prompts, completions)]
"""


def rltt_command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def tried(folder: Path, function: str, *texts: str, **columns: Any) -> Any:
    """The command's JSON for completions of these texts, and how it ended."""
    file = write_rows(folder / "completions.jsonl", *({"completion": text, **columns} for text in texts))
    done = rltt_command("reward", "test", f"{folder}/mine.py:{function}", "--completions", file, "--json")
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_math_on_completions_of_a_file(folder):
    file = write_rows(
        folder / "c.jsonl",
        {"completion": r"So it is \boxed{\frac{2}{4}}.", "gold": "0.5"},
        {"response": r"\boxed{7}", "gold": 8},
        {"completion": "no idea", "gold": "1"},
        {"completion": r"\boxed{1}", "gold": "$$"},
    )
    done = rltt_command("reward", "test", "math", "--completions", file)
    assert done.exit_code == 0, done.output
    for row, status in enumerate(("right", "wrong", "unparseable", "bad_gold"), start=1):
        assert f"c.jsonl:{row}" in done.stdout
        assert status in done.stdout
    assert "math: 4 completions, mean 0.333, solved 0.250 (reward >= 1), None 1, failed 0" in done.stdout
    report = json.loads(rltt_command("reward", "test", "math", "--completions", file, "--json").stdout)
    assert [row["outcome"]["status"] for row in report["rows"]] == ["right", "wrong", "unparseable", "bad_gold"]
    assert [row["reward"] for row in report["rows"]] == [1.0, 0.0, 0.0, None]


def test_golds_alone_are_tried_boxed_bare_and_empty(folder):
    file = write_rows(folder / "d.jsonl", {"prompt": "p", "gold": "4"}, {"prompt": "q", "gold": "5"})
    done = rltt_command("reward", "test", "math", "--data", file, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["completion"], row["reward"]) for row in rows] == [
        *((r"\boxed{4}", 1.0), ("4", 0.0), ("", 0.0)),
        *((r"\boxed{5}", 1.0), ("5", 0.0), ("", 0.0)),
    ]
    limited = json.loads(rltt_command("reward", "test", "math", "--data", file, "--limit", "1", "--json").stdout)
    assert len(limited["rows"]) == 3


def test_a_function_that_raises_is_told_and_the_other_rows_are_shown(folder):
    file = write_rows(folder / "c.jsonl", {"completion": "four"}, {"completion": ""}, {"completion": "eight888"})
    done = rltt_command("reward", "test", f"{folder}/mine.py:divides", "--completions", file)
    assert done.exit_code == 1
    assert "reward function 'divides' failed: ZeroDivisionError" in done.stdout
    assert f"{file}:2: ''" in done.stdout
    assert "return [1 / len(text) for text in completions]" in done.stdout
    assert "0.25" in done.stdout
    assert "0.125" in done.stdout
    assert "divides: 3 completions, mean 0.188, solved 0.000 (reward >= 1), None 0, failed 1" in done.stdout
    status, report = tried(folder, "divides", "four", "", "eight888")
    assert status == 1
    assert [row["reward"] for row in report["rows"]] == [0.25, None, 0.125]
    assert report["rows"][1]["failure"]["kind"] == "raised"
    assert report["batch_failures"][0]["index"] == 1


def test_none_is_an_answer_and_nan_is_a_failure(folder):
    status, report = tried(folder, "mixed", "yes", "no", "nan")
    assert status == 1
    assert [row["reward"] for row in report["rows"]] == [2.0, None, None]
    assert [row["failure"] and row["failure"]["kind"] for row in report["rows"]] == [None, "none", "not_finite"]
    assert {key: report["summary"][key] for key in ("none", "failed", "mean", "solved")} == {
        "none": 1,
        "failed": 1,
        "mean": 2.0,
        "solved": pytest.approx(1 / 3),
    }
    status, _ = tried(folder, "mixed", "yes", "no")
    assert status == 0


def test_hanging_and_dying_functions_end_only_their_completion(folder):
    file = write_rows(folder / "c.jsonl", {"completion": "hang"}, {"completion": "fine"})
    done = rltt_command(
        "reward", "test", f"{folder}/mine.py:hangs", "--completions", file, "--timeout", "0.5", "--json"
    )
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert [row["failure"] and row["failure"]["kind"] for row in report["rows"]] == ["timeout", None]
    assert 0.4 < report["rows"][0]["seconds"] < 10
    status, report = tried(folder, "dies", "die", "fine")
    assert status == 1
    assert [row["failure"] and row["failure"]["kind"] for row in report["rows"]] == ["died", None]


def test_coroutines_are_awaited_and_timed(folder):
    status, report = tried(folder, "later", "a", "b", gold="x")
    assert status == 0
    assert [row["reward"] for row in report["rows"]] == [0.5, 0.5]
    assert 0.05 <= report["summary"]["seconds_median"] <= report["summary"]["seconds_max"]
    assert report["summary"]["seconds"] >= 0.1


def test_functions_that_compare_completions_are_told_apart(folder):
    status, report = tried(folder, "best", "a", "aaa")
    assert status == 0
    assert [(row["reward"], row["alone"]) for row in report["rows"]] == [(0.0, 1.0), (1.0, 1.0)]
    assert report["summary"]["otherwise_alone"] == 1


def test_a_batch_that_fails_where_no_completion_does(folder):
    file = write_rows(folder / "c.jsonl", {"completion": "a"}, {"completion": "b"})
    done = rltt_command("reward", "test", f"{folder}/mine.py:only_one", "--completions", file)
    assert done.exit_code == 1
    assert "returned 1 rewards for 2 completions" in done.stdout
    assert "in a call with a whole batch" in done.stdout


def test_what_the_function_prints_stays_out_of_the_json(folder):
    file = write_rows(folder / "c.jsonl", {"completion": "4", "gold": "4"})
    command = "from rltt.cli.main import app; app()"
    options = ["reward", "test", f"{folder}/mine.py:ends", "--completions", str(file), "--json"]
    done = subprocess.run([sys.executable, "-c", command, *options], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"][0]["reward"] == 1.0
    assert "a line from the reward" in done.stderr


def test_rollouts_of_a_run_get_the_columns_of_their_rows(folder):
    data = write_rows(
        folder / "data.jsonl",
        {"prompt": "one", "gold": "1", "level": 3},
        {"prompt": "two", "gold": "2", "level": 5},
    )
    rollouts = folder / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    rest = {"rewards": {"math": 1.0}, "reward": 1.0, "solved": 1.0, "advantage": 0.0}
    for step, (row, gold) in enumerate([(2, "2"), (1, "1"), (2, "2")], start=1):
        rollout = {"step": step, "prompt": "Q: templated", "completion": f"\\boxed{{{gold}}}", "gold": gold}
        write_rows(rollouts / f"step_{step:06d}.jsonl", rollout | {"row": f"{data}:{row}"} | rest)
    for place in (folder / "run", rollouts):
        done = rltt_command("reward", "test", "math", "--completions", place, "--json")
        assert [row["reward"] for row in json.loads(done.stdout)["rows"]] == [1.0, 1.0, 1.0]
    level = f"{folder}/mine.py:level"
    done = rltt_command("reward", "test", level, "--completions", folder / "run")
    assert done.exit_code == 2
    assert "reward function 'level' needs the column 'level'" in done.stderr
    assert "--data can add columns" in done.stderr
    done = rltt_command("reward", "test", level, "--completions", folder / "run", "--data", data, "--json")
    assert [row["reward"] for row in json.loads(done.stdout)["rows"]] == [5.0, 3.0, 5.0]
    limited = rltt_command("reward", "test", "math", "--completions", folder / "run", "--limit", "1", "--json")
    assert [Path(row["where"]).name for row in json.loads(limited.stdout)["rows"]] == ["step_000002.jsonl:1"]


PROBLEMS = [
    Problem("one?", "1", None, {"level": 3}, "d:1"),
    Problem("two?", "2", "because", {"level": 5}, "d:2"),
]


def test_how_completions_find_their_rows():
    def golds(samples: list[Sample]) -> list[Any]:
        return [sample.columns["gold"] for sample in with_data(samples, PROBLEMS)]

    assert golds([Sample("c:1", "x", "two?"), Sample("c:2", "x", "one? "), Sample("c:3", "x", "two?")]) == list("212")
    assert golds([Sample("c:1", "x", [{"role": "user", "content": "two?"}])]) == ["2"]
    assert golds([Sample("c:1", "x", "other", {"row": "d:2"})]) == ["2"]
    assert golds([Sample("c:1", "x"), Sample("c:2", "x")]) == ["1", "2"]
    (first, second) = with_data([Sample("c:1", "x", None, {"gold": "own"}), Sample("c:2", "x")], PROBLEMS)
    assert first.columns == {"gold": "own", "row": "d:1", "level": 3}
    assert (first.prompt, second.prompt) == ("one?", "two?")
    assert second.columns == {"gold": "2", "row": "d:2", "response": "because", "level": 5}


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([Sample("c:1", "x")], "1 completions for 2 rows of data: .*matched by order, and must be as many"),
        ([Sample("c:1", "x", "three?")], "c:1: its prompt is not in the data"),
        ([Sample("c:1", "x", None, {"row": "d:9"})], "c:1: row 'd:9' is not in the data"),
    ],
)
def test_completions_that_do_not_fit_the_data(samples, said):
    with pytest.raises(DataError, match=said):
        with_data(samples, PROBLEMS)


def test_a_prompt_with_two_golds_matches_nothing():
    problems = [Problem("same", "1", None, where="d:1"), Problem("same", "2", None, where="d:2")]
    with pytest.raises(DataError, match="d:1 and d:2 have the same prompt and differ otherwise"):
        with_data([Sample("c:1", "x", "same")], problems)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": "x"}', "c.jsonl:1: has neither `completion` nor `response`; found 'text'"),
        ('{"completion": 3}', "c.jsonl:1: completion is 3; expected text, or a list of messages"),
        ('{"completion": "x", "prompts": 1}', "c.jsonl:1: a column may not be called 'prompts'"),
        ('{"completion": "x"', "c.jsonl:1: not JSON"),
        ('["x"]', "c.jsonl:1: found list"),
    ],
)
def test_malformed_completions(tmp_path, row, said):
    (tmp_path / "c.jsonl").write_text(row + "\n")
    with pytest.raises(DataError) as error:
        read_samples(tmp_path / "c.jsonl")
    assert said in str(error.value)


def test_where_there_are_no_completions(tmp_path):
    with pytest.raises(DataError, match="no such file or run directory"):
        read_samples(tmp_path / "nowhere")
    (tmp_path / "summary.json").write_text("{}")
    write_rows(tmp_path / "metrics.jsonl", {"step": 1})
    with pytest.raises(DataError, match="holds no rollouts"):
        read_samples(tmp_path)
    done = rltt_command("reward", "test", "math")
    assert done.exit_code == 2
    assert "give --completions, --data, or both" in done.stderr


def test_a_wrong_name_gets_the_registrys_error(folder):
    done = rltt_command("reward", "test", "maht", "--data", "arithmetic", "--limit", "1")
    assert done.exit_code == 2
    assert "reward 'maht' is not known; did you mean 'math'?" in done.stderr
    done = rltt_command("reward", "test", f"{folder}/mine.py:end", "--data", "arithmetic", "--limit", "1")
    assert done.exit_code == 2
    assert "has no function 'end'; did you mean 'ends'?" in done.stderr


def test_messages_tokenizer_and_prompts(folder, tokenizer):
    def rewards(function: str, samples: list[Sample], **options: Any) -> list[float | None]:
        report = try_reward(RewardEntry(use=f"{folder}/mine.py:{function}"), samples, **options)
        return [trial.reward for trial in report.trials]

    yes = [Sample("c:1", "yes"), Sample("c:2", [{"role": "assistant", "content": "no"}])]
    assert rewards("says", yes, chat=True) == [1.0, 0.0]
    assert rewards("length", [Sample("c:1", "Tom has 4")], tokenizer=lambda: tokenizer) == [3.0]
    with pytest.raises(RewardError, match="name one with --tokenizer"):
        rewards("length", yes)
    assert rewards("prompted", [Sample("c:1", "one? 1", "one?")]) == [1.0]
    with pytest.raises(RewardError, match="takes prompts"):
        rewards("prompted", yes)


RECIPE = """\
name: x
policy: {new: {hidden_size: 16, num_attention_heads: 2}, loops: 2}
data: {train: {path: arithmetic, size: 4}}
rewards: [{use: mine.py:length, weight: 0.5}, {use: "mine.py:scaled", args: {factor: 2}}, math]
"""


@pytest.fixture
def recipe(folder):
    (folder / "mine.py").write_text(
        REWARDS + "def scaled(completions, factor, **kwargs):\n    return [float(factor)] * len(completions)\n"
    )
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def test_the_rewards_of_a_recipe_with_their_args_its_data_and_the_tokenizer_of_its_new_policy(recipe):
    done = rltt_command("reward", "test", "--recipe", recipe, "--json")
    assert done.exit_code == 0, done.output
    lengths, scaled, math = ([row["reward"] for row in report["rows"]] for report in json.loads(done.stdout))
    assert len(lengths) == 12  # boxed, bare, and empty
    assert min(lengths) == 0
    assert max(lengths) > 2
    assert set(scaled) == {2.0}
    assert sum(value == 1.0 for value in math) == 4


def test_one_reward_of_a_recipe_with_another_argument(recipe):
    done = rltt_command("reward", "test", "scaled", "--recipe", recipe, "--arg", "factor=3.5", "--json")
    assert {row["reward"] for row in json.loads(done.stdout)["rows"]} == {3.5}
    done = rltt_command("reward", "test", "nobody", "--recipe", recipe)
    assert "nobody is none of the recipe's rewards" in done.stderr
    done = rltt_command("reward", "test", "scaled", "--recipe", recipe, "--arg", "factor")
    assert "write it as key=value" in done.stderr


def test_a_reward_in_this_process(folder):
    (folder / "mine.py").write_text("import os\ndef pid(completions, **kwargs):\n    return [float(os.getpid())]\n")
    (folder / "one.jsonl").write_text('{"completion": "x"}\n')
    command = ("reward", "test", f"{folder}/mine.py:pid", "--completions", folder / "one.jsonl", "--json")
    pids = [json.loads(rltt_command(*command, *more).stdout)["rows"][0]["reward"] for more in ([], ["--no-isolate"])]
    assert pids[1] == os.getpid() != pids[0]


def test_samples_of_golds():
    found = samples_of_golds(PROBLEMS[1:])
    assert [sample.where for sample in found] == ["d:2 (boxed)", "d:2 (bare)", "d:2 (empty)"]
    assert all(sample.prompt == "two?" and sample.columns["gold"] == "2" for sample in found)
