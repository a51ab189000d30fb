"""Log-probs ℓ^(t) of given tokens at every loop, without ever holding T·S·V logits.

The head, the log-softmax and the gather run in tiles of rows and vocabulary (TRL's kernel), whose size does not depend
on T, and the backward recomputes each tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Rows and vocabulary columns of logits that exist at once."""

    rows: int
    columns: int


# TRL's own. With its Triton kernel a tile needs no temporaries; without, it needs some eight of its size and is
# slow beyond the processor's cache: measured on a CPU, 512 x 8,192 takes half the time and an eighth of the memory.
TRL_TILE = Tile(4096, 32768)
CPU_TILE = Tile(512, 8192)


class LoopScores(NamedTuple):
    """Scores of a sequence's tokens; column s belongs to the prediction of token s+1. Zero where there is no label.

    A tuple, for ZeRO-3: DeepSpeed looks for tensors in a module's output to hang its backward hooks on, not in
    dataclasses, and would not gather the head's weights again in the backward.

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
        compact: score only rows with a label, in small tiles. False follows TRL, whose kernel scores all rows where
            there is no Triton: the same rows and tiles give the head's gradient the same order of summation, bit for
            bit.
    """
    # Imported when used: trl loads transformers' trainers, and the model classes must load without them.
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    targets = labels[:, 1:]
    mask = targets != -100
    has_triton = head.device.type == "cuda"
    rows_mask = mask if compact or has_triton else torch.ones_like(mask)
    tile = CPU_TILE if compact and not has_triton else TRL_TILE
    rows = [state[:, :-1][rows_mask] for state in loop_states]
    row_targets = targets.clamp(min=0)[rows_mask]

    loops = range(len(loop_states))
    with_grad = [t for t in loops if grad_loops is None or t in grad_loops]
    without_grad = [t for t in loops if t not in with_grad]
    per_loop: dict[int, tuple[Tensor, Tensor]] = {}
    with maybe_gather_lm_head_ctx(head, None):
        per_loop |= _score_rows(rows, with_grad, head, row_targets, temperature, tile)
        with torch.no_grad():
            per_loop |= _score_rows(rows, without_grad, head, row_targets, temperature, tile)

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
    tile: Tile,
) -> dict[int, tuple[Float[Tensor, " N"], Float[Tensor, " N"]]]:
    """Log-probs and entropies of the given loops' rows, by loop."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    columns = min(tile.columns, head.shape[0])
    scores = {}
    for t in loops:
        parts = [
            ChunkedLogProbFunction.apply(hidden, head, None, chunk, temperature, columns, None, 1.0, ("entropy",))[:2]
            for hidden, chunk in zip(rows[t].split(tile.rows), targets.split(tile.rows), strict=True)
        ]
        log_probs, entropy = zip(*parts, strict=True)
        scores[t] = (torch.cat(log_probs), torch.cat(entropy))
    return scores
