"""Policy terms, one for each loss type of TRL plus the paper's REINFORCE, and the reductions over tokens.

A term is computed for each loop on its own, with ρ^(t) = exp(ℓ^(t) - ℓ_old^(t)). On the first update after sampling
ρ = 1: all forms then have the same gradient, and a loss near 0 is normal.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

LossType = Literal["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
Reduction = Literal["response_mean", "response_sum", "token_mean", "micro_batch_token_mean", "constant"]

REDUCTION: dict[LossType, Reduction] = {
    "reinforce": "response_mean",
    "grpo": "response_mean",
    "sapo": "response_mean",
    "luspo": "response_sum",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "constant",
    "bnpo": "micro_batch_token_mean",
}


@dataclass(frozen=True)
class PolicyLoss:
    """A loss type with its constants. Names and defaults are TRL's."""

    loss_type: LossType = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def ratio(
        self, log_probs: Float[Tensor, "B C"], old_log_probs: Float[Tensor, "B C"], mask: Float[Tensor, "B C"]
    ) -> Float[Tensor, "B C"]:
        """ρ of one loop, at this loss's level."""
        return importance_ratio(log_probs, old_log_probs, mask, self.importance_sampling_level)

    def term(
        self,
        log_probs: Float[Tensor, "B C"],
        old_log_probs: Float[Tensor, "B C"],
        ratio: Float[Tensor, "B C"],
        advantages: Float[Tensor, "B 1"],
        mask: Float[Tensor, "B C"],
        sampler_ratio: Float[Tensor, "B C"] | None = None,
    ) -> Float[Tensor, "B C"]:
        """The policy term of one loop, to be minimised. [B, 1] where the ratio is one for a sequence.

        Args:
            ratio: what `ratio` gave for the same loop.
            sampler_ratio: training path against another engine's sampler, for the forms that need it inside (VESPO).
        """
        match self.loss_type:
            case "reinforce":
                return reinforce(log_probs, advantages)
            case "cispo":
                return cispo(log_probs, ratio, advantages, self.epsilon_high)
            case "sapo":
                return sapo(ratio, advantages, self.sapo_temperature_pos, self.sapo_temperature_neg)
            case "vespo":
                weight = vespo_weight(
                    advantages,
                    log_probs.detach() - old_log_probs,
                    mask,
                    sampler_ratio,
                    k=(self.vespo_k_pos, self.vespo_k_neg),
                    lam=(self.vespo_lambda_pos, self.vespo_lambda_neg),
                )
                return -weight * advantages * log_probs
            case _:
                return clipped(ratio, advantages, self.epsilon_low, self.epsilon_high, self.delta)


def importance_ratio(
    log_probs: Float[Tensor, "B C"],
    old_log_probs: Float[Tensor, "B C"],
    mask: Float[Tensor, "B C"],
    level: Literal["token", "sequence"] = "token",
) -> Float[Tensor, "B C"]:
    """ρ for each token, or (GSPO) one for each sequence, [B, 1]: the exponential of the mean log-ratio."""
    log_ratio = log_probs - old_log_probs
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return log_ratio.exp()


def reinforce(log_probs: Float[Tensor, "B C"], advantages: Float[Tensor, "B 1"]) -> Float[Tensor, "B C"]:
    """-A·ℓ (RLTT, eq. 5)."""
    return -advantages * log_probs


def clipped(
    ratio: Float[Tensor, "B C"],
    advantages: Float[Tensor, "B 1"],
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Float[Tensor, "B C"]:
    """-min(ρ·A, clip(ρ, 1-ε_low, 1+ε_high)·A), with ρ ≤ δ in the first if given (PPO; GRPO, eq. 3; two-sided)."""
    clipped_ratio = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.min(ratio * advantages, clipped_ratio * advantages)


def cispo(
    log_probs: Float[Tensor, "B C"], ratio: Float[Tensor, "B C"], advantages: Float[Tensor, "B 1"], epsilon_high: float
) -> Float[Tensor, "B C"]:
    """-min(ρ, ε_high)·A·ℓ with the ratio detached (MiniMax-M1, eq. 4)."""
    return -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs


def sapo(
    ratio: Float[Tensor, "B C"], advantages: Float[Tensor, "B 1"], temperature_pos: float, temperature_neg: float
) -> Float[Tensor, "B C"]:
    """-A·4σ(τ(ρ-1))/τ, a soft gate instead of a clip; τ by the sign of A (Soft Adaptive Policy Optimization)."""
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return -(torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature) * advantages


@torch.no_grad()
def vespo_weight(
    advantages: Float[Tensor, "B 1"],
    log_ratio: Float[Tensor, "B C"],
    mask: Float[Tensor, "B C"],
    sampler_ratio: Float[Tensor, "B C"] | None,
    k: tuple[float, float],
    lam: tuple[float, float],
) -> Float[Tensor, "B 1"]:
    """φ(w) = e^λ·w^k·e^(-λw) with w the sequence's importance weight, φ(1) = 1; (k, λ) by the sign of A (VESPO).

    In log space, with TRL's bounds: a token's log-ratio within ±20, log w within [log 1e-8, 20].
    """
    low, high = math.log(1e-8), 20.0
    log_w = torch.sum(log_ratio.clamp(-high, high) * mask, dim=-1, keepdim=True)
    if sampler_ratio is not None:
        log_w = log_w + sampler_ratio.log().clamp(low, high).sum(-1, keepdim=True)
    log_w = log_w.clamp(low, high)
    positive = advantages >= 0
    exponent = torch.where(positive, *k)
    rate = torch.where(positive, *lam).clamp(min=1e-4)
    log_phi = rate + exponent * log_w - rate * log_w.exp()
    return log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def reduce_tokens(
    per_token: Float[Tensor, "B C"],
    mask: Float[Tensor, "B C"],
    reduction: Reduction,
    *,
    total_tokens: Float[Tensor, ""] | None = None,
    max_length: int | None = None,
) -> Float[Tensor, ""]:
    """One number from [B, C] (or [B, 1], one value a sequence).

    Micro-batches of equal size average to the whole batch, but for `token_mean`, whose micro-batches add up to it, and
    for `micro_batch_token_mean`, which depends on the micro-batch by design.

    Args:
        reduction: `response_mean`: over the tokens of a response, then over responses (the paper's 1/|y|);
            `response_sum`: sum over a response's tokens, then the mean (LUSPO); `token_mean`: one denominator for the
            whole batch, `total_tokens`; `constant`: B·`max_length` (Dr. GRPO); `micro_batch_token_mean`: the tokens of
            what is passed (BNPO).
        total_tokens: for `token_mean`: the tokens of the whole batch.
        max_length: for `constant`: the longest possible completion.
    """
    masked = per_token * mask
    match reduction:
        case "response_mean":
            return (masked.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        case "response_sum":
            return masked.sum(-1).mean()
        case "token_mean":
            if total_tokens is None:
                raise ValueError("token_mean needs total_tokens, the tokens of the whole batch")
            return masked.sum() / total_tokens
        case "constant":
            if max_length is None:
                raise ValueError("constant needs max_length")
            return masked.sum() / (per_token.shape[0] * max_length)
        case "micro_batch_token_mean":
            return masked.sum() / mask.sum().clamp(min=1.0)
