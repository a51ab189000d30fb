"""A Parallel Loop Transformer in plain float64, one sequence at a time, to test the library's models against.

Written from the published facts (LoopCoder-v2: arXiv 2606.18023, section 2.2; IQuest-Coder-Loop v1) over a raw state
dict and the raw fields of a configuration. No cache, no batch, no mask: a query is given the keys that it may see.

Shapes: S positions, H hidden, V vocabulary, D head dimension.
"""

from dataclasses import dataclass

import torch
from plain_decoder import PlainDecoder
from torch import Tensor


@dataclass
class PlainPLT(PlainDecoder):
    """Weights under their names in the checkpoint, and the numbers of its configuration."""

    a: float = 1.0
    b: float = 1.0
    left: int = 64
    normalize: bool = True
    shifts: bool = True

    @classmethod
    def of(cls, model: torch.nn.Module) -> "PlainPLT":
        plain, fields = PlainDecoder.of(model), model.config.to_dict()
        if fields["model_type"] == "iquestloopcoder":
            own = {"left": fields["loop_window_size"] - 1, "normalize": False, "shifts": False}
        else:
            own = {
                "a": 1.0 if fields["plt_emb_scale"] is None else fields["plt_emb_scale"],
                "b": 1.0 if fields["plt_hidden_scale"] is None else fields["plt_hidden_scale"],
                "left": fields["plt_window_size"][0],
                "normalize": fields["plt_normalize_per_loop"],
            }
        return cls(**vars(plain), **own)

    def loop_states(self, ids: Tensor, loops: int) -> list[Tensor]:
        """The normed state [S, H] after each loop."""
        embeddings = self.weights["model.embed_tokens.weight"][ids]
        x, first, states = embeddings, {}, []
        for loop in range(loops):
            if loop and self.shifts:
                x = self.a * embeddings + self.b * torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            for i in range(self.layers):
                name = f"model.layers.{i}."
                normed = self._norm(x, f"{name}input_layernorm.weight")
                query = self._heads(normed, f"{name}self_attn.q_proj", self.heads)
                key = self._heads(normed, f"{name}self_attn.k_proj", self.kv_heads)
                value = self._heads(normed, f"{name}self_attn.v_proj", self.kv_heads)
                query, key = (torch.stack([self._rotate(head) for head in heads]) for heads in (query, key))
                if loop == 0:
                    first[i] = key, value
                    attended = self._attend(query, key, value, left=len(ids))
                else:
                    g = self._attention_gate(i, x, query)[..., None]
                    attended = g * self._attend(query, *first[i], left=len(ids))
                    attended = attended + (1 - g) * self._attend(query, key, value, left=self.left)
                x = x + self._linear(attended.transpose(0, 1).flatten(1), f"{name}self_attn.o_proj")
                x = x + self._mlp(self._norm(x, f"{name}post_attention_layernorm.weight"), f"{name}mlp.")
            states.append(self._norm(x, "model.norm.weight"))
            x = states[-1] if self.normalize else x
        return states

    def _linear(self, x: Tensor, name: str) -> Tensor:
        product = x @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else product

    def _heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        return self._linear(x, name).view(len(x), heads, -1).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, left: int) -> Tensor:
        """[heads, S, D]: each query sees `left` positions before its own, and its own."""
        outputs = torch.empty_like(query)
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            for i in range(query.shape[1]):
                seen = slice(max(0, i - left), i + 1)
                scores = key[group, seen] @ query[head, i] / query.shape[-1] ** 0.5
                outputs[head, i] = torch.softmax(scores, 0) @ value[group, seen]
        return outputs

    def _attention_gate(self, layer: int, x: Tensor, query: Tensor) -> Tensor:
        """[heads, S]."""
        upstream = f"model.gate_projections.{layer}"
        name = upstream if f"{upstream}.weight" in self.weights else f"model.layers.{layer}.self_attn.plt_gate"
        if f"{name}.gate_norm.weight" in self.weights:
            logits = self._linear(self._norm(x, f"{name}.gate_norm.weight"), name).T
        else:
            weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            logits = (query * weight[:, None]).sum(-1) + bias[:, None]
        return 1 / (1 + torch.exp(-logits))
