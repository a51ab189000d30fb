"""Log-probs ℓ^(t) of given tokens at every loop, without ever holding T·S·V logits.

The head, the log-softmax and the gather run in tiles of rows and vocabulary, and the backward recomputes each tile
(TRL's kernel). All loops that carry a gradient go through one call, so that there is one set of buffers whatever T is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Vocabulary columns in a tile. As in TRL: another value would give another order of summation.
VOCAB_CHUNK = 32768


@dataclass
class LoopScores:
    """Scores of a sequence's tokens; column s belongs to the prediction of token s+1. Zero where there is no label.

    Attributes:
        log_probs: [B, S-1, T] fp32.
        entropy: [B, S-1, T] fp32, nats, of each loop's distribution.
    """

    log_probs: Tensor
    entropy: Tensor


def loop_log_probs(
    loop_states: Sequence[Float[Tensor, "B S H"]],
    head: Float[Tensor, "V H"],
    labels: Int[Tensor, "B S"],
    temperature: float = 1.0,
    grad_loops: Sequence[int] | None = None,
    compact: bool = True,
) -> LoopScores:
    """ℓ^(t) = log softmax(head(h^(t)) / τ)[label], fp32, with the entropy of the same distribution.

    Args:
        loop_states: the normed state after each loop.
        labels: tokens to score, -100 elsewhere. Label s is predicted from position s-1.
        grad_loops: loops (from 0) that carry a gradient, None for all. The others are computed without one.
        compact: score only rows with a label. False follows TRL, whose kernel scores all rows where there is no
            Triton: the same rows give the same order of summation in the head's gradient, bit for bit.
    """
    # Imported when used: trl loads transformers' trainers, and the model classes must load without them.
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    targets = labels[:, 1:]
    mask = targets != -100
    rows_mask = mask if compact or head.device.type == "cuda" else torch.ones_like(mask)
    rows = [state[:, :-1][rows_mask] for state in loop_states]
    row_targets = targets.clamp(min=0)[rows_mask]

    loops = range(len(loop_states))
    with_grad = [t for t in loops if grad_loops is None or t in grad_loops]
    without_grad = [t for t in loops if t not in with_grad]
    per_loop: dict[int, tuple[Tensor, Tensor]] = {}
    with maybe_gather_lm_head_ctx(head, None):
        per_loop |= _score_rows(rows, with_grad, head, row_targets, temperature)
        with torch.no_grad():
            per_loop |= _score_rows(rows, without_grad, head, row_targets, temperature)

    def to_positions(column: int) -> Tensor:
        flat = torch.stack([per_loop[t][column] for t in loops], dim=-1)
        # masked_scatter keeps the graph alive when no row has a label: the backward then gives zeros, not an error.
        spread = flat.new_zeros(*mask.shape, len(loop_states)).masked_scatter(rows_mask[..., None], flat)
        return spread.masked_fill(~mask[..., None], 0.0)

    return LoopScores(log_probs=to_positions(0), entropy=to_positions(1))


def _score_rows(
    rows: list[Float[Tensor, "N H"]],
    loops: list[int],
    head: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    temperature: float,
) -> dict[int, tuple[Float[Tensor, " N"], Float[Tensor, " N"]]]:
    """Log-probs and entropies of the given loops' rows, by loop."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    if not loops:
        return {}
    hidden = torch.cat([rows[t] for t in loops])
    chunk = min(VOCAB_CHUNK, head.shape[0])
    log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, head, None, targets.repeat(len(loops)), temperature, chunk, None, 1.0, ("entropy",)
    )
    split = zip(loops, log_probs.chunk(len(loops)), entropy.chunk(len(loops)), strict=True)
    return {t: (log_prob, loop_entropy) for t, log_prob, loop_entropy in split}
