"""`rltt probe`: solve rates before a run, and `data.filter`, which trains by them."""

import itertools
import json
import math
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import killed
import pytest
from killed import both_ended, ended
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.errors import DataError, RecipeError
from rltt.probe.estimate import histogram, mixed_at, mixed_share
from rltt.probe.filter import KEPT
from rltt.probe.report import Report
from rltt.probe.results import Result, Results
from rltt.probe.solve_rates import probe
from rltt.probe.start import probed, start_of
from rltt.recipe import load_recipe
from rltt.train import run

pytestmark = pytest.mark.usefixtures("quick_collections")

RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data: {train: {path: arithmetic, difficulty: 1, size: 24}}
rewards: [{use: "thirds.py:thirds", isolate: false}]
objective: {credit: final}
rollout: {num_generations: 4, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 2, learning_rate: 1.0e-3, save_steps: 1}
telemetry: {tracker: none}
"""
# Rows 1, 4, 7, … are solved by every other completion, 2, 5, 8, … never, 3, 6, 9, … always.
THIRDS = """\
def thirds(completions, row, log_metric=None, **kwargs):
    numbers = [int(name.rpartition(":")[2]) % 3 for name in row]
    if log_metric is not None:
        log_metric("reward/thirds/never", numbers.count(2) / len(numbers))
    return [(float(i % 2), 0.0, 1.0)[(number - 1) % 3] for i, number in enumerate(numbers)]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def train_with(cache: Path, *args: Any) -> None:
    """In a process of its own, which has not the environment of this one."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    killed.train(*args)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "thirds.py").write_text(THIRDS)
    return tmp_path / "tiny.yaml"


def quiet() -> Console:
    return Console(quiet=True)


def probe_of(recipe: Path, prompts: int = 24, samples: int | None = None, *overrides: str) -> Report:
    return probe(load_recipe(recipe, overrides), prompts, samples, quiet())


def trained_rows(path: Path) -> set[int]:
    lines = [line for file in (path / "rollouts").iterdir() for line in file.read_text().splitlines()]
    return {int(json.loads(line)["row"].rpartition(":")[2]) for line in lines}


# ------------------------------------------------------------------------------------------------------- the estimator


@pytest.mark.parametrize("n", [2, 5, 8])
def test_mixed_groups_are_counted_over_all_groups_that_could_be_drawn(n: int) -> None:
    for c in range(n + 1):
        solved = [index < c for index in range(n)]
        for size in range(1, n + 1):
            groups = list(itertools.combinations(solved, size))
            share = sum(len(set(group)) == 2 for group in groups) / len(groups)
            assert mixed_at(n, c, size) == pytest.approx(share, abs=1e-15)


def test_mixed_groups_are_estimated_without_bias() -> None:
    """The mean over what could be sampled of a prompt with a known rate is 1 - p^G - (1-p)^G."""
    n = 8
    for p, size in itertools.product((0.03, 0.5, 0.8), (2, 4, 8)):
        chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(weight * mixed_at(n, c, size) for c, weight in enumerate(chance))
        assert mean == pytest.approx(1 - p**size - (1 - p) ** size, abs=1e-14)


def test_no_group_is_larger_than_the_samples() -> None:
    assert mixed_share([(8, 4), (7, 0)], 8) is None
    assert mixed_share([(8, 4), (0, 0)], 8) == (1.0, None)  # a prompt without a graded completion says nothing
    share = mixed_share([(4, 2), (4, 0), (4, 4)], 2)
    assert share is not None
    assert share == pytest.approx((2 / 9, 2 / 9))
    with pytest.raises(ValueError, match="n=4"):
        mixed_at(4, 2, 5)


def test_solve_rates_fall_into_their_bins() -> None:
    counts = {(low, high): count for low, high, count in histogram([0, 1, 0.1, 0.3, 0.301, 1 / 64, 63 / 64, 0.5])}
    assert {bounds: count for bounds, count in counts.items() if count} == {
        (0, 0): 1, (0, 0.1): 2, (0.2, 0.3): 1, (0.3, 0.4): 1, (0.4, 0.5): 1, (0.9, 1): 1, (1, 1): 1,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the probe


def test_solve_rates_are_those_of_the_reward(recipe: Path, tmp_path: Path) -> None:
    report = probe_of(recipe)
    assert len(report.results) == report.rows_in_all == 24
    for result in report.results:
        assert result.rate == (0.5, 0.0, 1.0)[(int(result.row.rpartition(":")[2]) - 1) % 3]
        assert 0 < result.tokens <= 8
    assert report.solve_rate is not None
    assert report.solve_rate.value == 0.5
    # Of two solved and two unsolved, four of the six pairs are mixed; a third of the prompts is like that.
    sizes = {group.size: group.mixed and group.mixed.value for group in report.groups}
    assert sizes == {2: pytest.approx(2 / 9), 4: pytest.approx(1 / 3), 8: None, 16: None, 32: None, 64: None}
    assert report.outcomes["reward/thirds/never"] == pytest.approx(1 / 3)
    assert report.outcomes["reward/thirds/raised"] == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["cache"]


def test_what_is_known_is_not_sampled_again(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe_of(recipe, 6)
    assert len(first.results) == 6
    lines = first.cache.read_text().splitlines()
    assert len(lines) == 7
    second = probe_of(recipe, 12)
    assert {result.id for result in first.results} < {result.id for result in second.results}
    assert second.cache.read_text().splitlines()[1:7] == lines[1:]
    assert not list(second.cache.parent.glob(".*"))
    with monkeypatch.context() as patch:
        patch.delattr("rltt.probe.solve_rates.make_trainer")  # not called for
        again = probe_of(recipe, 12)
    assert again.to_json() == second.to_json()
    # More samples of a prompt take the place of fewer.
    more = probe_of(recipe, 6, 8)
    assert sorted({result.samples for result in more.results}) == [4, 8]
    assert len(more.results) == len(again.results)


def test_the_same_probe_finds_the_same(recipe: Path) -> None:
    overrides = ("rewards=[math]", "rollout.max_completion_length=6")
    report = probe_of(recipe, 24, None, *overrides)
    report.cache.unlink()
    assert probe_of(recipe, 24, None, *overrides).results == report.results
    assert sum(result.truncated for result in report.results) > 0


@pytest.mark.parametrize(
    "override",
    ["rollout.temperature=0.9", "rewards=[math]", "policy.loops=3", "train.seed=1", "pretrain={max_steps: 1}"],
)
def test_results_belong_to_policy_sampling_and_reward(recipe: Path, override: str) -> None:
    same = ["data.train.size=30", "data.holdout=2", "rollout.num_generations=2", "train.learning_rate=1.0"]
    assert Results(load_recipe(recipe, [override])).path != Results(load_recipe(recipe)).path
    assert Results(load_recipe(recipe, same)).path == Results(load_recipe(recipe)).path


def test_another_reward_of_the_same_name_is_another(recipe: Path) -> None:
    before = Results(load_recipe(recipe)).path
    (recipe.parent / "thirds.py").write_text(THIRDS + "# changed\n")
    assert Results(load_recipe(recipe)).path != before


def test_the_policy_is_the_one_that_training_would_start_from(recipe: Path, tmp_path: Path) -> None:
    overrides = ["pretrain={max_steps: 3, batch_size: 8}", "data.filter={solve_rate: [0.1, 0.9]}"]
    resolved = load_recipe(recipe, [*overrides, f"run_dir={tmp_path / 'run'}"])
    probe(resolved, 24, None, quiet())
    alone = probed(resolved, str(tmp_path / "probe"))
    policy = start_of(alone, run.prepare(alone, quiet()), quiet())
    run.train(resolved)
    started = load_file(tmp_path / "run" / "start" / "model.safetensors")
    for name, weight in policy.model.state_dict().items():
        if name in started:
            assert weight.equal(started[name]), name
    assert trained_rows(tmp_path / "run") <= set(range(1, 25, 3))


# --------------------------------------------------------------------------------------------------------- suggestions


def report_of(recipe: Path, counts: list[tuple[int, int]], levels: list[str] | None = None, *overrides: str) -> Report:
    results = [Result(f"{i}", f"row:{i}", n, n, c, 0, 5.0, {}) for i, (n, c) in enumerate(counts)]
    columns = {} if levels is None else {"level": levels}
    return Report(load_recipe(recipe, overrides), results, columns, len(results), Path("cache.jsonl"))


def test_a_larger_group_is_suggested_where_it_suffices(recipe: Path) -> None:
    report = report_of(recipe, [(16, 3)] * 40)
    sizes = {group.size: group.mixed.value for group in report.groups if group.mixed}
    assert sizes[2] < 0.5 < sizes[4]
    assert report.suggestions == []
    report = report_of(recipe, [(16, 1)] * 40)  # mixed in every group of 16, in half of the groups of 8
    assert report.suggestions[0].override == "rollout.num_generations=8"
    # Of a size that the micro-batch does not divide none is made.
    sizes = ("rollout.num_generations=3", "train.prompts_per_step=2", "train.per_device_train_batch_size=6")
    report = report_of(recipe, [(16, 1)] * 40, None, *sizes)
    assert all("smallest group" not in change.advice for change in report.suggestions)


def test_a_filter_is_suggested_where_few_prompts_are_of_use(recipe: Path) -> None:
    report = report_of(recipe, [(4, 0)] * 50 + [(4, 2)] * 20)
    assert [change.override for change in report.suggestions] == ["data.filter.solve_rate=[0.1,0.9]"]
    assert "about 20 of 70 rows" in report.suggestions[0].advice


def test_an_easier_or_harder_start_is_suggested_where_nothing_is_mixed(recipe: Path) -> None:
    hard = report_of(recipe, [(4, 0)] * 50, None, "data.train.difficulty=3")
    assert [change.override for change in hard.suggestions] == ["data.train.difficulty=1"]
    easy = report_of(recipe, [(4, 4)] * 50, None, "data.train.difficulty=3")
    assert [change.override for change in easy.suggestions] == ["data.train.difficulty=4"]


def test_the_level_with_the_best_share_is_named(recipe: Path) -> None:
    report = report_of(recipe, [(4, 2)] * 20 + [(4, 0)] * 60, ["Level 1"] * 20 + ["Level 5"] * 60)
    assert [(part.value, part.prompts, part.solve_rate.value) for part in report.subsets["level"]] == [
        ("Level 1", 20, 0.5),
        ("Level 5", 60, 0.0),
    ]
    (named,) = [change for change in report.suggestions if change.override is None]
    assert "level 'Level 1' have 100% mixed groups, all have 25%" in named.advice
    assert re.search(r"Level 5 +60 +0\.000 ± 0\.000 +0\.000 ± 0\.000", report.render())


def test_suggestions_can_be_pasted_behind_a_recipe(recipe: Path) -> None:
    for counts in ([(16, 1)] * 40, [(4, 0)] * 50 + [(4, 2)] * 20, [(4, 0)] * 50, [(4, 4)] * 50):
        report = report_of(recipe, counts)
        _, _, printed = report.render().partition("recipe.yaml`:\n")
        overrides = [shlex.split(line)[0] for line in printed.splitlines() if "=" in line.split("(")[0]]
        assert overrides == [change.override for change in report.suggestions if change.override]
        for override in overrides:
            load_recipe(recipe, [override])


# ---------------------------------------------------------------------------------------------------------- the filter


def test_only_rows_in_the_interval_are_trained_on(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe_of(recipe)
    overrides = [f"run_dir={tmp_path / 'run'}", "data.filter.solve_rate=[0.5,0.99]", "train.max_steps=4"]
    path = run.train(load_recipe(recipe, overrides))
    assert trained_rows(path) == set(range(1, 25, 3))
    assert json.loads((path / KEPT).read_text()) == [f"arithmetic-1[train]:{n}" for n in range(1, 25, 3)]
    assert "data.filter: 8 of 24 training rows kept (8 below 0.5, 8 above 0.99)" in capsys.readouterr().out


def test_a_filter_without_a_probe_is_refused_before_anything_is_loaded(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered = load_recipe(recipe, [f"run_dir={tmp_path / 'run'}", "data.filter.solve_rate=[0.1,0.9]"])
    with monkeypatch.context() as patch:
        patch.delattr("rltt.train.run.load")
        with pytest.raises(DataError, match=r"run `rltt probe recipe.yaml --prompts N`"):
            run.train(filtered)
    probe_of(recipe, 6)
    with pytest.raises(DataError, match=r"18 of 24 training rows were not probed; run `rltt probe .* --prompts 24`"):
        run.train(filtered)
    assert not (tmp_path / "run").exists()


def test_rows_that_were_not_probed_are_kept_or_dropped(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = probe_of(recipe, 12)
    half = [result for result in report.results if result.rate == 0.5]
    for unprobed, rows in (("keep", 12 + len(half)), ("drop", len(half))):
        filtered = [f"run_dir={tmp_path / unprobed}", f"data.filter={{solve_rate: [0.5, 0.5], unprobed: {unprobed}}}"]
        path = run.train(load_recipe(recipe, [*filtered, "train.max_steps=1"]))
        assert len(json.loads((path / KEPT).read_text())) == rows
        told = "kept" if unprobed == "keep" else "dropped"
        assert f"{rows} of 24 training rows kept" in (said := capsys.readouterr().out)
        assert f"12 not probed and {told}" in said


def test_a_filter_goes_with_limit_and_holdout(recipe: Path, tmp_path: Path) -> None:
    probe_of(recipe)
    overrides = [f"run_dir={tmp_path / 'run'}", "data.train.limit=20", "data.holdout=2", "evaluate.num_generations=2"]
    path = run.train(load_recipe(recipe, [*overrides, "data.filter.solve_rate=[0.1,0.9]", "train.max_steps=1"]))
    kept = [int(row.rpartition(":")[2]) for row in json.loads((path / KEPT).read_text())]
    assert set(kept) < set(range(1, 25, 3))
    assert len(kept) > 4


def test_a_run_that_goes_on_keeps_its_rows(recipe: Path, tmp_path: Path, cache: Path) -> None:
    report = probe_of(recipe)
    overrides = [f"run_dir={tmp_path / 'run'}", "data.filter.solve_rate=[0.5,0.99]"]
    moment = ("rltt.train.trainer:RLTTTrainer._compute_loss", 6, signal.SIGKILL)
    assert ended(train_with, cache, recipe, overrides, moment) == -signal.SIGKILL
    report.cache.unlink()  # whatever a later probe finds, or nothing
    run.train(load_recipe(recipe, overrides))
    assert trained_rows(tmp_path / "run") <= set(range(1, 25, 3))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_two_processes_keep_the_same_rows(recipe: Path, tmp_path: Path, cache: Path) -> None:
    probe_of(recipe)
    overrides = [f"run_dir={tmp_path / 'run'}", "data.filter.solve_rate=[0.1,0.9]", "train.max_steps=1"]
    assert both_ended(train_with, cache, recipe, overrides) == [0, 0]
    assert trained_rows(tmp_path / "run") <= set(range(1, 25, 3))


# --------------------------------------------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.filter.solve_rate=[0.9,0.1]",
            r"data.filter.solve_rate: found \[0.9, 0.1\]; expected \[lowest, highest\]",
        ),
        ("data.filter.solve_rate=[0.1]", r"expected \[lowest, highest\]"),
        ("data.filter.solve_rate=[0.1,1.5]", r"data.filter.solve_rate\[1\]: found the number 1.5; expected .* at most"),
        ("data.filter.solve_rate=0.5", "found the number 0.5; expected a list"),
        ("data.filter.unprobed=drop", "data.filter.solve_rate: missing. Lowest and highest share"),
        ("data.filter={solve_rate: [0, 1]}", "keeps every prompt"),
        ("data.filter={solve_rates: [0, 1]}", "unknown key; the nearest is 'data.filter.solve_rate'"),
        ("data.filter={solve_rate: [0.1, 1], unprobed: skip}", "found 'skip'; expected 'stop', 'keep' or 'drop'"),
    ],
)
def test_a_filter_that_cannot_work_is_named(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, [override])


def test_a_filter_does_nothing_for_pretraining(recipe: Path) -> None:
    filtered = load_recipe(recipe, ["pretrain={}", "data.filter.solve_rate=[0.1,0.9]"])
    with pytest.raises(RecipeError, match=r"data.filter: has no effect on pretraining"):
        filtered.require("pretrain")


def test_a_file_that_no_probe_wrote_is_named(recipe: Path) -> None:
    report = probe_of(recipe, 6)
    report.cache.write_text(report.cache.read_text() + '{"id": 1}\n')
    with pytest.raises(DataError, match=r"\.jsonl:8: not a result of `rltt probe`"):
        probe_of(recipe, 6)


def test_an_engine_over_several_processes_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="vllm_tensor_parallel_size: a probe is one process"):
        probe_of(recipe, 6, None, "rollout.engine=vllm", "rollout.vllm_tensor_parallel_size=2")


# -------------------------------------------------------------------------------------------------------- command line


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class MeanJson(Strict):
    value: float
    stderr: float | None


class BinJson(Strict):
    low: float
    high: float
    prompts: int


class GroupJson(Strict):
    size: int
    mixed: MeanJson | None
    useful_prompts: MeanJson | None


class SubsetJson(Strict):
    value: str
    prompts: int
    solve_rate: MeanJson
    mixed: MeanJson | None


class ChangeJson(Strict):
    override: str | None
    advice: str


class ReportJson(Strict):
    recipe: str
    prompts: int
    rows: int
    completions: int
    samples: int
    solve_rate: MeanJson | None
    ungraded: int
    truncated: MeanJson
    mean_length: float
    outcomes: dict[str, float]
    histogram: list[BinJson]
    group_size: int
    prompts_per_step: int
    groups: list[GroupJson]
    subsets: dict[str, list[SubsetJson]]
    subsets_group_size: int | None
    suggestions: list[ChangeJson]
    cache: str


def test_the_command_prints_text_or_json(recipe: Path, tmp_path: Path) -> None:
    arguments = ["probe", str(recipe), "data.train.limit=12", "--prompts", "6", "--out", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("probe of tiny: samples up to 6 training prompts, 4 completions each")
    assert done.stdout.startswith("6 of 12 training prompts, 24 completions")
    again = CliRunner().invoke(app, [*arguments, "--json"])
    found = ReportJson.model_validate_json(again.stdout)
    assert found == ReportJson.model_validate_json((tmp_path / "out.json").read_text())
    assert (found.prompts, found.rows, found.completions, found.group_size) == (6, 12, 24, 4)
    assert sum(part.prompts for part in found.histogram) == 6


def test_the_command_says_what_it_takes(recipe: Path, tmp_path: Path) -> None:
    text = CliRunner().invoke(app, ["probe", "--help"]).output
    for option in ("--prompts", "--samples", "--json", "--out"):
        assert option in text
    for arguments, message in (
        (["--prompts", "0"], "greater than or equal to 1"),
        (["--samples", "1"], "greater than or equal to 2"),
        (["--out", str(tmp_path / "no" / "out.json")], "there is no folder"),
        (["rewards=[]"], "training needs at least one"),
    ):
        done = CliRunner().invoke(app, ["probe", str(recipe), *arguments])
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
