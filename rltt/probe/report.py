"""What a probe found, for a person and as JSON, and what it suggests to change in the recipe."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset

from ..evaluate import Mean
from ..recipe import Recipe
from ..telemetry import Change, flat
from ..telemetry.causes import CUT, UNREAD
from ..telemetry.changes import BOXED_TEMPLATE, easier, harder
from ..telemetry.signals import MIXED_ENOUGH
from .estimate import histogram, mixed_share
from .results import Result

GROUPS = (2, 4, 8, 16, 32, 64)
SUBSETS = ("level", "subject", "type", "difficulty")
"""Columns that part a data set into easier and harder prompts."""

MIXED_AIM = 0.5
"""Share of mixed groups that a suggested group size reaches. A verdict has too few below 0.2 (`MIXED_ENOUGH`), and the
share falls while a policy learns."""

TOO_HARD, TOO_EASY = 0.1, 0.9
"""Solve rates outside of which a prompt is of little use: the range of the suggested filter."""

_BAR = 24


@dataclass(frozen=True)
class Group:
    """Groups of one size: the share of mixed ones, and how many prompts of a step would carry a gradient."""

    size: int
    mixed: Mean | None
    """None: more than the samples of a prompt."""
    useful: Mean | None


@dataclass(frozen=True)
class Subset:
    """The prompts with one value in a column of the data."""

    value: str
    prompts: int
    solve_rate: Mean
    mixed: Mean | None
    """At the recipe's group size, or the largest that was sampled."""


@dataclass(frozen=True)
class Report:
    """What is known of how often a recipe's start solves its training prompts.

    Attributes:
        recipe: that of the run.
        results: one a prompt.
        columns: values of the columns in `SUBSETS` that the data have, one a prompt.
        rows_in_all: training rows of the recipe, probed or not.
        cache: where the results are kept.
    """

    recipe: Recipe
    results: Sequence[Result]
    columns: Mapping[str, Sequence[Any]]
    rows_in_all: int
    cache: Path

    @cached_property
    def rates(self) -> list[float]:
        """Solve rates of the prompts with a graded completion."""
        return [result.rate for result in self.results if result.rate is not None]

    @property
    def solve_rate(self) -> Mean | None:
        """Mean over prompts."""
        return Mean.over_prompts(self.rates) if self.rates else None

    @property
    def ungraded(self) -> int:
        """Completions that the first reward gave no number."""
        return sum(result.samples - result.graded for result in self.results)

    @property
    def truncated(self) -> Mean:
        """Share of completions that met the length limit."""
        return Mean.over_prompts([result.truncated / result.samples for result in self.results])

    @property
    def outcomes(self) -> dict[str, float]:
        """Shares of completions that the rewards reported, such as `reward/math/unparseable`."""
        names = dict.fromkeys(name for result in self.results for name in result.outcomes)
        return {name: fmean(result.outcomes.get(name, 0.0) for result in self.results) for name in names}

    @property
    def group_size(self) -> int:
        """The recipe's."""
        return self.recipe.rollout.num_generations

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Graded and solved completions of each prompt."""
        return [(result.graded, result.solved) for result in self.results]

    @cached_property
    def groups(self) -> list[Group]:
        """The usual sizes, and the recipe's."""
        return [self._group(size) for size in sorted({*GROUPS, self.group_size})]

    def _group(self, size: int) -> Group:
        mixed = mixed_share(self.counts, size)
        prompts = self.recipe.train.prompts_per_step
        useful = mixed and Mean(prompts * mixed.value, mixed.stderr and prompts * mixed.stderr)
        return Group(size, mixed, useful)

    @cached_property
    def largest(self) -> Group | None:
        """The recipe's group size, or if that has more than the samples of a prompt, the largest that has not."""
        sizes = [group for group in self.groups if group.mixed is not None and group.size <= self.group_size]
        return sizes[-1] if sizes else None

    @cached_property
    def subsets(self) -> dict[str, list[Subset]]:
        """Of each column with at least two values, these in their order."""
        found: dict[str, list[Subset]] = {}
        for name, values in self.columns.items():
            parts: dict[str, list[Result]] = {}
            for value, result in zip(values, self.results, strict=True):
                if result.rate is not None:
                    parts.setdefault(str(value), []).append(result)
            if len(parts) > 1:
                found[name] = [self._subset(value, parts[value]) for value in sorted(parts)]
        return found

    def _subset(self, value: str, results: list[Result]) -> Subset:
        rates = Mean.over_prompts([result.solved / result.graded for result in results])
        counts = [(result.graded, result.solved) for result in results]
        mixed = None if self.largest is None else mixed_share(counts, self.largest.size)
        return Subset(value, len(results), rates, mixed)

    # --------------------------------------------------------------------------------------------------- suggestions

    @cached_property
    def suggestions(self) -> list[Change]:
        """What keeps completions from being graded, and what would give more prompts a gradient.

        Nothing of the latter where at least `MIXED_AIM` of the groups are mixed.
        """
        found = list(self._form())
        if self.solve_rate is None or self.largest is None or self.largest.mixed is None:
            return found
        now = self.largest.mixed.value
        if now < MIXED_AIM:
            found += [*self._larger_groups(now), *self._filter(), *self._another_level(now)]
        if now < MIXED_ENOUGH:
            settings = flat(self.recipe.model_dump())
            found.append(easier(settings) if self.solve_rate.value < 0.5 else harder(settings))
        return found

    def _form(self) -> Iterator[Change]:
        limit, template = self.recipe.rollout.max_completion_length, self.recipe.data.prompt_template
        unread = max((share for name, share in self.outcomes.items() if name.endswith("/unparseable")), default=0.0)
        if self.truncated.value >= CUT:
            yield Change(f"rollout.max_completion_length={2 * limit}", f"now {limit}: completions do not fit")
        elif unread >= UNREAD and "boxed" not in template:
            yield Change(f'data.prompt_template="{BOXED_TEMPLATE}"', "asks for the answer in the form that is graded")

    def _larger_groups(self, now: float) -> Iterator[Change]:
        per_device = self.recipe.train.per_device_train_batch_size or 1
        for group in self.groups:
            fits = self.recipe.train.prompts_per_step * group.size % per_device == 0
            if group.size > self.group_size and fits and group.mixed and group.mixed.value >= MIXED_AIM:
                yield Change(
                    f"rollout.num_generations={group.size}",
                    f"now {self.group_size}: the smallest group with {MIXED_AIM:.0%} mixed or more "
                    f"({group.mixed.value:.0%}, now {now:.0%}), at {group.size / self.group_size:g} times the cost",
                )
                return

    def _filter(self) -> Iterator[Change]:
        kept = sum(TOO_HARD <= rate <= TOO_EASY for rate in self.rates) / len(self.rates)
        rows = round(kept * self.rows_in_all)
        if rows < self.recipe.train.prompts_per_step * self.recipe.train.updates_per_rollout or kept > MIXED_AIM:
            return
        rest = self.rows_in_all - len(self.results)
        first = f"; probe all rows first (--prompts {self.rows_in_all})" if rest else ""
        yield Change(
            f"data.filter.solve_rate=[{TOO_HARD},{TOO_EASY}]",
            f"keeps about {rows:,} of {self.rows_in_all:,} rows, those that are solved neither always nor never{first}",
        )

    def _another_level(self, now: float) -> Iterator[Change]:
        for name, subsets in self.subsets.items():
            known = [(subset.mixed, subset) for subset in subsets if subset.mixed is not None]
            mixed, best = max(known, key=lambda pair: pair[0].value)
            if mixed.stderr is not None and mixed.value - 2 * mixed.stderr > now:
                yield Change(
                    None,
                    f"data: the prompts with {name} {best.value!r} have {mixed.value:.0%} mixed groups, all have "
                    f"{now:.0%}; a file of these rows alone would give more of a step a gradient",
                )

    # -------------------------------------------------------------------------------------------------------- output

    def to_json(self) -> dict[str, Any]:
        """Everything that `render` shows, as JSON has it."""

        def mean(value: Mean | None) -> dict[str, float | None] | None:
            return None if value is None else value._asdict()

        return {
            "recipe": self.recipe.name,
            "prompts": len(self.results),
            "rows": self.rows_in_all,
            "completions": sum(result.samples for result in self.results),
            "samples": min(result.samples for result in self.results),
            "solve_rate": mean(self.solve_rate),
            "ungraded": self.ungraded,
            "truncated": mean(self.truncated),
            "mean_length": fmean(result.tokens for result in self.results),
            "outcomes": self.outcomes,
            "histogram": [{"low": low, "high": high, "prompts": count} for low, high, count in histogram(self.rates)],
            "group_size": self.group_size,
            "prompts_per_step": self.recipe.train.prompts_per_step,
            "groups": [
                {"size": group.size, "mixed": mean(group.mixed), "useful_prompts": mean(group.useful)}
                for group in self.groups
            ],
            "subsets": {
                name: [
                    {
                        "value": subset.value,
                        "prompts": subset.prompts,
                        "solve_rate": mean(subset.solve_rate),
                        "mixed": mean(subset.mixed),
                    }
                    for subset in subsets
                ]
                for name, subsets in self.subsets.items()
            },
            "subsets_group_size": self.largest.size if self.largest else None,
            "suggestions": [asdict(change) for change in self.suggestions],
            "cache": str(self.cache),
        }

    def render(self) -> str:
        """The report as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        completions = sum(result.samples for result in self.results)
        rollout = self.recipe.rollout
        yield (
            f"{len(self.results):,} of {self.rows_in_all:,} training prompts, {completions:,} completions "
            f"at temperature {rollout.temperature:g}, {fmean(result.tokens for result in self.results):.0f} tokens each"
        )
        yield f"solve rate  {self.solve_rate or 'not known: no completion was graded'}"
        yield f"truncated   {self.truncated} (rollout.max_completion_length {rollout.max_completion_length})"
        if self.ungraded:
            yield f"ungraded    {self.ungraded / completions:.3f}"
        for name, share in self.outcomes.items():
            if share:
                yield f"{name.removeprefix('reward/'):<11} {share:.3f}"
        yield from ("", "solved      prompts")
        for low, high, count in histogram(self.rates):
            label = {(0.0, 0.0): "never", (1.0, 1.0): "always"}.get((low, high), f"{low:.0%} to {high:.0%}")
            share = count / max(1, len(self.rates))
            yield f"{label:<11} {count:>6}  {share:>4.0%}  {'█' * round(share * _BAR)}".rstrip()
        yield from ("", f"group  mixed groups    useful prompts of {self.recipe.train.prompts_per_step} a step")
        missing = []
        for group in self.groups:
            if group.mixed is None:
                missing.append(group.size)
                continue
            now = "   this recipe" if group.size == self.group_size else ""
            useful = group.useful
            assert useful is not None
            spread = "" if useful.stderr is None else f" ± {useful.stderr:.1f}"
            yield f"{group.size:>5}  {group.mixed!s:<14}  {useful.value:.1f}{spread}{now}"
        if missing:
            samples = min((n for n, _ in self.counts if n), default=0)
            sizes = ", ".join(map(str, missing))
            yield f"{sizes}: not known from {samples} graded samples of a prompt; --samples {missing[0]} tells"
        if self.largest is not None and self.largest.mixed is not None and self.largest.mixed.value == 0:
            few = 3 / len(self.rates)  # the rule of three: 95 % of samples from a larger share have one
            yield f"none of {len(self.rates)} prompts is mixed, which leaves room for {min(few, 1):.0%} of them (95 %)"
        for name, subsets in self.subsets.items():
            assert self.largest is not None
            width = max(len(name), *(len(subset.value) for subset in subsets))
            yield from ("", f"{name:<{width}}  prompts  solve rate     mixed groups of {self.largest.size}")
            for subset in subsets:
                yield f"{subset.value:<{width}}  {subset.prompts:>7}  {subset.solve_rate!s:<13}  {subset.mixed or ''}"
        yield ""
        if self.suggestions:
            yield "suggestions, to be put after `rltt train recipe.yaml`:"
            for change in self.suggestions:  # a shell would take brackets for a pattern
                yield f"  {change if change.override is None else Change(shlex.quote(change.override), change.advice)}"
        elif self.largest is not None and self.largest.mixed is not None:
            now = f"{self.largest.mixed.value:.0%} of the groups are mixed"
            yield f"no change suggested: {now}, and {MIXED_AIM:.0%} is enough"


def subsets_of(dataset: Dataset) -> dict[str, list[Any]]:
    """The columns in `SUBSETS` that a data set has."""
    return {name: list(dataset[name]) for name in SUBSETS if name in dataset.column_names}
