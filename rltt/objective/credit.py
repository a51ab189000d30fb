"""Credit weights ω: how the policy gradient is shared among the loops (RLTT, section 3).

Every scheme gives ω ≥ 0 with Σ_t ω_t = 1. Σ_t ω_t log P_t is not log Σ_t ω_t P_t: each loop has a term of its own. The
samples come from the last loop alone, so for t < T the group baseline is not neutral: an early loop receives an
advantage-weighted distillation of the last one.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

SCHEMES = ("final", "uniform", "progressive", "exit_pdf", "learned")


def final(loops: int, device: torch.device | None = None) -> Float[Tensor, " T"]:
    """All credit to the last loop. This is GRPO."""
    weights = torch.zeros(loops, device=device)
    weights[-1] = 1.0
    return weights


def uniform(loops: int, device: torch.device | None = None) -> Float[Tensor, " T"]:
    """ω_t = 1/T."""
    return torch.full((loops,), 1.0 / loops, device=device)


def progressive(loops: int, alpha: float = 1.0, device: torch.device | None = None) -> Float[Tensor, " T"]:
    """ω_t = t^α / Σ_s s^α, t = 1..T. α = 0 is uniform; a large α tends to final."""
    weights = torch.arange(1, loops + 1, device=device, dtype=torch.float32) ** alpha
    return weights / weights.sum()


def exit_pdf(exit_log_pdf: Float[Tensor, "B C T"], detach: bool = True) -> Float[Tensor, "B C T"]:
    """ω_t = p_t of the exit gate at that token.

    Detached by default: undetached, a negative advantage trains the gate to prefer the loops that gave the sample the
    lowest probability.
    """
    return (exit_log_pdf.detach() if detach else exit_log_pdf).exp()


def learned(logits: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """ω = softmax of T logits."""
    return torch.softmax(logits.float(), dim=0)


class LearnedCredit(nn.Module):
    """`learned`, of T trainable logits, which start at zero (uniform).

    Needs a policy term whose value depends on the loop: with a ratio form every loop's ratio is 1 on policy, Σ_t ω_t
    is constant, and the logits get no gradient.
    """

    def __init__(self, loops: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(loops))

    def forward(self) -> Float[Tensor, " T"]:
        return learned(self.logits)
