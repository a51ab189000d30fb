"""The work of `rltt diagnose`: text and policy in, a folder of numbers, tables and plots out."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from .. import __version__
from ..data.sources import some
from ..errors import UserError
from ..files import write_text
from ..models.load import load_config, load_policy, load_tokenizer
from ..models.looped import LoopedForCausalLM
from ..recipe import DataSource
from .measures import MEASURES, Accumulator, batches, measure_batch, optional
from .plots import write_plots
from .recommend import recommend
from .report import Diagnosis, shares_of
from .texts import read_texts, token_ids


def run_diagnose(
    model: str,
    source: DataSource,
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    max_length: int = 2048,
    loops: int | None = None,
    batch_size: int = 1,
) -> Diagnosis:
    """Measure a checkpoint on held-out text; write `out` and print the tables.

    Args:
        columns: of a row, that make its text; None finds them (`read_texts`).
        limit: texts, evenly spread over the source.
        max_length: tokens of a text at most; the policy's positions are a limit too.
        loops: depth; None is the checkpoint's own.
        batch_size: texts that go through the policy at once.

    Raises:
        UserError: whatever is wrong with these, before the weights load where that can be known.
    """
    refuse_former(out)
    texts = read_texts(source, columns)
    config = load_config(model)
    tokenizer = load_tokenizer(model) if texts.need_tokenizer else None
    max_length = min(max_length, config.max_position_embeddings)
    sequences, short = token_ids(texts, tokenizer, config.vocab_size, max_length, limit)
    policy = load_policy(model)
    stored = getattr(config, "dtype", None)
    trained = policy.loop_spec.loops
    policy.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    depth = trained if loops is None else loops

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{model}: {depth} loops, {len(sequences)} texts of {source.path} ({texts.kind})", markup=False)
    if short:
        console.print(f"left out, too short: {len(short)} ({some(short)})", markup=False)
    if depth > trained:
        console.print(f"deeper than the {trained} loops it was trained with")
    about = {
        "model": model,
        "model_type": policy.config.model_type,
        "trained_loops": trained,
        "data": source.model_dump(exclude_defaults=True) | {"kind": texts.kind},
        "samples": len(sequences),
        "max_length": max_length,
        "stored_dtype": None if stored is None else str(stored).removeprefix("torch."),
        "measured_dtype": str(policy.dtype).removeprefix("torch."),
        "rltt": __version__,
    }
    diagnosis = diagnose(policy, sequences, depth, batch_size, about, trained, console)
    write(diagnosis, out)
    for table in diagnosis.rich_tables():
        console.print(table, soft_wrap=False)
    console.print(diagnosis.advice(), markup=False)
    for line in diagnosis.recommendation.limits:
        console.print(f"  {line}", markup=False)
    console.print(f"written: {out}", markup=False)
    return diagnosis


def diagnose(
    policy: LoopedForCausalLM,
    sequences: Sequence[Tensor],
    loops: int,
    batch_size: int = 1,
    about: dict[str, Any] | None = None,
    trained_loops: int | None = None,
    console: Console | None = None,
) -> Diagnosis:
    """Measure a policy in memory (fp32, in eval mode) on token ids. Sequences stream: only means are kept.

    Raises:
        PolicyError: as `measure_batch`.
    """
    found = Accumulator()
    silent = Console(quiet=True) if console is None else console
    steps = -(-len(sequences) // batch_size)
    for batch in track(batches(sequences, batch_size), "measuring", total=steps, console=silent, transient=True):
        for sequence in measure_batch(policy, batch, loops):
            found.add(sequence)
    rows, errors = (_rows(found, what, loops) for what in (found.measures.mean, found.measures.stderr))
    total_peaks = found.peaks.sum().item()
    shares = {
        "output": shares_of([row["output_kl"] for row in rows[1:]]),
        "attention": shares_of([row["attention_kl"] for row in rows[1:]]),
        "peak": [peak / total_peaks for peak in found.peaks[1:].tolist()],
    }
    ranks = [row["effective_rank"] for row in rows]
    spec = policy.loop_spec
    return Diagnosis(
        about=(about or {}) | {"tokens": found.tokens},
        loops=rows,
        stderr=errors,
        shares=shares,
        peak_loop=None if loops == 1 else int(found.peaks.argmax()) + 1,
        embedding_rank=found.embedding_rank.mean.item(),
        similarity=found.similarity.mean.tolist(),
        recommendation=recommend(
            ranks,
            found.rank_changes.mean.tolist(),
            optional(found.rank_changes.stderr),
            samples=len(sequences),
            trained_loops=spec.loops if trained_loops is None else trained_loops,
            offset=spec.input.shift > 0,
        ),
    )


def _rows(found: Accumulator, what: Tensor, loops: int) -> list[dict[str, Any]]:
    by_name = found.of_loops(what)
    return [{"loop": r + 1} | {name: by_name[name][r] for name in MEASURES} for r in range(loops)]


def refuse_former(out: Path) -> None:
    """Raises `UserError` where `out` holds something, or cannot be made."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already and is not overwritten; name another folder, or remove it")
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"--out {out}: {folder} is a file, not a folder")


def write(diagnosis: Diagnosis, out: Path) -> None:
    """The folder of a diagnosis, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    text = json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(partial / "diagnostics.json", text + "\n")
    pictures = write_plots(diagnosis, partial)
    shown = "\n\n".join(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in pictures)
    write_text(partial / "diagnostics.md", f"{diagnosis.markdown()}\n{shown}\n")
    refuse_former(out)
    partial.rename(out)
