"""Turn a dense checkpoint into a looped one (Closing the Loop, section 4.1).

The layers are copied as they are; new are one mixing scalar and the exit gate. Without re-injection of the embeddings
(`identity`) later loops start out worse than the first; the paper's w = 0.99 keeps them close to it.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import PolicyError
from .configuration import LoopedLlamaConfig, LoopedQwen3Config
from .looped import LoopedForCausalLM
from .looped_dense import LoopedLlamaForCausalLM, LoopedQwen3ForCausalLM

FAMILIES: dict[str, tuple[type[Any], type[LoopedForCausalLM]]] = {
    "llama": (LoopedLlamaConfig, LoopedLlamaForCausalLM),
    "qwen3": (LoopedQwen3Config, LoopedQwen3ForCausalLM),
}


def loop_dense_model(
    dense: PreTrainedModel,
    loops: int,
    mixing: str = "scalar",
    mixing_init: float = 0.99,
    norm_each_loop: bool = True,
) -> LoopedForCausalLM:
    """A looped model with the dense model's weights, in the dense model's dtype. At `loops=1` it equals the dense one.

    Args:
        dense: a Llama- or Qwen3-family causal language model.
        loops: T.
        mixing: `scalar`: w·E + (1-w)·h enters loops after the first, w learned; `identity`: h does.
        mixing_init: w at the start, in (0, 1).
        norm_each_loop: whether the next loop receives the normed state.

    Raises:
        PolicyError: the dense model is of another family, or has sliding-window layers.
    """
    model_type = dense.config.model_type
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise PolicyError(f"cannot loop a model of type {model_type!r}; the families that can be looped are: {known}")
    if getattr(dense.config, "use_sliding_window", False):
        raise PolicyError("cannot loop a model with sliding-window layers: set use_sliding_window to false")
    if not 0.0 < mixing_init < 1.0:
        raise PolicyError(f"mixing_init must lie between 0 and 1, found {mixing_init}")
    config_class, model_class = FAMILIES[model_type]
    # `quantization_config` describes the file that the weights came from (GGUF); they are plain tensors by now.
    stale = ("model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "_name_or_path")
    fields = {key: value for key, value in dense.config.to_dict().items() if key not in stale}
    config = config_class(
        **fields,
        total_ut_steps=loops,
        loop_mixing=mixing,
        loop_mixing_init=mixing_init,
        norm_each_loop=norm_each_loop,
    )
    config._attn_implementation = dense.config._attn_implementation
    looped = model_class(config).to(dense.dtype)
    missing, unexpected = looped.load_state_dict(dense.state_dict(), strict=False)
    new = {"model.early_exit_gate.weight", "model.early_exit_gate.bias", "model.input_mixing.logit"}
    if unexpected or set(missing) - new:
        raise PolicyError(
            f"weights do not fit a {model_type}: missing {sorted(set(missing) - new)}, extra {unexpected}"
        )
    looped.generation_config = dense.generation_config
    return looped


def convert_checkpoint(
    source: str, out: Path, loops: int, mixing: str = "scalar", mixing_init: float = 0.99, norm_each_loop: bool = True
) -> None:
    """`rltt convert`: read a dense checkpoint and write a looped one with its tokenizer, in safetensors.

    Args:
        source: Hub id, folder, or `package:NAME/FILE.gguf`.
        out: a folder that does not exist yet or is empty.

    Raises:
        PolicyError: the source cannot be looped, or `out` holds files.
    """
    from .load import load_checkpoint, load_tokenizer

    if out.exists() and any(out.iterdir()):
        raise PolicyError(f"{out}: the folder is not empty; choose another --out, nothing is overwritten")
    tokenizer = load_tokenizer(source)
    dense = load_checkpoint(source, dtype="auto")
    looped = loop_dense_model(dense, loops, mixing, mixing_init, norm_each_loop)
    partial = out.with_name(f".{out.name}.partial")  # `out` appears when it is complete
    looped.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
