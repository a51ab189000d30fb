"""Completions from transformers' `generate` on the policy itself, leaving no trace on a training run.

Shapes: B rows of a batch, S positions of the longest prompt in it, C completion tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rltt.data import prompt_ids
from rltt.models.looped import LoopedForCausalLM

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        text: decoded without special tokens.
        truncated: no stop token came before the length limit.
        tokens: the completion's token ids, with the stop token that ended it.
    """

    text: str
    truncated: bool
    tokens: tuple[int, ...]


def generate(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    num_generations: int,
    temperature: float,
    max_completion_length: int,
    batch_size: int,
    stop_token_ids: list[int],
    loops: int | None = None,
    seed: int,
) -> list[list[Completion]]:
    """`num_generations` completions of each prompt, in the prompts' order.

    Changes neither the model (mode, depth, generation defaults) nor the state of torch's random numbers. Runs under
    the caller's autocast.

    Args:
        prompts: all text, or all chat messages.
        temperature: 0 is greedy decoding, whose completions of one prompt are all the same.
        max_completion_length: in tokens, the stop token included.
        batch_size: completions generated at once. Greedy completions do not depend on it; sampled ones do, as all
            rows of a batch draw from one stream of random numbers.
        stop_token_ids: what ends a completion; see `rltt.models.load.stop_token_ids`.
        loops: depth T for these completions; None is the model's own.
    """
    if not prompts:
        return []
    ids = prompt_ids(prompts, tokenizer)
    copies = 1 if temperature == 0 else num_generations
    # Neighbours in length share a batch, which spares padding. Longest first: if memory is short, it shows at once.
    rows = sorted((index for index in range(len(ids)) for _ in range(copies)), key=lambda index: -len(ids[index]))
    pad = stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = _generation_config(temperature, max_completion_length, stop_token_ids, pad)

    groups: list[list[Completion]] = [[] for _ in prompts]
    with _sampling_from(model, loops), _own_random_numbers(model.device, seed), torch.no_grad():
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            input_ids, attention_mask = _pad_left([ids[index] for index in batch], pad)
            output = model.generate(
                input_ids=input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                generation_config=config,
            )
            for index, tokens in zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True):
                groups[index].append(_completion(tokenizer, tokens, stop_token_ids))
    return [group * (num_generations // copies) for group in groups]


def _generation_config(temperature: float, max_new_tokens: int, stop_token_ids: list[int], pad: int) -> Any:
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # transformers' own top_k is 50; completions have to come from the distribution that is scored.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    return GenerationConfig(
        **sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_token_ids,
        pad_token_id=pad,
        disable_compile=True,
    )


@contextmanager
def _sampling_from(model: LoopedForCausalLM, loops: int | None) -> Iterator[None]:
    """Make the model ready to sample at a depth, and put everything back."""
    training, depth, defaults = model.training, model.loop_spec.loops, model.generation_config
    # In training mode, gradient checkpointing would drop the cache. A checkpoint's generation defaults (min_p, a
    # repetition penalty, ...) would fill in whatever our configuration leaves open.
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        if loops is not None:
            model.set_loops(loops)
        yield
    finally:
        model.train(training)
        model.set_loops(depth)
        model.generation_config = defaults


@contextmanager
def _own_random_numbers(device: torch.device, seed: int) -> Iterator[None]:
    """`generate` draws from torch's global state: seed it here, and give the caller's back."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _pad_left(ids: list[list[int]], pad: int) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Input ids and attention mask."""
    longest = max(map(len, ids))
    padded = [[pad] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    return torch.tensor(padded), torch.tensor(mask)


def _completion(tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop_token_ids: list[int]) -> Completion:
    """Cut a row of generated tokens after its first stop token: what follows is padding."""
    length = next((position for position, token in enumerate(tokens, start=1) if token in stop_token_ids), None)
    kept = tokens[:length]
    return Completion(tokenizer.decode(kept, skip_special_tokens=True), length is None, tuple(kept))
