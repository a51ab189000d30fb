"""Faults planted in a run are caught by the parity gate and named: here with transformers' `generate` as the engine.

What only a second engine can get wrong (weights, its dtype and depth) is planted in a real one: test_vllm_faults.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer
from rltt.cli.main import app
from rltt.errors import ParityError
from rltt.models.exit_gate import ExitGate
from rltt.models.looped import read_out
from rltt.models.spec import Readout

pytestmark = pytest.mark.usefixtures("quick_collections")


def score(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


@pytest.fixture
def trainer(tiny_ouro: Path, tmp_path: Path) -> RLTTTrainer:
    policy = load_policy(str(tiny_ouro))
    with torch.no_grad():  # a freshly made model is nearly the same at each depth
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = RLTTConfig(
        str(tmp_path / "out"),
        credit="uniform",
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        temperature=0.8,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": ["ada has 3 apples and gets 4 more .", "2 + 3 ="] * 8})
    return RLTTTrainer(policy, score, config, data, processing_class=load_tokenizer(str(tiny_ouro)))


def test_a_healthy_run_passes_and_is_measured_at_each_step(trainer: RLTTTrainer) -> None:
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["parity/tokens"] > 50
        assert 0 < row["parity/max"] < 1e-5  # with a cache and without one are not the same to the last bit
        assert row["parity/raw_ratio"] == pytest.approx(1, abs=1e-5)


def plant_temperature(trainer: RLTTTrainer) -> None:
    trainer.generation_config.temperature = 1.0


def plant_top_k(trainer: RLTTTrainer) -> None:
    trainer.generation_config.top_k = 5


def plant_early_stop(trainer: RLTTTrainer) -> None:
    trainer.generation_config.eos_token_id = [*trainer.eos_token_ids, *range(5, 40)]


def plant_other_depth(trainer: RLTTTrainer) -> None:
    generate = trainer._generate_single_turn

    def shallow(*args: Any, **kwargs: Any) -> Any:
        trainer.policy.set_loops(2)
        try:
            return generate(*args, **kwargs)
        finally:
            trainer.policy.set_loops(3)

    trainer._generate_single_turn = shallow


def plant_gate_exit(trainer: RLTTTrainer) -> None:
    """Rollouts leave at each token's own loop; scoring reads the last."""
    backbone, generate = trainer.policy.model, trainer._generate_single_turn
    gate = backbone.early_exit_gate
    assert isinstance(gate, ExitGate)
    with torch.no_grad():
        gate.weight.normal_()
    forward = backbone.forward

    def exiting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = read_out(list(output.loop_states), output.gate_logits, Readout(0.5).threshold)
        return output

    def adaptive(*args: Any, **kwargs: Any) -> Any:
        backbone.forward = exiting
        try:
            return generate(*args, **kwargs)
        finally:
            backbone.forward = forward

    trainer._generate_single_turn = adaptive


def plant_padding(trainer: RLTTTrainer) -> None:
    """Scoring takes the padding on the left for text."""
    rate = trainer._score

    def unmasked(model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return rate(model, ids, torch.ones_like(mask), *args, **kwargs)

    trainer._score = unmasked


def plant_half_precision(trainer: RLTTTrainer) -> None:
    generate = trainer._generate_single_turn

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return generate(*args, **kwargs)

    trainer._generate_single_turn = rounded


def plant_other_tokens(trainer: RLTTTrainer) -> None:
    """Completions go through text, and come back as other tokens."""
    generate = trainer._generate_single_turn

    def through_text(*args: Any, **kwargs: Any) -> Any:
        completions, log_probs = generate(*args, **kwargs)
        return [[row[0], *row] for row in completions], [[numbers[0], *numbers] for numbers in log_probs]

    trainer._generate_single_turn = through_text


@pytest.mark.parametrize(
    ("plant", "culprit"),
    [
        (plant_temperature, "temperature: the log-probs of the rollout engine are those of temperature 1,"),
        (plant_top_k, "truncated sampling: the rollout engine keeps only the most probable tokens"),
        (plant_early_stop, "stop tokens: a completion ends after"),
        (plant_other_depth, "depth: the log-probs of the rollout engine are those of depth 2"),
        (plant_gate_exit, "adaptive exit: the rollout engine reads each token at its own loop"),
        (plant_padding, "left padding: the training path is right on rows without padding"),
        (plant_half_precision, "dtype: the rollout engine differs by"),
        (plant_other_tokens, "tokenizer round trip: a completion has"),
    ],
)
def test_a_fault_stops_the_run_before_its_first_update_and_is_named(
    trainer: RLTTTrainer, plant: Callable[[RLTTTrainer], None], culprit: str
) -> None:
    plant(trainer)
    before = trainer.policy.lm_head.weight.clone()
    with pytest.raises(ParityError) as error:
        trainer.train()
    assert str(error.value).splitlines()[1].startswith(culprit)
    assert torch.equal(trainer.policy.lm_head.weight, before)


def test_the_gate_comes_back_after_some_rollouts(trainer: RLTTTrainer) -> None:
    trainer.parity_gate.every = 2
    trainer.args.max_steps = 4
    generate = trainer._generate_single_turn

    def hot_after_the_first(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step:
            plant_temperature(trainer)
        return generate(*args, **kwargs)

    trainer._generate_single_turn = hot_after_the_first
    with pytest.raises(ParityError, match="temperature"):
        trainer.train()
    assert trainer.state.global_step == 2  # the second rollout is measured, the third is checked
    assert trainer.state.log_history[1]["parity/max"] > 0.01


RECIPE = """
name: doctor
policy: {new: {hidden_size: 32, intermediate_size: 48, num_attention_heads: 2, max_position_embeddings: 96}, loops: 2}
data: {train: {path: arithmetic, size: 64}}
rewards: [math]
rollout: {num_generations: 4, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 100, learning_rate: 1.0e-3, seed: 0}
"""


def test_doctor_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = CliRunner().invoke(app, ["doctor", "recipe.yaml", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["culprit"] is None
    assert report["parity"]["max"] < 1e-5
    assert report["parity"]["tokens"] == sum(part["tokens"] for part in report["rollouts"])
    assert len(report["rollouts"]) == 2
    assert [depth["loop"] for depth in report["depths"]] == [1, 2]
    assert report["depths"][0]["max"] > 0.01 > report["depths"][1]["max"]
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]  # nothing is written


def test_doctor_ends_with_status_1_at_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    start = RLTTTrainer.train

    def with_fault(self: RLTTTrainer) -> Any:
        plant_top_k(self)
        return start(self)

    monkeypatch.setattr(RLTTTrainer, "train", with_fault)
    result = CliRunner().invoke(app, ["doctor", "recipe.yaml"])
    assert result.exit_code == 1
    assert "culprit: truncated sampling" in result.stdout
