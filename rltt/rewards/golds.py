r"""Can the golds of a data set be graded at all? Asked before a run, for a bad gold trains on noise or on nothing.

A reward function takes part by carrying a function `check_golds(golds) -> list[Outcome]`, which gives one outcome for
each gold, `right` for a gold that a correct completion can reach. `math` gives each gold back as `\boxed{gold}`. A
verifier of your own does the same:

    def score(completions, gold, **kwargs): ...

    def check_golds(golds):
        return [Outcome("right") if gold.isdigit() else Outcome("bad_gold", "not a whole number") for gold in golds]

    score.check_golds = check_golds
"""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rltt.data.problems import Problem
from rltt.errors import DataError, RewardError
from rltt.rewards.extract import quoted
from rltt.rewards.isolated import NoOutcome
from rltt.rewards.outcome import Outcome, Status
from rltt.rewards.pool import Pool
from rltt.rewards.registry import RewardEntry, absolute_use, is_built_in, resolve_reward

GoldCheck = Callable[[Sequence[str]], Sequence[Outcome]]
OnBadGold = Literal["stop", "drop", "keep"]

_SHOWN = 5
_DROPS_SHOWN = 20


@dataclass(frozen=True)
class BadGold:
    """A row whose gold one of the rewards does not take for right. `where` names the row, `detail` says why."""

    where: str
    gold: str
    reward: str
    status: Status
    detail: str

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.where}: gold {quoted(self.gold, 80)} is {self.status} for {self.reward}{detail}"


def gold_checks(entries: Iterable[RewardEntry], base: Path | None = None) -> dict[str, GoldCheck]:
    """The gold checks of a recipe's rewards, by what the recipe calls them; of the rewards that have one.

    Raises `RewardError` as `resolve_reward` does, and for a `check_golds` that cannot be called.
    """
    checks: dict[str, GoldCheck] = {}
    for entry in entries:
        function: Any = resolve_reward(entry.use, base)
        check = getattr(function, "check_golds", None)
        if check is None:
            continue
        if not callable(check):
            raise RewardError(
                f"reward {entry.use!r}: its check_golds is {type(check).__name__} {str(check)[:40]!r}, not a function. "
                "It should be `def check_golds(golds) -> list[Outcome]`."
            )
        isolated = entry.isolate and not is_built_in(function)  # ours grades in workers by itself
        checks[entry.use] = _in_workers(absolute_use(entry.use, base), entry.timeout) if isolated else check
    return checks


def _in_workers(use: str, timeout: float) -> GoldCheck:
    """A user's check, called with one gold at a time in worker processes: one that hangs or dies costs its gold."""

    def check(golds: Sequence[str]) -> list[Outcome]:
        pool = Pool("rltt.rewards.isolated:prepare_gold_check", deadline=timeout, foreign=(use,))
        try:
            replies = pool.map(golds)
        finally:
            pool.close()
        outcomes: list[Any] = []
        for gold, reply in zip(golds, replies, strict=True):
            if reply.status != "ok":
                outcomes.append(Outcome("timeout" if reply.status == "timeout" else "error", reply.detail))
                continue
            found, trace = reply.value
            if trace:
                raise RewardError(f"failed on gold {quoted(gold, 80)}: {trace}")
            if len(found) != 1:
                raise RewardError(f"gave {len(found)} outcomes for 1 gold, {quoted(gold, 80)}")
            outcomes += found
        return outcomes

    return check


def bad_golds(problems: Sequence[Problem], checks: Mapping[str, GoldCheck]) -> list[BadGold]:
    """Every row whose gold is not `right` for one of `checks`, in order of the rows. Equal golds are checked once.

    Raises `RewardError` when a check fails, or gives something else than one `Outcome` for each gold.
    """
    golds = list(dict.fromkeys(problem.gold for problem in problems))
    found: list[BadGold] = []
    outcomes = {
        reward: dict(zip(golds, _called(reward, check, golds), strict=True)) for reward, check in checks.items()
    }
    for problem in problems:
        for reward, of in outcomes.items():
            outcome = of[problem.gold]
            if outcome.status != "right":
                found.append(BadGold(problem.where, problem.gold, reward, outcome.status, outcome.detail))
    return found


def without_bad_golds(
    problems: Sequence[Problem],
    checks: Mapping[str, GoldCheck],
    policy: OnBadGold,
    say: Callable[[str], None],
    purpose: str = "training",
) -> list[Problem]:
    """The problems that a run may use, by `data.bad_gold`: `stop` raises, `drop` leaves rows out, `keep` lets them be.

    `say` is told of bad golds that do not stop the run. Raises `DataError` for `stop`, and when `drop` leaves nothing.
    """
    bad = bad_golds(problems, checks)
    if not bad:
        return list(problems)
    golds = {gold.gold for gold in bad}
    kept = [problem for problem in problems if problem.gold not in golds]
    count = f"{len(problems) - len(kept)} of {len(problems)} {purpose} rows have a gold that cannot be graded"
    if policy == "stop":
        raise DataError(
            f"{_listed(f'{count}:', bad, _SHOWN)}\n"
            "A completion cannot be right on such a row. Mend the golds, or set data.bad_gold to drop (leave these "
            "rows out) or keep (train on them all the same)."
        )
    if policy == "keep":
        say(_listed(f"{count}, and are kept (data.bad_gold: keep):", bad, _SHOWN))
        return list(problems)
    if not kept:
        raise DataError(f"{_listed(f'{count}:', bad, _SHOWN)}\ndata.bad_gold: drop would leave no row.")
    say(_listed(f"{count}, and are left out (data.bad_gold: drop):", bad, _DROPS_SHOWN))
    return kept


def _called(reward: str, check: GoldCheck, golds: list[str]) -> list[Outcome]:
    try:
        outcomes = list(check(golds))
    except RewardError as error:  # of a worker, where its traceback is known
        raise RewardError(f"reward {reward!r}: its check_golds {error}") from error
    except Exception as error:
        raise RewardError(
            f"reward {reward!r}: its check_golds failed on {len(golds)} golds: {type(error).__name__}: {error}\n"
            f"{traceback.format_exc().rstrip()}"
        ) from error
    if len(outcomes) != len(golds):
        raise RewardError(f"reward {reward!r}: its check_golds gave {len(outcomes)} outcomes for {len(golds)} golds.")
    for outcome in outcomes:
        if not isinstance(outcome, Outcome):
            found = outcome if isinstance(outcome, NoOutcome) else NoOutcome.describing(outcome)
            raise RewardError(
                f"reward {reward!r}: its check_golds gave {found}; give an "
                "rltt.rewards.Outcome for each gold, such as Outcome('right')."
            )
    return outcomes


def _listed(head: str, bad: Sequence[BadGold], shown: int) -> str:
    lines = [head, *(f"  {gold}" for gold in bad[:shown])]
    if len(bad) > shown:
        lines.append(f"  and {len(bad) - shown} more; `rltt check-data` lists them all")
    return "\n".join(lines)
