"""Make looped model types known to transformers' Auto classes as soon as those are loaded, and not before.

Registering needs the model classes, which need torch: seconds that `import rltt` and `rltt --help` must not cost. So
the imports of transformers are watched. When its tables have been loaded and no import is half-way (a class of ours
could then meet a partly loaded transformers module), the registration follows.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_configs() -> None:
    """Teach `AutoConfig` the looped model types. Needs no torch."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from .models import configuration

    for config_class in (
        configuration.OuroConfig,
        configuration.LoopedLlamaConfig,
        configuration.LoopedQwen3Config,
        configuration.IQuestPLTCoderConfig,
        configuration.IQuestLoopCoderConfig,
    ):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def register_models() -> None:
    """Teach `AutoModel` and `AutoModelForCausalLM` the looped model types."""
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from .models import looped_dense, looplm, plt

    for model_class, causal_lm_class in (
        (looplm.OuroModel, looplm.OuroForCausalLM),
        (looped_dense.LoopedLlamaModel, looped_dense.LoopedLlamaForCausalLM),
        (looped_dense.LoopedQwen3Model, looped_dense.LoopedQwen3ForCausalLM),
        (plt.IQuestPLTCoderModel, plt.IQuestPLTCoderForCausalLM),
        (plt.IQuestLoopCoderModel, plt.IQuestLoopCoderForCausalLM),
    ):
        AutoModel.register(model_class.config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(causal_lm_class.config_class, causal_lm_class, exist_ok=True)


def register_when_transformers_loads() -> None:
    """Register now what transformers has loaded already, and the rest when it loads it."""
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    watch.settle()


class _Watch(MetaPathFinder):
    """Finds modules of transformers and rltt as Python would, and counts those that are half-way loaded."""

    def __init__(self) -> None:
        self.loading = 0
        self.searching: set[str] = set()
        self.pending = {
            "transformers.models.auto.configuration_auto": register_configs,
            "transformers.models.auto.modeling_auto": register_models,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(("transformers.", "rltt.")) or fullname in self.searching or not self.pending:
            return None
        self.searching.add(fullname)  # find_spec comes back to this finder, which must then stand aside
        try:
            spec = find_spec(fullname)
        finally:
            self.searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self)
        return spec

    def settle(self) -> None:
        """Run the registrations whose module is there, once nothing is half-way."""
        for name, register in list(self.pending.items()):
            if self.loading == 0 and name in sys.modules and name in self.pending:
                del self.pending[name]
                self.loading += 1  # what the registration imports must not start another one
                try:
                    register()
                finally:
                    self.loading -= 1
                self.settle()


class _WatchedLoader(Loader):
    def __init__(self, loader: Loader, watch: _Watch) -> None:
        self.loader = loader
        self.watch = watch

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)  # get_data, get_source, is_package, …

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.watch.loading += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.watch.loading -= 1
        self.watch.settle()
