"""How often the policy solves its training prompts, sampled and graded by the trainer itself. Nothing is trained."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import set_seed

from ..data.sources import spread
from ..errors import RecipeError
from ..objective.advantage import solved_of
from ..recipe import Recipe
from ..train.run import make_trainer, prepare, unscored_told_once
from ..train.trainer import RLTTTrainer
from .report import Report, subsets_of
from .results import Result, Results, row_id
from .start import probed, start_of


def probe(recipe: Recipe, prompts: int, samples: int | None, console: Console) -> Report:
    """Sample `prompts` training prompts, spread evenly over the data, and report how often they are solved.

    Prompts that an earlier probe has sampled as often are not sampled again; the report is on all that are known of
    these training rows.

    Args:
        recipe: a train recipe.
        samples: completions of each prompt; None: the recipe's own group.
        console: told what is done. Should not be that of the report.

    Raises:
        UserError: what `rltt train` refuses before it starts, or a file of results that cannot be read.
    """
    refuse_layouts(recipe)
    samples = samples or recipe.rollout.num_generations
    results = Results(recipe)
    with tempfile.TemporaryDirectory(prefix="rltt-probe-") as folder:
        at_once = prompts_at_once(recipe, prompts, samples)
        alone = probed(
            recipe,
            folder,
            prompts_per_step=at_once,
            per_device_train_batch_size=None,
            updates_per_rollout=1,
            num_iterations=1,
            max_steps=1,
        )
        alone = alone.model_copy(
            update={
                "data": recipe.data.model_copy(update={"filter": None}),
                "rollout": recipe.rollout.model_copy(update={"num_generations": samples, "resample_uniform": False}),
            }
        )
        ready = prepare(alone, console)
        dataset = ready.dataset
        ids = [row_id(example) for example in dataset]
        chosen = spread(range(len(dataset)), prompts)
        todo = [index for index in chosen if not _known(results, ids[index], samples)]
        known = f", {len(chosen) - len(todo)} known from {results.path}" if len(todo) < len(chosen) else ""
        _say(console, f"{len(chosen)} of {len(dataset)} training prompts{known}")
        if todo:
            policy = start_of(alone, ready, console)
            trainer = make_trainer(ready.config, policy, dataset, ready.rewards)
            # Other completions than those of an earlier probe, and the same ones whenever this one is repeated.
            set_seed(recipe.train.seed + len(results.known))
            started = time.monotonic()
            with unscored_told_once():
                for done, found in _sampled(trainer, dataset, ids, todo, at_once, samples):
                    results.add(found)
                    seconds = time.monotonic() - started
                    left = seconds / done * (len(todo) - done)
                    _say(console, f"sampled {done}/{len(todo)} prompts in {seconds:.0f} s, about {left:.0f} s left")
    index_of = {identifier: index for index, identifier in enumerate(ids)}
    of_row = {index_of[key]: result for key, result in results.known.items() if key in index_of}
    rows = sorted(of_row)
    return Report(
        recipe,
        [of_row[index] for index in rows],
        {name: [values[index] for index in rows] for name, values in subsets_of(dataset).items()},
        rows_in_all=len(dataset),
        cache=results.path,
    )


def refuse_layouts(recipe: Recipe) -> None:
    """A probe is one process.

    Raises:
        RecipeError: the engine asks for more.
    """
    if recipe.rollout.vllm_tensor_parallel_size > 1:
        raise RecipeError(
            "rollout.vllm_tensor_parallel_size: a probe is one process, which cannot spread an engine over "
            f"{recipe.rollout.vllm_tensor_parallel_size}; set it to 1, or sample from an `rltt serve` "
            "(rollout.vllm_server)"
        )


def prompts_at_once(recipe: Recipe, prompts: int, samples: int) -> int:
    """Prompts in one call of the engine: no more completions than a rollout of the recipe has."""
    rollout = recipe.train.prompts_per_step * recipe.train.updates_per_rollout
    return max(1, min(prompts, rollout, rollout * recipe.rollout.num_generations // samples))


def _known(results: Results, identifier: str, samples: int) -> bool:
    return identifier in results.known and results.known[identifier].samples >= samples


def _sampled(
    trainer: RLTTTrainer, dataset: Dataset, ids: list[str], todo: list[int], at_once: int, samples: int
) -> Iterator[tuple[int, list[Result]]]:
    """How many prompts are done, and what was found of the last ones."""
    trainer.model.train()  # as in training: the mode decides what TRL takes for a group
    ends = {*trainer.eos_token_ids, trainer.processing_class.pad_token_id}
    for start in range(0, len(todo), at_once):
        indices = todo[start : start + at_once]
        inputs: list[dict[str, Any]] = [dataset[index] for index in indices for _ in range(samples)]
        prompts = [example["prompt"] for example in inputs]
        _, completion_ids, _, completions, *_ = trainer._generate(prompts)
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids)
        solved = solved_of(rewards, trainer.args.solved_at).view(-1, samples)
        outcomes = {name: sum(values) / len(values) for name, values in trainer._pending_metrics.items() if values}
        trainer._pending_metrics.clear()
        trainer._pending_extra_logs.clear()
        trainer.parity_gate.turns.clear()
        found = []
        for place, index in enumerate(indices):
            group = completion_ids[place * samples :][:samples]
            found.append(
                Result(
                    id=ids[index],
                    row=dataset[index]["row"],
                    samples=samples,
                    graded=int((~solved[place].isnan()).sum()),
                    solved=int((solved[place] == 1).sum()),
                    truncated=sum(tokens[-1] not in ends for tokens in group),
                    tokens=sum(map(len, group)) / samples,
                    outcomes=outcomes,
                )
            )
        yield start + len(indices), found


def _say(console: Console, message: str) -> None:
    console.print(message, highlight=False, soft_wrap=True, markup=False)
