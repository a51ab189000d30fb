"""LoRA on the shared block, by PEFT: one adapter for all loops, or one for each.

The looped model keeps its class; PEFT puts its layers inside and a `PeftModel` around. Adapters of loops are PEFT's
adapters `loop1` to `loopT`, and a layer switches to the loop's own before it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_peft_available

from ..errors import PolicyError
from .looped import LoopedForCausalLM

ADAPTER_CONFIG = "adapter_config.json"


def require_peft() -> None:
    """Refuse LoRA where PEFT is not installed."""
    if not is_peft_available():
        raise PolicyError('policy.lora needs PEFT: pip install "rltt[lora]"')


def add_lora(
    model: LoopedForCausalLM,
    r: int,
    alpha: float,
    target_modules: list[str] | None = None,
    per_loop: bool = False,
    base: str | None = None,
) -> Any:
    """A `PeftModel` around the policy, in which only adapters train. They start without effect.

    Args:
        model: gets PEFT's layers in place.
        r: rank.
        alpha: the update is scaled by alpha / r.
        target_modules: names of linear layers in the block; None is all of them.
        per_loop: one adapter for each loop of the model's depth.
        base: where the weights under the adapters can be loaded from; None is the model's own path.

    Raises:
        PolicyError: a name that is no linear layer of the block, or the model has adapters already.
    """
    require_peft()
    from peft import LoraConfig, get_peft_model

    linear = sorted(
        {name.rpartition(".")[2] for name, module in model.model.layers.named_modules() if type(module) is nn.Linear}
    )
    if has_adapters(model):
        raise PolicyError("policy.lora: the policy has adapters already, one a loop; train from the model under them")
    if unknown := sorted(set(target_modules or []) - set(linear)):
        raise PolicyError(
            f"policy.lora.target_modules: {', '.join(unknown)}: no linear layer of the shared block; it has "
            f"{', '.join(linear)}"
        )
    names = [f"loop{t + 1}" for t in range(model.loop_spec.loops)] if per_loop else ["default"]
    adapted = None
    for name in names:
        config = LoraConfig(
            r=r,
            lora_alpha=alpha,
            # As a pattern: PEFT would look for a plain name all over the model.
            target_modules=rf"model\.layers\..*\.({'|'.join(target_modules or linear)})",
            task_type="CAUSAL_LM",
        )
        if adapted is None:
            adapted = get_peft_model(model, config, adapter_name=name)
        else:
            adapted.add_adapter(name, config)
        adapted.peft_config[name].base_model_name_or_path = base or model.name_or_path
    activate(adapted)
    return adapted


def check_peft_config(config: Any) -> None:
    """Raise PolicyError for a PEFT configuration other than plain LoRA, whose weights an engine can be given."""
    require_peft()
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise PolicyError(f"peft_config must be a LoraConfig, found {type(config).__name__}")
    if config.modules_to_save:
        raise PolicyError(f"peft_config.modules_to_save is {config.modules_to_save}: only adapters can be trained")


def add_adapters(model: LoopedForCausalLM, config: Any) -> Any:
    """A `PeftModel` with one adapter for all loops, as a LoraConfig of one's own says."""
    from peft import get_peft_model

    return get_peft_model(model, config)


def activate(adapted: Any) -> None:
    """Make every adapter trainable, and let each layer switch to that of the loop where there is one a loop."""
    names = list(adapted.peft_config)
    adapted.base_model.set_adapter(names)
    if names != ["default"]:
        _switch_by_loop(adapted.get_base_model(), names)


def _switch_by_loop(model: LoopedForCausalLM, names: list[str]) -> None:
    """Run each layer with the adapter of the loop.

    In a hook of the layer: activation checkpointing runs the layer again in the backward, in another order of loops,
    and hooks with it. PEFT's `set_adapter` would also change which parameters have gradients, so its state is set.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.model.layers:
        adapted = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]

        def switch(_: nn.Module, args: Any, kwargs: Any, adapted: list[Any] = adapted) -> Any:
            loop = kwargs.pop("adapter")
            for module in adapted:
                module._active_adapter = [names[loop]]
            return args, kwargs

        if model.model.loop_adapters == 0:
            layer.register_forward_pre_hook(switch, with_kwargs=True)
    model.model.loop_adapters = len(names)


def without_wrapper(model: Any) -> LoopedForCausalLM:
    """The looped model itself, inside a `PeftModel` or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT's layers are in the model."""
    return any(True for _ in _tuner_layers(model))


def _tuner_layers(model: nn.Module) -> Iterator[Any]:
    if not is_peft_available():
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    yield from (module for module in model.modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model under the adapters. PEFT's own switch also turns gradients off and on, which DDP and ZeRO count on."""
    layers = list(_tuner_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdaptersOff:
    """The frozen reference of a LoRA policy: the policy with its adapters off. No second model in memory.

    Args:
        trainer: whose model is called, as it is at that moment.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __call__(self, **inputs: Any) -> Any:
        with adapters_off(self.trainer.policy), torch.no_grad():
            return self.trainer.model(**inputs)


Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]


def merged_parameters(adapted: Any, gather: Gather = lambda _: nullcontext()) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter of the policy with its adapter added, one at a time, for a rollout engine.

    PEFT's `merge_adapter` adds in place and takes away again: the weights under the adapter would drift by rounding.

    Args:
        gather: context in which these parameters are whole (ZeRO-3).

    Raises:
        PolicyError: one adapter a loop cannot be part of weights that all loops share.
    """
    model = adapted.get_base_model()
    if model.model.loop_adapters:
        raise PolicyError("one adapter a loop cannot be merged into weights that all loops share")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        owner, _, kind = name.rpartition(".")
        if not owner.endswith(".base_layer"):
            with gather([parameter]):
                yield name, parameter.data
            continue
        owner = owner.removesuffix(".base_layer")
        layer = model.get_submodule(owner)
        with gather(list(layer.parameters())), torch.no_grad():
            weight = parameter.data
            if kind == "weight":
                weight = weight + layer.get_delta_weight("default").to(weight.dtype)
            yield f"{owner}.{kind}", weight


def adapter_folders(path: str) -> list[Path]:
    """Where the adapters of a saved LoRA policy lie: its folder, or one folder a loop; none for another checkpoint."""
    folder = Path(path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        return [folder]
    loops = sorted(folder.glob(f"loop*/{ADAPTER_CONFIG}"), key=lambda file: int(file.parent.name.removeprefix("loop")))
    return [file.parent for file in loops]


def apply_adapters(model: LoopedForCausalLM, folders: list[Path]) -> LoopedForCausalLM:
    """Put saved adapters on the model they were trained on: one for all loops is merged, several stay beside it."""
    require_peft()
    from peft import PeftModel

    if len(folders) == 1 and not folders[0].name.startswith("loop"):
        return PeftModel.from_pretrained(model, folders[0]).merge_and_unload()
    adapted = PeftModel.from_pretrained(model, folders[0], adapter_name=folders[0].name)
    for folder in folders[1:]:
        adapted.load_adapter(folder, folder.name)
    _switch_by_loop(model, [folder.name for folder in folders])
    return model
