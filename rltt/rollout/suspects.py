"""Why do rollout and training differ? The usual suspects, tried one by one.

Every completion of a small sample is scored once more by the policy alone, one sequence at a time: no padding, no
cache, no engine. Whichever of the two paths departs from that reference is looked at. Some suspects are facts (other
tokens, another dtype, a weight that is not the policy's); the others are explanations, and are tried: would the path's
numbers be right for another depth, for another temperature, …?

Shapes: C completion tokens of one completion, N tokens of all, D depths, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models.looped import LoopedForCausalLM, Score
from .parity import Parity, measure_parity

Culprit = Literal[
    "tokenizer round trip",
    "left padding",
    "stop tokens",
    "stale weights",
    "dtype",
    "depth",
    "adaptive exit",
    "temperature",
    "truncated sampling",
]
Path = Literal["rollout", "training"]

SAMPLE = 8
"""Completions that are scored once more: those with the largest differences."""
WHOLE = 8
"""Tokens of each of them whose whole distribution is looked at."""


@dataclass(frozen=True)
class Finding:
    """A suspect that is guilty, and why: a sentence with the numbers."""

    culprit: Culprit
    evidence: str

    def __str__(self) -> str:
        return f"{self.culprit}: {self.evidence}"


@dataclass(frozen=True)
class Sampled:
    """One completion as both paths know it. Token ids have no padding.

    Attributes:
        prompt, completion: what the training path scores.
        padding: positions to the left of the prompt in the training path's batch.
        engine_prompt, engine_completion: what the engine was asked and what it answered.
        rollout, training: [C] log-probs of each path.
    """

    prompt: list[int]
    completion: list[int]
    padding: int
    engine_prompt: list[int]
    engine_completion: list[int]
    rollout: Float[Tensor, " C"]
    training: Float[Tensor, " C"]

    @property
    def gap(self) -> float:
        """Largest difference between the paths."""
        return _gap(self.rollout, self.training)


@dataclass(frozen=True)
class Setting:
    """What the recipe asks of both paths."""

    temperature: float
    stop_token_ids: Sequence[int]
    max_completion_length: int
    tolerance: float
    compute_dtype: torch.dtype
    autocast: Callable[[], AbstractContextManager[None]]
    """What the training path's forward runs under."""


class EngineWeights(Protocol):
    """What an engine tells about the weights that it holds."""

    @property
    def dtype(self) -> torch.dtype: ...

    def stale_weights(self) -> list[str] | None:
        """Names of the policy's weights that the engine holds other values of; None if its memory is out of reach."""
        ...


@dataclass(frozen=True)
class Diagnosis:
    """What differs between rollout and training.

    Attributes:
        findings: guilty suspects, the likeliest cause first.
        depths: the engine's log-probs against the policy read at each depth, of the sample.
    """

    findings: tuple[Finding, ...]
    depths: tuple[Parity, ...]

    @property
    def culprit(self) -> Culprit | None:
        return self.findings[0].culprit if self.findings else None

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(map(str, self.findings))
        closest = min(range(len(self.depths)), key=lambda index: self.depths[index].mean, default=None)
        if closest is None:
            return "none of the usual suspects explains it"
        return (
            "none of the usual suspects explains it (tokens, weights, dtype, depth, adaptive exit, temperature, "
            f"truncated sampling, padding, stop tokens); the engine is closest to depth {closest + 1}: "
            f"{self.depths[closest]}"
        )


def diagnose(
    rows: Sequence[Sampled], policy: LoopedForCausalLM, setting: Setting, engine: EngineWeights | None
) -> Diagnosis:
    """Try every suspect. Each process of a sharded run takes part with the same number of forward passes."""
    findings = [*other_tokens(rows), *other_stops(rows, setting)]
    if engine is not None:
        findings += other_weights(engine, setting)
    reference = Reference(sample(rows), policy, setting)
    if not any(finding.culprit in ("tokenizer round trip", "left padding") for finding in findings):
        findings += [
            finding
            for path in ("rollout", "training")
            if (finding := reference.explain(path)) is not None
            and finding.culprit not in {earlier.culprit for earlier in findings}
        ]
    if engine is not None and not findings:
        findings += unseen_weights(engine, reference)
    return Diagnosis(tuple(findings), reference.parity_by_depth())


def sample(rows: Sequence[Sampled]) -> list[Sampled]:
    """The completions with the largest differences, among them some with and some without padding."""
    worst = sorted(rows, key=lambda row: -row.gap)
    padded, bare = ([row for row in worst if (row.padding > 0) == wanted] for wanted in (True, False))
    return [*padded[: max(SAMPLE // 2, SAMPLE - len(bare))], *bare[: max(SAMPLE // 2, SAMPLE - len(padded))]]


# --------------------------------------------------------------------------------------------------------- facts


def other_tokens(rows: Iterable[Sampled]) -> Iterator[Finding]:
    """The engine was asked, or answered, with other tokens than those that are scored."""
    for row in rows:
        extra = len(row.engine_prompt) - len(row.prompt)
        if extra > 0 and row.engine_prompt[extra:] == row.prompt:
            yield Finding("left padding", f"the engine got a prompt with {extra} more tokens in front of it")
            return
        for name, engine, scored in (
            ("prompt", row.engine_prompt, row.prompt),
            ("completion", row.engine_completion, row.completion),
        ):
            if engine != scored:
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(engine, scored, strict=False)))
                yield Finding(
                    "tokenizer round trip",
                    f"a {name} has {len(engine)} tokens in the engine and {len(scored)} where it is scored; the first "
                    f"{same} are the same",
                )
                return


def other_stops(rows: Iterable[Sampled], setting: Setting) -> Iterator[Finding]:
    """A completion must end with its first stop token, or at the length limit."""
    stops = set(setting.stop_token_ids)
    for row in rows:
        tokens = row.engine_completion
        first = next((position for position, token in enumerate(tokens) if token in stops), None)
        if first is not None and first < len(tokens) - 1:
            yield Finding(
                "stop tokens",
                f"the engine went on for {len(tokens) - 1 - first} tokens after stop token {tokens[first]}",
            )
            return
        if first is None and len(tokens) < setting.max_completion_length:
            yield Finding(
                "stop tokens",
                f"a completion ends after {len(tokens)} tokens with token {tokens[-1] if tokens else 'none'}, which is "
                f"none of the stop tokens {sorted(stops)}, below the limit of {setting.max_completion_length}",
            )
            return


def other_weights(engine: EngineWeights, setting: Setting) -> Iterator[Finding]:
    """The engine holds other weights, or in another precision."""
    if stale := engine.stale_weights():
        shown = ", ".join(stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
        yield Finding("stale weights", f"the engine's values are not the policy's for {shown}")
    if engine.dtype != setting.compute_dtype:
        yield Finding("dtype", f"the engine computes in {engine.dtype}, the training path in {setting.compute_dtype}")


def unseen_weights(engine: EngineWeights, reference: "Reference") -> Iterator[Finding]:
    """What is left when nothing else explains the engine's log-probs and its weights cannot be compared."""
    if engine.stale_weights() is None and reference.departs("rollout"):
        yield Finding(
            "stale weights",
            "nothing else explains the engine's log-probs, and its weights cannot be looked at from here",
        )


# -------------------------------------------------------------------------------------------------- explanations


class Reference:
    """The policy alone on a few completions, each by itself, at depths 1 to 2T.

    Args:
        rows: at most `SAMPLE` completions.
    """

    @torch.no_grad()
    def __init__(self, rows: Sequence[Sampled], policy: LoopedForCausalLM, setting: Setting) -> None:
        self.rows, self.setting = rows, setting
        self.loops = policy.loop_spec.loops
        device = next(policy.parameters()).device
        training = policy.training
        policy.eval()
        try:
            self.by_depth = torch.cat([self._score(policy, row, setting.autocast) for row in rows])
            self.in_bf16 = torch.cat(
                [self._score(policy, row, lambda: torch.autocast(device.type, torch.bfloat16)) for row in rows]
            )[:, self.loops - 1]
            self.logits: Float[Tensor, "M V"] = torch.cat([self._logits(policy, row) for row in rows])
        finally:
            policy.train(training)
        self.last = self.by_depth[:, self.loops - 1]
        # Which of the N tokens the M rows of logits belong to.
        self.whole = torch.cat([torch.arange(len(row.completion)) < WHOLE for row in rows])
        self.tokens = torch.tensor([token for row in rows for token in row.completion[:WHOLE]])[:, None]
        self.columns: dict[Path, Float[Tensor, " N"]] = {
            "rollout": torch.cat([row.rollout for row in rows]).double().cpu(),
            "training": torch.cat([row.training for row in rows]).double().cpu(),
        }

    def _score(
        self, policy: LoopedForCausalLM, row: Sampled, autocast: Callable[[], AbstractContextManager[None]]
    ) -> Float[Tensor, "C D"]:
        ids = _ids(policy, row)
        labels = ids.clone()
        labels[:, : len(row.prompt)] = -100
        request = Score(self.setting.temperature)
        with autocast():
            scores = policy(input_ids=ids, labels=labels, loops=2 * self.loops, score=request).scores
        return scores.log_probs[0, len(row.prompt) - 1 :].double().cpu()

    def _logits(self, policy: LoopedForCausalLM, row: Sampled) -> Float[Tensor, "M V"]:
        with self.setting.autocast():
            logits = policy(input_ids=_ids(policy, row), use_cache=False, logits_to_keep=len(row.completion) + 1).logits
        return logits[0, :-1][:WHOLE].double().cpu()

    def parity_by_depth(self) -> tuple[Parity, ...]:
        """The rollout's log-probs against those of the policy at depths 1 to T."""
        rollout, every = self.columns["rollout"], torch.ones(len(self.last))
        tolerance = self.setting.tolerance
        return tuple(measure_parity(self.by_depth[:, t], rollout, every, tolerance) for t in range(self.loops))

    def departs(self, path: Path) -> bool:
        """Whether this path's numbers are not the reference's."""
        return self._differ(self.columns[path], self.last)

    def explain(self, path: Path) -> Finding | None:
        """Why this path's numbers are not the reference's; None when they are, or when nothing explains it."""
        if not self.departs(path):
            return None
        column = self.columns[path]
        suspects = (self._depth, self._adaptive_exit, self._temperature, self._truncation, self._padding, self._dtype)
        return next((finding for suspect in suspects if (finding := suspect(path, column)) is not None), None)

    def _differ(self, column: Float[Tensor, " N"], other: Float[Tensor, " N"]) -> bool:
        return _gap(column, other) > self.setting.tolerance

    def _explains(self, other: Float[Tensor, " N"], column: Float[Tensor, " N"], own: Float[Tensor, " N"]) -> bool:
        """Whether `other` explains the column: it is within the tolerance, and far nearer than the policy's own."""
        return not self._differ(column, other) and _gap(column, other) <= _gap(column, own) / 4

    def _depth(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        for depth, at_depth in enumerate(self.by_depth.unbind(-1), start=1):
            if self._explains(at_depth, column, self.last):
                return Finding(
                    "depth",
                    f"the log-probs of {_NAMES[path]} are those of depth {depth} (largest difference "
                    f"{_gap(column, at_depth):.1e}), the policy's depth is {self.loops}",
                )
        return None

    def _adaptive_exit(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        loops = self.by_depth[:, : self.loops]
        nearest = (loops - column[:, None]).abs().argmin(-1)
        if not self._explains(loops.gather(-1, nearest[:, None])[:, 0], column, self.last):
            return None
        shares = ", ".join(f"loop {t + 1} for {(nearest == t).double().mean().item():.0%}" for t in range(self.loops))
        return Finding("adaptive exit", f"{_NAMES[path]} reads each token at its own loop ({shares}), not at the last")

    def _temperature(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        column, asked = column[self.whole], self.setting.temperature

        def gap(temperature: float) -> float:
            return _gap(column, self._at_temperature(temperature))

        best = min([1.0, *torch.logspace(-1, 1, 81).tolist()], key=gap)
        step = 0.06
        while step > 1e-7:
            best = min((best, best * (1 - step), best * (1 + step)), key=gap)
            step /= 1.6
        if not self._explains(self._at_temperature(best), column, self._at_temperature(asked)):
            return None
        return Finding(
            "temperature",
            f"the log-probs of {_NAMES[path]} are those of temperature {best:.4g}, asked for is {asked:g}",
        )

    def _at_temperature(self, temperature: float) -> Float[Tensor, " M"]:
        return (self.logits / temperature).log_softmax(-1).gather(-1, self.tokens)[:, 0]

    def _truncation(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        """top_p, top_k, min_p: log p - log(mass of the m most probable tokens), with some m for each token."""
        column = column[self.whole]
        log_probs = (self.logits / self.setting.temperature).log_softmax(-1)
        own = log_probs.gather(-1, self.tokens)
        ordered = log_probs.sort(-1, descending=True).values
        possible = (own - ordered.logcumsumexp(-1)).masked_fill(ordered > own, torch.inf)  # the token itself is kept
        nearest = (possible - column[:, None]).abs().argmin(-1, keepdim=True)
        if not self._explains(possible.gather(-1, nearest)[:, 0], column, own[:, 0]):
            return None
        return Finding(
            "truncated sampling",
            f"{_NAMES[path]} keeps only the most probable tokens (top_p, top_k or min_p): its log-probs are up to "
            f"{(column - own[:, 0]).max().item():.2g} higher",
        )

    def _padding(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        padded = torch.cat([torch.full((len(row.completion),), row.padding > 0) for row in self.rows])
        if padded.all() or not self._differ(column[padded], self.last[padded]):
            return None
        if self._differ(column[~padded], self.last[~padded]):
            return None
        return Finding(
            "left padding",
            f"{_NAMES[path]} is right on rows without padding (largest difference "
            f"{_gap(column[~padded], self.last[~padded]):.1e}) and wrong on rows padded on the left "
            f"({_gap(column[padded], self.last[padded]):.1e})",
        )

    def _dtype(self, path: Path, column: Float[Tensor, " N"]) -> Finding | None:
        rounding = (self.in_bf16 - self.last).abs().mean().item()
        gap = (column - self.last).abs().mean().item()
        if self.setting.compute_dtype != torch.float32 or not rounding / 4 <= gap <= rounding * 4:
            return None
        return Finding(
            "dtype",
            f"{_NAMES[path]} differs by {gap:.1e} on average, as much as rounding to bf16 would ({rounding:.1e}); "
            "asked for is fp32",
        )


_NAMES: dict[Path, str] = {"rollout": "the rollout engine", "training": "the training path"}


def _ids(policy: LoopedForCausalLM, row: Sampled) -> Int[Tensor, "1 S"]:
    return torch.tensor([[*row.prompt, *row.completion]], device=next(policy.parameters()).device)


def _gap(column: Float[Tensor, " N"], other: Float[Tensor, " N"]) -> float:
    """Largest difference; infinite where a number is missing, 0 of nothing."""
    gaps = (column - other).abs().nan_to_num(nan=torch.inf)
    return gaps.max().item() if len(gaps) else 0.0
