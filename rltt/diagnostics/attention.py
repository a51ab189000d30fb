"""Where a loop looks (LoopCoder-v2, section 3.2.2).

A^(r,h)_q is how head h of loop r spreads its attention at query position q over the positions before and at q. In a
later loop of a Parallel Loop Transformer that is the gate's mixture of its two attentions, g·A_global + (1-g)·A_local:
both are over positions, and so is their sum.

Attention is made anew from queries and keys, some queries at a time: what is in memory grows with S, not with S².
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .hidden import spectral_entropy

ELEMENTS = 2**20
"""Numbers of attention that are held at once, of one kind."""


@dataclass(frozen=True)
class LayerAttention:
    """What the attention of one layer in one loop is made of, for one sequence.

    Attributes:
        query: [N, S, D], rotated.
        key: [M, S, D], rotated; of loop 1 in a later loop of a Parallel Loop Transformer.
        scaling: what scores are multiplied by.
        own_key: [M, S, D], the later loop's own keys; None elsewhere.
        gate: [S, N], the weight g of the attention to `key`; None elsewhere.
        window: positions that a query sees among its own keys, itself included.
    """

    query: Float[Tensor, "N S D"]
    key: Float[Tensor, "M S D"]
    scaling: float
    own_key: Float[Tensor, "M S D"] | None = None
    gate: Float[Tensor, "S N"] | None = None
    window: int | None = None


@dataclass(frozen=True)
class AttentionMeasures:
    """Means over heads and query positions of one layer in one loop.

    Attributes:
        entropy: H_q^(r,h).
        kl: D_KL^(r), to the loop before; None in the first.
        head_effective_rank: of the N × K matrix of head attentions at a query.
        head_similarity: [N, N] cosines of head attentions.
    """

    entropy: Float[Tensor, ""]
    kl: Float[Tensor, ""] | None
    head_effective_rank: Float[Tensor, ""]
    head_similarity: Float[Tensor, "N N"]


def measure_attention(now: LayerAttention, before: LayerAttention | None) -> AttentionMeasures:
    """All measures of a layer in a loop, against the same layer in the loop before.

    Sums are in float64. The queries of a sequence are taken in chunks of at most `ELEMENTS` weights.
    """
    heads, positions, _ = now.query.shape
    zero = torch.zeros((), dtype=torch.float64, device=now.query.device)
    entropy, kl, rank = zero, zero, zero
    similarity = torch.zeros(heads, heads, dtype=torch.float64, device=now.query.device)
    for start, stop in chunks(positions, heads):
        future = future_of(start, stop, now.query.device)
        log_weights = log_attention(now, start, stop, future)
        weights = log_weights.exp()
        entropy = entropy + torch.special.entr(weights).sum(dtype=torch.float64)
        if before is not None:
            change = (log_weights - log_attention(before, start, stop, future)).masked_fill_(future, 0.0)
            kl = kl + change.mul_(weights).sum(dtype=torch.float64)
        by_query = weights.transpose(0, 1).double()  # [Q, N, K]
        gram = by_query @ by_query.mT
        rank = rank + spectral_entropy(gram).exp().sum()
        norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        similarity += (gram / (norms[:, :, None] * norms[:, None, :])).sum(0)
    return AttentionMeasures(
        entropy=entropy / (heads * positions),
        kl=None if before is None else kl / (heads * positions),
        head_effective_rank=rank / positions,
        head_similarity=similarity / positions,
    )


def mean_pairwise(similarity: Float[Tensor, "N N"]) -> Float[Tensor, ""]:
    """Mean over pairs of different heads; NaN with one head."""
    heads = len(similarity)
    return (similarity.sum() - similarity.diagonal().sum()) / (heads * (heads - 1))


def log_attention(
    attention: LayerAttention, start: int, stop: int, future: Bool[Tensor, "Q K"]
) -> Float[Tensor, "N Q K"]:
    """log A of the queries from `start` to `stop` to the K = `stop` positions that they may see."""
    scores = _scores(attention.query, attention.key, attention.scaling, start, stop).masked_fill_(future, -torch.inf)
    log_weights = scores.log_softmax(-1)
    if attention.gate is None:
        return log_weights
    assert attention.own_key is not None
    assert attention.window is not None
    unseen = future | future_of(start - attention.window, stop - attention.window, future.device, stop).logical_not()
    own = _scores(attention.query, attention.own_key, attention.scaling, start, stop).masked_fill_(unseen, -torch.inf)
    gate = attention.gate[start:stop].T[..., None]  # [N, Q, 1]
    return torch.logaddexp(gate.log() + log_weights, (-gate).log1p() + own.log_softmax(-1))


def future_of(start: int, stop: int, device: torch.device, keys: int | None = None) -> Bool[Tensor, "Q K"]:
    """Where key position j lies after query position i, for i from `start` to `stop` and j below `keys` (or `stop`)."""
    query = torch.arange(start, stop, device=device)[:, None]
    return torch.arange(stop if keys is None else keys, device=device) > query


def chunks(positions: int, heads: int) -> Iterator[tuple[int, int]]:
    """From and to of query positions such that heads · queries · keys stay within `ELEMENTS`."""
    start = 0
    while start < positions:
        stop = start + 1
        while stop < positions and heads * (stop + 1 - start) * (stop + 1) <= ELEMENTS:
            stop += 1
        yield start, stop
        start = stop


def _scores(
    query: Float[Tensor, "N S D"], key: Float[Tensor, "M S D"], scaling: float, start: int, stop: int
) -> Float[Tensor, "N Q K"]:
    heads, groups = len(query), len(key)
    asked = query[:, start:stop].reshape(groups, -1, query.shape[-1])  # N/M heads share keys
    return (asked @ key[:, :stop].mT).mul_(scaling).view(heads, stop - start, stop)
