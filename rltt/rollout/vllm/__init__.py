"""Looped models in vLLM: a plugin that vLLM loads by itself (entry point `vllm.general_plugins`) in all its processes.

models.py   the looped families as native vLLM models
plt.py      Parallel Loop Transformers
shift.py    what moves a state one token on, between their loops
engine.py   an engine inside the training process, over TRL's plumbing
server.py   vLLM's server on other GPUs, and the trainer's end of it
cpu.py      what vLLM's CPU build needs so that weights can be synced

With rltt installed, `vllm serve ByteDance/Ouro-1.4B` and `LLM("ByteDance/Ouro-1.4B")` work without remote code.
"""

from importlib.util import find_spec

from ...errors import UserError

ARCHITECTURES = {
    "OuroForCausalLM": "models",
    "LoopedLlamaForCausalLM": "models",
    "LoopedQwen3ForCausalLM": "models",
    "IQuestPLTCoderForCausalLM": "plt",
    "IQuestLoopCoderForCausalLM": "plt",
}
"""In which file of this folder a model is."""


def register() -> None:
    """Make the looped architectures and their configurations known to vLLM. Loads neither torch nor a model."""
    from vllm import ModelRegistry

    from ... import _auto_register  # noqa: F401  (AutoConfig must know the model types)

    for architecture, file in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"{__name__}.{file}:{architecture}")


def require_vllm() -> None:
    """Raises `UserError` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UserError(
            'rollout.engine: vllm needs vLLM, which is not installed: `pip install "rltt[vllm]"` on a GPU machine; for '
            "a CPU see `vLLM` in the README. `rollout.engine: hf` needs nothing"
        )
