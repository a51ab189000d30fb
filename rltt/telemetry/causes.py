"""Why a run does not move, or not well: one function a cause, in the order in which they are believed.

Each looks at the signals and says nothing (None), or what it found: the verdict that follows, if one does, with its
confidence, its evidence, and the change that would mend it. A cause that hides others stands before them: where all
completions are cut, none is solved, and it is the cut that has to be mended.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from rltt.telemetry.changes import (
    BOXED_TEMPLATE,
    Change,
    easier,
    harder,
    lower_learning_rate,
    nice,
    raise_learning_rate,
)
from rltt.telemetry.sequential import CERTAIN, confidence
from rltt.telemetry.signals import KL_MOVES, KL_NOTHING, KL_NOTHING_FP32, UNRELATED, Signals
from rltt.telemetry.windows import Window

LEAST = 5
"""Rollouts before any cause is named."""

SURE = 0.95
"""Confidence from which a verdict is given."""

CUT = 0.4
"""Share of cut completions from which the cut decides what is learned."""

UNREAD = 0.5
"""Share of completions whose answer cannot be found, or whose gold is bad."""

KL_FAR = 0.7
"""KL at which a policy hardly resembles its start. Runs that gained stayed below 0.4."""

PARITY_BROKEN, PARITY_DOUBTFUL = 0.5, 1e-3
"""KL of engine and training path: another model altogether, and more than rounding (bf16 has about 1e-5)."""

GATE = 0.95
"""Mean exit probability of one loop from which the others are not asked."""


@dataclass(frozen=True)
class Evidence:
    """A number, where it comes from, and what it means."""

    metric: str
    value: float
    steps: tuple[int, int]
    meaning: str

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.3g} (steps {self.steps[0]}-{self.steps[1]}): {self.meaning}"


@dataclass(frozen=True)
class Finding:
    """A cause that is there. `verdict` is None where the run may move all the same."""

    cause: str
    verdict: Literal["stalled", "unstable"] | None
    confidence: float
    evidence: tuple[Evidence, ...]
    change: Change | None


def seen(window: Window, meaning: str, value: float | None = None) -> Evidence:
    """A window as evidence, with its mean."""
    return Evidence(window.metric, window.mean if value is None else value, window.steps, meaning)


def rollout_mismatch(s: Signals) -> Finding | None:
    """The engine samples from another model than the one that is trained."""
    gap = s.per_rollout.last("parity/kl")
    if gap is None or gap.mean < PARITY_DOUBTFUL:
        return None
    broken = gap.mean >= PARITY_BROKEN
    engine = s.setting("rollout.engine")
    change = (
        Change("rollout.engine=hf", "samples from the policy itself; `rltt doctor` names what differs in the engine")
        if engine == "vllm"
        else Change("rollout.parity_tolerance=1e-4", "stops at the first check and names what differs")
    )
    meaning = "the engine's log-probs are another model's" if broken else "more than rounding; 1e-5 is usual in bf16"
    return Finding(
        "rollout_mismatch", "stalled" if broken else None, CERTAIN if broken else 0.9, (seen(gap, meaning),), change
    )


def bad_golds(s: Signals) -> Finding | None:
    """Most completions cannot be graded, through no fault of theirs."""
    for window in _outcomes(s, "bad_gold", "error", "raised", "died"):
        if window.mean >= UNREAD:
            return Finding(
                "bad_golds",
                "stalled",
                CERTAIN,
                (seen(window, "share of completions that could not be graded"),),
                Change("data.bad_gold=drop", "leaves those rows out; `rltt check-data` names them"),
            )
    return None


def truncated(s: Signals) -> Finding | None:
    """Completions end at the length limit, before their answer."""
    name = "completions/clipped_ratio"
    first, last = s.per_rollout.first(name), s.per_rollout.last(name)
    # A policy that falls apart runs into the limit as well: only the first rollout is of the start itself.
    if first is None or last is None or min(first.mean, last.mean, first.values[0]) < CUT:
        return None
    # Some rewards do not care for the end of a completion.
    if s.solve_last is not None and s.solve_last.mean > 1 - last.mean + 0.1:
        return None
    limit = s.setting("rollout.max_completion_length")
    longest = s.history.series("completions/max_length")[1]
    limit = int(max(longest)) if limit is None and longest else limit
    change = limit and Change(f"rollout.max_completion_length={2 * limit}", f"now {limit}: completions do not fit")
    rising = s.solve is not None and s.solve.rises >= SURE
    lost = s.kl is not None and s.kl.last.median >= KL_FAR
    return Finding(
        "truncated",
        "unstable" if lost else None if rising else "stalled",
        CERTAIN if last.mean > 0.9 else 0.95,
        (seen(last, "share of completions that are cut; each gets reward 0 with full weight"),),
        change or None,
    )


def unparseable(s: Signals) -> Finding | None:
    """Completions end by themselves, but without an answer that the reward can find."""
    for window in _outcomes(s, "unparseable"):
        first = s.per_rollout.first(window.metric)
        if first is None or min(window.mean, first.values[0]) < UNREAD:
            continue
        rising = s.solve is not None and s.solve.rises >= SURE
        template = s.setting("data.prompt_template") or "{prompt}"
        asks = "boxed" in template
        change = (
            Change("pretrain={}", "the prompt asks for a box already; a warm start on responses teaches the form")
            if asks
            else Change(f'data.prompt_template="{BOXED_TEMPLATE}"', "asks for the answer in the form that is graded")
        )
        return Finding(
            "unparseable",
            None if rising else "stalled",
            CERTAIN,
            (seen(window, "share of completions without an answer that can be found"),),
            change,
        )
    return None


def held_out_falls(s: Signals) -> Finding | None:
    """What is paid for goes up, while what is wanted goes down or stays behind."""
    evidence: list[Evidence] = []
    sure = 0.0
    reward, solve = s.reward, s.solve
    window = s.solve_last
    if s.solve_name == "solve_rate" and reward and solve and window and reward.rises >= SURE and solve.falls >= SURE:
        sure = min(reward.rises, solve.falls)
        evidence = [
            seen(window, f"falls by {-solve.slope:.2g} a rollout, while the reward rises by {reward.slope:.2g}"),
        ]
    points = s.history.held_out
    if len(points) >= 2:
        best = max(points[:-1], key=lambda point: point.solve_rate)
        last = points[-1]
        # The best of several is lucky; the first is not chosen.
        for earlier, least in ((points[0], 2.0), (best, 3.0)):
            error = ((earlier.stderr or 0.03) ** 2 + (last.stderr or 0.03) ** 2) ** 0.5
            fall = (earlier.solve_rate - last.solve_rate) / error
            if fall >= least and not (solve and solve.falls >= SURE and reward and reward.rises < SURE):
                sure = max(sure, min(CERTAIN, 0.95 + 0.01 * (fall - least)))
                evidence.append(
                    Evidence(
                        "eval/solve_rate",
                        last.solve_rate,
                        (earlier.step, last.step),
                        f"was {earlier.solve_rate:.3f}: {fall:.1f} standard errors lower now",
                    )
                )
                break
        if not evidence and (learned := _by_heart(s)) is not None:
            sure, evidence = 0.95, [learned]
    if not evidence:
        return None
    others = [entry for entry in s.setting("rewards", []) if _name(entry) != "math"]
    limit = s.setting("data.train.limit")
    if len(s.setting("rewards", [])) > 1 and others:
        first = _name(s.setting("rewards")[0])
        change = Change(f"rewards=[{first}]", "another reward outweighs the one that counts as solved")
    elif limit:
        change = Change("data.train.limit=null", f"now {limit} prompts, which the policy learns by heart")
    else:
        step = max(points, key=lambda point: point.solve_rate).step if points else s.history.last_step // 2
        change = Change(f"train.max_steps={max(step, 1)}", "stops where held-out prompts were solved best")
    return Finding("held_out_falls", "unstable", sure, tuple(evidence), change)


def _by_heart(s: Signals) -> Evidence | None:
    """Training prompts are solved far more than at the start, and held-out prompts are not."""
    first, last, points = s.solve_first, s.solve_last, s.history.held_out
    if s.solve is None or first is None or last is None or s.solve.rises < SURE or last.mean - first.values[0] < 0.15:
        return None
    before, now = points[0], points[-1]
    rise, held = last.mean - fmean(first.values[:2]), now.solve_rate - before.solve_rate
    error = ((before.stderr or 0.03) ** 2 + (now.stderr or 0.03) ** 2) ** 0.5
    if rise - held < 4 * error or held > error:
        return None
    meaning = f"was {before.solve_rate:.3f}, while training prompts went up by {rise:.2f}: they are learned by heart"
    return Evidence("eval/solve_rate", now.solve_rate, (before.step, now.step), meaning)


def kl_explosion(s: Signals) -> Finding | None:
    """The policy has left its start for nowhere."""
    if s.kl is None or s.kl.last.median < KL_FAR:
        return None
    rising = s.solve is not None and s.solve.rises >= SURE
    if rising and s.solve_last is not None and s.solve_last.mean > 0.2:
        return None
    return Finding(
        "kl_explosion",
        "unstable",
        min(CERTAIN, 0.95 + 0.01 * s.kl.last.median),
        (seen(s.kl.last, f"above {KL_FAR} the policy hardly resembles its start", s.kl.last.median),),
        lower_learning_rate(s),
    )


def entropy_collapse(s: Signals) -> Finding | None:
    """Completions of a prompt have become all the same, before they were right."""
    entropy = s.history.series("entropy")[1]
    steps, mixed = s.rollouts.series("mixed_groups")
    last = s.windows.last("entropy", width=min(5, s.windows.width))
    if len(entropy) < 2 * LEAST or last is None or len(mixed) < 2 * LEAST:
        return None
    start, early, late = median(entropy[:3]), fmean(mixed[:3]), fmean(mixed[-5:])
    still_solving = s.solve is not None and s.solve.rises >= SURE
    if start < 0.02 or last.median > 0.35 * start or late > 0.5 * early or still_solving:
        return None
    penalised = (s.setting("objective.beta") or 0.0) > 0
    change = lower_learning_rate(s, 5) if penalised else Change("objective.beta=0.05", "a KL penalty keeps entropy up")
    return Finding(
        "entropy_collapse",
        "unstable",
        0.95,
        (
            seen(last, f"was {start:.3g} at the start", last.median),
            Evidence("mixed_groups", late, (steps[-5], steps[-1]), f"was {early:.2f} at the start"),
        ),
        change,
    )


def gradient_spikes(s: Signals) -> Finding | None:
    """Single steps of a gradient ten times the usual, which clipping does not hold."""
    steps, norms = s.history.series("grad_norm")
    positive = [norm for norm in norms if norm > 0]
    if len(positive) < LEAST:
        return None
    usual = median(positive)
    limit = s.setting("train.max_grad_norm") or float("inf")
    spikes = [(step, norm) for step, norm in zip(steps, norms, strict=True) if min(norm, limit) > 10 * usual]
    # A policy without signal has a median near zero, and every real gradient looks like a spike.
    if len(spikes) < 2 or (s.mixed is not None and s.mixed.share < 0.2):
        return None
    return Finding(
        "gradient_spikes",
        "unstable",
        min(CERTAIN, 0.9 + 0.03 * len(spikes)),
        (
            Evidence(
                "grad_norm",
                max(norm for _, norm in spikes),
                (spikes[0][0], spikes[-1][0]),
                f"{len(spikes)} of {len(norms)} steps above ten times the median of {usual:.3g}",
            ),
        ),
        Change(f"train.max_grad_norm={nice(2 * usual):g}", "holds the spikes; then look for outliers in the reward"),
    )


def reward_constant(s: Signals) -> Finding | None:
    """The reward does not depend on the completion."""
    steps, values = s.rollouts.series("reward")
    _, zero_std = s.rollouts.series("frac_reward_zero_std")
    if len(values) < LEAST or not zero_std or min(zero_std) < 1 or max(values) - min(values) > 1e-6:
        return None
    value = values[-1]
    # Nothing solved is what a hard task looks like, and everything solved by `math` is an easy one.
    if value == 0 or (value == 1 and any(_outcomes(s, "right"))):
        return None
    return Finding(
        "reward_constant",
        "stalled",
        CERTAIN,
        (Evidence("reward", value, (steps[0], steps[-1]), "the same for every completion of every rollout"),),
        Change("rewards=[math]", "or mend your function: `rltt reward test` shows what it gives on completions"),
    )


def updates_vanish(s: Signals) -> Finding | None:
    """The optimizer steps, the weights stay: steps below the resolution of bf16."""
    changed, norm = s.windows.last("update/changed"), s.windows.last("grad_norm")
    if changed is None or norm is None or norm.median <= 0 or changed.mean > 0.2 or _no_signal(s):
        return None
    if s.kl is not None and s.kl.stays <= s.kl.leaves:
        return None
    change = raise_learning_rate(s)
    return Finding(
        "updates_vanish",
        "stalled",
        CERTAIN,
        (
            seen(changed, "share of weights that an update changes; the others round back to what they were"),
            seen(norm, "there is a gradient"),
        ),
        Change(
            change.override if change else None,
            "larger steps; better: keep the weights in fp32 (rltt does unless a checkpoint is loaded in bf16)",
        ),
    )


def reference_wrong(s: Signals) -> Finding | None:
    """The KL is zero although the policy changes: it is not measured to the start."""
    _, kls = s.history.series("kl")
    norm, changed = s.windows.last("grad_norm"), s.windows.last("update/changed")
    if len(kls) < LEAST or norm is None or norm.median <= 0 or _no_signal(s):
        return None
    # TRL computes e^d - d - 1 in fp32, whose rounding is no distance: it does not grow.
    nothing = KL_NOTHING if "solve_rate" in s.history.names else KL_NOTHING_FP32
    sizes = [abs(kl) for kl in kls]
    early, late = fmean(sizes[: len(sizes) // 2]), fmean(sizes[len(sizes) // 2 :])
    if max(sizes) > nothing or late > 3 * early + KL_NOTHING or (changed is not None and changed.mean < 0.2):
        return None
    window = s.windows.whole("kl")
    assert window is not None
    return Finding(
        "reference_wrong",
        None,
        0.95 if changed is not None else 0.8,
        (
            seen(window, "no distance at all from the reference"),
            seen(norm, "and yet there is a gradient: the reference follows the policy"),
        ),
        Change(None, "load the reference from the checkpoint that the run started from, and freeze it"),
    )


def learning_rate_too_small(s: Signals) -> Finding | None:
    """There is a gradient, and the policy stays where it is."""
    if s.kl is None or confidence(s.kl.stays) < SURE or _no_signal(s) or reference_wrong(s) is not None:
        return None
    # Few mixed groups, or prompts that are mostly solved, leave little to step for.
    mostly_solved = s.mixed is None and s.solve_last is not None and s.solve_last.mean > 0.7 and s.kl.at_end > 1e-3
    if mostly_solved or (s.mixed is not None and s.mixed.lacking > 0):
        return None
    evidence = [
        seen(
            s.kl.last,
            f"at best {s.kl.at_end:.1g} at step {s.horizon}; runs that gained passed {KL_MOVES:g}",
            s.kl.last.median,
        )
    ]
    if s.mixed is not None:
        evidence.append(seen(s.mixed.window, "enough groups have a gradient", s.mixed.share))
    return Finding(
        "learning_rate_too_small", "stalled", confidence(s.kl.stays), tuple(evidence), raise_learning_rate(s)
    )


def too_easy(s: Signals) -> Finding | None:
    """Nearly every completion is solved: nothing is left to tell apart."""
    return _uniform(s, easy=True)


def too_hard(s: Signals) -> Finding | None:
    """Nearly no completion is solved: nothing is there to tell apart."""
    return _uniform(s, easy=False)


def _uniform(s: Signals, *, easy: bool) -> Finding | None:
    window = s.solve_last
    if window is None or len(s.rollouts) < LEAST or (window.mean > 0.5) != easy:
        return None
    if s.solve is not None and s.solve.rises >= SURE:
        return None
    still = s.kl is not None and confidence(s.kl.stays) >= SURE
    lacking = s.mixed.lacking if s.mixed is not None else 0.0
    if confidence(lacking) < SURE and not (still and easy and window.mean > 0.7):
        return None
    evidence = [seen(window, "of the completions are solved")]
    if s.mixed is not None:
        evidence.append(seen(s.mixed.window, "share of groups with a gradient", s.mixed.share))
    if still and s.kl is not None:
        evidence.append(seen(s.kl.last, f"at best {s.kl.at_end:.1g} at step {s.horizon}", s.kl.last.median))
    return Finding(
        "too_easy" if easy else "too_hard",
        "stalled",
        max(confidence(lacking), confidence(s.kl.stays) if still and s.kl is not None else 0.0),
        tuple(evidence),
        harder(s.history.settings) if easy else easier(s.history.settings),
    )


def reward_unrelated(s: Signals) -> Finding | None:
    """The policy is not right more often where it is certain: the reward tells of something else."""
    if s.certainty is None or s.certainty.upper > UNRELATED or _no_signal(s):
        return None
    if s.solve is not None and s.solve.rises >= SURE:
        return None
    custom = [entry for entry in s.setting("rewards", []) if _name(entry) != "math"]
    change = (
        Change("rewards=[math]", "or mend your function: `rltt reward test` shows what it gives on golds")
        if custom
        else Change("data.columns.gold=answer", "name the column that holds the answer to its own row's prompt")
    )
    return Finding(
        "reward_unrelated",
        "stalled",
        0.95,
        (
            seen(
                s.certainty.window,
                f"at most {s.certainty.upper:.2f}: reward and certainty go their own ways (0.3 to 0.5 are usual)",
            ),
        ),
        change,
    )


def gate_collapsed(s: Signals) -> Finding | None:
    """The exit gate leaves everything at one loop."""
    loops = _loops(s)
    for t in range(1, loops + 1):
        window = s.windows.last(f"loop{t}/exit_prob")
        if loops > 1 and window is not None and window.mean > GATE:
            credit = s.setting("objective.credit")
            change = (
                Change("objective.credit=uniform", "gives every loop its share, whatever the gate says")
                if credit in (None, "exit_pdf")
                else Change(None, f"credit '{credit}' does not read the gate; early exit at inference would")
            )
            return Finding("gate_collapsed", None, CERTAIN, (seen(window, "mean probability of one loop"),), change)
    return None


def loops_identical(s: Signals) -> Finding | None:
    """Every loop gives what the last one gives."""
    loops = _loops(s)
    windows = [s.windows.whole(f"loop{t}/kl_to_last") for t in range(1, loops)]
    if not windows or any(window is None or max(map(abs, window.values)) > 1e-9 for window in windows):
        return None
    assert windows[0] is not None
    return Finding(
        "loops_identical",
        None,
        CERTAIN,
        (seen(windows[0], "the first loop says what the last one says: the depth is not applied"),),
        Change("objective.credit=final", "the loops' credit adds up to plain GRPO; look at how the model loops"),
    )


def _no_signal(s: Signals) -> bool:
    return s.mixed is not None and s.mixed.share < 0.02


def _loops(s: Signals) -> int:
    return max((int(n[4:].split("/")[0]) for n in s.history.names if n.startswith("loop") and "/" in n), default=0)


def _outcomes(s: Signals, *kinds: str) -> list[Window]:
    """The shares of completions with these outcomes, of every reward function that counts them."""
    names = [n for n in s.history.names if n.startswith("reward/") and n.rsplit("/", 1)[-1] in kinds]
    return [window for name in sorted(names) if (window := s.per_rollout.last(name)) is not None]


def _name(entry: Any) -> str:
    return str(entry.get("use")) if isinstance(entry, Mapping) else str(entry)


CAUSES: tuple[Callable[[Signals], Finding | None], ...] = (
    rollout_mismatch,
    bad_golds,
    held_out_falls,
    reward_constant,
    updates_vanish,
    learning_rate_too_small,
    truncated,
    unparseable,
    kl_explosion,
    entropy_collapse,
    too_easy,
    too_hard,
    reward_unrelated,
    gradient_spikes,
    reference_wrong,
    loops_identical,
    gate_collapsed,
)
