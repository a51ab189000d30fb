"""A looped decoder in plain float64, one sequence at a time, to test the library's models against.

Written from the published facts (Ouro: arXiv 2510.25741; looped dense: arXiv 2610.00673) over a raw state dict. It
shares no code with rltt or transformers.

Shapes: S positions, H hidden, V vocabulary, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PlainDecoder:
    """Weights under their names in the checkpoint, and the few numbers that the forward needs."""

    weights: dict[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    epsilon: float
    theta: float

    def __post_init__(self) -> None:
        self.weights = {name: weight.double() for name, weight in self.weights.items()}

    @classmethod
    def of(cls, model: torch.nn.Module) -> "PlainDecoder":
        """Read the weights, and from the configuration the numbers only, of a transformers model."""
        config = model.config
        return cls(
            weights=model.state_dict(),
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            epsilon=config.rms_norm_eps,
            theta=config.rope_parameters["rope_theta"],
        )

    def logits(self, state: Tensor) -> Tensor:
        """[S, H] normed state -> [S, V]."""
        return state @ self.weights["lm_head.weight"].T

    def gate(self, state: Tensor) -> Tensor:
        """[S, H] normed state -> [S], before the sigmoid."""
        weight, bias = self.weights["model.early_exit_gate.weight"], self.weights["model.early_exit_gate.bias"]
        return (state @ weight.T + bias)[:, 0]

    def loop_states(self, ids: Tensor, loops: int, norm_each_loop: bool = True, mixing: float | None = None) -> list:
        """The normed state [S, H] after each loop.

        Args:
            norm_each_loop: whether the next loop gets the normed state.
            mixing: w of `w·E + (1-w)·h`; None hands over h as it is.
        """
        embeddings = self.weights["model.embed_tokens.weight"][ids]
        entering, states = embeddings, []
        for _ in range(loops):
            x = entering
            for i in range(self.layers):
                x = self._layer(x, f"model.layers.{i}.")
            normed = self._norm(x, "model.norm.weight")
            states.append(normed)
            carried = normed if norm_each_loop else x
            entering = carried if mixing is None else mixing * embeddings + (1 - mixing) * carried
        return states

    def _layer(self, x: Tensor, name: str) -> Tensor:
        if f"{name}input_layernorm_2.weight" in self.weights:  # LoopLM: four norms
            attended = self._attention(self._norm(x, f"{name}input_layernorm.weight"), f"{name}self_attn.")
            x = x + self._norm(attended, f"{name}input_layernorm_2.weight")
            widened = self._mlp(self._norm(x, f"{name}post_attention_layernorm.weight"), f"{name}mlp.")
            return x + self._norm(widened, f"{name}post_attention_layernorm_2.weight")
        x = x + self._attention(self._norm(x, f"{name}input_layernorm.weight"), f"{name}self_attn.")
        return x + self._mlp(self._norm(x, f"{name}post_attention_layernorm.weight"), f"{name}mlp.")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.weights[name] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = x @ self.weights[f"{name}gate_proj.weight"].T
        up = x @ self.weights[f"{name}up_proj.weight"].T
        return (gate / (1 + torch.exp(-gate)) * up) @ self.weights[f"{name}down_proj.weight"].T

    def _attention(self, x: Tensor, name: str) -> Tensor:
        def project(letter: str, heads: int) -> Tensor:
            return (x @ self.weights[f"{name}{letter}_proj.weight"].T).view(len(x), heads, -1)

        queries, keys, values = project("q", self.heads), project("k", self.kv_heads), project("v", self.kv_heads)
        if f"{name}q_norm.weight" in self.weights:  # Qwen3
            queries, keys = self._norm(queries, f"{name}q_norm.weight"), self._norm(keys, f"{name}k_norm.weight")
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            query, key = self._rotate(queries[:, head]), self._rotate(keys[:, group])
            scores = (query @ key.T / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
            outputs.append(torch.softmax(scores, -1) @ values[:, group])
        return torch.cat(outputs, -1) @ self.weights[f"{name}o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary positions of [S, D]: channel i turns with channel i + D/2."""
        half = x.shape[-1] // 2
        speed = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )
