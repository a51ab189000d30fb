"""RMS norm in fp32, as everywhere, or in the input's own precision where that is higher."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class RMSNorm(LlamaRMSNorm):
    """Llama's norm, bit for bit up to fp32. Llama's would round an fp64 model, and with it a finite difference."""

    def forward(self, hidden_states: Float[Tensor, "... H"]) -> Float[Tensor, "... H"]:
        precise = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        variance = precise.pow(2).mean(-1, keepdim=True)
        return self.weight * (precise * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)
