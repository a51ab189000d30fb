"""The arithmetic of a plan, against numbers worked out by hand."""

import subprocess
import sys
from typing import Any

import pytest

from rltt.errors import RecipeError
from rltt.recipe import Recipe
from rltt.train.plan import Plan, count_parameters, kv_bytes_per_token, plan

OURO = {
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
}


def recipe(**sections: Any) -> Recipe:
    base = {"name": "r", "policy": {"path": "x"}, "data": {"train": "x"}, "rewards": ["math"]}
    return Recipe.model_validate({**base, **sections})


def test_kv_cache_of_ouro():
    assert kv_bytes_per_token(OURO, loops=4, value_bytes=2) == 786_432
    assert kv_bytes_per_token({**OURO, "num_hidden_layers": 48}, loops=4, value_bytes=2) == 1_572_864
    assert kv_bytes_per_token({**OURO, "num_key_value_heads": 4}, loops=1, value_bytes=4) == 786_432 // 8


SHARED = {key: value for key, value in OURO.items() if key != "total_ut_steps"}
LOOPCODER = SHARED | {
    "model_type": "iquestpltcoder",
    "num_hidden_layers": 14,
    "num_key_value_heads": 8,
    "plt_num_loops": 2,
    "plt_window_size": [64, 0],
    "plt_gate_use_hidden_states": True,
}
IQUEST = SHARED | {"model_type": "iquestloopcoder", "loop_num": 3, "loop_window_size": 64}


def test_kv_cache_of_a_parallel_loop_transformer():
    token = 14 * 2 * 8 * 128 * 2  # one loop's keys and values, bf16
    for loops in (1, 2, 4):
        run = recipe(
            policy={"path": "x", "loops": loops},
            data={"train": "x", "max_prompt_length": 100},
            rollout={"max_completion_length": 300},
        )
        memory = plan(run, LOOPCODER, None, precision="bf16").memory
        assert (memory.kv_per_token, memory.kv_windows) == (token, (loops - 1) * 65 * token)
        assert memory.kv_rollout == 256 * (400 + (loops - 1) * 65) * token
        assert ("of windows a sequence" in plan(run, LOOPCODER, None).render()) == (loops > 1)
    dense = 786_432 // 4  # 24 layers of 16 heads
    memory = plan(recipe(), IQUEST, None, precision="bf16").memory
    assert (memory.loops, memory.kv_per_token, memory.kv_windows) == (3, dense, 2 * 64 * dense)
    convert = {"path": "x", "loops": 3, "convert": {"family": "plt", "window": 9}}
    memory = plan(recipe(policy=convert), SHARED | {"model_type": "llama"}, None, precision="bf16").memory
    assert (memory.kv_per_token, memory.kv_windows) == (dense, 2 * 10 * dense)


def test_heads_that_a_configuration_leaves_out():
    short = {key: value for key, value in OURO.items() if key not in ("head_dim", "num_key_value_heads")}
    assert kv_bytes_per_token(short, loops=4, value_bytes=2) == 786_432


def test_parameters():
    # SmolLM2-135M, a tied Llama with grouped queries: the published number of its weights.
    smollm = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    smollm |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    assert count_parameters(smollm, looped=False) == 134_515_008
    assert count_parameters(smollm, looped=True) == 134_515_008 + 576 + 1
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632 + 4 * 2048
    assert count_parameters(OURO, looped=True) == 2 * 49152 * 2048 + 24 * layer + 2048 + 2049


def test_schedule():
    train = {"prompts_per_step": 6, "updates_per_rollout": 2, "num_iterations": 3, "max_steps": 13}
    run = recipe(
        train={**train, "per_device_train_batch_size": 8},
        rollout={"num_generations": 4, "max_completion_length": 100},
    )
    schedule = plan(run, None, train_rows=24).schedule
    assert schedule is not None
    assert (schedule.prompts_per_rollout, schedule.completions_per_rollout) == (12, 48)
    assert (schedule.completions_per_update, schedule.micro_batch, schedule.accumulation) == (24, 8, 3)
    # 6 updates to a rollout: the 13th needs a third one.
    assert (schedule.updates, schedule.rollouts, schedule.completions) == (13, 3, 144)
    assert schedule.max_tokens == 14_400
    assert schedule.epochs == pytest.approx(36 / 24)


def test_a_micro_batch_is_a_group_unless_said_otherwise():
    schedule = plan(recipe(), None, None).schedule
    assert schedule is not None
    assert (schedule.micro_batch, schedule.accumulation, schedule.epochs) == (8, 32, None)


def test_memory():
    run = recipe(data={"train": "x", "max_prompt_length": 100}, rollout={"max_completion_length": 300})
    memory = plan(run, OURO, None, precision="bf16").memory
    assert memory is not None
    assert memory.loops == 4
    assert memory.policy == 16 * memory.parameters
    assert memory.reference == 4 * memory.parameters
    assert memory.kv_rollout == 786_432 * 400 * 256
    # fp32 where nothing says what `auto` comes to; the recipe's own precision and depth win.
    assert plan(run, OURO, None).memory.kv_per_token == 2 * 786_432
    forced = recipe(train={"precision": "bf16"}, policy={"path": "x", "loops": 2})
    assert plan(forced, OURO, None, precision="fp32").memory.kv_per_token == 786_432 // 2


@pytest.mark.parametrize(
    ("train", "precision", "policy", "cpu", "reference"),
    [
        ({"sharding": "ddp"}, "bf16", 16, 0, 4),
        ({"sharding": "zero2"}, "bf16", 2 + 14 / 8, 0, 2),
        ({"sharding": "zero2"}, "fp32", 4 + 16 / 8, 0, 4),
        ({"sharding": "zero3"}, "bf16", 16 / 8, 0, 2 / 8),
        ({"sharding": "zero2", "offload": "optimizer"}, "bf16", 2, 14 / 8, 2),
        ({"sharding": "zero3", "offload": "parameters"}, "bf16", 0, 16 / 8, 0),
    ],
)
def test_memory_of_each_process(
    train: dict[str, str], precision: Any, policy: float, cpu: float, reference: float
) -> None:
    # Bytes a parameter, as in the ZeRO paper: 2 for bf16 weights, 2 for gradients, 12 for Adam with fp32 weights.
    memory = plan(recipe(train=train), OURO, None, precision=precision, processes=8).memory
    assert memory is not None
    found = [memory.policy, memory.offloaded, memory.reference]
    assert [count / memory.parameters for count in found] == pytest.approx([policy, cpu, reference])
    text = plan(recipe(train=train), OURO, None, precision=precision, processes=8).render()
    assert "8 processes, each 4 micro-batches of 8" in text
    assert f"on each of 8 processes, {train['sharding']}" in text


def test_memory_with_adapters() -> None:
    config = {**OURO, "num_hidden_layers": 2}
    # q, k, v, o are 2048 to 2048; gate, up, down between 2048 and 5632.
    all_layers = 2 * 16 * (4 * 4096 + 3 * 7680)
    for lora, expected in (
        ({}, all_layers),
        ({"per_loop": True}, 4 * all_layers),
        ({"target_modules": ["q_proj"], "r": 8}, 2 * 8 * 4096),
    ):
        memory = plan(recipe(policy={"path": "x", "lora": lora}), config, None).memory
        assert memory is not None
        assert memory.trained == expected
        assert memory.policy == 4 * memory.parameters + 16 * memory.trained
        assert memory.reference == 0


def test_processes_that_cannot_share_an_update_are_refused() -> None:
    with pytest.raises(RecipeError, match="the 256 rows of an update cannot be shared equally by 3 processes"):
        plan(recipe(), None, None, processes=3)
    with pytest.raises(RecipeError, match="= 48 does not divide the 128 rows of an update that each of 3"):
        plan(recipe(train={"prompts_per_step": 48, "per_device_train_batch_size": 48}), None, None, processes=3)


@pytest.mark.parametrize(
    ("sections", "config", "rows", "expected"),
    [
        ({"train": {"prompts_per_step": 32, "updates_per_rollout": 2}}, None, 63, "63 training rows cannot fill one"),
        ({}, None, None, "objective: a run at 1e-6 with 32 prompts a step is unlikely to move the policy"),
        (
            {"data": {"train": "x", "max_prompt_length": 65_100}},
            OURO,
            None,
            "can reach 65612 tokens; the model has 65536 positions",
        ),
        (
            {"train": {"warmup_steps": 9, "max_steps": 2, "lr_scheduler_type": "cosine"}},
            None,
            None,
            "train: the warmup of 9 steps does not end within 2 steps",
        ),
        ({"pretrain": {"max_steps": 20}}, None, None, "pretrain: the warmup of 20 steps does not end within 20 steps"),
    ],
)
def test_warnings(sections, config, rows, expected):
    warnings = plan(recipe(**sections), config, rows).warnings
    assert any(expected in warning for warning in warnings)


def test_a_sound_recipe_has_no_warnings():
    assert plan(recipe(train={"learning_rate": 1e-5, "prompts_per_step": 32}), OURO, 32).warnings == ()
    assert plan(recipe(train={"learning_rate": 1e-6, "prompts_per_step": 33}), OURO, 33).warnings == ()


def test_render():
    text = plan(recipe(pretrain={}, train={"learning_rate": 1e-6}), OURO, 320, precision="bf16").render()
    lines = dict(line.split("  ", 1) for line in text.splitlines()[:-1])
    lines = {label: value.strip() for label, value in lines.items()}
    assert lines["pretraining"] == "at most 12,800 rows"
    assert lines["an update"] == "256 completions = 32 micro-batches of 8"
    assert lines["passes over the data"] == "14.00"
    assert lines["parameters"] == "1,434,652,673, run 4 times"
    assert lines["KV cache"] == "768.0 KiB a token, 96.0 GiB for 256 sequences of 512 tokens"
    assert text.splitlines()[-1].startswith("warning: objective: a run at 1e-6")


def test_pretraining_alone_plans_no_rollouts():
    alone: Plan = plan(recipe(rewards=[], pretrain={}), OURO, 10)
    assert alone.schedule is None
    assert alone.memory is not None
    assert alone.memory.kv_rollout == 0
    assert alone.warnings == ()
    assert "rollout" not in alone.render()


def test_planning_loads_no_torch():
    code = "import sys, rltt.train.plan; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
