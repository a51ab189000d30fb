"""Fixtures that several files share. Nothing here imports torch before a test asks for it."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARED_DATA = Path(__file__).parents[1] / ".." / "shared" / "data"


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


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Trainers call `gc.collect` at every start, which would visit all of torch and transformers each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
