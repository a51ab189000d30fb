"""LoopLM pretraining on prompts with responses: the job of `rltt pretrain`, and the warm start before RL.

Σ_t p_t·CE_t + β·KL(p ‖ uniform) over response tokens (../objective/looplm.py), warmup and cosine decay. The loss does
not show when the gate collapses onto the first loop, so the exit distribution is measured and a collapse is said. A
model without a gate (a Parallel Loop Transformer) learns by its last loop, with ε of the loss spread over all.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as HFTrainingArguments

from ..data import prompt_ids
from ..errors import DataError
from ..models.load import end_of_response_id
from ..models.looped import LoopedForCausalLM, Score
from ..objective.looplm import last_loop_token_loss, looplm_token_loss
from .faults import GuardedTrainer
from .token_means import TokenMeans

GATE_COLLAPSE = 0.95
"""Mean exit probability of the first loop above which later loops hardly learn (Closing the Loop, section 3.3)."""


class GateCollapseWarning(UserWarning):
    """The exit gate sends nearly all tokens out after the first loop."""


class LoopLMTrainer(GuardedTrainer):
    """transformers' Trainer with the LoopLM objective. Rows are those of `tokenize_responses`.

    Args:
        beta: weight of KL(p ‖ uniform).
        epsilon: share of the loss that is spread evenly over the loops.
    """

    def __init__(self, model: LoopedForCausalLM, *, beta: float, epsilon: float, **kwargs: Any) -> None:
        super().__init__(model=model, **kwargs)
        self.beta = beta
        self.epsilon = epsilon
        self._token_means = TokenMeans()
        self._collapse_said = False

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Float[Tensor, ""]:
        labels = inputs["labels"]
        output = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels, score=Score()
        )
        mask = (labels[:, 1:] != -100).float()
        cross_entropy = -output.scores.log_probs
        for t in range(cross_entropy.shape[-1]):
            self._token_means.add(f"loop{t + 1}/loss", cross_entropy[..., t].detach(), mask)
        if output.exit_log_pdf is None:
            token_loss = last_loop_token_loss(cross_entropy, self.epsilon)
        else:
            exit_log_pdf = output.exit_log_pdf[:, :-1]
            token_loss = looplm_token_loss(cross_entropy, exit_log_pdf, self.beta, self.epsilon)
            for t in range(cross_entropy.shape[-1]):
                self._token_means.add(f"loop{t + 1}/exit_prob", exit_log_pdf[..., t].detach().exp(), mask)
        tokens = mask.sum() if num_items_in_batch is None else num_items_in_batch
        return (token_loss * mask).sum() / tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs |= self._token_means.pop(self.accelerator)
        collapsed = logs.get("loop1/exit_prob", 0.0) > GATE_COLLAPSE and self.model.loop_spec.loops > 1
        if collapsed and not self._collapse_said:
            self._collapse_said = True
            warnings.warn(
                f"step {self.state.global_step}: the exit gate has collapsed, {logs['loop1/exit_prob']:.0%} of the "
                "probability leaves after loop 1 and later loops stop learning; the loss does not show it. Raise "
                "pretrain.beta or pretrain.warmup_steps",
                GateCollapseWarning,
                stacklevel=2,
            )
        super().log(logs, start_time)


class StopWhen(TrainerCallback):
    """Ends training as soon as `reached()` says so, asked every `every` steps."""

    def __init__(self, reached: Callable[[int], bool], every: int) -> None:
        self.reached = reached
        self.every = every

    def on_step_end(
        self, args: HFTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.every == 0 and self.reached(state.global_step):
            control.should_training_stop = True


def tokenize_responses(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Rows of `input_ids` and `labels` from the columns `prompt` and `response`; only the response is learned.

    The prompt is tokenized as for a rollout, and the response ends with the token that ends a completion.

    Raises:
        DataError: there is no response, or a row is longer than `max_length` tokens.
    """
    if "response" not in dataset.column_names:
        raise DataError("the LoopLM objective needs a response in every row: name its column in data.columns.response")
    rows = with_responses(dataset, "response", tokenizer)
    for (prompt, response), where in zip(rows, dataset["row"], strict=True):
        if len(prompt) + len(response) > max_length:
            raise DataError(
                f"{where}: prompt and response have {len(prompt) + len(response)} tokens, more than the "
                f"{max_length} positions of the model"
            )
    return Dataset.from_dict(
        {
            "input_ids": [prompt + response for prompt, response in rows],
            "labels": [[-100] * len(prompt) + response for prompt, response in rows],
        }
    )


def with_responses(
    dataset: Dataset, column: str, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Token ids of each prompt, as for a rollout, and of its response, with the token that ends a completion."""
    end = end_of_response_id(tokenizer, chat=not isinstance(dataset[0]["prompt"], str))
    prompts = prompt_ids(dataset["prompt"][:], tokenizer)
    responses = tokenizer(dataset[column][:], add_special_tokens=False)["input_ids"]
    return [(prompt, [*response, end]) for prompt, response in zip(prompts, responses, strict=True)]


def pad_collator(pad_token_id: int) -> Callable[[Sequence[dict[str, list[int]]]], dict[str, Tensor]]:
    """Batches of rows, padded on the right."""

    def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        def padded(values: list[list[int]], fill: int) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(value) for value in values], batch_first=True, padding_value=fill
            )

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(ids, pad_token_id),
            "attention_mask": padded([[1] * len(value) for value in ids], 0),
            "labels": padded([row["labels"] for row in rows], -100),
        }

    return collate
