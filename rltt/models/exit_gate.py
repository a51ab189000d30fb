"""The exit gate of LoopLM: fp32, in log space (arXiv 2510.25741, section 3).

In bf16 a sigmoid rounds to exactly 1 from 6.25 on and a cumulative sum reaches 1 early, so that tokens leave before the
last loop in one engine and not in another. Nothing here ever leaves fp32 or log space.

Shapes: T loops, `...` any leading shape (usually B S).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class ExitGate(nn.Linear):
    """`Linear(H, 1)` that computes its logit in fp32 whatever the dtype of weights, input and autocast."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    def forward(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "..."]:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


def exit_log_pdf(gate_logits: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
    """log p_t with λ_t = σ(gate_t), p_t = λ_t ∏_{s<t} (1-λ_s) for t < T; the last loop takes the remainder."""
    log_stay = F.logsigmoid(-gate_logits[..., :-1])
    log_survival = F.pad(log_stay.cumsum(-1), (1, 0))  # log ∏_{s<t} (1-λ_s), zero for the first loop
    log_exit = F.pad(F.logsigmoid(gate_logits[..., :-1]), (0, 1))  # zero for the last loop: it always exits
    return log_survival + log_exit


def exit_loop(gate_logits: Float[Tensor, "... T"], threshold: float) -> Int[Tensor, "..."]:
    """Q-exit: the first loop (from 0) whose cumulative exit probability reaches `threshold`, else the last.

    Σ_{s<=t} p_s >= q  is  ∏_{s<=t} (1-λ_s) <= 1-q, which is compared as logarithms.
    """
    loops = gate_logits.shape[-1]
    if threshold >= 1.0 or loops == 1:
        return torch.full(gate_logits.shape[:-1], loops - 1, device=gate_logits.device, dtype=torch.long)
    log_survival = F.logsigmoid(-gate_logits[..., :-1]).cumsum(-1)
    return (log_survival > math.log1p(-threshold)).sum(-1)
