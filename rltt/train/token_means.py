"""Means over all tokens of a step, exact whatever the micro-batches and processes."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class TokenMeans:
    """Collects masked sums and counts by name; `pop` reduces them over processes and starts anew.

    A mean of micro-batch means would weigh a micro-batch of short completions as much as one of long ones, and count a
    fully masked one as zero.

    Attributes:
        sums: by name, the masked sum and the count.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Float[Tensor, "B C"], mask: Float[Tensor, "B C"]) -> None:
        """Add values where mask is 1. Values of shape [B, 1] are one number a sequence and count once."""
        if values.shape[1] == 1 and mask.shape[1] != 1:
            mask = mask.any(dim=1, keepdim=True)
        pair = torch.stack([(values * mask).sum().double(), mask.sum().double()])
        self.sums[name] = self.sums.get(name, 0.0) + pair

    def pop(self, accelerator: Any) -> dict[str, float]:
        """The means by name; names without a single token are left out."""
        if not self.sums:
            return {}
        names = list(self.sums)
        totals = accelerator.reduce(torch.stack([self.sums[name] for name in names]), reduction="sum").tolist()
        self.sums.clear()
        return {name: total / count for name, (total, count) in zip(names, totals, strict=True) if count > 0}
