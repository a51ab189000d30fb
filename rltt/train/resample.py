"""Dynamic sampling: groups without a gradient are replaced by groups of fresh prompts (DAPO, arXiv 2503.14476, §3.2).

A group whose completions all have the same reward has advantage 0. Such groups are thrown away, and as many fresh
prompts sampled, until every group of the rollout is mixed or the budget is spent. Fresh prompts come from passes over
the training rows of their own, so the order in which the data loader deals rows does not change.

Which groups are replaced is decided on the rewards of all processes, so each comes to the same decision; each samples
an equal share of the fresh prompts.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from ..objective.advantage import equal_groups, nanstd, total_reward
from .parity_gate import Turn

if TYPE_CHECKING:
    from .trainer import RLTTTrainer

Example = dict[str, Any]
# TRL's `_generate`: prompts in; token ids, texts and log-probs of their completions out.
Generate = Callable[[list[Any]], tuple[Any, ...]]


@dataclass
class Row:
    """One completion with all that TRL and the parity gate keep of it."""

    example: Example
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any
    log_probs: list[float]
    engine_prompt: list[int]
    engine_completion: list[int]
    logged: dict[str, Any]
    """What reward functions logged of it by `log_extra`."""


@dataclass
class Draw:
    """Completions of this process, and the rewards of all."""

    rows: list[Row]
    rewards: Float[Tensor, "B F"]


@dataclass
class Spent:
    """What one rollout has cost beyond its own prompts."""

    prompts: int = 0
    rounds: int = 0
    replaced: int = 0
    uniform_before: float = 0.0
    as_dealt: Float[Tensor, "B F"] | None = field(default=None, repr=False)
    """Rewards of the prompts that the data loader dealt, before any was replaced."""


class Resampler:
    """Fills a trainer's rollouts with mixed groups.

    Args:
        trainer: whose rollouts; it hands its generation to `rollout`.
        budget: fresh prompts for a rollout at most, as a multiple of the prompts that it takes.

    Attributes:
        drawn: fresh prompts taken so far, on which depends which come next: all that a checkpoint has to hold.
        spent: of the last rollout.

    Raises:
        UserError: the trainer's rollouts cannot be taken apart, or there is nothing to draw fresh prompts from.
    """

    def __init__(self, trainer: "RLTTTrainer", budget: float) -> None:
        prompts = trainer.args.generation_batch_size // trainer.num_generations
        data = trainer.train_dataset
        if not isinstance(data, Dataset):
            raise UserError("resample_uniform draws fresh prompts by index, which a stream of rows does not have")
        if len(data) <= prompts:
            raise UserError(
                f"resample_uniform: a rollout takes {prompts} prompts, and the training data has no more than these "
                f"{len(data)} to replace uniform groups by; bring more data, or turn it off"
            )
        if trainer.tools or trainer.rollout_func is not None or trainer.environment_factories is not None:
            raise UserError("resample_uniform works on single turns: without tools, environments and rollout_func")
        if trainer.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                "resample_uniform looks at the sum of the rewards; multi_objective_aggregation has to be "
                "'sum_then_normalize'"
            )
        self.trainer = trainer
        self.prompts = prompts
        self.budget = int(budget * prompts)
        if not self.budget:
            raise UserError(f"resample_budget: {budget:g} of the {prompts} prompts of a rollout is not one prompt")
        self.drawn = 0
        self.spent = Spent()
        self._order: tuple[int, list[int]] = (-1, [])

    def rollout(self, inputs: list[Example], prompts: list[Any], generate: Generate) -> tuple[Any, ...]:
        """What `generate` gives for the prompts, with uniform groups replaced.

        Args:
            inputs, prompts: this process's rows and their prompts, as TRL holds them. Where a group is replaced they
                are changed in place: TRL grades, logs and hands on these very lists.
        """
        kept = self._sample(inputs, generate)
        uniform = self._uniform(kept.rewards)
        spent = Spent(uniform_before=len(uniform) / self.prompts, as_dealt=kept.rewards.clone())
        present = set(gather_object([repr(row.example["prompt"]) for row in kept.rows]))
        while uniform:
            examples = self._fresh(self._evenly(len(uniform), self.budget - spent.prompts), present)
            if not examples:
                break
            with self._unmeasured():
                fresh = self._sample(self._mine(examples), generate)
            spent.prompts += len(examples)
            spent.rounds += 1
            wasted = set(self._uniform(fresh.rewards))
            good = [group for group in range(len(examples)) if group not in wasted]
            moves = list(zip(uniform, good, strict=False))
            self._move(fresh, kept, moves)
            spent.replaced += len(moves)
            uniform = uniform[len(moves) :]
        self.spent = spent
        return self._hand_back(kept, inputs, prompts)

    def rewards_as_dealt(self) -> dict[str, float]:
        """TRL's statistics of the rewards of the prompts as the data loader dealt them.

        Of the groups that are kept they say little: those are the ones that are neither always nor never solved.
        """
        rewards = self.spent.as_dealt
        assert rewards is not None
        total = self._total(rewards)
        statistics = {"reward": total.nanmean().item(), "reward_std": nanstd(total, dim=0).item()}
        for index, name in enumerate(self.trainer.reward_func_names):
            statistics[f"rewards/{name}/mean"] = rewards[:, index].nanmean().item()
            statistics[f"rewards/{name}/std"] = nanstd(rewards[:, index], dim=0).item()
        return statistics

    def cost(self) -> dict[str, float]:
        """What the last rollout cost beyond its own prompts, as metrics."""
        spent = self.spent
        return {
            "resample/prompts": float(spent.prompts),
            "resample/rounds": float(spent.rounds),
            "resample/replaced": float(spent.replaced),
            "resample/uniform_before": spent.uniform_before,
        }

    # ------------------------------------------------------------------------------------------------- fresh prompts

    def _evenly(self, wanted: int, left: int) -> int:
        """How many prompts to sample: at least those wanted, if the budget allows, in equal shares of whole rows."""
        size = self.trainer.accelerator.num_processes
        unit = size // math.gcd(size, self.trainer.num_generations)
        return min(math.ceil(wanted / unit), left // unit) * unit

    def _fresh(self, count: int, present: set[str]) -> list[Example]:
        """The next training rows, without those whose prompts are in this rollout already."""
        found: list[Example] = []
        data = self.trainer.train_dataset
        for _ in range(2 * len(data)):  # twice: the rest of one pass, and a whole one
            if len(found) == count:
                return found
            example = data[self._index(self.drawn)]
            self.drawn += 1
            if (prompt := repr(example["prompt"])) not in present:
                present.add(prompt)
                found.append(example)
        return found[: self._evenly(len(found), len(found))]

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self.trainer.train_dataset))
        if self._order[0] != epoch:
            order = list(range(len(self.trainer.train_dataset)))
            random.Random(f"resample {self.trainer.args.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]

    def _mine(self, examples: list[Example]) -> list[Example]:
        """This process's share of the groups of fresh prompts, cut as TRL cuts a batch."""
        every = [example for example in examples for _ in range(self.trainer.num_generations)]
        accelerator = self.trainer.accelerator
        size = len(every) // accelerator.num_processes
        return every[accelerator.process_index * size :][:size]

    # -------------------------------------------------------------------------------------------------------- groups

    def _sample(self, inputs: list[Example], generate: Generate) -> Draw:
        trainer = self.trainer
        prompts = [example["prompt"] for example in inputs]
        prompt_ids, completion_ids, _, completions, log_probs, *_ = generate(prompts)
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids)
        turn = trainer.parity_gate.turns.pop()
        columns = (inputs, prompt_ids, completion_ids, completions, log_probs, turn.prompts, turn.completions)
        logged = {name: list(values) for name, values in trainer._pending_extra_logs.items()}
        trainer._pending_extra_logs.clear()
        extras = [
            {name: values[index] for name, values in logged.items() if index < len(values)}
            for index in range(len(inputs))
        ]
        return Draw([Row(*row) for row in zip(*columns, extras, strict=True)], rewards)

    def _total(self, rewards: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        return total_reward(rewards, self.trainer.reward_weights.to(rewards.device))

    def _uniform(self, rewards: Float[Tensor, "B F"]) -> list[int]:
        """Groups whose completions all have the same reward, or none, by their number."""
        return equal_groups(self._total(rewards), self.trainer.num_generations).nonzero().flatten().tolist()

    def _move(self, source: Draw, target: Draw, moves: list[tuple[int, int]]) -> None:
        """Put groups of the source in the place of groups of the target: pairs of (target, source)."""
        size, first = self.trainer.num_generations, self.trainer.accelerator.process_index * len(target.rows)
        rows = gather_object(source.rows)
        for into, out_of in moves:
            for offset in range(size):
                place, origin = into * size + offset, out_of * size + offset
                target.rewards[place] = source.rewards[origin]
                if first <= place < first + len(target.rows):
                    target.rows[place - first] = rows[origin]

    def _hand_back(self, kept: Draw, inputs: list[Example], prompts: list[Any]) -> tuple[Any, ...]:
        """The rollout in TRL's terms; its rewards and its turn with the engine are where the trainer looks for them."""
        trainer, rows = self.trainer, kept.rows
        inputs[:] = [row.example for row in rows]
        prompts[:] = [row.example["prompt"] for row in rows]
        for column in sorted({name for row in rows for name in row.logged}):
            trainer._pending_extra_logs[column] = [row.logged.get(column) for row in rows]
        trainer.parity_gate.turns.append(
            Turn([row.engine_prompt for row in rows], [row.engine_completion for row in rows])
        )
        trainer.known_rewards = kept.rewards
        completions = [row.completion for row in rows]
        ids = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
        return *ids, None, completions, [row.log_probs for row in rows], {}, None, []

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Metrics of a rollout tell of the prompts as they were dealt; of fresh ones only the tokens are counted."""
        trainer = self.trainer
        measured = (trainer._metrics["train"], trainer._pending_metrics)
        lengths = [{name: len(values) for name, values in metrics.items()} for metrics in measured]
        yield
        for metrics, before in zip(measured, lengths, strict=True):
            for name, values in metrics.items():
                if name != "num_tokens":
                    del values[before.get(name, 0) :]
