"""Parallel Loop Transformers through recipes, pretraining, RL and conversion."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_plt import PlainPLT
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainingArguments,
)
from typer.testing import CliRunner

from rltt import RLTTConfig
from rltt.cli.main import app
from rltt.data import build_dataset, read_problems
from rltt.errors import PolicyError, RecipeError
from rltt.evaluate import evaluate_policy
from rltt.models.configuration import IQuestPLTCoderConfig
from rltt.models.convert import convert_checkpoint, loop_dense_model
from rltt.models.load import load_policy, load_tokenizer
from rltt.models.plt import IQuestPLTCoderForCausalLM
from rltt.recipe import DataSource, load_recipe
from rltt.rewards import load_rewards
from rltt.train import run
from rltt.train.plan import count_parameters
from rltt.train.pretrain import LoopLMTrainer, pad_collator
from rltt.train.trainer import check_trainable, prepare_gradients

pytestmark = pytest.mark.usefixtures("quick_collections")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
RECIPE = """\
name: tiny-plt
policy:
  new: {family: plt, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2,
        max_position_embeddings: 64, window: 5}
  loops: 3
data:
  train: {path: arithmetic, difficulty: 1, size: 64}
  eval: {path: arithmetic, difficulty: 1, size: 8, split: test}
rewards: ["my_rewards.py:letters"]
objective: {credit: uniform}
rollout: {num_generations: 2, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 2, learning_rate: 1.0e-3}
evaluate: {num_generations: 2}
pretrain: {max_steps: 2, batch_size: 8}
"""
REWARDS = "def letters(completions, **kwargs):\n    return [sum(map(ord, text)) % 7 / 3 for text in completions]\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "r.yaml"


def new_plt(loops: int = 3, **fields: Any) -> IQuestPLTCoderForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    config = {**SIZES, **sizes, "plt_num_loops": loops, "plt_window_size": [3, 0], "initializer_range": 0.1, **fields}
    return IQuestPLTCoderForCausalLM(IQuestPLTCoderConfig(**config)).eval()


def arguments(**options: Any) -> RLTTConfig:
    return RLTTConfig("unused", report_to=[], bf16=False, use_cpu=True, **options)


def test_a_recipe_trains_a_new_plt_with_credit_to_every_loop(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = run.train(load_recipe(recipe_file, [f"run_dir={tmp_path / 'run'}"]))
    assert "no exit gate: pretraining is of the last loop" in " ".join(capsys.readouterr().out.split())
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert [row[f"loop{t}/credit"] for t in (1, 2, 3)] == pytest.approx([1 / 3] * 3)
        assert len({row[f"loop{t}/logp"] for t in (1, 2, 3)}) == 3
        assert row["grad_norm"] > 0
        assert not any("exit_prob" in key for key in row)
    policy = load_policy(str(path / "policy"))
    assert type(policy) is IQuestPLTCoderForCausalLM
    assert (policy.loop_spec.loops, policy.loop_spec.window) == (3, 6)
    start = load_policy(str(path / "start")).state_dict()
    assert all(not torch.equal(weight, start[name]) for name, weight in policy.state_dict().items())


def test_dry_run_counts_one_loop_of_keys_and_windows(recipe_file: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(recipe_file), "--dry-run"])
    assert done.exit_code == 0, done.output
    # 1 layer of 2 heads of 16 channels, keys and values in fp32: 256 B; 2 later loops keep 5 positions and their own.
    assert "256 B a token and 3.0 KiB of windows a sequence" in done.stdout


@pytest.mark.parametrize("reads_input", [True, False])
def test_parameters_are_counted_exactly(reads_input: bool) -> None:
    model = new_plt(plt_gate_use_hidden_states=reads_input)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model.config.to_dict(), looped=True) == counted


def test_credit_by_exit_is_refused_with_the_reason(recipe_file: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"objective\.credit: 'exit_pdf' weighs the loops by an exit gate, which a Par"
    ):
        load_recipe(recipe_file, ["objective.credit=exit_pdf"]).require("train")
    with pytest.raises(PolicyError, match="credit 'exit_pdf' needs an exit gate, which this model does not have"):
        check_trainable(new_plt(), arguments(credit="exit_pdf"), None)


@pytest.mark.parametrize(("loops", "trains"), [(1, False), (2, True)])
def test_gates_of_one_loop_are_frozen(loops: int, trains: bool) -> None:
    model = new_plt(loops)
    prepare_gradients(model, arguments(credit="uniform"))
    assert {p.requires_grad for gate in model.model.gates for p in gate.parameters()} == {trains}


@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_pretraining_without_a_gate_is_of_the_last_loop(tmp_path: Path, epsilon: float) -> None:
    model = new_plt(plt_hidden_scale=2.0)
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": [-100, *range(4, 3 + n)]} for n in (6, 9)]
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = LoopLMTrainer(model, beta=7.0, epsilon=epsilon, args=args, train_dataset=rows)
    found = trainer.compute_loss(model, pad_collator(0)(rows))
    plain, losses = PlainPLT.of(model), []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        logits = torch.stack([plain.logits(state) for state in plain.loop_states(ids, 3)])
        losses.append(-logits[:, :-1].log_softmax(-1).gather(-1, ids[None, 1:, None].expand(3, -1, -1))[..., 0])
    each = torch.cat(losses, dim=1).mean(-1)
    expected = (1 - epsilon) * each[-1] + epsilon * each.mean()
    assert found.item() == pytest.approx(expected.item(), abs=2e-5)
    assert abs(each[0] - each[-1]) > 1e-3


def test_pretraining_without_a_gate_learns_to_solve(recipe_file: Path, tmp_path: Path) -> None:
    changes = [
        *("policy.new.hidden_size=64", "policy.new.intermediate_size=168", "policy.new.num_attention_heads=4"),
        *("policy.new.window=64", "policy.loops=2", "data.train.size=2048", f"run_dir={tmp_path / 'run'}"),
        "pretrain={max_steps: 110, batch_size: 48, learning_rate: 1.0e-2, warmup_steps: 10, epsilon: 0.2}",
        *("train.save_steps=null", "rewards=[math]"),
    ]
    recipe = load_recipe(recipe_file, changes)
    run.pretrain(recipe)
    losses = [json.loads(line) for line in (tmp_path / "run" / "pretrain.jsonl").read_text().splitlines()]
    assert losses[-1]["loop2/loss"] < 0.1 * losses[0]["loop2/loss"]

    policy, tokenizer = (load(str(tmp_path / "run" / "policy")) for load in (load_policy, load_tokenizer))
    problems = read_problems(DataSource(path="arithmetic", size=64, split="test"), recipe.data)
    dataset, _ = build_dataset(problems, recipe.data, tokenizer)
    (reward,) = load_rewards(recipe.rewards)
    solved = [
        evaluate_policy(
            policy,
            tokenizer,
            dataset,
            reward,
            num_generations=1,
            temperature=0,
            max_completion_length=12,
            batch_size=64,
            stop_token_ids=[tokenizer.eos_token_id],
            seed=0,
            loops=loops,
        ).solve_rate
        for loops in (1, 2)
    ]
    assert solved[1] > 0.3
    assert solved[1] > solved[0] + 0.2  # the second loop does its part of the work


# ---------------------------------------------------------------------------------------------------------- conversion


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dense_for_plt")
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_convert_makes_a_plt_of_a_llama(dense_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "plt"
    convert_checkpoint(str(dense_folder), out, 3, mixing_init=0.9, norm_each_loop=False, family="plt", window=7)
    plt, dense = load_policy(str(out)), AutoModelForCausalLM.from_pretrained(dense_folder)
    assert type(plt) is IQuestPLTCoderForCausalLM
    spec, ids = plt.loop_spec, torch.arange(3, 20)[None]
    assert (spec.loops, spec.window, spec.norm_each_loop) == (3, 8, False)
    assert (spec.input.embedding_scale, spec.input.state_scale) == pytest.approx((0.9, 0.1))
    with torch.no_grad():
        assert torch.equal(plt(ids, loops=1).logits, dense(ids).logits)
    assert not any(gate.weight.any() for gate in plt.model.gates)
    looped = load_policy(str(dense_folder), 2, convert={"family": "plt"})
    assert (type(looped), looped.loop_spec.loops) == (IQuestPLTCoderForCausalLM, 2)


def test_convert_from_the_command_line(dense_folder: Path, tmp_path: Path) -> None:
    options = ["convert", str(dense_folder), "--loops", "2", "--out", str(tmp_path / "out"), "--family", "plt"]
    done = CliRunner().invoke(app, [*options, "--window", "9"])
    assert done.exit_code == 0, done.output
    assert load_policy(str(tmp_path / "out")).config.plt_window_size == [9, 0]


def test_only_a_llama_becomes_a_plt() -> None:
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=50, num_key_value_heads=2))
    with pytest.raises(PolicyError, match="Parallel Loop Transformer of type 'qwen3': its attention is Llama's"):
        loop_dense_model(qwen, 2, family="plt")
