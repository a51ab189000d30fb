"""Dense decoders run T times, conversion, and what loading a policy refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from plain_decoder import PlainDecoder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rltt.errors import PolicyError
from rltt.models.convert import convert_checkpoint, loop_dense_model
from rltt.models.load import load_policy, load_tokenizer, stop_token_ids
from rltt.models.looped_dense import LoopedLlamaForCausalLM, LoopedQwen3ForCausalLM
from rltt.models.looplm import OuroForCausalLM

VOCABULARY = 50
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LoopedLlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, LoopedQwen3ForCausalLM),
}


def make_dense(family: str, seed: int = 0, **fields) -> PreTrainedModel:
    """A random dense decoder with grouped key-value heads and every weight away from its initial value."""
    config_class, model_class, _ = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
            "initializer_range": 0.15,
            **fields,
        }
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


# ----------------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_loop_is_the_dense_model_bit_for_bit(family: str, tied: bool, dtype: torch.dtype) -> None:
    dense = make_dense(family, tie_word_embeddings=tied).to(dtype)
    looped = loop_dense_model(dense, loops=1).eval()
    assert type(looped) is FAMILIES[family][2]
    assert looped.dtype == dtype
    assert (looped.lm_head.weight is looped.model.embed_tokens.weight) == tied

    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0  # left padding
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(looped(ids, attention_mask=mask).logits, dense(ids, attention_mask=mask).logits)
    generated = [m.generate(ids, **options, output_logits=True, return_dict_in_generate=True) for m in (looped, dense)]
    assert torch.equal(generated[0].sequences, generated[1].sequences)
    assert torch.equal(torch.stack(generated[0].logits), torch.stack(generated[1].logits))


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_starts_from_the_papers_mixing_and_leaves_the_dense_model_alone(family: str) -> None:
    dense = make_dense(family)
    before = {name: weight.clone() for name, weight in dense.state_dict().items()}
    looped = loop_dense_model(dense, loops=3)
    new = set(looped.state_dict()) - set(before)
    assert new == {"model.input_mixing.logit", "model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert looped.model.input_mixing.logit.item() == pytest.approx(4.595, abs=1e-3)
    assert looped.config.total_ut_steps == looped.loop_spec.loops == 3
    with torch.no_grad():
        for parameter in looped.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in dense.state_dict().items())


def test_other_families_and_values_are_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    with pytest.raises(PolicyError, match=r"'gpt2'; the families that can be looped are: llama, qwen3"):
        loop_dense_model(gpt2, loops=2)
    with pytest.raises(PolicyError, match="sliding-window"):
        loop_dense_model(make_dense("qwen3", use_sliding_window=True, sliding_window=8), loops=2)
    with pytest.raises(PolicyError, match=r"between 0 and 1, found 1\.0"):
        loop_dense_model(make_dense("llama"), loops=2, mixing_init=1.0)
    with pytest.raises(ValueError, match="loop_mixing must be 'scalar' or 'identity', found 'sum'"):
        loop_dense_model(make_dense("llama"), loops=2, mixing="sum")


# ----------------------------------------------------------------------------------------------- several loops, plainly


@pytest.mark.parametrize("mixing", [0.99, 0.4, None])
@pytest.mark.parametrize("norm_each_loop", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_loops_equal_a_plain_float64_forward(family: str, norm_each_loop: bool, mixing: float | None) -> None:
    kind = {"mixing": "identity"} if mixing is None else {"mixing": "scalar", "mixing_init": mixing}
    looped = loop_dense_model(make_dense(family), loops=3, norm_each_loop=norm_each_loop, **kind).eval()
    plain, ids = PlainDecoder.of(looped), tokens(10)
    states = plain.loop_states(ids, 3, norm_each_loop=norm_each_loop, mixing=mixing)
    for depth in (1, 2, 3):
        with torch.no_grad():
            logits = looped(ids[None], loops=depth).logits[0].double()
            gate = looped.model(ids[None], loops=depth).gate_logits[0, :, -1].double()
        torch.testing.assert_close(logits, plain.logits(states[depth - 1]), atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(gate, plain.gate(states[depth - 1]), atol=5e-5, rtol=1e-5)
    # The fields do matter here: the other way of handing over gives another state.
    other = plain.loop_states(ids, 2, norm_each_loop=not norm_each_loop, mixing=mixing)[1]
    unmixed = plain.loop_states(ids, 2, norm_each_loop=norm_each_loop, mixing=0.7)[1]
    assert (other - states[1]).abs().max() > 1e-3
    assert (unmixed - states[1]).abs().max() > 1e-2


def test_the_mixing_scalar_is_computed_in_fp32() -> None:
    # bf16 holds 1 - 0.99 as 0.0117 if it is computed from a bf16 w: the state would then enter 17 % too strong.
    looped = loop_dense_model(make_dense("llama").to(torch.bfloat16), loops=2)
    state, zero = torch.full((1, 1, 32), 64.0, dtype=torch.bfloat16), torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    w = torch.sigmoid(looped.model.input_mixing.logit.detach().double()).item()
    entering = looped.model.input_mixing(zero, state)
    assert entering.dtype == torch.bfloat16
    torch.testing.assert_close(entering.double(), state.double() * (1 - w), atol=0, rtol=2**-8)


# ------------------------------------------------------------------------------------------------------------ on disk


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_dense("llama", vocab_size=len(tokenizer), tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_convert_writes_a_folder_that_transformers_loads(dense_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "looped"
    convert_checkpoint(str(dense_folder), out, loops=2, mixing_init=0.6, norm_each_loop=False)
    assert list(out.glob("*.safetensors"))
    assert not list(out.glob("*.bin"))
    looped = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(looped) is LoopedLlamaForCausalLM
    assert (looped.loop_spec.loops, looped.loop_spec.norm_each_loop) == (2, False)
    assert torch.sigmoid(looped.model.input_mixing.logit).item() == pytest.approx(0.6)
    assert load_tokenizer(str(out))("Ann has 3 apples.") == load_tokenizer(str(dense_folder))("Ann has 3 apples.")

    dense, ids = AutoModelForCausalLM.from_pretrained(dense_folder).eval(), tokens(1, 7)
    with torch.no_grad():
        assert torch.equal(looped(ids, loops=1).logits, dense(ids).logits)
        assert torch.equal(load_policy(str(out), loops=1)(ids).logits, dense(ids).logits)


def test_convert_writes_into_no_folder_that_holds_files(dense_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PolicyError, match=f"{re.escape(str(tmp_path))}: the folder is not empty"):
        convert_checkpoint(str(dense_folder), tmp_path, loops=2)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_dense_checkpoint_needs_conversion(dense_folder: Path) -> None:
    path = str(dense_folder)
    with pytest.raises(PolicyError, match="'llama' is not a looped model; `rltt convert`, or `convert` under `policy`"):
        load_policy(path)
    with pytest.raises(PolicyError, match="needs the number of loops"):
        load_policy(path, convert={})
    looped = load_policy(path, loops=3, convert={"mixing": "identity"})
    assert (type(looped), looped.loop_spec.loops) == (LoopedLlamaForCausalLM, 3)
    assert looped.loop_spec.input.kind == "state"
    assert looped.config._name_or_path == path


def test_a_looped_checkpoint_needs_no_conversion(tiny_ouro: Path) -> None:
    with pytest.raises(PolicyError, match="is a looped model already"):
        load_policy(str(tiny_ouro), loops=2, convert={})
    policy = load_policy(str(tiny_ouro), loops=2)
    assert (type(policy), policy.loop_spec.loops, policy.dtype) == (OuroForCausalLM, 2, torch.float32)


# --------------------------------------------------------------------------------------------- broken or absent weights


@pytest.fixture
def checkpoint(tiny_ouro: Path, tmp_path: Path) -> Path:
    """A copy of the tiny LoopLM that a test may break."""
    for file in tiny_ouro.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_configuration(folder: Path, field: str, value: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, field: value}))


@pytest.mark.parametrize("name", ["model.early_exit_gate.weight", "model.layers.1.input_layernorm_2.weight"])
def test_a_missing_weight_is_refused(checkpoint: Path, name: str) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights[name]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=rf"does not fit OuroForCausalLM: {{'missing_keys': \['{re.escape(name)}'"):
        load_policy(str(checkpoint))


def test_a_left_over_weight_is_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors") | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=r"unexpected_keys.*model\.layers\.9\.mlp"):
        load_policy(str(checkpoint))


def test_a_weight_of_another_shape_is_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors") | {"model.norm.weight": torch.ones(7)}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=re.escape(str(checkpoint))):
        load_policy(str(checkpoint))


def test_a_damaged_weight_file_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(PolicyError, match=re.escape(str(checkpoint))):
        load_policy(str(checkpoint))


@pytest.mark.parametrize(("field", "value"), [("total_ut_steps", 0), ("total_ut_steps", "4"), ("hidden_size", 63)])
def test_a_wrong_configuration_is_refused(checkpoint: Path, field: str, value: object) -> None:
    change_configuration(checkpoint, field, value)
    with pytest.raises(PolicyError, match=f"{re.escape(str(checkpoint))}: (.|\n)*{field.replace('_', '.')}"):
        load_policy(str(checkpoint))


def test_a_whole_number_is_a_threshold(checkpoint: Path) -> None:
    change_configuration(checkpoint, "early_exit_threshold", 1)
    assert not load_policy(str(checkpoint)).loop_spec.readout.adaptive


@pytest.mark.parametrize("loops", [0, -1])
def test_a_policy_without_loops_is_refused(tiny_ouro: Path, loops: int) -> None:
    with pytest.raises(PolicyError, match=f"at least 1 loop, found {loops}"):
        load_policy(str(tiny_ouro), loops=loops)


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"cannot load the model: .*safetensors"):
        load_policy(str(checkpoint))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/such/folder", r"\./no/such/folder: no such folder"),
        (
            "package:no_such_package_here/x.gguf",
            r"package 'no_such_package_here' is not installed; .* no-such-package-here",
        ),
        ("package:json/model.gguf", r"no file 'model.gguf' in package 'json'; GGUF files there: none"),
    ],
)
def test_a_wrong_path_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(path)
    with pytest.raises(PolicyError, match=message):
        load_tokenizer(path)


# --------------------------------------------------------------------------------------------------------- stop tokens

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> PreTrainedTokenizerFast:
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(str(tmp_path))
    copy.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    copy.chat_template = CHAT_TEMPLATE
    return copy


def test_chat_completions_stop_at_the_templates_end_of_turn(
    tiny_ouro: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = load_policy(str(tiny_ouro))
    eos, end_of_turn = chat_tokenizer.eos_token_id, chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert eos != end_of_turn
    assert stop_token_ids(policy, chat_tokenizer, chat=False) == [eos]
    assert stop_token_ids(policy, chat_tokenizer, chat=True) == sorted([eos, end_of_turn])
    policy.generation_config.eos_token_id = [eos, 40]
    assert stop_token_ids(policy, chat_tokenizer, chat=True) == sorted([eos, end_of_turn, 40])


def test_tokenizers_pad_on_the_left_and_end_sequences(tiny_ouro: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_ouro))
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "without_pad")
    assert load_tokenizer(str(tmp_path / "without_pad")).pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "without_eos")
    with pytest.raises(PolicyError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path / "without_eos"))
