"""KL of the last loop to a frozen reference, as a per-token estimate."""

from jaxtyping import Float
from torch import Tensor


def k3(ref_log_probs: Float[Tensor, "B C"], log_probs: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """k3(d) = e^d - d - 1 with d = ℓ_ref - ℓ: unbiased and never negative (Schulman, Approximating KL divergence)."""
    # Written out as TRL does, so that gradients are summed in its order.
    return (ref_log_probs - log_probs).exp() - (ref_log_probs - log_probs) - 1


def kl_to_last_loop(loop_log_probs: Float[Tensor, "B C T"]) -> Float[Tensor, "B C T"]:
    """k3 estimate of KL(last loop ‖ loop t) on tokens sampled from the last loop. Zero for t = T."""
    difference = loop_log_probs - loop_log_probs[..., -1:]
    return difference.exp() - difference - 1
