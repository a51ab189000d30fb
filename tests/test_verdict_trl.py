"""The verdict on runs of plain TRL: a dense model, GRPOTrainer as it comes, its own trainer_state.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from typer.testing import CliRunner

from rltt.cli.main import app

pytestmark = pytest.mark.usefixtures("quick_collections")


def many_a(completions: list[str], **kwargs: Any) -> list[float]:
    """Easy to learn: whether a certain word is in the completion."""
    return [float("apples" in text) for text in completions]


def trained(folder: Path, tokenizer: PreTrainedTokenizerFast, learning_rate: float) -> Path:
    """A run of twelve steps, and its last checkpoint."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    args = GRPOConfig(
        str(folder / "out"),
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        beta=0.001,
        max_steps=12,
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=24,
        logging_steps=1,
        save_steps=12,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": [f"Ann has {n} books and buys {n} more." for n in range(2, 10)] * 4})
    trainer = GRPOTrainer(str(folder / "model"), many_a, args, prompts, processing_class=tokenizer)
    trainer.train()
    return folder / "out" / "checkpoint-12" / "trainer_state.json"


@pytest.mark.parametrize(
    ("learning_rate", "verdict", "cause"),
    [(1e-6, "stalled", "learning_rate_too_small"), (1e-2, "moving", None)],
)
def test_a_plain_trl_run_is_judged_by_its_own_log(
    learning_rate: float, verdict: str, cause: str | None, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    state = trained(tmp_path, tokenizer, learning_rate)
    result = CliRunner().invoke(app, ["verdict", "--trl", str(state), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["verdict"], found["cause"]) == (verdict, cause), result.stdout
    assert "solve_rate" in found["missing"]
    if cause is not None:
        assert found["change"]["override"].startswith("train.learning_rate=")
