"""The log-probs that transformers' `generate` drew its tokens with, recorded while it samples.

Shapes: B sequences, S positions so far, V vocabulary, C completion tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from ..models.looped import LoopedForCausalLM


class SampledLogProbs(LogitsProcessor):
    """Remembers the log-prob of each sampled token. Changes no score.

    `generate` shows a processor the scores before it draws from them, and the token only in the next step: one [B, V]
    table is kept until then.
    """

    def __init__(self) -> None:
        self._table: Float[Tensor, "B V"] | None = None
        self._columns: list[Float[Tensor, " B"]] = []

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        self._look_up(input_ids[:, -1])
        self._table = scores.log_softmax(-1)
        return scores

    def of(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probs of the completions that `generate` returned, cut to their lengths.

        Args:
            completions: token ids of each row of the batch, without what follows the stop token.
        """
        steps = len(self._columns) + 1  # the last token's is still in the table
        last = torch.tensor([row[steps - 1] if len(row) == steps else 0 for row in completions])
        assert self._table is not None
        self._look_up(last.to(self._table.device))
        columns = torch.stack(self._columns, dim=1).tolist()
        return [row[: len(tokens)] for row, tokens in zip(columns, completions, strict=True)]

    def _look_up(self, tokens: Int[Tensor, " B"]) -> None:
        if self._table is not None:
            self._columns.append(self._table.gather(-1, tokens[:, None]).squeeze(-1))


@contextmanager
def recorded_log_probs(model: LoopedForCausalLM) -> Iterator[SampledLogProbs]:
    """Let `model.generate` record inside of this context."""
    record, usual = SampledLogProbs(), model._get_logits_processor

    # transformers puts a caller's processors before temperature and the like; the record has to come last.
    def with_record(*args: object, **kwargs: object) -> LogitsProcessorList:
        return LogitsProcessorList([*usual(*args, **kwargs), record])

    model._get_logits_processor = with_record
    try:
        yield record
    finally:
        del model._get_logits_processor
