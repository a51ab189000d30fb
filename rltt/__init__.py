"""RL post-training for looped language models.

Importing rltt is quick and loads no torch. From then on transformers knows the looped model types, so
`AutoModelForCausalLM.from_pretrained("ByteDance/Ouro-1.4B")` works without remote code.
"""

from importlib import import_module
from typing import Any

from ._auto_register import register_when_transformers_loads

__version__ = "0.1.0"

# Public names and where they live; each is imported when it is first used.
_EXPORTS = {
    "LoopSpec": "rltt.models.spec",
    "RLTTConfig": "rltt.train.config",
    "RLTTTrainer": "rltt.train.trainer",
    "Recipe": "rltt.recipe",
    "load_policy": "rltt.models.load",
    "load_recipe": "rltt.recipe",
    "load_tokenizer": "rltt.models.load",
}
__all__ = ["LoopSpec", "RLTTConfig", "RLTTTrainer", "Recipe", "load_policy", "load_recipe", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'rltt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_transformers_loads()
