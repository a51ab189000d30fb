"""`LoopSpec`: what a looped model does, in one frozen description that needs no torch.

Every other part asks the spec instead of knowing families: which KV slot a loop and layer use, what flows from one loop
into the next, where the final norm sits, whether there is an exit gate, and which loop is read out.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class LoopInput:
    """How the input of loop t >= 2 is made from token embeddings E and the state h of loop t-1.

    - `state`: h (LoopLM, Nanbeige);
    - `mix`: w·E + (1-w)·h with one learned scalar w = sigmoid(a) (Closing the Loop, eq. 1);
    - `add`: a·E + b·shift(h), fixed scales, `shift` positions to the right (Parallel Loop Transformers).
    """

    kind: Literal["state", "mix", "add"] = "state"
    embedding_scale: float = 1.0
    state_scale: float = 1.0
    shift: int = 0


@dataclass(frozen=True)
class Readout:
    """Which loop's state the language-model head reads.

    `threshold >= 1` reads the last loop. Below 1 it is the Q-exit of LoopLM: for each token the first loop at which the
    cumulative exit probability reaches the threshold; all loops still run.
    """

    threshold: float = 1.0

    @property
    def adaptive(self) -> bool:
        return self.threshold < 1.0


@dataclass(frozen=True)
class LoopSpec:
    """A looped model as the rest of the library sees it.

    Attributes:
        loops: T, how many times the block of layers is applied.
        layers: L, physical layers in the looped block.
        input: what flows between loops.
        norm_each_loop: whether the final norm is applied to the state that the next loop receives. The state that is
            read out is normed in any case.
        kv_heads, head_dim: shape of one layer's keys and values for one token.
        global_kv_loops: how many loops keep keys and values of all positions. LoopLM: all of them. PLT: the first only.
        window: positions (to the left, and self) that later loops keep when they do not keep all. None: no window.
        attention_gate: what weighs the first loop's keys and values against a later loop's window, one scalar a head:
            a projection of the layer's normed input, or of the rotated query. None: no loop reads another's.
        exit_gate: whether the model has a gate that gives each loop an exit probability.
        readout: which loop is read.
    """

    loops: int
    layers: int
    input: LoopInput
    norm_each_loop: bool
    kv_heads: int
    head_dim: int
    global_kv_loops: int
    window: int | None
    attention_gate: Literal["input", "query"] | None
    exit_gate: bool
    readout: Readout

    @property
    def kv_slots(self) -> int:
        """Number of key-value slots in the cache."""
        return self.loops * self.layers

    def kv_slot(self, loop: int, layer: int) -> int:
        """Cache slot of a layer in a loop, both counted from 0: loop·L + layer."""
        if not (0 <= loop < self.loops and 0 <= layer < self.layers):
            raise IndexError(f"loop {loop}, layer {layer} is outside of {self.loops} loops of {self.layers} layers")
        return loop * self.layers + layer

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of cache that grow with each token. Windowed loops have a constant cost and are not counted."""
        return self.global_kv_loops * self.layers * 2 * self.kv_heads * self.head_dim * bytes_per_value

    def kv_bytes_of_windows(self, bytes_per_value: int = 2) -> int:
        """Bytes of cache of one sequence for the loops that keep a window only, however long it grows."""
        slots = (self.loops - self.global_kv_loops) * self.layers
        return slots * (self.window or 0) * 2 * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def parallel_decode(self) -> bool:
        """Whether all loops of the next token can run at once: none of their inputs is a state of that token."""
        return self.input.kind == "add" and self.input.shift > 0

    @classmethod
    def from_config(cls, config: Any) -> "LoopSpec":
        """Derive the spec from a looped model's configuration, as it is now (a changed depth is seen).

        Raises:
            ValueError: the configuration has no loop count, so the model is not a looped one.
        """
        loops = getattr(config, "total_ut_steps", None)
        if loops is None:
            raise ValueError(f"model_type {config.model_type!r} is not a looped model: it has no `total_ut_steps`")
        parallel = config.model_type in ("iquestpltcoder", "iquestloopcoder")
        return cls(
            loops=loops,
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            **(_parallel_loops(config) if parallel else _sequential_loops(config)),
        )


def _sequential_loops(config: Any) -> dict[str, Any]:
    """LoopLM and looped dense models: every loop is a whole decoder with keys and values of its own."""
    return {
        "input": LoopInput("mix") if getattr(config, "loop_mixing", "identity") == "scalar" else LoopInput("state"),
        "norm_each_loop": getattr(config, "norm_each_loop", True),
        "global_kv_loops": config.total_ut_steps,
        "window": None,
        "attention_gate": None,
        "exit_gate": getattr(config, "use_exit_gate", True),
        "readout": Readout(config.early_exit_threshold),
    }


def _parallel_loops(config: Any) -> dict[str, Any]:
    """Parallel Loop Transformers: LoopCoder-V2, and IQuest-Coder-Loop v1 with neither shift nor norm between loops."""
    common = {"global_kv_loops": 1, "exit_gate": False, "readout": Readout()}
    if config.model_type == "iquestloopcoder":
        return common | {
            "input": LoopInput("state"),
            "norm_each_loop": False,
            "window": config.loop_window_size,
            "attention_gate": "query",
        }
    scales = (config.plt_emb_scale, config.plt_hidden_scale)
    embedding_scale, state_scale = (1.0 if scale is None else float(scale) for scale in scales)
    return common | {
        "input": LoopInput("add", embedding_scale, state_scale, shift=1),
        "norm_each_loop": config.plt_normalize_per_loop,
        "window": config.plt_window_size[0] + 1,  # the configuration counts what lies to the left of a token
        "attention_gate": "input" if config.plt_gate_use_hidden_states else "query",
    }
