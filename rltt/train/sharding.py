"""How the processes of a run share the model: the recipe's `train.sharding` as a DeepSpeed configuration.

    ddp     every process holds all of it: 16 bytes a parameter with fp32 Adam, and the frozen reference
    zero2   gradients and optimizer state are split over the processes
    zero3   the weights too, gathered layer by layer when they are used

Shared layers run T times a pass. ZeRO-3 gathers a layer anew for each of them unless it may stay gathered until its
next use, so the two bounds on that are set to the size of the model (benchmarks/zero3_gathers.py counts).
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import Trainer, TrainingArguments
from trl.models import unwrap_model_for_generation

from ..errors import RecipeError
from ..models.adapters import without_wrapper
from ..processes import is_main, world_size
from ..recipe import TrainSection

STAGES = {"zero2": 2, "zero3": 3}

# What the recipe says already; in a file of one's own these have to be left to it.
_OF_THE_RECIPE = {
    "train_batch_size": "train.prompts_per_step",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.prompts_per_step",
    "gradient_clipping": "train.max_grad_norm",
}


def deepspeed_config(section: TrainSection, parameters: int) -> dict[str, Any] | None:
    """DeepSpeed's configuration, or None where DeepSpeed is not used.

    Args:
        parameters: of the policy, for how long ZeRO-3 may keep layers gathered.

    Raises:
        RecipeError: DeepSpeed is not installed, or the file of `train.deepspeed` does not fit the recipe.
    """
    stage = STAGES.get(section.sharding)
    if stage is None:
        return None
    require_deepspeed(section.sharding)
    leave_collectives_to_gloo()
    if section.deepspeed is not None:
        return own_config(Path(section.deepspeed), section.sharding, stage)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": parameters,
            "stage3_max_reuse_distance": parameters,
            "stage3_gather_16bit_weights_on_model_save": True,  # checkpoints hold a model that loads anywhere
        }
    if section.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if section.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        # The optimizer is transformers' AdamW: learned credit weights have a group of their own in it.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(_OF_THE_RECIPE, "auto"),
    }


def own_config(path: Path, sharding: str, stage: int) -> dict[str, Any]:
    """The configuration in a file of one's own.

    Raises:
        RecipeError: not JSON, another stage than the recipe's, or it sets what the recipe sets.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"train.deepspeed: {path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise RecipeError(f"train.deepspeed: {path}: line {error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise RecipeError(f"train.deepspeed: {path}: holds a {type(config).__name__}; a DeepSpeed file is a mapping")
    zero = config.get("zero_optimization")
    found = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if found != stage:
        raise RecipeError(
            f"train.deepspeed: {path}: zero_optimization.stage is {found!r}, but train.sharding is {sharding}; "
            "make them agree"
        )
    for key, owner in _OF_THE_RECIPE.items():
        if config.get(key, "auto") != "auto":
            raise RecipeError(f'train.deepspeed: {path}: {key} is {config[key]!r}; write "auto": {owner} decides')
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise RecipeError(f"train.deepspeed: {path}: has {key!r}; remove it: the recipe's train section decides")
    ours = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return ours | config | dict.fromkeys(_OF_THE_RECIPE, "auto")


def require_deepspeed(sharding: str) -> None:
    """Refuse ZeRO where DeepSpeed is not installed."""
    from transformers.integrations.deepspeed import is_deepspeed_available

    if not is_deepspeed_available():
        raise RecipeError(f'train.sharding: {sharding} needs DeepSpeed: pip install "rltt[deepspeed]"')


def leave_collectives_to_gloo() -> None:
    """Without a GPU, keep DeepSpeed from compiling collectives of its own at its first start.

    That takes a compiler and a minute, and whoever is killed meanwhile leaves a lock in torch's cache of extensions on
    which every later start waits for ever. gloo does the same work.
    """
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_processes(section: TrainSection) -> None:
    """Make this process ready to be one of several, before anything asks how many there are.

    Raises:
        RecipeError: several processes, but `train.sharding: none`.
    """
    if world_size() > 1 and section.sharding == "none":
        raise RecipeError(
            f"train.sharding: 'none' is for one process, but {world_size()} were launched; choose ddp, zero2 or zero3"
        )
    if world_size() > 1 and not torch.cuda.is_available():
        # accelerate would call it cpu:0, a place to which torch loads no checkpoint.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    if section.sharding in STAGES and "LOCAL_RANK" not in os.environ:
        # DeepSpeed wants to be launched, also alone: with offloading, one process is a layout of its own.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def whole_weights() -> Iterator[None]:
    """Load a model as it is. While a ZeRO-3 configuration is alive, transformers would split it while it loads."""
    from transformers.integrations import deepspeed as integration

    config = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = config


def begin_trainer(args: TrainingArguments) -> None:
    """Make these arguments' layout the one that accelerate, transformers and TRL ask for: before a trainer is made.

    They keep it in globals, in which an earlier trainer of the process (the warm start's) has left its own.
    """
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    AcceleratorState._reset_state()
    config = getattr(args, "hf_deepspeed_config", None)
    if config is not None:
        set_hf_deepspeed_config(config)
    elif args.deepspeed_plugin is None:
        unset_hf_deepspeed_config()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


@contextmanager
def sampling(trainer: Trainer | None) -> Iterator[None]:
    """`generate` on the trainer's plain model: under ZeRO-3 its weights are gathered for as long as this lasts."""
    if trainer is None or not trainer.is_deepspeed_enabled:
        yield
        return
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator):
        yield


def can_save_alone(trainer: Trainer) -> bool:
    """Whether one process can save without the others, which may be stuck or dead."""
    return world_size() == 1 or not trainer.is_deepspeed_enabled


def whole_state_dict(trainer: Trainer, model: torch.nn.Module) -> dict[str, Tensor] | None:
    """The trained weights, whole and in fp32, by name; None where the model holds them itself.

    Under ZeRO they are split, or bf16 copies of the optimizer's fp32 weights. Every process has to call this; the
    result is the main process's, and empty on the others.
    """
    if not trainer.is_deepspeed_enabled:
        return None
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    only_trained = without_wrapper(model) is not model  # adapters
    state = {}
    for name, parameter in model.named_parameters():
        if only_trained and not parameter.requires_grad:
            continue
        whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if whole is None:  # frozen, or trained in fp32 without a copy
            with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                whole = parameter.detach().clone()
        if is_main():
            state[name] = whole.detach().float().cpu()
    return state
