"""Is this run going to move the policy? `judge` answers from its metrics alone.

    moving      the policy leaves its start, or is solving more already
    stalled     it does not, and will not at this rate
    unstable    it moves, and not to where it should
    plateaued   it moved, and has stopped
    undecided   the evidence is not enough yet, or a metric that it takes is missing

Two conditions decide (Closing the Loop, arXiv 2610.00673, appendix C): the policy must leave its start, and groups must
be mixed. KL alone does not tell: policies that fail go as far as policies that learn.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rltt.telemetry.causes import CAUSES, LEAST, SURE, Evidence, Finding, seen
from rltt.telemetry.changes import Change
from rltt.telemetry.history import History
from rltt.telemetry.sequential import CERTAIN, confidence
from rltt.telemetry.signals import KL_MOVES, Signals

Kind = Literal["moving", "stalled", "unstable", "plateaued", "undecided"]

CODES: dict[Kind, float] = {"moving": 2.0, "plateaued": 1.0, "undecided": 0.0, "stalled": -1.0, "unstable": -2.0}
"""The verdict as a number, for a chart: below zero something has to be done."""


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a run after `step`.

    Attributes:
        verdict: see the module.
        cause: the most likely one, by the name of its function in causes.py; None where nothing is wrong.
        confidence: in the verdict, at most 0.99; 0 where it is undecided.
        evidence: numbers with their windows.
        change: what to change in the recipe; None where nothing has to be.
        missing: metrics that would have been read and are not there.
    """

    verdict: Kind
    cause: str | None
    confidence: float
    evidence: tuple[Evidence, ...]
    change: Change | None
    step: int
    missing: tuple[str, ...] = ()

    @property
    def code(self) -> float:
        """The verdict as a number."""
        return CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON can hold it."""
        evidence = [asdict(item) | {"steps": list(item.steps)} for item in self.evidence]
        return asdict(self) | {
            "confidence": round(self.confidence, 4),
            "evidence": evidence,
            "missing": list(self.missing),
        }

    @property
    def title(self) -> str:
        """One line: the verdict, its confidence and its cause."""
        text = f"{self.verdict}" if self.verdict == "undecided" else f"{self.verdict} ({self.confidence:.0%})"
        return text if self.cause is None else f"{text}: {self.cause.replace('_', ' ')}"

    def __str__(self) -> str:
        lines = [self.title, *(f"  {item}" for item in self.evidence)]
        if self.change is not None:
            lines.append(f"  change: {self.change}")
        if self.missing:
            lines.append(f"  not measured in this run: {', '.join(self.missing)}")
        return "\n".join(lines)


def judge(history: History) -> Verdict:
    """The verdict on a run as far as it has come.

    Every cause is asked; the first that forbids moving decides. Without one, the solve rate decides where it rises,
    and else the KL and the mixed groups.
    """
    signals = Signals(history)
    step, missing = history.last_step, tuple(signals.missing)
    if len(signals.rollouts) < LEAST:
        return Verdict("undecided", None, 0.0, (), None, step, missing)
    findings = [finding for cause in CAUSES if (finding := cause(signals)) is not None]
    blocking = next((finding for finding in findings if finding.verdict is not None), None)
    if blocking is not None and blocking.verdict is not None:
        sure, evidence = blocking.confidence, blocking.evidence
        return Verdict(blocking.verdict, blocking.cause, sure, evidence, blocking.change, step, missing)
    verdict = _movement(signals, findings)
    return replace(verdict, step=step, missing=missing)


def _movement(s: Signals, findings: list[Finding]) -> Verdict:
    """The verdict where no cause forbids that the run moves; what was found on the way is named beside it."""
    noted = findings[0] if findings else None
    cause, change = (noted.cause, noted.change) if noted else (None, None)
    notes = noted.evidence if noted else ()
    blind = any(finding.cause == "reference_wrong" for finding in findings)
    solve, window = s.solve, s.solve_last

    def verdict(kind: Kind, sure: float, *evidence: Evidence) -> Verdict:
        return Verdict(kind, cause, sure, (*evidence, *notes), change, s.history.last_step)

    if solve is not None and window is not None and solve.falls >= SURE:
        return verdict("unstable", solve.falls, seen(window, f"falls by {-solve.slope:.2g} a rollout"))
    if solve is not None and window is not None and solve.rises >= SURE:
        rising = seen(window, f"rises by {solve.slope:.2g} a rollout")
        if _flat_at_last(s):
            stop = Change(f"train.max_steps={s.history.last_step}", "more steps will hardly add to it")
            return Verdict("plateaued", cause, 0.8, (rising, *notes), change or stop, s.history.last_step)
        return verdict("moving", solve.rises, rising)
    if s.kl is None or blind:
        hint = change or (Change("objective.beta=0.001", "TRL measures the KL only then") if s.kl is None else None)
        return Verdict("undecided", cause, 0.0, notes, hint, s.history.last_step)
    enough = s.mixed is None or s.mixed.lacking <= 0
    if enough and confidence(s.kl.leaves) >= SURE and (window is None or 0.02 < window.mean < 0.98):
        evidence = [seen(s.kl.last, f"has left its start; runs that gained passed {KL_MOVES:g}", s.kl.last.median)]
        if s.mixed is not None:
            evidence.append(seen(s.mixed.window, "share of groups with a gradient", s.mixed.share))
        if window is not None:
            evidence.append(seen(window, "of the completions are solved"))
        return verdict("moving", min(confidence(s.kl.leaves), CERTAIN), *evidence)
    return verdict("undecided", 0.0, seen(s.kl.last, f"at best {s.kl.at_end:.1g} at step {s.horizon}"))


def _flat_at_last(s: Signals) -> bool:
    """Whether the last 40 % of a run surely gain less, each step, than a quarter of what the rest did."""
    _, values = s.rollouts.series(s.solve_name or "")
    cut = len(values) * 3 // 5
    if len(values) < 60:
        return False
    early, late = s.trend_of(values[:cut]), s.trend_of(values[cut:])
    return early is not None and late is not None and late.slope + late.stderr < early.slope / 4
