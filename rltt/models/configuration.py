"""Configurations of the looped model families. No torch here: recipes and plans read them too."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


@strict
class OuroConfig(LlamaConfig):
    """LoopLM with upstream's field names, so that `ByteDance/Ouro-1.4B` loads without remote code.

    Args:
        total_ut_steps: T, the number of loops. The model reads it at every forward: there is no second copy.
        early_exit_threshold: 1 or more reads the last loop; below 1 is the Q-exit.
    """

    model_type = "ouro"
    # Saved Hub configurations carry an `auto_map` to remote code; our registered class must win over it.
    auto_map: ClassVar[dict[str, str]] = {}

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 65536
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    total_ut_steps: int = 4
    early_exit_threshold: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)
        if self.rope_parameters is None:
            kwargs.setdefault("rope_theta", 1e6)
        super().__post_init__(**kwargs)
        check_loop_fields(self)


@strict
class LoopedLlamaConfig(LlamaConfig):
    """A Llama-family decoder run T times. See `LoopedFields` in the README for the loop's own fields.

    Args:
        total_ut_steps: T, the number of loops; 1 is exactly the dense model.
        early_exit_threshold: 1 or more reads the last loop; below 1 is the Q-exit.
        loop_mixing: `scalar`: w·E + (1-w)·h enters loops after the first; `identity`: h does.
        loop_mixing_init: w at conversion.
        norm_each_loop: whether the next loop receives the normed state.
        use_exit_gate: whether there is an exit gate.
    """

    model_type = "looped_llama"
    auto_map: ClassVar[dict[str, str]] = {}

    total_ut_steps: int = 2
    early_exit_threshold: float | int = 1.0
    loop_mixing: str = "scalar"
    loop_mixing_init: float | int = 0.99
    norm_each_loop: bool = True
    use_exit_gate: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_loop_fields(self)


@strict
class LoopedQwen3Config(Qwen3Config):
    """A Qwen3-family decoder run T times. The loop's fields are those of `LoopedLlamaConfig`."""

    model_type = "looped_qwen3"
    auto_map: ClassVar[dict[str, str]] = {}

    total_ut_steps: int = 2
    early_exit_threshold: float | int = 1.0
    loop_mixing: str = "scalar"
    loop_mixing_init: float | int = 0.99
    norm_each_loop: bool = True
    use_exit_gate: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_loop_fields(self)


@strict
class IQuestPLTCoderConfig(LlamaConfig):
    """A Parallel Loop Transformer with the field names of LoopCoder-V2. Sizes are those of the released 7B model.

    Args:
        plt_num_loops: R, the number of loops; 1 is a plain dense decoder.
        plt_window_size: [left, right] of the local attention in loops after the first: so many positions beside the
            token's own. A causal model sees none to the right.
        plt_emb_scale, plt_hidden_scale: a and b of a·E + b·shift(h), which enters loops after the first; null is 1.
        plt_normalize_per_loop: whether the next loop receives the normed state.
        plt_gate_use_hidden_states: whether the gate reads the normed layer input, or else the rotated query.
        parallel_decode: run all loops of a generated token in one pass over the layers, or else one after another.
            Both give the same logits. Ours: the released configuration has no such field.
    """

    model_type = "iquestpltcoder"
    auto_map: ClassVar[dict[str, str]] = {}
    attribute_map: ClassVar[dict[str, str]] = {"total_ut_steps": "plt_num_loops"}

    vocab_size: int = 76800
    hidden_size: int = 5120
    intermediate_size: int = 27648
    num_hidden_layers: int = 14
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float | int = 1e-5
    plt_num_loops: int = 2
    plt_window_size: list[int] | tuple[int, ...] = (64, 0)
    plt_emb_scale: float | int | None = None
    plt_hidden_scale: float | int | None = None
    plt_normalize_per_loop: bool = True
    plt_gate_use_hidden_states: bool = True
    parallel_decode: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        _plt_defaults(self, kwargs)
        super().__post_init__(**kwargs)
        check_loop_fields(self)
        window = list(self.plt_window_size)
        if len(window) != 2 or window[0] < 0 or window[1] != 0:
            raise ValueError(f"plt_window_size must be [positions to the left, 0], found {window}")
        self.plt_window_size = window


@strict
class IQuestLoopCoderConfig(LlamaConfig):
    """IQuest-Coder-Loop v1 with upstream's field names: loops share the first one's keys and values, without a shift.

    Args:
        loop_num: the number of loops; 1 is a plain dense decoder.
        loop_window_size: positions that the local attention in loops after the first sees, the token's own included.
    """

    model_type = "iquestloopcoder"
    auto_map: ClassVar[dict[str, str]] = {}
    attribute_map: ClassVar[dict[str, str]] = {"total_ut_steps": "loop_num"}

    vocab_size: int = 76800
    hidden_size: int = 5120
    intermediate_size: int = 27648
    num_hidden_layers: int = 80
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float | int = 1e-5
    loop_num: int = 2
    loop_window_size: int = 64

    def __post_init__(self, **kwargs: Any) -> None:
        _plt_defaults(self, kwargs)
        super().__post_init__(**kwargs)
        check_loop_fields(self)
        if self.loop_window_size < 1:
            raise ValueError(f"loop_window_size must be at least 1, found {self.loop_window_size}")


def _plt_defaults(config: Any, kwargs: dict[str, Any]) -> None:
    kwargs.pop("auto_map", None)
    if config.rope_parameters is None:
        kwargs.setdefault("rope_theta", 5e5)


LoopedConfig = OuroConfig | LoopedLlamaConfig | LoopedQwen3Config | IQuestPLTCoderConfig | IQuestLoopCoderConfig


def check_loop_fields(config: LoopedConfig) -> None:
    """Refuse values of the loop's fields that no forward could honour."""
    if config.total_ut_steps < 1:
        name = config.attribute_map.get("total_ut_steps", "total_ut_steps")
        raise ValueError(f"{name} must be at least 1, found {config.total_ut_steps}")
    mixing = getattr(config, "loop_mixing", "identity")
    if mixing not in ("scalar", "identity"):
        raise ValueError(f"loop_mixing must be 'scalar' or 'identity', found {mixing!r}")
    if getattr(config, "early_exit_threshold", 1.0) < 1.0 and not getattr(config, "use_exit_gate", True):
        raise ValueError("early_exit_threshold below 1 needs an exit gate, but use_exit_gate is false")
