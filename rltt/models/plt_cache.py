"""The cache of a Parallel Loop Transformer: O(L·S·D) whatever the number of loops, and windows.

Shapes: B sequences, R loops, L layers, M key-value heads, W = w-1 positions kept of a window of w, D channels of a
head, H hidden.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

# Of one layer. One tensor when all loops of a position run at once, a list when they run one after another: nothing is
# written in place, so that a gradient may pass.
Windows = Float[Tensor, "R-1 B M W D"] | list[Float[Tensor, "B M W D"]]


class PLTCache(Cache):
    """Loop 1 keeps keys and values of all positions. Each later loop keeps, of every layer, those of the last W
    positions; the window of the next token is these and the token itself. For the shift, every loop but the last keeps
    its state at the last position.

    Positions before the first token are zeros, which `window_mask` hides.

    Args:
        layers: L.
        loops: R.
        window: w, positions that a later loop sees, the token's own included.

    Attributes:
        window_keys, window_values: the windows of each layer, or None as long as there is nothing.
        last_states: [B, R-1, H], or None as long as there is nothing.
    """

    def __init__(self, layers: int, loops: int, window: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])
        self.loops = loops
        self.kept = window - 1
        self.window_keys: list[Windows | None] = [None] * layers
        self.window_values: list[Windows | None] = [None] * layers
        self.last_states: Tensor | None = None

    def update_window(
        self, keys: Float[Tensor, "B M S D"], values: Float[Tensor, "B M S D"], layer: int, loop: int
    ) -> tuple[Float[Tensor, "B M K D"], Float[Tensor, "B M K D"]]:
        """Take the new positions of one loop (from 1, the second); returns the W positions before them with them."""
        self._begin(keys, layer)
        past_keys, past_values = _by_loop(self.window_keys[layer]), _by_loop(self.window_values[layer])
        all_keys = torch.cat([past_keys[loop - 1], keys], dim=-2)
        all_values = torch.cat([past_values[loop - 1], values], dim=-2)
        past_keys[loop - 1], past_values[loop - 1] = self._last(all_keys), self._last(all_values)
        self.window_keys[layer], self.window_values[layer] = past_keys, past_values
        return all_keys, all_values

    def update_windows(
        self, keys: Float[Tensor, "R-1 B M 1 D"], values: Float[Tensor, "R-1 B M 1 D"], layer: int
    ) -> tuple[Float[Tensor, "R-1 B M w D"], Float[Tensor, "R-1 B M w D"]]:
        """Take one new position of all loops after the first; returns their whole windows."""
        self._begin(keys[0], layer)
        all_keys = torch.cat([_stacked(self.window_keys[layer]), keys], dim=-2)
        all_values = torch.cat([_stacked(self.window_values[layer]), values], dim=-2)
        self.window_keys[layer], self.window_values[layer] = self._last(all_keys), self._last(all_values)
        return all_keys, all_values

    def states_before(self, embeddings: Float[Tensor, "B S H"]) -> Float[Tensor, "B R-1 H"]:
        """The states of loops 1 to R-1 at the position before the new ones: zeros before the first token."""
        if self.last_states is None:
            return embeddings.new_zeros(len(embeddings), self.loops - 1, embeddings.shape[-1])
        return self.last_states

    def _begin(self, keys: Float[Tensor, "B M S D"], layer: int) -> None:
        """Nothing before the first token: zeros."""
        if self.window_keys[layer] is None:
            batch, heads, _, channels = keys.shape
            nothing = keys.new_zeros(self.loops - 1, batch, heads, self.kept, channels)
            self.window_keys[layer] = self.window_values[layer] = nothing

    def _last(self, positions: Float[Tensor, "... K D"]) -> Float[Tensor, "... W D"]:
        return positions[..., positions.shape[-2] - self.kept :, :]

    # ------------------------------------------------------------------------------- what generation does with a cache

    def reset(self) -> None:
        super().reset()
        self._each(torch.zeros_like, torch.zeros_like)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda window: window.index_select(1, beam_idx), lambda state: state.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(
            lambda window: window.repeat_interleave(repeats, dim=1),
            lambda state: state.repeat_interleave(repeats, dim=0),
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda window: window[:, indices], lambda state: state[indices])

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("the cache of a Parallel Loop Transformer cannot forget its last tokens: windows have no past")

    def _each(self, of_window: Any, of_state: Any) -> None:
        self.window_keys = [None if keys is None else of_window(_stacked(keys)) for keys in self.window_keys]
        self.window_values = [None if values is None else of_window(_stacked(values)) for values in self.window_values]
        self.last_states = None if self.last_states is None else of_state(self.last_states)


def _stacked(windows: Windows | None) -> Float[Tensor, "R-1 B M W D"]:
    assert windows is not None
    return torch.stack(windows) if isinstance(windows, list) else windows


def _by_loop(windows: Windows | None) -> list[Float[Tensor, "B M W D"]]:
    assert windows is not None
    return windows if isinstance(windows, list) else list(windows.unbind())
