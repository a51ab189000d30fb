"""What vLLM's CPU build needs beside the plugin. Everything about vLLM on a CPU is here and in the README.

Facts of vLLM 0.31 on a CPU:

- Linear weights are repacked after loading (for oneDNN; bf16 ones for AMX where the processor has it) and the originals
  freed, so that a later sync of weights fails (`'Parameter' object has no attribute 'weight_loader'`). With the choice
  of kernel below every linear layer takes vLLM's own fallback, torch's linear on the weights as they were loaded.
- Its attention kernel knows few head sizes (32 and up). `models.py` fills smaller heads with zeros, which changes
  neither scores nor outputs.
- It takes all memory but some for its cache and binds threads to cores, which the trainer beside it needs too.
"""

import os

from torch import nn
from torch.nn import functional
from vllm.platforms import current_platform


def prepare_environment() -> None:
    """Defaults for an engine that shares the machine with a trainer; variables that are set already win."""
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def keep_weights_syncable() -> None:
    """Let linear layers keep their weights as they were loaded. To be called before the model is built."""
    if current_platform.is_cpu():
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _torch_linear


def _torch_linear(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


def attention_head_size(head_dim: int) -> int:
    """The smallest head size that the platform's attention can take for heads of `head_dim` channels."""
    if not current_platform.is_cpu():
        return head_dim
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min(size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_dim)
