"""Turn a dense checkpoint into a looped one (Closing the Loop, section 4.1).

The layers are copied as they are; new are one mixing scalar and the exit gate. Without re-injection of the embeddings
(`identity`) later loops start out worse than the first; the paper's w = 0.99 keeps them close to it. A Llama becomes a
Parallel Loop Transformer in the same way, where the gates of its attention are new.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import PolicyError
from .configuration import IQuestPLTCoderConfig, LoopedLlamaConfig, LoopedQwen3Config
from .looped import LoopedForCausalLM
from .looped_dense import LoopedLlamaForCausalLM, LoopedQwen3ForCausalLM
from .plt import IQuestPLTCoderForCausalLM

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
    family: str = "looped",
    window: int = 64,
) -> LoopedForCausalLM:
    """A looped model with the dense model's weights, in the dense model's dtype. At `loops=1` it equals the dense one.

    Args:
        dense: a Llama- or Qwen3-family causal language model.
        loops: T.
        mixing: `scalar`: w·E + (1-w)·h enters loops after the first, w learned; `identity`: h does.
        mixing_init: w at the start, in (0, 1).
        norm_each_loop: whether the next loop receives the normed state.
        family: `looped`, or `plt`: a Parallel Loop Transformer, whose later loops start from w·E + (1-w)·shift(h) with
            w as it is, and whose gates start as an even blend.
        window: of a `plt`: positions before its own that a later loop sees of that loop.

    Raises:
        PolicyError: the dense model is of another family, or has sliding-window layers.
    """
    model_type = dense.config.model_type
    if family == "plt" and model_type != "llama":
        raise PolicyError(f"cannot make a Parallel Loop Transformer of type {model_type!r}: its attention is Llama's")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise PolicyError(f"cannot loop a model of type {model_type!r}; the families that can be looped are: {known}")
    if getattr(dense.config, "use_sliding_window", False):
        raise PolicyError("cannot loop a model with sliding-window layers: set use_sliding_window to false")
    if not 0.0 < mixing_init < 1.0:
        raise PolicyError(f"mixing_init must lie between 0 and 1, found {mixing_init}")
    # `quantization_config` describes the file that the weights came from (GGUF); they are plain tensors by now.
    stale = ("model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "_name_or_path")
    fields = {key: value for key, value in dense.config.to_dict().items() if key not in stale}
    config: Any
    model_class: type[LoopedForCausalLM]
    if family == "plt":
        model_class = IQuestPLTCoderForCausalLM
        config = IQuestPLTCoderConfig(
            **fields,
            plt_num_loops=loops,
            plt_window_size=[window, 0],
            plt_emb_scale=mixing_init,
            plt_hidden_scale=1.0 - mixing_init,
            plt_normalize_per_loop=norm_each_loop,
        )
    else:
        config_class, model_class = FAMILIES[model_type]
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
    lost = sorted(name for name in missing if name not in new and "plt_gate" not in name)
    if unexpected or lost:
        raise PolicyError(f"weights do not fit a {model_type}: missing {lost}, extra {unexpected}")
    looped.generation_config = dense.generation_config
    return looped


def convert_checkpoint(
    source: str,
    out: Path,
    loops: int,
    mixing: str = "scalar",
    mixing_init: float = 0.99,
    norm_each_loop: bool = True,
    family: str = "looped",
    window: int = 64,
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
    looped = loop_dense_model(dense, loops, mixing, mixing_init, norm_each_loop, family, window)
    partial = out.with_name(f".{out.name}.partial")  # `out` appears when it is complete
    looped.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
