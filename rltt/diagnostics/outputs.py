"""What a loop predicts (LoopCoder-v2, section 3.2.3): p^(r) = softmax(Head(h^(r))), read through the final norm.

Logits exist for some positions at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

ELEMENTS = 2**21
"""Logits that are held at once for each loop."""


@dataclass(frozen=True)
class OutputMeasures:
    """Of one sequence, for each position; loops from 1.

    Attributes:
        entropy: [S, R], H(p^(r)).
        kl: [S, R-1], Δp^(r) = KL(p^(r) ‖ p^(r-1)) of loops 2 to R.
        true_rank: [S-1, R], the place of the true next token among all tokens by p^(r); 1 is the likeliest.
    """

    entropy: Float[Tensor, "S R"]
    kl: Float[Tensor, "S R-1"]
    true_rank: Float[Tensor, "S-1 R"]


def measure_outputs(
    states: Sequence[Float[Tensor, "S H"]], head: Callable[[Tensor], Tensor], ids: Int[Tensor, " S"]
) -> OutputMeasures:
    """All measures at each position.

    Args:
        states: normed, of each loop.
        head: from states to logits [., V].
    """
    positions, loops = len(ids), len(states)
    numbers: dict[str, Any] = {"dtype": torch.float64, "device": ids.device}
    measures = OutputMeasures(
        entropy=torch.empty(positions, loops, **numbers),
        kl=torch.empty(positions, loops - 1, **numbers),
        true_rank=torch.empty(positions - 1, loops, **numbers),
    )
    rows = max(1, ELEMENTS // head(states[0][:1]).shape[-1])
    for start in range(0, positions, rows):
        part = slice(start, start + rows)
        following = ids[start + 1 : start + rows + 1]
        before: Tensor | None = None
        for loop, state in enumerate(states):
            log_probs = head(state[part]).float().log_softmax(-1)
            probs = log_probs.exp()
            measures.entropy[part, loop] = -(probs * log_probs).sum(-1).double()
            if before is not None:
                measures.kl[part, loop - 1] = (probs * (log_probs - before)).sum(-1).double()
            known = log_probs[: len(following)]  # the last token of the text has no next one
            measures.true_rank[part, loop] = true_token_rank(known, following)
            before = log_probs
    return measures


def true_token_rank(scores: Float[Tensor, "S V"], true: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """1 + how many tokens score higher than the true one."""
    return (scores > scores.gather(-1, true[:, None])).sum(-1).add(1).double()
