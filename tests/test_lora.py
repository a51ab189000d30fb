"""LoRA on shared blocks: only adapters learn, the base is the reference, and engines get merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from rltt.data.arithmetic import arithmetic_problems
from rltt.errors import PolicyError, RecipeError, UserError
from rltt.models.adapters import add_lora, merged_parameters, without_wrapper
from rltt.models.load import load_policy
from rltt.recipe import Recipe, check
from rltt.train.config import RLTTConfig
from rltt.train.trainer import RLTTTrainer

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("quick_collections")

PER_LOOP = pytest.mark.parametrize("per_loop", [False, True], ids=["one adapter", "one a loop"])


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


def trainer(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path, **options: Any) -> RLTTTrainer:
    problems = arithmetic_problems(1, 32, "train")
    extra = {"peft_config": options.pop("peft_config")} if "peft_config" in options else {}
    config = RLTTConfig(
        **{
            "output_dir": str(out),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "credit": "uniform",
            "loss_type": "grpo",
            "beta": 0.05,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            **options,
        }
    )
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    return RLTTTrainer(model, letters, config, data, processing_class=tokenizer, **extra)


def randomized(adapted: Any) -> Any:
    """Adapters that do something: PEFT starts B at zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted


def logits(model: Any, **options: Any) -> torch.Tensor:
    ids = torch.arange(12).reshape(2, 6) + 5
    with torch.no_grad():
        return model.eval()(input_ids=ids, **options).logits


@PER_LOOP
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_only_adapters_learn_and_the_reference_is_the_base(
    tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, per_loop: bool, checkpointing: bool
) -> None:
    base = load_file(tiny_ouro / "model.safetensors")
    adapted = add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8, per_loop=per_loop)
    run = trainer(adapted, tokenizer, tmp_path, gradient_checkpointing=checkpointing)
    run.train()
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    assert steps[0]["kl"] == 0  # B starts at zero, and the reference is the policy without adapters
    assert steps[1]["kl"] > 1e-5
    assert steps[0]["parity/max"] < 1e-5
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * 7 * (3 if per_loop else 1)  # A and B of 7 linear layers in 2 layers
    moved = {name for name, parameter in adapted.named_parameters() if "lora_B" in name and parameter.abs().sum() > 0}
    assert len(moved) == len(trained) / 2  # every loop's
    for name, parameter in without_wrapper(adapted).named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")]), name
    assert run.ref_model.trainer is run  # no second model


def test_gradients_of_adapters_a_loop_do_not_depend_on_checkpointing(tiny_ouro: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        adapted = randomized(add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8, per_loop=True))
        if checkpointing:
            adapted.get_base_model().gradient_checkpointing_enable()
        ids = torch.arange(12).reshape(2, 6) + 5
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert len(plain) == 84
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(recomputed[name], gradient)


def test_an_adapter_a_loop_is_that_adapter_in_its_loop_only(tiny_ouro: Path) -> None:
    adapted = add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8, per_loop=True)
    model = adapted.get_base_model()
    plain = [logits(model, loops=depth) for depth in (1, 2, 3)]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B.loop2" in name:
                parameter.normal_(std=0.2)
    assert torch.equal(logits(model, loops=1), plain[0])
    assert not torch.allclose(logits(model, loops=2), plain[1])
    assert not torch.allclose(logits(model, loops=3), plain[2])  # through the state
    with pytest.raises(PolicyError, match="adapters for 3 loops, found depth 4"):
        logits(model, loops=4)


def test_merged_weights_give_the_logits_of_the_adapters(tiny_ouro: Path) -> None:
    adapted = randomized(add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8))
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    merged = dict(merged_parameters(adapted))
    plain = load_policy(str(tiny_ouro))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    assert not torch.allclose(logits(plain), logits(adapted), atol=1e-3)
    plain.load_state_dict(merged, strict=True)
    torch.testing.assert_close(logits(plain), logits(adapted), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapted.named_parameters())
    with pytest.raises(PolicyError, match="cannot be merged into weights that all loops share"):
        next(merged_parameters(add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8, per_loop=True)))


@PER_LOOP
def test_saved_adapters_load_as_the_policy_at_its_depth(tiny_ouro: Path, tmp_path: Path, per_loop: bool) -> None:
    model = load_policy(str(tiny_ouro))
    model.set_loops(2)
    adapted = randomized(add_lora(model, r=4, alpha=8, target_modules=["q_proj", "down_proj"], per_loop=per_loop))
    adapted.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = load_policy(str(tmp_path))
    assert type(loaded) is type(model)
    assert loaded.loop_spec.loops == 2
    torch.testing.assert_close(logits(loaded), logits(adapted), atol=1e-5, rtol=1e-5)
    if per_loop:
        with pytest.raises(PolicyError, match="adapters already, one a loop"):
            add_lora(loaded, r=4, alpha=8)
    file = next(tmp_path.rglob("adapter_config.json"))
    file.write_text(file.read_text().replace(str(tiny_ouro), "/gone/away"))
    with pytest.raises(PolicyError, match=r"the model under them cannot be loaded .*change base_model_name_or_path"):
        load_policy(str(tmp_path))


def test_wrong_target_modules_are_named(tiny_ouro: Path) -> None:
    with pytest.raises(PolicyError, match="lm_head, q: no linear layer of the shared block; it has down_proj"):
        add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8, target_modules=["q", "lm_head"])


def test_what_does_not_go_with_lora_is_refused(
    tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trained = trainer(load_policy(str(tiny_ouro)), tokenizer, tmp_path, peft_config=lora)
    assert sum(parameter.requires_grad for parameter in trained.model.parameters()) == 4
    for options, message in [
        ({"credit": "learned", "loss_type": "reinforce"}, "'learned' with LoRA"),
        ({"credit": "exit_pdf", "detach_exit": False}, "the exit gate is frozen"),
    ]:
        with pytest.raises(UserError, match=message):
            trainer(load_policy(str(tiny_ouro)), tokenizer, tmp_path, peft_config=lora, **options)


RECIPE: dict[str, Any] = {
    "name": "x",
    "policy": {"path": "some/model", "lora": {}},
    "data": {"train": "arithmetic"},
    "rewards": ["math"],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"path": "m", "lora": {"per_loop": True}}, "rollout": {"engine": "vllm"}}, "policy.lora.per_loop"),
        ({"train": {"sharding": "zero3", "gradient_checkpointing": True}}, "train.gradient_checkpointing: .*reentrant"),
        (
            {"objective": {"credit": "learned", "loss_type": "cispo", "epsilon_high": 5.0}},
            "objective.credit: 'learned'",
        ),
        ({"objective": {"detach_exit": False}}, "objective.detach_exit: false has no effect"),
        ({"policy": {"path": "m", "lora": {"r": 0}}}, "policy.lora.r"),
    ],
)
def test_recipes_that_cannot_work_with_lora_are_refused(changes: dict[str, Any], message: str) -> None:
    check(Recipe, RECIPE, source="recipe")
    with pytest.raises(RecipeError, match=message):
        check(Recipe, RECIPE | changes, source="recipe")


def test_an_engine_is_sent_merged_weights(tiny_ouro: Path) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from rltt.rollout.vllm.engine import Engine

    engine = Engine.__new__(Engine)  # without an engine behind it
    engine._dist = SimpleNamespace(gather_params=lambda _: nullcontext(), is_fsdp=False)
    engine.model = randomized(add_lora(load_policy(str(tiny_ouro)), r=4, alpha=8))
    plain = load_policy(str(tiny_ouro))
    plain.load_state_dict(dict(engine._iter_named_params()), strict=True)
    torch.testing.assert_close(logits(plain), logits(engine.model), atol=1e-5, rtol=1e-5)
