"""Do rollout and training see the same policy? The engine's log-probs of its tokens against the training path's.

Shapes: B completions, C completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..objective.kl import k3


@dataclass(frozen=True)
class Parity:
    """Differences over the tokens that the engine sampled.

    Attributes:
        max, mean: of |log-prob of the training path - log-prob of the engine|.
        kl: k3 estimate of KL(engine ‖ training path), as the tokens come from the engine.
        above: share of tokens whose difference is above the tolerance.
        raw_ratio: mean of exp(training path - engine), the importance ratio before any masking.
        tokens: how many were compared.
    """

    max: float
    mean: float
    kl: float
    above: float
    raw_ratio: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"log-prob difference of at most {self.max:.2e}, {self.mean:.2e} on average, KL {self.kl:.2e}, "
            f"{self.above:.1%} of {self.tokens} tokens above the tolerance"
        )


def measure_parity(
    training: Float[Tensor, "B C"], engine: Float[Tensor, "B C"], mask: Float[Tensor, "B C"], tolerance: float
) -> Parity:
    """Compare the two paths' log-probs where `mask` is 1. A token that the engine gave no number is infinitely off."""
    chosen = mask.bool()
    if not chosen.any():
        return Parity(0.0, 0.0, 0.0, 0.0, 1.0, 0)
    ours, theirs = training[chosen].double(), engine[chosen].double()
    gap = (ours - theirs).abs().nan_to_num(nan=torch.inf)
    return Parity(
        max=gap.max().item(),
        mean=gap.mean().item(),
        kl=k3(ours, theirs).nan_to_num(nan=torch.inf).mean().item(),
        above=(gap > tolerance).double().mean().item(),
        raw_ratio=(ours - theirs).exp().mean().item(),
        tokens=gap.numel(),
    )


def combined(parts: Sequence[Parity]) -> Parity:
    """The numbers over all tokens of several measurements."""
    tokens = sum(part.tokens for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.tokens for part in parts) / max(tokens, 1)

    return Parity(
        max=max((part.max for part in parts), default=0.0),
        **{name: mean(name) for name in ("mean", "kl", "above", "raw_ratio")},
        tokens=tokens,
    )
