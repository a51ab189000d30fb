"""The verdict on a run: the paper's three kinds of run, each cause from its numbers, and what a user sees of it."""

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.recipe import load_recipe
from rltt.telemetry import HeldOut, History, LiveVerdict, Verdict, judge
from rltt.telemetry.sequential import normal_sprt, share_sprt, trend
from rltt.telemetry.signals import Signals

REPOSITORY = Path(__file__).parents[1]
Series = Callable[[int], float]


def history(steps: int, *, total: int | None = None, settings: dict[str, Any] | None = None, **series: Any) -> History:
    """A history of metrics given as numbers or as functions of the step; `__` stands for a slash."""

    def at(value: Any, step: int) -> float:
        return value(step) if callable(value) else value

    rows = [
        {"step": step} | {name.replace("__", "/"): at(value, step) for name, value in series.items()}
        for step in range(1, steps + 1)
    ]
    return History(rows, settings=settings or {}, total_steps=total or steps)


def noisy(value: Series | float, noise: float, seed: int = 0) -> Series:
    """With normal noise, the same for the same step."""
    return lambda step: (value(step) if callable(value) else value) + random.Random(1000 * seed + step).gauss(0, noise)


def grows(end: float, steps: int, power: float) -> Series:
    """A KL of zero at the first step, with the ten percent of noise that k3 has over a batch."""
    return lambda step: noisy(1.0, 0.1)(step) * end * ((step - 1) / (steps - 1)) ** power


# ----------------------------------------------------------------------------------------- Closing the Loop, appendix C


def gsm8k_run() -> History:
    """lr 1e-5, solve rate 0.30, KL 0.013 over the first 20 steps and 0.084 over the last, gradient norm 0.6."""
    return history(
        140,
        kl=lambda step: noisy(1.0, 0.1)(step) * 0.0877 * (step / 140) ** 0.74 if step > 1 else 0.0,
        grad_norm=noisy(0.6, 0.05),
        solve_rate=noisy(lambda step: 0.30 + 0.12 * step / 140, 0.04),
        lr=1e-5,
        settings={"train.prompts_per_step": 32, "rollout.num_generations": 8},
    )


def math_run() -> History:
    """lr 1e-5, solve rate 0.77, KL reaches 0.003, gradient norm 0.1; MATH went from 55.7 to 55.2."""
    return history(140, kl=grows(0.003, 140, 1.0), grad_norm=noisy(0.1, 0.01), solve_rate=noisy(0.77, 0.04), lr=1e-5)


def slow_run(steps: int, solve_rate: float) -> History:
    """lr 1e-6: KL stays near 2e-4, whatever the checkpoint and the task."""
    return history(
        steps,
        kl=lambda step: noisy(2e-4, 2e-5)(step) * min(1.0, (step - 1) / 20),
        grad_norm=noisy(0.3, 0.03),
        solve_rate=noisy(solve_rate, 0.04),
        lr=1e-6,
    )


def test_the_gsm8k_run_of_the_paper_moves() -> None:
    run = gsm8k_run()
    kl = [value for value in run.column("kl") if value is not None]
    assert (sum(kl[:20]) / 20, sum(kl[-20:]) / 20) == pytest.approx((0.013, 0.084), rel=0.1)
    assert judge(run.up_to(28)).verdict == "moving"
    at_end = judge(run)
    assert (at_end.verdict, at_end.cause) == ("moving", None)


def test_the_math_run_of_the_paper_stalls_because_its_task_is_too_easy() -> None:
    assert judge(math_run().up_to(28)).verdict in ("undecided", "stalled")
    at_end = judge(math_run())
    assert (at_end.verdict, at_end.cause) == ("stalled", "too_easy")
    assert at_end.confidence >= 0.95


@pytest.mark.parametrize(("steps", "solve_rate"), [(94, 0.30), (200, 0.77), (421, 0.1), (140, 0.30)])
def test_the_runs_of_the_paper_at_1e_6_stall_for_their_learning_rate(steps: int, solve_rate: float) -> None:
    verdict = judge(slow_run(steps, solve_rate))
    assert (verdict.verdict, verdict.cause) == ("stalled", "learning_rate_too_small")
    assert verdict.change is not None
    rate = float(str(verdict.change.override).removeprefix("train.learning_rate="))
    assert 1e-5 <= rate <= 2e-5  # the paper's own runs that moved: 1e-5


# ------------------------------------------------------------------------------------------------- the tests themselves


def test_a_trend_is_seldom_seen_where_there_is_none_however_often_one_looks() -> None:
    alarms = 0
    for seed in range(200):
        values = [noisy(0.5, 0.08, seed)(step) for step in range(1, 101)]
        readings = (trend(values[:n], expected_slope=0.003, floor=0.08) for n in range(6, 101))
        alarms += any(reading is not None and reading.confidence >= 0.95 for reading in readings)
    assert alarms <= 20  # Ville's bound is 10 of 200; the noise is estimated


def test_a_trend_is_seen_with_its_direction() -> None:
    rising = [noisy(lambda step: 0.3 + 0.003 * step, 0.05)(step) for step in range(1, 101)]
    found = trend(rising, expected_slope=0.003, floor=0.05)
    assert found is not None
    assert found.rises == 0.99
    assert found.slope == pytest.approx(0.003, abs=0.001)
    assert found.noise == pytest.approx(0.05, abs=0.01)
    falling = trend(rising[::-1], expected_slope=0.003, floor=0.05)
    assert falling is not None
    assert (falling.falls, falling.rises) == (0.99, 0.0)


def test_the_mixture_test_equals_its_integral() -> None:
    """E against the numerical integral of the likelihood ratio over the prior."""
    values = [0.3, 0.4, 0.2, 0.5, 0.6, 0.4, 0.6]
    found = trend(values, expected_slope=0.1, floor=0.0)
    assert found is not None
    squares = sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2
    sigma, tau = math.sqrt(squares / (len(values) + 4)), 0.1
    residuals, scales = [], []
    for i in range(2, len(values) + 1):
        scale = math.sqrt((i - 1) / i)
        residuals.append((values[i - 1] - sum(values[: i - 1]) / (i - 1)) * scale)
        scales.append(i / 2 * scale)

    def ratio(slope: float) -> float:
        exponent = sum(r**2 - (r - slope * c) ** 2 for r, c in zip(residuals, scales, strict=True)) / (2 * sigma**2)
        return math.exp(exponent - slope**2 / (2 * tau**2)) / (tau * math.sqrt(2 * math.pi))

    grid = [tau * (k / 1000 - 8) for k in range(16001)]
    assert 1 - found.confidence == pytest.approx(1 / (sum(map(ratio, grid)) * tau / 1000), rel=1e-6)


def test_walds_ratios_are_those_of_the_densities() -> None:
    def density(x: float, mean: float) -> float:
        return math.exp(-((x - mean) ** 2) / (2 * 0.3**2))

    values = [0.2, -0.1, 0.6]
    expected = sum(math.log(density(x, 0.5) / density(x, 0.1)) for x in values)
    assert normal_sprt(values, low=0.1, high=0.5, noise=0.3) == pytest.approx(expected)
    assert share_sprt(3, 10, low=0.1, high=0.4) == pytest.approx(math.log((0.4**3 * 0.6**7) / (0.1**3 * 0.9**7)))


# --------------------------------------------------------------------------------------------------------------- causes

SOUND = {
    "kl": grows(0.05, 80, 0.7),
    "grad_norm": noisy(0.5, 0.1),
    "solve_rate": noisy(0.4, 0.06),
    "mixed_groups": noisy(0.8, 0.05),
    "reward": noisy(0.4, 0.06),
    "reward_logp_corr": noisy(0.4, 0.1),
    "frac_reward_zero_std": 0.2,
    "entropy": 0.2,
    "completions__clipped_ratio": 0.01,
    "completions__mean_length": noisy(11, 0.2),
    "completions__max_length": 16,
    "update__changed": 0.98,
    "parity__kl": 1e-13,
    "loop1__kl_to_last": 0.04,
    "loop2__kl_to_last": 0.0,
    "loop1__exit_prob": 0.5,
    "loop2__exit_prob": 0.5,
    "lr": 3e-4,
}
SETTINGS = {
    "train.prompts_per_step": 16,
    "train.learning_rate": 3e-4,
    "rollout.num_generations": 8,
    "rollout.engine": "hf",
    "rollout.max_completion_length": 16,
    "rewards": ["math"],
    "objective.credit": "exit_pdf",
    "data.train.path": "arithmetic",
    "data.train.difficulty": 2,
}
UNIFORM = {"mixed_groups": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "kl": 0.0}
UNSOLVED = UNIFORM | {"solve_rate": 0.0, "reward": 0.0}
TINY_KL = {"kl": grows(7e-7, 80, 2.0)}

# Cause, what is different from a sound run, other settings, verdict, override.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str | None]] = [
    ("learning_rate_too_small", TINY_KL, {"train.learning_rate": 1e-7}, "stalled", "train.learning_rate=5e-05"),
    (
        "updates_vanish",
        TINY_KL | {"update__changed": 0.02},
        {"train.learning_rate": 1e-7},
        "stalled",
        "train.learning_rate=5e-05",
    ),
    (
        "too_easy",
        {"solve_rate": 0.99, "mixed_groups": 0.03, "kl": grows(1e-3, 80, 1.0)},
        {},
        "stalled",
        "data.train.difficulty=3",
    ),
    (
        "too_easy",
        {"solve_rate": 0.99, "mixed_groups": 0.03},
        {"pretrain.stop_at_solve_rate": 0.97},
        "stalled",
        "pretrain.stop_at_solve_rate=0.3",
    ),
    ("too_hard", UNSOLVED, {}, "stalled", "data.train.difficulty=1"),
    ("too_hard", UNSOLVED, {"data.train.path": "x.jsonl"}, "stalled", "rollout.num_generations=32"),
    ("too_hard", UNSOLVED, {"pretrain.max_steps": 20, "data.train.difficulty": 1}, "stalled", "pretrain.max_steps=80"),
    ("truncated", UNSOLVED | {"completions__clipped_ratio": 0.98}, {}, "stalled", "rollout.max_completion_length=32"),
    (
        "unparseable",
        UNSOLVED | {"reward__math__unparseable": 0.97, "reward__math__wrong": 0.03},
        {},
        "stalled",
        r'data.prompt_template="{prompt}\nPut your final answer in \\boxed{}."',
    ),
    ("bad_golds", {"reward__math__bad_gold": 0.9}, {}, "stalled", "data.bad_gold=drop"),
    (
        "reward_constant",
        UNIFORM | {"solve_rate": 1.0, "reward": 1.0},
        {"rewards": ["mine.py:score"]},
        "stalled",
        "rewards=[math]",
    ),
    (
        "reward_unrelated",
        {"reward_logp_corr": noisy(0.0, 0.08)},
        {"rewards": ["mine.py:score"]},
        "stalled",
        "rewards=[math]",
    ),
    ("rollout_mismatch", {"parity__kl": 1.5}, {"rollout.engine": "vllm"}, "stalled", "rollout.engine=hf"),
    ("rollout_mismatch", {"parity__kl": 0.05}, {}, "moving", "rollout.parity_tolerance=1e-4"),
    ("reference_wrong", {"kl": 0.0}, {}, "undecided", None),
    ("gate_collapsed", {"loop1__exit_prob": 0.99}, {}, "moving", "objective.credit=uniform"),
    ("loops_identical", {"loop1__kl_to_last": 0.0}, {}, "moving", "objective.credit=final"),
    ("kl_explosion", {"kl": grows(5.0, 80, 1.0)}, {}, "unstable", "train.learning_rate=2e-05"),
    (
        "entropy_collapse",
        {"entropy": lambda step: 0.2 * 0.9**step, "mixed_groups": lambda step: 0.8 * 0.95**step},
        {},
        "unstable",
        "objective.beta=0.05",
    ),
    (
        "gradient_spikes",
        {"grad_norm": lambda step: 40.0 if step % 9 == 0 else 0.5},
        {"train.max_grad_norm": 1e9},
        "unstable",
        "train.max_grad_norm=1",
    ),
    (
        "held_out_falls",
        {"reward": noisy(lambda s: 1 + s / 40, 0.05), "solve_rate": noisy(lambda s: 0.5 - s / 200, 0.05)},
        {"rewards": ["math", {"use": "mine.py:short", "weight": 5.0}]},
        "unstable",
        "rewards=[math]",
    ),
]


@pytest.mark.parametrize(("cause", "metrics", "settings", "verdict", "override"), CASES)
def test_each_cause_is_named_with_its_change(
    cause: str, metrics: dict[str, Any], settings: dict[str, Any], verdict: str, override: str | None
) -> None:
    found = judge(history(80, settings=SETTINGS | settings, **(SOUND | metrics)))
    assert (found.verdict, found.cause) == (verdict, cause), str(found)
    assert found.evidence
    assert found.change is not None
    assert found.change.override == override
    if override is not None:  # it can be pasted behind a recipe
        load_recipe(REPOSITORY / "recipes" / "quickstart.yaml", [override])


def test_a_sound_run_moves() -> None:
    found = judge(history(80, settings=SETTINGS, **SOUND))
    assert (found.verdict, found.cause, found.change) == ("moving", None, None)


def test_a_run_that_rose_and_rises_no_more_has_plateaued() -> None:
    rose = SOUND | {"solve_rate": noisy(lambda step: min(0.4 + step / 100, 0.75), 0.03)}
    assert judge(history(120, settings=SETTINGS, **rose)).verdict == "plateaued"


def test_held_out_prompts_that_are_solved_less_make_a_run_unstable() -> None:
    run = history(80, settings=SETTINGS | {"data.train.limit": 16}, **SOUND)
    fallen = History(run.rows, "x", run.settings, 80, HeldOut(0, 0.4, 0.03), HeldOut(80, 0.2, 0.03))
    found = judge(fallen)
    assert (found.verdict, found.cause) == ("unstable", "held_out_falls")
    assert found.change is not None
    assert found.change.override == "data.train.limit=null"
    steady = History(run.rows, "x", run.settings, 80, HeldOut(0, 0.4, 0.03), HeldOut(80, 0.38, 0.03))
    assert judge(steady).verdict == "moving"


def test_prompts_learned_by_heart_are_told_from_learning() -> None:
    rising = SOUND | {"solve_rate": noisy(lambda step: min(0.4 + step / 30, 0.85), 0.04)}
    run = history(16, total=80, settings=SETTINGS | {"data.train.limit": 16}, **rising)

    def held_out(now: float) -> History:
        rows = [dict(row) for row in run.rows]
        rows[-1] |= {"eval/solve_rate": now, "eval/stderr": 0.04}
        return History(rows, "x", run.settings, 80, HeldOut(0, 0.4, 0.035))

    found = judge(held_out(0.37))
    assert (found.verdict, found.cause) == ("unstable", "held_out_falls")
    assert "learned by heart" in str(found)
    assert judge(held_out(0.75)).verdict == "moving"


def test_updates_that_share_a_rollout_count_it_once() -> None:
    """Repeated rows are no new evidence: a trend over 20 rollouts is the same in 80 rows."""
    rollouts = [noisy(lambda step: 0.4 + step / 200, 0.08)(step) for step in range(20)]

    def run(each: int) -> History:
        rows = [
            {"step": step + 1, "solve_rate": rollouts[step // each], "num_tokens": None if step % each else step}
            for step in range(20 * each)
        ]
        return History(rows, settings=SETTINGS | {"train.num_iterations": each}, total_steps=20 * each)

    assert Signals(run(4)).solve == Signals(run(1)).solve


def test_missing_metrics_are_named_and_do_not_stop_the_verdict() -> None:
    few = {name: SOUND[name] for name in ("kl", "grad_norm", "reward", "frac_reward_zero_std", "lr")}
    found = judge(history(80, **few))
    assert found.verdict == "moving"
    assert found.missing == ("solve_rate", "mixed_groups", "reward_logp_corr", "update/changed", "entropy")
    assert "not measured in this run: solve_rate" in str(found)
    without_kl = judge(history(80, **{name: few[name] for name in few if name != "kl"}))
    assert without_kl.verdict == "undecided"
    assert without_kl.change is not None
    assert without_kl.change.override == "objective.beta=0.001"


# ------------------------------------------------------------------------------------------------------ command and run


def written(folder: Path, run: History) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.rows))
    return folder


def test_the_command_prints_a_change_that_can_be_pasted(tmp_path: Path) -> None:
    run = history(80, **(SOUND | TINY_KL | {"lr": 1e-7}))
    written(tmp_path, run)
    text = CliRunner().invoke(app, ["verdict", str(tmp_path)])
    assert text.exit_code == 0
    assert text.stdout.startswith("stalled (99%): learning rate too small\n  kl ")
    assert "change: train.learning_rate=2e-05" in text.stdout
    result = CliRunner().invoke(app, ["verdict", str(tmp_path / "metrics.jsonl"), "--json"])
    found = json.loads(result.stdout)
    assert {"verdict", "cause", "confidence", "evidence", "change"} <= set(found)
    assert found["verdict"] == "stalled"
    assert found["change"]["override"] == "train.learning_rate=2e-05"
    assert {"metric", "value", "steps", "meaning"} == set(found["evidence"][0])
    early = CliRunner().invoke(app, ["verdict", str(tmp_path), "--step", "3"])
    assert early.stdout.startswith("undecided")


def test_a_run_says_its_verdict_once_and_keeps_it(tmp_path: Path) -> None:
    said: list[str] = []
    alerts: list[tuple[str, str, str]] = []
    kept: list[Verdict] = []
    live = LiveVerdict(tmp_path / "metrics.jsonl", SETTINGS, 80, said.append, kept.append)
    live.alert = lambda title, text, level: alerts.append((title, text, level))
    run = history(30, total=80, settings=SETTINGS, **(SOUND | TINY_KL))
    metrics = [live.update(row) for row in run.rows]
    assert metrics[0] == {"verdict/code": 0.0, "verdict/confidence": 0.0}
    assert metrics[-1]["verdict/code"] == -1.0
    assert len(said) == 1
    assert "stalled" in said[0]
    assert [(title.split(",")[0], level) for title, _, level in alerts] == [
        ("stalled (99%): learning rate too small", "warn")
    ]
    assert [verdict.step for verdict in kept] == list(range(1, 31))
    assert kept[-1].cause == "learning_rate_too_small"
    assert not live.stop


def test_on_stalled_stop_ends_the_run_and_a_resumed_run_knows_its_past(tmp_path: Path) -> None:
    run = history(30, total=80, settings=SETTINGS, **(SOUND | TINY_KL))
    written(tmp_path, history(20, total=80, settings=SETTINGS, **(SOUND | TINY_KL)))
    live = LiveVerdict(tmp_path / "metrics.jsonl", SETTINGS, 80, lambda _: None, lambda _: None, "stop")
    for row in run.rows[18:24]:  # from a checkpoint after step 18
        live.update(row)
    assert [row["step"] for row in live.rows] == list(range(1, 25))
    assert live.stop
