"""The LoopLM training objective (arXiv 2510.25741, section 3; smoothing: Closing the Loop, eq. 2).

    (1-ε)·Σ_t p_t·CE_t + (ε/T)·Σ_t CE_t + β·KL(p ‖ uniform)

The smoothing touches only the weights of the cross entropies; the regulariser sees the raw exit distribution.
"""

import math

from jaxtyping import Float
from torch import Tensor


def looplm_token_loss(
    cross_entropy: Float[Tensor, "... T"], exit_log_pdf: Float[Tensor, "... T"], beta: float, epsilon: float = 0.0
) -> Float[Tensor, "..."]:
    """The objective at each token, to be averaged over response tokens."""
    loops = cross_entropy.shape[-1]
    pdf = exit_log_pdf.exp()
    weights = (1 - epsilon) * pdf + epsilon / loops
    return (weights * cross_entropy).sum(-1) + beta * kl_to_uniform(exit_log_pdf)


def last_loop_token_loss(cross_entropy: Float[Tensor, "... T"], epsilon: float = 0.0) -> Float[Tensor, "..."]:
    """The objective of a model without an exit gate, whose p is 1 at the last loop: (1-ε)·CE_T + (ε/T)·Σ_t CE_t."""
    return (1 - epsilon) * cross_entropy[..., -1] + epsilon * cross_entropy.mean(-1)


def kl_to_uniform(exit_log_pdf: Float[Tensor, "... T"]) -> Float[Tensor, "..."]:
    """KL(p ‖ uniform) = Σ_t p_t·log p_t + log T."""
    # A loop with p = 0 has log p = -inf in the limit; p·log p is then 0, and finite logits never reach it.
    return (exit_log_pdf.exp() * exit_log_pdf).sum(-1) + math.log(exit_log_pdf.shape[-1])
