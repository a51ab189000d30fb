"""How the state moves from loop to loop (LoopCoder-v2, section 3.2.1).

h^(r) is what loop r hands to the next one: normed where the model norms between loops. Every function takes the states
[S, H] of one sequence, measures in float64, and returns one number.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

STILL = 1e-6
"""Size of an update relative to its state below which it is rounding."""


def step_size(state: Float[Tensor, "S H"], before: Float[Tensor, "S H"]) -> Float[Tensor, ""]:
    """δ^(r) = ‖h^(r) - h^(r-1)‖₂, mean over tokens."""
    return (state.double() - before.double()).norm(dim=-1).mean()


def update_alignment(
    state: Float[Tensor, "S H"], before: Float[Tensor, "S H"], two_before: Float[Tensor, "S H"]
) -> Float[Tensor, ""]:
    """cos θ^(r), the cosine of the updates h^(r) - h^(r-1) and h^(r-1) - h^(r-2), mean over tokens.

    A token that moved by rounding only has no direction and counts as 0. The first token of a Parallel Loop Transformer
    is one: from loop 2 on nothing is shifted onto it, so its state stays.
    """
    h, h_1, h_2 = state.double(), before.double(), two_before.double()
    still = ((h - h_1).norm(dim=-1) < STILL * h.norm(dim=-1)) | ((h_1 - h_2).norm(dim=-1) < STILL * h_1.norm(dim=-1))
    return F.cosine_similarity(h - h_1, h_1 - h_2, dim=-1, eps=1e-30).masked_fill(still, 0.0).mean()


def effective_rank(state: Float[Tensor, "S H"]) -> Float[Tensor, ""]:
    """erank(h^(r)) = exp(entropy of the singular values, normalized to sum 1) of the RMS-normed states.

    The norm has no weights: each token's root mean square becomes 1. Between 1 and min(S, H).
    """
    normed = F.normalize(state.double(), dim=-1)  # a common factor of all tokens changes nothing
    smaller = normed if len(normed) <= normed.shape[-1] else normed.T
    return spectral_entropy(smaller @ smaller.T).exp()


def spectral_entropy(gram: Float[Tensor, "... n n"]) -> Float[Tensor, "..."]:
    """Entropy of the normalized singular values of matrices A, of which A·Aᵀ is given in float64."""
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return torch.special.entr(singular / singular.sum(-1, keepdim=True)).sum(-1)


def offset_cost(before: Float[Tensor, "S H"]) -> Float[Tensor, ""]:
    """Ω^(r), the mean over adjacent tokens of ‖h^(r-1)_i - h^(r-1)_{i-1}‖₂: how far what the shift brings is off.

    Args:
        before: the states that loop r - 1 hands to loop r.
    """
    before = before.double()
    return (before[1:] - before[:-1]).norm(dim=-1).mean()


def fixed_point_gap(state: Float[Tensor, "S H"], image: Float[Tensor, "S H"]) -> Float[Tensor, ""]:
    """Δ_FP^(r) = ‖h^(r) - f_θ(h^(r))‖₂, mean over tokens.

    Args:
        image: f_θ(h^(r)), of `forward.block_of_states`.
    """
    return step_size(image, state)
