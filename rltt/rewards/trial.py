"""One reward function, shown at work on real completions: what it gives, where it fails, how long it takes.

Every completion is first graded in a batch, as in a run, then alone, which says where a batch failed and how long each
takes. Failures are shown, not judged: `on_error` is a run's business.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from rltt.errors import DataError, RewardError
from rltt.rewards.call import Failure, Result, judge
from rltt.rewards.calls import OnEventLoop
from rltt.rewards.extract import completion_text
from rltt.rewards.guard import joined
from rltt.rewards.math import REWARD_OF, verify_math
from rltt.rewards.outcome import Outcome
from rltt.rewards.registry import (
    NamedReward,
    RewardEntry,
    check_columns,
    load_rewards,
    resolve_reward,
    use_tokenizer,
)
from rltt.rewards.samples import Sample, keywords_of

# Completions in one call, as in a step of 32 prompts with 8 completions each: a timeout counts for the whole call.
BATCH = 256


@dataclass(frozen=True)
class Trial:
    """What became of one completion.

    `reward` is None where the function gave none; `failure` then says why (its kind `none` is an answer: does not
    apply). `alone` is the reward when graded alone. `outcome` is the math verifier's, for `math`.
    """

    where: str
    completion: str
    gold: Any
    reward: float | None
    alone: float | None
    failure: Failure | None
    outcome: Outcome | None
    seconds: float


@dataclass(frozen=True)
class TrialReport:
    """All completions. `batch_failures` are calls with many completions that failed as a whole."""

    name: str
    solved_at: float
    trials: tuple[Trial, ...]
    batch_failures: tuple[Failure, ...]
    batch_seconds: float

    @property
    def failed(self) -> list[Trial]:
        """The completions on which the function failed. A None is no failure."""
        return [trial for trial in self.trials if trial.failure is not None and trial.failure.kind != "none"]

    @property
    def ok(self) -> bool:
        """Whether no call failed, of a batch or of a completion alone."""
        return not self.failed and not self.batch_failures

    def summary(self) -> dict[str, Any]:
        """The numbers: counts, mean reward, share solved, seconds. The mean is over those that have a reward."""
        rewards = [trial.reward for trial in self.trials if trial.reward is not None]
        seconds = [trial.seconds for trial in self.trials]
        return {
            "reward": self.name,
            "completions": len(self.trials),
            "mean": fmean(rewards) if rewards else None,
            "solved": sum(reward >= self.solved_at for reward in rewards) / len(self.trials),
            "solved_at": self.solved_at,
            "none": sum(trial.failure is not None and trial.failure.kind == "none" for trial in self.trials),
            "failed": len(self.failed),
            "otherwise_alone": sum(trial.reward != trial.alone for trial in self.trials if trial.failure is None),
            "batch_seconds": self.batch_seconds,
            "seconds": sum(seconds),
            "seconds_median": median(seconds),
            "seconds_max": max(seconds),
        }

    def to_json(self) -> dict[str, Any]:
        """The summary, the calls that failed as a whole, and every completion."""
        return {
            "summary": self.summary(),
            "batch_failures": [asdict(failure) for failure in self.batch_failures],
            "rows": [asdict(trial) for trial in self.trials],
        }


def try_reward(
    entry: RewardEntry, samples: Sequence[Sample], *, chat: bool = False, tokenizer: Callable[[], Any] | None = None
) -> TrialReport:
    """Call the reward function that a recipe would name with `entry` on the samples.

    With `chat`, completions that are text are passed as messages, as of a policy with a chat template. `tokenizer`
    loads the one for functions that name it.

    Raises:
        RewardError: there is no such function, or it needs what the samples have not.
        DataError: there are no samples.
    """
    if not samples:
        raise DataError("no completions to try the reward function on")
    (reward,) = load_rewards([entry])
    assert reward.guard is not None  # load_rewards guards every function
    _check_inputs(reward, entry, samples, tokenizer)
    if tokenizer is not None and reward.tokenizer_names:
        use_tokenizer([reward], tokenizer())
    calls = reward.guard.calls
    outcomes: list[Outcome | None] = [None] * len(samples)
    state = SimpleNamespace(global_step=0, max_steps=0, epoch=0.0)
    with asyncio.Runner() as loop:  # one event loop for all calls, as clients of services need

        def call(chosen: Sequence[Sample]) -> Result:
            keywords = keywords_of(chosen, state, chat)
            return loop.run(calls.batch(keywords)) if isinstance(calls, OnEventLoop) else calls.batch(keywords)

        batches, batch_failures, batch_seconds = _in_batches(call, samples)
        if entry.use.strip() == "math":
            outcomes, alone, seconds = _alone_by_math(samples)
        else:
            alone, seconds = _alone(call, samples)
    trials = []
    for i, sample in enumerate(samples):
        value = alone[i] if batches[i] is None else batches[i]
        trials.append(
            Trial(
                where=sample.where,
                completion=completion_text(sample.completion),
                gold=sample.columns.get("gold"),
                reward=_number(value),
                alone=_number(alone[i]),
                failure=replace(value, index=i) if isinstance(value, Failure) else None,
                outcome=outcomes[i],
                seconds=seconds[i],
            )
        )
    return TrialReport(reward.name, reward.solved_at, tuple(trials), tuple(batch_failures), batch_seconds)


def _in_batches(
    call: Callable[[Sequence[Sample]], Result], samples: Sequence[Sample]
) -> tuple[list[float | Failure | None], list[Failure], float]:
    """A value for each sample, None where its call failed as a whole; those failures; seconds of all calls."""
    values: list[float | Failure | None] = []
    failures: list[Failure] = []
    begun = time.perf_counter()
    for start in range(0, len(samples), BATCH):
        chunk = samples[start : start + BATCH]
        found = call(chunk).values
        if isinstance(found, Failure):
            failures.append(found if found.index is None else replace(found, index=start + found.index))
            values.extend([None] * len(chunk))
        else:
            values.extend(found)
    return values, failures, time.perf_counter() - begun


def _alone(
    call: Callable[[Sequence[Sample]], Result], samples: Sequence[Sample]
) -> tuple[list[float | Failure], list[float]]:
    values: list[float | Failure] = []
    seconds = []
    for sample in samples:
        begun = time.perf_counter()
        result = call([sample])
        seconds.append(time.perf_counter() - begun)
        values.extend(joined([result], 1))
    return values, seconds


def _alone_by_math(
    samples: Sequence[Sample],
) -> tuple[list[Outcome | None], list[float | Failure], list[float]]:
    """Each graded alone by the math verifier itself, whose outcomes say more than the reward's numbers."""
    outcomes: list[Outcome | None] = []
    values: list[float | Failure] = []
    seconds = []
    for sample in samples:
        begun = time.perf_counter()
        (outcome,) = verify_math([str(sample.columns["gold"])], [completion_text(sample.completion)])
        seconds.append(time.perf_counter() - begun)
        outcomes.append(outcome)
        values += joined([Result(judge([REWARD_OF[outcome.status]], 1))], 1)
    return outcomes, values, seconds


def _check_inputs(reward: NamedReward, entry: RewardEntry, samples: Sequence[Sample], tokenizer: Any) -> None:
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    try:
        check_columns([reward], columns)
    except RewardError as error:
        raise RewardError(f"{error} (--data can add columns to completions)") from error
    for name in reward.columns:
        for sample in samples:
            if sample.columns.get(name) is None:
                raise RewardError(
                    f"reward function {reward.name!r} needs the column {name!r}, and {sample.where} has none"
                )
    names = inspect.signature(resolve_reward(entry.use)).parameters
    if "prompts" in names and any(sample.prompt is None for sample in samples):
        raise RewardError(
            f"reward function {reward.name!r} takes prompts, and the completions have no field `prompt`; --data can "
            "add them"
        )
    if reward.tokenizer_names and tokenizer is None:
        raise RewardError(f"reward function {reward.name!r} takes the policy's tokenizer; name one with --tokenizer")


def _number(value: float | Failure | None) -> float | None:
    return None if isinstance(value, Failure) else value
