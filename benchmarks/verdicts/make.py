"""Makes the histories that the verdict is judged on: `python benchmarks/verdicts/make.py WORK [NAME …]`.

Each run is a real `rltt train` of a very small policy. What happened to it is measured apart from it: the held-out
solve rate of the policy it started from and of the one it ended with, by the same prompts, with `math`. Runs that are
done are skipped, so that the script can be stopped and called again (`--seconds` ends it after that long).
"""

import argparse
import gzip
import json
import random
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scenarios import SCENARIOS, STEPS, VARIANTS, Scenario, Variant

from rltt.data.arithmetic import arithmetic_problems
from rltt.models.load import load_policy, load_tokenizer, stop_token_ids
from rltt.recipe import Recipe, check
from rltt.rewards import verify_math
from rltt.rollout import generate
from rltt.telemetry import flat
from rltt.train import run

HERE = Path(__file__).parent
HISTORIES = HERE / "histories"
PROMPTS, SAMPLES = 512, 4
# Solve rate at which a warm start ends.
STARTS = {"low": 0.1, "mid": 0.35, "good": 0.7, "easy": 0.99}
# Kept of the recipe in a history: what a verdict may read.
SETTINGS = (
    "train.",
    "rollout.",
    "objective.",
    "data.train.",
    "rewards",
    "policy.loops",
    "policy.convert",
    "evaluate.every",
)


def base(variant: Variant, work: Path) -> dict[str, Any]:
    """The recipe that scenarios change."""
    return {
        "name": "verdict",
        "data": {"train": {"path": "arithmetic", "difficulty": 1, "size": 8000}},
        "rewards": ["math"],
        "objective": {"credit": "uniform", "loss_type": "grpo"},
        "rollout": {"num_generations": variant.group, "temperature": 1.0, "max_completion_length": 16},
        "train": {
            "prompts_per_step": variant.prompts,
            "max_steps": STEPS,
            "learning_rate": 3e-4,
            "per_device_train_batch_size": variant.prompts * variant.group,
            "seed": variant.seed,
        },
    }


def start(kind: str, variant: Variant, work: Path) -> Path:
    """The warm start of a kind, made once."""
    folder = work / f"start-{kind}-{variant.seed}"
    if (folder / "policy").is_dir():
        return folder / "policy"
    shutil.rmtree(folder, ignore_errors=True)
    values = base(variant, work)
    values["run_dir"] = str(folder)
    values["policy"] = {"new": variant.new | {"max_position_embeddings": 128}, "loops": variant.loops}
    values["pretrain"] = {"max_steps": 1500, "learning_rate": 5e-3, "beta": 0.1, "check_every": 20}
    values["train"] |= {"max_steps": 1, "learning_rate": 1e-12}
    if kind == "unboxed":
        values["data"]["train"] = str(rows("unboxed", work))
        values["pretrain"] |= {"max_steps": 150}
        del values["pretrain"]["check_every"]
    else:
        values["pretrain"]["stop_at_solve_rate"] = STARTS[kind]
    run.train(check(Recipe, values, source=kind))
    shutil.rmtree(folder / "policy")
    (folder / "start").rename(folder / "policy")
    return folder / "policy"


def rows(kind: str, work: Path) -> Path:
    """Training rows with a fault."""
    file = work / f"{kind}.jsonl"
    problems = arithmetic_problems(1, 8000)
    golds = [problem.gold for problem in problems]
    responses = [problem.response for problem in problems]
    if kind == "bad_golds":
        golds = [gold if index % 20 == 0 else "\\frac{" for index, gold in enumerate(golds)]
    if kind == "shuffled_golds":
        random.Random(0).shuffle(golds)
    if kind == "noisy_golds":
        golds = [gold if index % 4 else golds[index - 1] for index, gold in enumerate(golds)]
    if kind == "unboxed":
        responses = [response.split(" \\boxed")[0] for response in responses]
    columns = zip(problems, golds, responses, strict=True)
    file.write_text("".join(json.dumps({"prompt": p.prompt, "gold": g, "response": r}) + "\n" for p, g, r in columns))
    return file


def solved(path: Path, difficulty: int, seed: int) -> list[float]:
    """The share of samples that `math` finds right, for each held-out prompt."""
    model, tokenizer = load_policy(str(path)), load_tokenizer(str(path))
    problems = arithmetic_problems(difficulty, PROMPTS, "test")
    groups = generate(
        model,
        tokenizer,
        [problem.prompt for problem in problems],
        num_generations=SAMPLES,
        temperature=1.0,
        max_completion_length=32,
        batch_size=1024,
        stop_token_ids=stop_token_ids(model, tokenizer, False),
        seed=seed,
    )
    golds = [problem.gold for problem in problems for _ in range(SAMPLES)]
    outcomes = verify_math(golds, [completion.text for group in groups for completion in group])
    right = [float(outcome.status == "right") for outcome in outcomes]
    return [fmean(right[index : index + SAMPLES]) for index in range(0, len(right), SAMPLES)]


def one(scenario: Scenario, variant: Variant, work: Path) -> None:
    """Run a scenario, measure what became of the policy, and keep the history."""
    beginning = start(scenario.start, variant, work)
    folder = work / f"{scenario.name}-{variant.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    values = base(variant, work)
    values |= {"run_dir": str(folder), "policy": {"path": str(beginning)}}
    if scenario.data:
        values["data"]["train"] = str(rows(scenario.data, work))
    if scenario.watched:
        values["data"]["eval"] = {"path": "arithmetic", "difficulty": 1, "size": 128, "split": "test"}
        values["evaluate"] = {"every": 8, "num_generations": 2, "batch_size": 512}
    for key, value in scenario.overrides.items():
        node = values
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    recipe = check(Recipe, values, source=scenario.name)

    make_trainer = run.make_trainer

    def planted(*args: Any, **kwargs: Any) -> Any:
        trainer = make_trainer(*args, **kwargs)
        if scenario.plant is not None:
            scenario.plant(trainer)
        return trainer

    run.make_trainer = planted
    began = time.time()
    try:
        run.train(recipe)
    finally:
        run.make_trainer = make_trainer
    seconds = time.time() - began

    difficulty = values["data"]["train"]["difficulty"] if isinstance(values["data"]["train"], dict) else 1
    before = solved(beginning, difficulty, seed=100)
    after = solved(folder / "policy", difficulty, seed=101)
    difference = [b - a for a, b in zip(before, after, strict=True)]
    settings = {key: value for key, value in flat(recipe.model_dump()).items() if key.startswith(SETTINGS)}
    summary = json.loads((folder / "summary.json").read_text())
    head = {
        "name": f"{scenario.name}-{variant.seed}",
        "scenario": scenario.name,
        "cause": scenario.cause,
        "split": variant.split,
        "held_out_before": round(fmean(before), 4),
        "held_out_after": round(fmean(after), 4),
        "gain": round(fmean(difference), 4),
        "gain_stderr": round(stdev(difference) / len(difference) ** 0.5, 4),
        "settings": settings,
        "eval_before": summary.get("eval_before"),
        "eval_after": summary.get("eval_after"),
    }
    keep(head, (folder / "metrics.jsonl").read_text().splitlines())
    print(
        f"{head['name']:20} {fmean(before):.3f} -> {fmean(after):.3f} ± {head['gain_stderr']:.3f}  {seconds:.0f} s",
        flush=True,
    )
    shutil.rmtree(folder / "policy")


def keep(head: dict[str, Any], lines: list[str]) -> None:
    """Write a history: its head, then a row a step with four digits."""
    out = [json.dumps(head)]
    for line in lines:
        row = {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith("seconds/") and k not in ("epoch", "step_time")
        }
        out.append(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}))
    HISTORIES.mkdir(exist_ok=True)
    with gzip.GzipFile(HISTORIES / f"{head['name']}.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(out) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[v.seed for v in VARIANTS])
    arguments = parser.parse_args()
    ends = time.time() + arguments.seconds
    arguments.work.mkdir(parents=True, exist_ok=True)
    for variant in (v for v in VARIANTS if v.seed in arguments.seeds):
        for scenario in (s for s in SCENARIOS if not arguments.names or s.name in arguments.names):
            name = f"{scenario.name}-{variant.seed}"
            if (HISTORIES / f"{name}.jsonl.gz").is_file():
                continue
            if time.time() > ends:
                sys.exit(75)
            claim = arguments.work / f"{name}.claim"
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                continue
            one(scenario, variant, arguments.work)


if __name__ == "__main__":
    main()
