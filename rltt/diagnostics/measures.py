"""All measures of one sequence, and their means over many.

A measure of a sequence is a mean over its tokens (and heads, and layers), as the paper defines it; what is reported is
the mean over sequences, with its standard error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PolicyError
from ..models.looped import LoopedForCausalLM
from .attention import LayerAttention, mean_pairwise, measure_attention
from .forward import LoopStates, block_of_states, run_loops, watching
from .hidden import effective_rank, fixed_point_gap, offset_cost, step_size, update_alignment
from .outputs import OutputMeasures, measure_outputs

HIDDEN = ("step_size", "cos_theta", "effective_rank", "fixed_point_gap", "offset_cost")
ATTENTION = ("attention_entropy", "attention_kl", "head_effective_rank", "head_similarity", "gate_mean")
OUTPUTS = ("true_token_rank", "output_kl", "output_entropy")
MEASURES = (*HIDDEN, *ATTENTION, *OUTPUTS)


@dataclass
class SequenceMeasures:
    """Of one sequence; NaN where a measure does not exist.

    Attributes:
        tokens: of the sequence.
        by_loop: [R] for each of `MEASURES`.
        similarity: [R, N, N] cosines of head attentions, mean over layers.
        peaks: [R] tokens whose largest Δp^(r) is that of loop r.
        embedding_rank: effective rank of h^(0).
    """

    tokens: int
    by_loop: dict[str, Float[Tensor, " R"]]
    similarity: Float[Tensor, "R N N"]
    peaks: Float[Tensor, " R"]
    embedding_rank: float


def measure_batch(
    model: LoopedForCausalLM, sequences: Sequence[Int[Tensor, " S"]], loops: int
) -> list[SequenceMeasures]:
    """Every measure of each sequence, from one forward of `loops` loops and one of one more for the fixed points.

    Args:
        model: with weights in fp32 or higher.
        sequences: token ids, at least 2 each.

    Raises:
        PolicyError: 16-bit weights, or states that are not finite.
    """
    if model.dtype.itemsize < 4:
        raise PolicyError(f"diagnostics are measured in fp32, found weights in {model.dtype}: load the policy in fp32")
    lengths = [len(ids) for ids in sequences]
    batch = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(model.device)
    with torch.inference_mode(), torch.autocast(model.device.type, enabled=False):
        every = [_Attention(loops, model, len(ids)) for ids in sequences]
        with watching(model, lengths, lambda loop, layer, b, now, before: every[b].add(loop, now, before)) as watch:
            states = run_loops(model, batch, loops, **watch)
        images = block_of_states(model, states, loops)
        return [
            _measure_sequence(
                model,
                batch[b, :length],
                states.of(b, length),
                [image[b, :length] for image in images],
                every[b],
            )
            for b, length in enumerate(lengths)
        ]


def _measure_sequence(
    model: LoopedForCausalLM,
    ids: Int[Tensor, " S"],
    states: LoopStates,
    images: list[Float[Tensor, "S H"]],
    attention: "_Attention",
) -> SequenceMeasures:
    if not states.finite:
        raise PolicyError("the states of the policy are not finite: its weights are damaged, or overflow in fp32")
    by_loop, outputs = measure_states(model, ids, states, images)
    loops = len(states.normed)
    peaks = torch.zeros(loops, dtype=torch.float64)
    if loops > 1:
        peaks[1:] = torch.bincount(outputs.kl.argmax(-1).cpu(), minlength=loops - 1)
    found = attention.by_loop | by_loop
    return SequenceMeasures(
        tokens=len(ids),
        by_loop={name: found[name] for name in MEASURES},
        similarity=attention.similarity,
        peaks=peaks,
        embedding_rank=effective_rank(states.handed[0]).item(),
    )


def measure_states(
    model: LoopedForCausalLM, ids: Int[Tensor, " S"], states: LoopStates, images: list[Float[Tensor, "S H"]]
) -> tuple[dict[str, Float[Tensor, " R"]], OutputMeasures]:
    """The measures of `HIDDEN` and of `OUTPUTS` by loop, NaN where one does not exist; and the latter by position.

    Args:
        states: of one sequence; finite.
        images: of `block_of_states`.
    """
    h, loops = states.handed, len(states.normed)
    found = {name: torch.full((loops,), math.nan, dtype=torch.float64) for name in HIDDEN}
    for r in range(1, loops + 1):
        found["step_size"][r - 1] = step_size(h[r], h[r - 1])
        found["effective_rank"][r - 1] = effective_rank(h[r])
        if r <= len(images):
            found["fixed_point_gap"][r - 1] = fixed_point_gap(h[r], images[r - 1])
        if r >= 2:
            found["cos_theta"][r - 1] = update_alignment(h[r], h[r - 1], h[r - 2])
            if model.loop_spec.input.shift:
                found["offset_cost"][r - 1] = offset_cost(h[r - 1])
    outputs = measure_outputs(states.normed, model.lm_head, ids)
    nothing = torch.full((1,), math.nan, dtype=torch.float64)
    found["output_entropy"] = outputs.entropy.mean(0).cpu()
    found["output_kl"] = torch.cat([nothing, outputs.kl.mean(0).cpu()])
    found["true_token_rank"] = outputs.true_rank.mean(0).cpu()
    return found, outputs


class _Attention:
    """Means over the layers of one sequence, while they come in."""

    def __init__(self, loops: int, model: LoopedForCausalLM, positions: int) -> None:
        self.layers = model.loop_spec.layers
        heads = model.config.num_attention_heads
        self.similarity = torch.zeros(loops, heads, heads, dtype=torch.float64)
        self.by_loop = {name: torch.zeros(loops, dtype=torch.float64) for name in ATTENTION}

    def add(self, loop: int, now: LayerAttention, before: LayerAttention | None) -> None:
        measures = measure_attention(now, before)
        values = {
            "attention_entropy": measures.entropy,
            "attention_kl": measures.kl,
            "head_effective_rank": measures.head_effective_rank,
            "head_similarity": mean_pairwise(measures.head_similarity),
            "gate_mean": None if now.gate is None else now.gate.double().mean(),
        }
        for name, value in values.items():
            self.by_loop[name][loop] += math.nan if value is None else value.item() / self.layers
        self.similarity[loop] += measures.head_similarity.cpu() / self.layers


@dataclass
class RunningMean:
    """Mean and standard error of tensors that come one by one (Welford)."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, value: Tensor) -> None:
        self.count += 1
        off = value - self.mean
        self.mean = self.mean + off / self.count
        self.squares = self.squares + off * (value - self.mean)

    @property
    def stderr(self) -> Tensor:
        """Of the mean; NaN for a single value."""
        if self.count < 2:
            return torch.full_like(self.mean, math.nan)
        return (self.squares / (self.count - 1) / self.count).sqrt()


class Accumulator:
    """Takes sequences one by one and keeps means only."""

    def __init__(self) -> None:
        self.tokens = 0
        self.measures = RunningMean()
        self.rank_changes = RunningMean()
        self.embedding_rank = RunningMean()
        self.similarity = RunningMean()
        self.peaks = torch.zeros(())

    def add(self, sequence: SequenceMeasures) -> None:
        ranks = sequence.by_loop["effective_rank"]
        self.tokens += sequence.tokens
        self.measures.add(torch.stack([sequence.by_loop[name] for name in MEASURES]))
        self.rank_changes.add(ranks[1:] - ranks[:-1])
        self.embedding_rank.add(torch.tensor(sequence.embedding_rank, dtype=torch.float64))
        self.similarity.add(sequence.similarity)
        self.peaks = self.peaks + sequence.peaks

    def of_loops(self, what: Tensor) -> dict[str, list[float | None]]:
        """Rows of `measures.mean` or `measures.stderr` by name, None for NaN."""
        return {name: optional(row) for name, row in zip(MEASURES, what, strict=True)}


def optional(values: Tensor) -> list[float | None]:
    """NaN and infinity as None: JSON has neither."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def batches(sequences: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Sequences, so many at a time."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
