"""Fixtures that several files share. Nothing here imports torch before a test asks for it."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARED_DATA = Path(__file__).parents[1] / ".." / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Trackio takes one folder a process, when it is imported: that of the tests is set before any of them is."""
    os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="rltt-trackio-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["TRACKIO_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data sets and golden checkpoints that lie beside the repository, not in it."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the data in ../shared/data")
    return SHARED_DATA.resolve()


@pytest.fixture(scope="session")
def tokenizer() -> "PreTrainedTokenizerFast":
    """The word-level tokenizer of the arithmetic problems: no chat template, pads on the left."""
    from rltt.data.tokenizer import arithmetic_tokenizer

    return arithmetic_tokenizer()


@pytest.fixture(scope="session")
def tiny_ouro(tmp_path_factory: pytest.TempPathFactory, tokenizer: "PreTrainedTokenizerFast") -> Path:
    """A checkpoint folder: a random LoopLM of 2 layers and 3 loops with grouped key-value heads, and its tokenizer."""
    import torch

    from rltt.models.configuration import OuroConfig
    from rltt.models.looplm import OuroForCausalLM

    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        total_ut_steps=3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny_ouro")
    OuroForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TINY_RECIPE = """\
name: tiny
policy:
  new:
    {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}
  loops: 2
data:
  train: {path: arithmetic, difficulty: 1, size: 64}
  eval: {path: arithmetic, difficulty: 1, size: 8, split: test}
rewards: ["letters.py:letters", math]
rollout: {num_generations: 4, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 3, learning_rate: 1.0e-3}
evaluate: {every: 2, num_generations: 2}
"""


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that trains in a second. Its first reward is met by two completions in seven, by chance."""
    folder = tmp_path_factory.mktemp("tiny_recipe")
    (folder / "letters.py").write_text(
        "def letters(completions, **kwargs):\n    return [sum(map(ord, text)) % 7 / 5 for text in completions]\n"
    )
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    return folder / "tiny.yaml"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path) -> Path:
    """The run directory of a finished run of `tiny_recipe`. Not to be written to."""
    from rltt.recipe import load_recipe
    from rltt.train import run

    return run.train(load_recipe(tiny_recipe, [f"run_dir={tmp_path_factory.mktemp('tiny_runs') / 'tiny'}"]))


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Trainers call `gc.collect` at every start, which would visit all of torch and transformers each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
