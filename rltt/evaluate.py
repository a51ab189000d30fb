"""How good a policy is: its solve rate with a standard error, greedy or sampled, and pass@k, at any depth.

`evaluate_policy` measures a policy in memory, before, during and after a run. `run_eval` is the work of `rltt eval`.
"""

import asyncio
import inspect
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from rltt import __version__
from rltt.data import build_dataset, read_problems
from rltt.errors import DataError, PolicyError, RewardError, UserError
from rltt.files import write_text
from rltt.models.load import load_policy, load_tokenizer, stop_token_ids
from rltt.models.looped import LoopedForCausalLM
from rltt.processes import everyones, rank, share_of
from rltt.recipe import DataSection, RewardEntry, check
from rltt.rewards import NamedReward, load_rewards
from rltt.rewards.registry import use_tokenizer
from rltt.rollout import Completion, generate

T = TypeVar("T")


class Mean(NamedTuple):
    """A mean over prompts and its standard error, which one prompt alone does not have."""

    value: float
    stderr: float | None

    @classmethod
    def over_prompts(cls, values: Sequence[float]) -> "Mean":
        """Mean of one value a prompt. Prompts are independent draws; the samples of one prompt are not."""
        return cls(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.stderr is None else f" ± {self.stderr:.3f}")


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation measured.

    Attributes:
        solve_rate: mean over prompts of the share of samples that are right.
        stderr: standard error of that mean over prompts; None for a single prompt.
        n: prompts that were graded.
        samples: completions of each prompt.
        truncated: share of completions that met the length limit before a stop token.
        mean_length: tokens of a completion, on average.
        ungraded: completions that the reward function gave None; they count neither as right nor as wrong.
        pass_at: unbiased pass@k of each k, over the prompts with at least k graded samples; without a k that has none.
    """

    solve_rate: float
    stderr: float | None
    n: int
    samples: int
    truncated: float
    mean_length: float
    ungraded: int
    pass_at: dict[int, Mean] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it."""
        return asdict(self) | {"pass_at": {str(k): mean._asdict() for k, mean in self.pass_at.items()}}

    def __str__(self) -> str:
        return f"{Mean(self.solve_rate, self.stderr)} (n = {self.n})"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of `k` samples is right, unbiased, from `c` right ones among `n` ≥ k.

    1 - C(n-c, k) / C(n, k), as in arXiv 2107.03374, eq. (1). Raises ValueError for k outside 1..n or c outside 0..n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, found n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate_policy(
    model: LoopedForCausalLM,
    tokenizer: Any,
    dataset: Any,
    reward: NamedReward,
    *,
    num_generations: int,
    temperature: float,
    max_completion_length: int,
    batch_size: int,
    stop_token_ids: list[int],
    seed: int,
    loops: int | None = None,
    ks: Sequence[int] = (),
) -> EvalResult:
    """Sample every prompt of `dataset` and grade the completions. The model and torch's random state stay as they were.

    Several processes share the prompts; each returns the result of all.

    Args:
        dataset: what `rltt.data.build_dataset` returns; all its columns reach the reward function, as in training.
        reward: a completion is solved when its reward is at least `reward.solved_at`.
        temperature: 0 is greedy.
        loops: depth T; None is the model's own.
        ks: the k of pass@k.

    Raises:
        UserError: a k that the samples cannot answer.
        PolicyError: a depth below 1.
        DataError: no prompts.
        RewardError: the reward function failed, or graded nothing.
    """
    _check_ks(ks, num_generations, temperature)
    if loops is not None and loops < 1:
        raise PolicyError(f"a looped policy runs at least 1 loop; found depth {loops}")
    if not len(dataset):
        raise DataError("there are no prompts to evaluate on")

    mine = dataset.select(share_of(dataset))
    completions = generate(
        model,
        tokenizer,
        list(mine["prompt"]),
        num_generations=num_generations,
        temperature=temperature,
        max_completion_length=max_completion_length,
        batch_size=batch_size,
        stop_token_ids=stop_token_ids,
        loops=loops,
        seed=seed + rank(),
    )
    grades = _of_everyone(_grade(reward, mine, completions))
    completions = _of_everyone(completions)
    threshold = reward.solved_at
    # For each prompt, how many samples were graded and how many of them are right.
    graded = [[value >= threshold for value in group if value is not None] for group in grades]
    counts = [(len(group), sum(group)) for group in graded if group]
    if not counts:
        raise RewardError(f"reward {reward.name!r} gave None for all {len(dataset) * num_generations} completions")
    solved = Mean.over_prompts([right / samples for samples, right in counts])
    pass_at = {k: [pass_at_k(n, right, k) for n, right in counts if n >= k] for k in ks}
    every = [completion for group in completions for completion in group]
    return EvalResult(
        solve_rate=solved.value,
        stderr=solved.stderr,
        n=len(counts),
        samples=num_generations,
        truncated=fmean(completion.truncated for completion in every),
        mean_length=fmean(len(completion.tokens) for completion in every),
        ungraded=len(every) - sum(samples for samples, _ in counts),
        pass_at={k: Mean.over_prompts(values) for k, values in pass_at.items() if values},
    )


def _of_everyone(mine: list[T]) -> list[T]:
    """What the processes have for their shares of the prompts, in the order of the prompts."""
    shares = everyones(mine)
    return [shares[index % len(shares)][index // len(shares)] for index in range(sum(map(len, shares)))]


def _check_ks(ks: Sequence[int], samples: int, temperature: float) -> None:
    for k in ks:
        if not 1 <= k <= samples:
            raise UserError(f"pass@{k} needs at least {max(k, 1)} samples of each prompt, found {samples}")
        if k > 1 and temperature == 0:
            raise UserError(f"pass@{k} needs samples that differ; found temperature 0, which is greedy")


def _grade(reward: NamedReward, dataset: Any, completions: list[list[Completion]]) -> list[list[float | None]]:
    """The reward of each completion, from one call with the keywords that TRL gives; its loggers do nothing here."""
    if not completions:  # fewer prompts than processes
        return []
    size = len(completions[0])
    every = [completion for group in completions for completion in group]
    columns = {name: [value for value in dataset[name] for _ in range(size)] for name in dataset.column_names}
    prompts = columns.pop("prompt")
    chat = isinstance(prompts[0], list)
    keywords = columns | {
        "prompts": prompts,
        "completions": [[{"role": "assistant", "content": c.text}] if chat else c.text for c in every],
        "completion_ids": [list(c.tokens) for c in every],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    rewards = reward.func(**keywords)
    if inspect.iscoroutine(rewards):
        # In a thread of its own: the caller's may run an event loop already, as a notebook's does.
        with ThreadPoolExecutor(1) as thread:
            rewards = thread.submit(asyncio.run, rewards).result()
    if len(rewards) != len(every):
        raise RewardError(f"reward {reward.name!r} returned {len(rewards)} rewards for {len(every)} completions")
    return [list(rewards[start : start + size]) for start in range(0, len(every), size)]


def _ignore(*_: Any) -> None:
    """Stands in for TRL's `log_extra` and `log_metric`."""


# ------------------------------------------------------------------------------------------------------- rltt eval


def run_eval(
    model: str,
    data: DataSection,
    loops: list[int] | None,
    ks: list[int],
    temperature: float,
    reward: str,
    max_completion_length: int,
    batch_size: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Evaluate a checkpoint on `data.eval`, greedily and from max(ks) samples a prompt, at each depth; print a table.

    Args:
        loops: depths; None is the checkpoint's own. Deeper than trained is allowed, and said.
        temperature: of the samples; 0 leaves only the greedy run.
        reward: what `use` of a recipe's rewards takes.
        json_path: also write the results there, after each depth, so that an interrupted run keeps what it has.

    Raises `UserError` for whatever is wrong with these, before the weights load where that can be known.
    """
    samples = max(ks)
    _check_ks(ks, samples, temperature)
    if any(depth < 1 for depth in loops or []):
        raise PolicyError(f"a looped policy runs at least 1 loop; found depth {min(loops or [])}")
    if data.eval is None:
        raise DataError("there is nothing to evaluate on: data.eval is missing")
    if json_path is not None and (json_path.is_dir() or not json_path.absolute().parent.is_dir()):
        raise UserError(f"{json_path}: cannot be written; name a file in a folder that exists")
    (named,) = load_rewards([check(RewardEntry, {"use": reward}, source="--reward")])
    problems = read_problems(data.eval, data, default_split="test")
    tokenizer = load_tokenizer(model)
    use_tokenizer([named], tokenizer)
    dataset, report = build_dataset(problems, data, tokenizer)
    policy = load_policy(model)
    trained = policy.loop_spec.loops
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy.to(device)
    stops = stop_token_ids(policy, tokenizer, chat=not isinstance(dataset[0]["prompt"], str))

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(dataset)} problems of {data.eval.path}, graded by {named.name}")
    if report.dropped:
        console.print(str(report))
    results: dict[str, Any] = {
        "model": model,
        "trained_loops": trained,
        "data": data.eval.model_dump(exclude_defaults=True),
        "reward": reward,
        "temperature": temperature,
        "max_completion_length": max_completion_length,
        "seed": seed,
        "rltt": __version__,
        "depths": [],
    }
    table = _empty_table(ks, temperature, samples)
    for depth in sorted(set(loops or [trained])):
        start = time.perf_counter()
        measure = partial(
            evaluate_policy,
            policy,
            tokenizer,
            dataset,
            named,
            max_completion_length=max_completion_length,
            batch_size=batch_size,
            stop_token_ids=stops,
            seed=seed,
            loops=depth,
        )
        # bf16 on a GPU as in training, so that the numbers are those of the run.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            runs = {"greedy": measure(num_generations=1, temperature=0)}
            if temperature > 0:
                runs["sampled"] = measure(num_generations=samples, temperature=temperature, ks=ks)
        rates = ", ".join(f"{name} {result}" for name, result in runs.items())
        note = f"; deeper than the {trained} loops it was trained with" if depth > trained else ""
        console.print(f"loops {depth}: {rates}, {time.perf_counter() - start:.1f} s{note}")
        table.add_row(*_cells(depth, runs, ks))
        results["depths"].append({"loops": depth} | {name: result.to_dict() for name, result in runs.items()})
        if json_path is not None:
            write_text(json_path, json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    console.print(table, soft_wrap=False)


def _empty_table(ks: Sequence[int], temperature: float, samples: int) -> Table:
    table = Table(title="share solved ± standard error over problems")
    # pass@1 is the sampled rate itself.
    sampled = [f"{samples} samples at {temperature:g}", *(f"pass@{k}" for k in ks if k > 1)]
    for name in ["loops", "greedy", *(sampled if temperature > 0 else []), "cut off", "ungraded"]:
        table.add_column(name, justify="right")
    return table


def _cells(depth: int, runs: dict[str, EvalResult], ks: Sequence[int]) -> list[str]:
    """A row of the table. What was cut off or ungraded is told of the run with more completions."""
    cells = [str(depth), *(str(Mean(result.solve_rate, result.stderr)) for result in runs.values())]
    if "sampled" in runs:
        cells += [str(runs["sampled"].pass_at.get(k, "-")) for k in ks if k > 1]
    last = list(runs.values())[-1]
    return [*cells, f"{last.truncated:.1%}", str(last.ungraded)]
