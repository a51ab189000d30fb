"""What is done when a reward function fails: the recipe's policy, the counting, the reporting.

A function is called with the whole batch first, as TRL does. Once such a call fails as a whole (an exception, a
timeout, a wrong length), each completion is graded alone, then and from then on: one bad completion costs itself, not
a step.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rltt.errors import RewardError
from rltt.rewards.call import KINDS, Failure, Result
from rltt.rewards.calls import Calls, OnEventLoop
from rltt.rewards.extract import completion_text, quoted

OnError = Literal["skip", "zero", "fail"]
SNIPPET = 200


@dataclass(frozen=True)
class FailureReport:
    """One failure, for a file. `gold` and `row` are columns of the data set, None where it has none."""

    step: int | None
    reward: str
    kind: str
    completion: str
    gold: Any
    row: Any
    detail: str
    traceback: str


class Guard:
    """Calls one reward function under its policy.

    Args:
        name: of the reward.
        calls: how it is called; an `OnEventLoop` for coroutine functions.
        on_error: `skip` makes a failed reward None, which TRL leaves out; `zero` makes it 0; `fail` raises.
        counted: whether the shares `reward/{name}/{kind}` are logged at each call.

    Attributes:
        report: receives each failure. To begin with, nobody.
        say: prints a message for a person; the first failure of each kind, and what is called differently from now on.
    """

    def __init__(self, name: str, calls: Calls | OnEventLoop, on_error: OnError = "skip", counted: bool = True) -> None:
        self.name = name
        self.calls = calls
        self.on_error = on_error
        self.counted = counted
        self.report: Callable[[FailureReport], None] = lambda report: None
        self.say: Callable[[str], None] = _to_stderr
        self._alone = False
        self._said: set[str] = set()

    def function(self) -> Callable[..., Any]:
        """The function for TRL: a coroutine function where the user's is one."""
        calls = self.calls
        if isinstance(calls, OnEventLoop):
            waiting = calls

            async def call_async(*, completions: Sequence[Any], **keywords: Any) -> list[float | None]:
                keywords["completions"] = completions
                if not self._alone:
                    result = await waiting.batch(keywords)
                    if not self._is_to_be_repeated(result, keywords):
                        return self._settle([result], keywords)
                return self._settle(await waiting.each(rows_of(keywords)), keywords)

            return self._named(call_async)

        def call(*, completions: Sequence[Any], **keywords: Any) -> list[float | None]:
            keywords["completions"] = completions
            if not self._alone:
                result = calls.batch(keywords)
                if not self._is_to_be_repeated(result, keywords):
                    return self._settle([result], keywords)
            return self._settle(calls.each(rows_of(keywords)), keywords)

        return self._named(call)

    def _named(self, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        wrapper.__name__ = wrapper.__qualname__ = self.name  # TRL names the metrics after it
        wrapper.__doc__ = inspect.getdoc(getattr(self.calls, "function", None))
        return wrapper

    def _is_to_be_repeated(self, result: Result, keywords: Mapping[str, Any]) -> bool:
        """Whether a batch failed as a whole, so that each completion has to be graded alone. Says so once."""
        failure = result.values
        if not isinstance(failure, Failure):
            return False
        completions = keywords["completions"]
        # A timeout or a crash does not say where: grading each alone finds the completion that `fail` has to name.
        if self.on_error == "fail" and failure.kind not in ("timeout", "died"):
            raise RewardError(self._message(failure, failure.index, completions))
        if len(completions) == 1:
            return False
        self._alone = True
        if failure.index is not None:
            self._said.add(failure.kind)
        self.say(
            f"{self._message(failure, failure.index, completions)}\n"
            f"From now on {self.name!r} is called with one completion at a time: a function that compares completions "
            "with each other sees one alone."
        )
        return True

    def _settle(self, results: Sequence[Result], keywords: Mapping[str, Any]) -> list[float | None]:
        """The policy applied to every failure; everything counted, reported and replayed."""
        completions = keywords["completions"]
        values = joined(results, len(completions))
        failures = {index: value for index, value in enumerate(values) if isinstance(value, Failure)}
        self._replay(results, keywords)
        if self.counted and values and (log_metric := keywords.get("log_metric")) is not None:
            for kind in KINDS:
                count = sum(failure.kind == kind for failure in failures.values())
                log_metric(f"reward/{self.name}/{kind}", count / len(values))
        for index, failure in failures.items():
            self.report(self._report(failure, index, keywords))
        if self.on_error == "fail":
            for index, failure in failures.items():
                raise RewardError(self._message(failure, index, completions))
        # None is an answer (does not apply); with anything else for every completion there is nothing to learn from.
        if values and len(failures) == len(values) and all(failure.kind != "none" for failure in failures.values()):
            message = self._message(failures[0], 0, completions)
            raise RewardError(f"{message}\nAll {len(values)} completions of this step failed: nothing can be learned.")
        for index, failure in failures.items():
            self._say_first(failure, index, completions)
        failed = 0.0 if self.on_error == "zero" else None
        return [failed if isinstance(value, Failure) else value for value in values]

    def _replay(self, results: Sequence[Result], keywords: Mapping[str, Any]) -> None:
        """What the function logged goes to TRL; where only some completions logged a column, the others have None."""
        if (log_metric := keywords.get("log_metric")) is not None:
            for result in results:
                for name, value in result.metrics:
                    log_metric(name, value)
        if (log_extra := keywords.get("log_extra")) is not None:
            logged = [dict(result.extras) for result in results]
            for column in dict.fromkeys(column for extras in logged for column in extras):
                log_extra(column, [value for extras in logged for value in extras.get(column, [None])])

    def _say_first(self, failure: Failure, index: int, completions: Sequence[Any]) -> None:
        if failure.kind in self._said or not self.counted:
            return
        self._said.add(failure.kind)
        does = "counts as 0" if self.on_error == "zero" else "is left out"
        self.say(f"{self._message(failure, index, completions)}\nSuch a completion {does}; more of these only count.")

    def _report(self, failure: Failure, index: int, keywords: Mapping[str, Any]) -> FailureReport:
        state = keywords.get("trainer_state")
        gold, row = (keywords[name][index] if name in keywords else None for name in ("gold", "row"))
        return FailureReport(
            step=None if state is None else state.global_step + 1,
            reward=self.name,
            kind=failure.kind,
            completion=completion_text(keywords["completions"][index]),
            gold=gold,
            row=row,
            detail=failure.problem,
            traceback=failure.traceback,
        )

    def _message(self, failure: Failure, index: int | None, completions: Sequence[Any]) -> str:
        where = ""
        if index is not None:
            text = completion_text(completions[index])
            where = f", for completion {index} of {len(completions)}: {quoted(text, SNIPPET)}"
        advice = ""
        if failure.kind == "none" and self.on_error == "fail":
            advice = " To say that a reward does not apply, set on_error: skip."
        trace = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
        return f"reward function {self.name!r} {failure.problem}{where}.{advice}{trace}"


def rows_of(keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keywords of a batch as those of one call for each completion."""
    count = len(keywords["completions"])
    columns = {name for name, value in keywords.items() if isinstance(value, list) and len(value) == count}
    return [
        {name: [value[index]] if name in columns else value for name, value in keywords.items()}
        for index in range(count)
    ]


def joined(results: Sequence[Result], count: int) -> list[float | Failure]:
    """One value for each completion, from one call of all or from one call for each."""
    values: list[float | Failure] = []
    for result in results:
        values.extend(
            [result.values] * (count // len(results)) if isinstance(result.values, Failure) else result.values
        )
    return values


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
