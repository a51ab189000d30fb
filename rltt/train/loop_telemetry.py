"""What each loop does while a run trains: some of the measures of `rltt diagnose`, on a few held-out texts.

The texts are the same at every step, so that what changes is the policy. They are shared by the processes, and each is
measured alone: the numbers are those of one process.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.sources import spread
from ..diagnostics.light import LIGHT, measure_lightly
from ..processes import everyones, share_of
from .pretrain import with_responses
from .sharding import sampling

TEXTS = 8
TOKENS = 512
"""Of a text at most: the effective rank costs their cube."""


class LoopTelemetry(TrainerCallback):
    """Measures `loop{t}/step_size` and the others of `LIGHT` every so many steps: means over the texts.

    Args:
        trainer: an `RLTTTrainer`.
        texts: token ids, of `held_out_texts`.
        report: receives the name and the value of each metric.
    """

    def __init__(self, trainer: Any, texts: list[Tensor], every: int, report: Callable[[str, float], None]) -> None:
        self.trainer = trainer
        self.texts = texts
        self.every = every
        self.report = report

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        start = time.perf_counter()
        with sampling(self.trainer):
            mine = [measure_lightly(self.trainer.policy, self.texts[index]) for index in share_of(self.texts)]
        every = [text for share in everyones(mine) for text in share]
        for name in LIGHT:
            for loop, value in enumerate(torch.stack([text[name] for text in every]).mean(0).tolist(), start=1):
                if loop >= FIRST_LOOP.get(name, 1):
                    self.report(f"loop{loop}/{name}", value)
        self.report("seconds/diagnose", time.perf_counter() - start)


FIRST_LOOP = {"cos_theta": 2, "output_kl": 2}
"""Where a measure compares with the loop before, it begins at the second."""


def held_out_texts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, positions: int) -> list[Tensor]:
    """`TEXTS` rows, evenly spread: each prompt with its response, or with its gold where rows have no responses.

    Args:
        dataset: of `build_dataset`.
        positions: of the policy.
    """
    rows = dataset.select(spread(range(len(dataset)), TEXTS))
    answer = "response" if "response" in rows.column_names else "gold"
    return [
        torch.tensor([*prompt, *response][: min(TOKENS, positions)])
        for prompt, response in with_responses(rows, answer, tokenizer)
    ]
