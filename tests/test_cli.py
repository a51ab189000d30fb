"""The command line: what reaches the library, and what a user sees. The work behind the commands is replaced."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rltt
import rltt.train
from rltt.cli.main import app
from rltt.errors import DataError
from rltt.recipe import load_recipe

RECIPE = """\
name: tiny
policy: {new: {}, loops: 4}
data: {train: arithmetic}
rewards: [math]
rollout: {max_completion_length: 32}
pretrain: {}
"""


def rltt_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, Any]]:
    """What the commands called, in place of the modules that do the work."""
    made: list[tuple[str, Any]] = []

    def replace(name: str, **functions: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    def record(name: str, result: Any = None) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            made.append((name, kwargs or args))
            return result

        return function

    run = replace(
        "rltt.train.run",
        train=record("train", Path("runs/tiny")),
        pretrain=record("pretrain", Path("runs/tiny")),
        describe=record("describe", "256 completions a step"),
    )
    monkeypatch.setattr(rltt.train, "run", run, raising=False)
    replace("rltt.models.convert", convert_checkpoint=record("convert"))
    replace("rltt.evaluate", run_eval=record("eval"))
    return made


@pytest.mark.parametrize("job", ["train", "pretrain"])
def test_jobs_get_the_recipe_with_overrides(job, recipe, calls):
    done = rltt_command(job, recipe, "train.max_steps=2", "objective.credit=final", "run_dir=/x")
    assert done.exit_code == 0, done.output
    assert "runs/tiny" in done.stdout
    ((called, (given, resume, accepted)),) = calls
    assert (called, resume, accepted) == (job, False, [])
    assert given == load_recipe(recipe, ["train.max_steps=2", "objective.credit=final", "run_dir=/x"])
    assert given.train.max_steps == 2


@pytest.mark.parametrize("job", ["train", "pretrain"])
def test_a_dry_run_prints_the_recipe_and_the_plan_and_stops(job, recipe, calls, tmp_path):
    done = rltt_command(job, recipe, "--dry-run", "train.max_steps=2")
    assert done.exit_code == 0
    assert [name for name, _ in calls] == ["describe"]
    resolved, plan, _ = done.stdout.rpartition("256 completions a step")
    assert plan
    (tmp_path / "resolved.yaml").write_text(resolved)
    assert load_recipe(tmp_path / "resolved.yaml") == load_recipe(recipe, ["train.max_steps=2"])


def test_a_users_mistake_is_a_message_and_status_2(recipe, calls):
    done = rltt_command("train", recipe, "objective.bta=1", "train.max_steps=x")
    assert done.exit_code == 2
    assert done.stdout == ""
    first, second = done.stderr.strip().splitlines()
    assert first == f"error: {recipe}: objective.bta: unknown key; the nearest is 'objective.beta'"
    assert second == f"       {recipe}: train.max_steps: found 'x'; expected a whole number"
    assert calls == []


def test_what_a_job_needs_is_checked_before_it_starts(recipe, calls):
    done = rltt_command("train", recipe, "rewards=[]", "--dry-run")
    assert done.exit_code == 2
    assert "rewards: training needs at least one" in done.stderr
    assert rltt_command("pretrain", recipe, "pretrain=null").exit_code == 2
    assert calls == []


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [(DataError("rows.jsonl:3: no gold"), 2, "error: rows.jsonl:3: no gold\n"), (KeyboardInterrupt(), 130, "")],
)
def test_how_a_run_can_end(recipe, calls, monkeypatch, raised, status, said):
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(sys.modules["rltt.train.run"], "train", fail)
    done = rltt_command("train", recipe)
    assert (done.exit_code, done.stderr) == (status, said)


def test_a_bug_keeps_its_traceback(recipe, calls, monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["rltt.train.run"], "train", fail)
    assert isinstance(rltt_command("train", recipe).exception, ZeroDivisionError)


def test_convert(calls):
    done = rltt_command("convert", "some/model", "--loops", "3", "--out", "out", "--no-norm-each-loop")
    assert done.exit_code == 0, done.output
    assert calls == [("convert", ("some/model", Path("out"), 3, "scalar", 0.99, False, "looped", 64))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mixing", "gated"], "rltt convert: mixing: found 'gated'; expected 'scalar' or 'identity'"),
        (["--mixing-init", "1"], "rltt convert: mixing_init: found the number 1.0; expected a value below 1"),
        (["--loops", "0"], "--loops"),
    ],
)
def test_wrong_conversions(calls, options, said):
    done = rltt_command("convert", "some/model", "--loops", "3", "--out", "out", *options)
    assert done.exit_code == 2
    assert said in done.stderr
    assert calls == []


def test_eval(calls):
    options = ["--loops", "1,2, 4", "--k", "1,8", "--limit", "5", "--split", "test", "--json", "o.json", "--seed", "3"]
    done = rltt_command("eval", "some/model", "--data", "openai/gsm8k", *options, "--prompt-template", "Q: {prompt}")
    assert done.exit_code == 0, done.output
    ((_, given),) = calls
    data = given.pop("data")
    assert data.eval.model_dump(exclude_defaults=True) == {"path": "openai/gsm8k", "split": "test", "limit": 5}
    assert data.prompt_template == "Q: {prompt}"
    assert given == {
        "model": "some/model",
        "loops": [1, 2, 4],
        "ks": [1, 8],
        "temperature": 1.0,
        "reward": "math",
        "max_completion_length": 512,
        "batch_size": 64,
        "seed": 3,
        "json_path": Path("o.json"),
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loops", "1,x"], "found '1,x'; expected whole numbers from 1"),
        (["--k", "0"], "found '0'; expected whole numbers from 1"),
        (["--split", "x"], "error: --data: split: has no effect unless path is a data set on the Hub"),
        (["--prompt-template", "x"], "error: rltt eval: prompt_template: found 'x'; it must contain {prompt}"),
    ],
)
def test_wrong_evaluations(calls, options, said):
    done = rltt_command("eval", "some/model", "--data", "x.jsonl", *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert calls == []


def test_version():
    assert rltt_command("--version").stdout == f"rltt {rltt.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["eval", "--help"], ["check-data", "--help"], ["reward", "test", "--help"]],
)
def test_help_loads_nothing_heavy(arguments):
    code = (
        "import sys; from rltt.cli.main import app\n"
        f"try: app({arguments!r})\n"
        "finally: print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert "Usage" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_a_wrong_recipe_is_told_without_torch(recipe):
    code = (
        "import sys; from rltt.cli.main import app\n"
        f"try: app(['train', {recipe!r}, 'train.seed=x'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert "Traceback" not in done.stderr
