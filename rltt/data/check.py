"""Prompts that occur more than once: within a set of problems, and on both sides of a split."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rltt.data.problems import Problem


@dataclass(frozen=True)
class RepeatedPrompt:
    """One prompt in several rows. `golds` are the different texts among theirs: more than one is a contradiction."""

    prompt: str
    rows: tuple[str, ...]
    golds: tuple[str, ...]


@dataclass(frozen=True)
class SharedPrompt:
    """One prompt that is both trained and evaluated on."""

    prompt: str
    train_rows: tuple[str, ...]
    eval_rows: tuple[str, ...]


def repeated_prompts(problems: Sequence[Problem]) -> list[RepeatedPrompt]:
    """Prompts of several rows, white space aside, in order of their first row."""
    return [
        RepeatedPrompt(
            prompt,
            tuple(problem.where for problem in same),
            tuple(dict.fromkeys(problem.gold.strip() for problem in same)),
        )
        for prompt, same in _by_prompt(problems).items()
        if len(same) > 1
    ]


def shared_prompts(train: Sequence[Problem], evaluation: Sequence[Problem]) -> list[SharedPrompt]:
    """Prompts on both sides, white space aside, in order of the evaluation rows."""
    trained = _by_prompt(train)
    return [
        SharedPrompt(
            prompt, tuple(problem.where for problem in trained[prompt]), tuple(problem.where for problem in evaluated)
        )
        for prompt, evaluated in _by_prompt(evaluation).items()
        if prompt in trained
    ]


def _by_prompt(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[" ".join(problem.prompt.split())].append(problem)
    return dict(groups)
