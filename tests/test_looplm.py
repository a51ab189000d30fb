"""LoopLM against upstream's numbers, against a plain float64 forward, and against itself by other ways."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_decoder import PlainDecoder
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from rltt.models.configuration import OuroConfig
from rltt.models.exit_gate import exit_loop
from rltt.models.looped import Score
from rltt.models.looplm import OuroForCausalLM, OuroModel
from rltt.models.spec import LoopSpec

LOOPS, LAYERS, VOCABULARY, PAD = 4, 3, 50, 0
DEPTHS = range(1, LOOPS + 1)


def make_model(seed: int = 0, **fields) -> OuroForCausalLM:
    """A random LoopLM, grouped key-value heads, with every weight (norms too) away from its initial value."""
    config = OuroConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "total_ut_steps": LOOPS,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": PAD,
            "initializer_range": 0.15,
            **fields,
        }
    )
    torch.manual_seed(seed)
    model = OuroForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "early_exit_gate.weight" in name:
                parameter.mul_(6.0)
        # The gate's logits then vary by about 3 around -1, so that tokens leave at different loops.
        model.model.early_exit_gate.bias.sub_(model.model(tokens(1, 64)).gate_logits.mean() + 1.0)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Input ids and attention mask of a batch, shorter sequences padded on the left."""
    width = max(map(len, sequences))
    ids = torch.stack([pad(s, (width - len(s), 0), value=PAD) for s in sequences])
    mask = torch.stack([pad(torch.ones_like(s), (width - len(s), 0)) for s in sequences])
    return ids, mask


def greedy(model: OuroForCausalLM, ids: Tensor, count: int, loops: int) -> tuple[Tensor, Tensor]:
    """`count` greedy tokens after `ids`, and their logits, by whole forwards: no cache, no padding, no `generate`."""
    logits = []
    for _ in range(count):
        logits.append(model(ids[None], loops=loops, use_cache=False).logits[0, -1])
        ids = torch.cat([ids, logits[-1].argmax().view(1)])
    return ids[-count:], torch.stack(logits)


@pytest.fixture(scope="module")
def model() -> OuroForCausalLM:
    return make_model()


# --------------------------------------------------------------------------------------------------- upstream's numbers


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> tuple[Path, dict[str, Tensor]]:
    folder = shared_data / "golden" / "ouro"
    return folder, load_file(folder / "golden.safetensors")


@pytest.mark.parametrize("way", ["argument", "set_loops", "configuration"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_upstream_logits_and_gate_at_each_depth(golden: tuple[Path, dict[str, Tensor]], depth: int, way: str) -> None:
    folder, expected = golden
    ids, argument = expected["input_ids"], {}
    if way == "configuration":
        model = AutoModelForCausalLM.from_pretrained(folder, total_ut_steps=depth)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        if way == "set_loops":
            model.set_loops(depth)
        else:
            argument["loops"] = depth
    assert type(model) is OuroForCausalLM
    with torch.no_grad():
        logits = model(ids, **argument).logits
        gate = model.model(ids, **argument).gate_logits

    torch.testing.assert_close(logits, expected["logits"][depth - 1], atol=1e-4, rtol=0)
    torch.testing.assert_close(gate.movedim(-1, 0), expected["gate_logits"][:depth], atol=1e-4, rtol=0)
    others = [t for t in range(LOOPS) if t != depth - 1]
    assert all((logits - expected["logits"][t]).abs().max() > 0.01 for t in others)  # the depths do differ


@pytest.mark.parametrize(
    "imports",
    [
        "import rltt, sys; assert 'torch' not in sys.modules; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import rltt",
    ],
    ids=["rltt first", "transformers first"],
)
def test_importing_rltt_alone_makes_transformers_load_ouro(shared_data: Path, imports: str) -> None:
    script = f"""{imports}
from safetensors.torch import load_file
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
golden = load_file(sys.argv[1] + "/golden.safetensors")
print(type(model).__module__, (model(golden["input_ids"]).logits - golden["logits"][-1]).abs().max().item())
"""
    folder = str(shared_data / "golden" / "ouro")
    done = subprocess.run([sys.executable, "-c", f"import sys\n{script}", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, difference = done.stdout.split()
    assert module == "rltt.models.looplm"
    assert float(difference) < 1e-4


@pytest.mark.parametrize("trust", [False, True])
def test_our_class_wins_over_remote_code(tiny_ouro: Path, tmp_path: Path, trust: bool) -> None:
    for file in tiny_ouro.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = {
        "AutoConfig": "remote_ouro.OuroConfig",
        "AutoModel": "remote_ouro.OuroModel",
        "AutoModelForCausalLM": "remote_ouro.OuroForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "remote_ouro.py").write_text("raise RuntimeError('remote code ran')\n")

    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
    assert type(model) is OuroForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path, trust_remote_code=trust)) is OuroModel
    assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is OuroConfig
    model.save_pretrained(tmp_path / "saved")  # what we write must not send others to remote code either
    assert not json.loads((tmp_path / "saved" / "config.json").read_text()).get("auto_map")


# ------------------------------------------------------------------------------------------------- the forward, plainly


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_forward_equals_a_plain_float64_forward_at_each_depth(kv_heads: int) -> None:
    model = make_model(num_key_value_heads=kv_heads)
    plain, ids = PlainDecoder.of(model), tokens(11)
    states = plain.loop_states(ids, LOOPS)
    for depth in DEPTHS:
        with torch.no_grad():
            logits = model(ids[None], loops=depth).logits[0]
            gate = model.model(ids[None], loops=depth).gate_logits[0]
        torch.testing.assert_close(logits.double(), plain.logits(states[depth - 1]), atol=2e-5, rtol=1e-5)
        expected = torch.stack([plain.gate(state) for state in states[:depth]], dim=-1)
        torch.testing.assert_close(gate.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_token_by_token_with_a_cache_equals_one_forward(model: OuroForCausalLM, depth: int) -> None:
    ids, cache = tokens(2, 9), DynamicCache()
    with torch.no_grad():
        whole = model(ids, loops=depth, use_cache=False).logits
        steps = [
            model(ids[:, i : i + 1], loops=depth, past_key_values=cache, use_cache=True).logits
            for i in range(ids.shape[1])
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert len(cache.layers) == depth * LAYERS
    assert all(layer.get_seq_length() == ids.shape[1] for layer in cache.layers)


def test_cache_slots_are_those_of_the_spec(model: OuroForCausalLM) -> None:
    ids, spec = tokens(1, 6), model.loop_spec
    caches = {}
    with torch.no_grad():
        for depth in DEPTHS:
            caches[depth] = model(ids, loops=depth, use_cache=True).past_key_values
    assert spec.kv_slots == len(caches[LOOPS].layers) == LOOPS * LAYERS
    # A run that ends after loop t has in its last L slots what the full run has in the slots of loop t.
    for depth, layer in itertools.product(DEPTHS, range(LAYERS)):
        ended = caches[depth].layers[(depth - 1) * LAYERS + layer]
        slot = caches[LOOPS].layers[spec.kv_slot(depth - 1, layer)]
        assert torch.equal(slot.keys, ended.keys)
        assert torch.equal(slot.values, ended.values)
    keys = [layer.keys for layer in caches[LOOPS].layers]
    assert all((a - b).abs().max() > 1e-3 for a, b in itertools.combinations(keys, 2))


@pytest.mark.parametrize("depth", DEPTHS)
def test_left_padded_batch_equals_single_sequences(model: OuroForCausalLM, depth: int) -> None:
    sequences = [tokens(n, seed=n) for n in (3, 8, 5)]
    ids, mask = left_padded(sequences)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, loops=depth).logits
        for row, sequence in zip(batch, sequences, strict=True):
            single = model(sequence[None], loops=depth).logits[0]
            torch.testing.assert_close(row[-len(sequence) :], single, atol=1e-5, rtol=1e-5)


def test_sdpa_equals_eager(model: OuroForCausalLM) -> None:
    eager = make_model(attn_implementation="eager")
    assert (model.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    ids, mask = left_padded([tokens(4), tokens(9)])
    with torch.no_grad():
        expected, found = (m(ids, attention_mask=mask).logits[mask == 1] for m in (eager, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("depth", [1, 3, LOOPS])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_with_left_padding_equals_greedy_forwards(depth: int, use_cache: bool) -> None:
    model, prompts, count = make_model(), [tokens(n, seed=n) for n in (2, 7, 4)], 12
    ids, mask = left_padded(prompts)
    model.set_loops(depth)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, use_cache=use_cache, **options)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            generated, logits = greedy(model, prompt, count, depth)
        assert torch.equal(out.sequences[row, ids.shape[1] :], generated)
        # The tokens alone could be right by luck: a random model soon repeats itself.
        torch.testing.assert_close(torch.stack(out.logits)[:, row], logits, atol=1e-5, rtol=1e-5)


def test_generate_refuses_a_static_cache(model: OuroForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"cache_implementation='static'.*12 slots"):
        model.generate(tokens(1, 4), max_new_tokens=2, cache_implementation="static")


def test_a_changed_depth_reaches_generate_scores_and_the_saved_model(tmp_path: Path) -> None:
    model, ids, count = make_model(), tokens(6), 10
    by_depth = {}
    with torch.no_grad():
        for depth in (2, LOOPS):
            model.set_loops(depth)
            assert model.loop_spec.loops == depth
            generated = model.generate(ids[None], max_new_tokens=count, do_sample=False)[0, len(ids) :]
            assert torch.equal(generated, greedy(model, ids, count, depth)[0])
            scores = model(ids[None], labels=ids[None], score=Score()).scores.log_probs
            assert scores.shape == (1, len(ids) - 1, depth)
            logits = model(ids[None]).logits
            by_depth[depth] = generated, logits

            folder = tmp_path / str(depth)
            model.save_pretrained(folder)
            assert json.loads((folder / "config.json").read_text())["total_ut_steps"] == depth
            assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits, logits)
    assert not torch.equal(by_depth[2][0], by_depth[LOOPS][0])
    assert (by_depth[2][1] - by_depth[LOOPS][1]).abs().max() > 0.1


@pytest.mark.parametrize("loops", [0, -1])
def test_a_depth_without_loops_is_refused(model: OuroForCausalLM, loops: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 loop, found {loops}"):
        model.set_loops(loops)
    with pytest.raises(ValueError, match=f"total_ut_steps must be at least 1, found {loops}"):
        OuroConfig(total_ut_steps=loops)


# -------------------------------------------------------------------------------------------------------------- scoring


def test_scores_are_the_log_probs_of_each_depth_and_differ(model: OuroForCausalLM) -> None:
    ids, temperature = tokens(2, 8), 0.7
    with torch.no_grad():
        scores = model(ids, labels=ids, score=Score(temperature=temperature)).scores.log_probs
        for depth in DEPTHS:
            log_probs = torch.log_softmax(model(ids, loops=depth).logits[:, :-1].double() / temperature, dim=-1)
            expected = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
            torch.testing.assert_close(scores[..., depth - 1].double(), expected, atol=1e-5, rtol=1e-5)
        last = model(ids, labels=ids, score=Score(temperature=temperature, last_only=True)).scores.log_probs
    for first, second in itertools.combinations(range(LOOPS), 2):
        assert (scores[..., first] - scores[..., second]).abs().mean() > 0.05
    torch.testing.assert_close(last, scores[..., -1:])


def test_scoring_needs_labels(model: OuroForCausalLM) -> None:
    with pytest.raises(ValueError, match="score needs labels"):
        model(tokens(1, 4), score=Score())


def test_loss_of_labels_is_the_cross_entropy_of_the_last_loop(model: OuroForCausalLM) -> None:
    ids = tokens(2, 8)
    labels = ids.clone()
    labels[:, :3] = -100
    with torch.no_grad():
        loss, logits = model(ids, labels=labels).loss, model(ids).logits
    expected = cross_entropy(logits[:, 2:-1].reshape(-1, VOCABULARY).double(), ids[:, 3:].reshape(-1))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


# ----------------------------------------------------------------------------------------------- gradient checkpointing


def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients() -> None:
    ids, gradients, calls = tokens(2, 8), [], []
    for checkpointing in (False, True):
        model, inputs = make_model().train(), []
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args))
        model(ids, labels=ids, score=Score()).scores.log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        calls.append(len(inputs))
    assert calls == [LOOPS, 2 * LOOPS]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_reentrant_checkpointing_is_refused(model: OuroForCausalLM) -> None:
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.is_gradient_checkpointing


# ------------------------------------------------------------------------------------------------------- saved and back


def test_saved_weights_have_upstreams_names_and_come_back(model: OuroForCausalLM, tmp_path: Path) -> None:
    attention = [f"self_attn.{letter}_proj" for letter in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"]
    upstream = {f"model.layers.{i}.{part}.weight" for i in range(LAYERS) for part in attention + mlp + norms}
    upstream |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    upstream |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == upstream
    assert len(saved) == 11 * LAYERS + 5
    assert saved["model.early_exit_gate.weight"].shape == (1, 32)
    assert saved["model.early_exit_gate.bias"].shape == (1,)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    assert LoopSpec.from_config(loaded.config) == model.loop_spec
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


# ----------------------------------------------------------------------------------------------------- gate and readout


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8, 0.95])
def test_q_exit_reads_each_token_at_its_own_loop(threshold: float) -> None:
    model, ids = make_model(early_exit_threshold=threshold), tokens(24)
    with torch.no_grad():
        found = model(ids[None]).logits[0].double()
    plain = PlainDecoder.of(model)
    states = plain.loop_states(ids, LOOPS)
    left_at = []
    for position in range(len(ids)):
        stay, reached = 1.0, 0.0
        for t in range(LOOPS):
            leave = torch.sigmoid(plain.gate(states[t])[position]).item() if t < LOOPS - 1 else 1.0
            reached += stay * leave
            stay *= 1.0 - leave
            if reached >= threshold or t == LOOPS - 1:
                left_at.append(t)
                break
        expected = plain.logits(states[left_at[-1]])[position]
        torch.testing.assert_close(found[position], expected, atol=2e-5, rtol=1e-5)
    assert len(set(left_at)) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [1.0, 1.5])
def test_a_threshold_of_one_reads_the_last_loop_whatever_the_gate_says(threshold: float, dtype: torch.dtype) -> None:
    model, ids = make_model(early_exit_threshold=threshold).to(dtype), tokens(2, 8)
    with torch.no_grad():
        model.model.early_exit_gate.bias.fill_(1000.0)  # σ is exactly 1: every other reading leaves at the first loop
        output = model.model(ids)
    assert torch.equal(output.last_hidden_state, output.loop_states[-1])
    assert not torch.equal(output.loop_states[0], output.loop_states[-1])
    assert (exit_loop(output.gate_logits, threshold) == LOOPS - 1).all()


def test_bf16_does_not_leave_early() -> None:
    # σ(6.5) = 0.9985 is 1.0 in bf16; in fp32 it stays below the threshold, so no token leaves at the first loop.
    model, ids = make_model(early_exit_threshold=0.999).to(torch.bfloat16), tokens(2, 8)
    with torch.no_grad():
        model.model.early_exit_gate.weight.zero_()
        model.model.early_exit_gate.bias.fill_(6.5)
        output = model.model(ids)
    assert torch.sigmoid(torch.tensor(6.5, dtype=torch.bfloat16)) == 1.0
    assert torch.equal(output.last_hidden_state, output.loop_states[1])  # 1 - (1 - 0.9985)² passes it


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gate_computes_in_fp32(autocast: bool) -> None:
    model, ids = make_model(), tokens(2, 8)
    if not autocast:
        model = model.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model.model(ids)
    gate = model.model.early_exit_gate
    states = torch.stack(output.loop_states, dim=-2).float()
    expected = (states @ gate.weight.float().T).squeeze(-1) + gate.bias.float()
    assert output.gate_logits.dtype == torch.float32
    torch.testing.assert_close(output.gate_logits, expected, atol=1e-6, rtol=1e-5)
    assert (output.gate_logits.bfloat16().float() != output.gate_logits).float().mean() > 0.5  # not bf16 numbers


def test_q_exit_generates_the_same_with_and_without_a_cache() -> None:
    model, (ids, mask) = make_model(early_exit_threshold=0.6), left_padded([tokens(3), tokens(6)])
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, plain)
    model.config.early_exit_threshold = 1.0
    assert not torch.equal(model.generate(ids, **options), cached)  # the threshold does matter here


# ------------------------------------------------------------------------------------------------------------- the spec


def test_spec_tells_loops_slots_and_bytes(model: OuroForCausalLM) -> None:
    spec = model.loop_spec
    assert (spec.loops, spec.layers, spec.exit_gate, spec.norm_each_loop) == (LOOPS, LAYERS, True, True)
    assert spec.input.kind == "state"
    assert not spec.readout.adaptive
    assert spec.kv_slot(2, 1) == 2 * LAYERS + 1
    with pytest.raises(IndexError, match="loop 4, layer 0"):
        spec.kv_slot(LOOPS, 0)
    # The released sizes: 768 KiB a token for Ouro-1.4B, 1.5 MiB for 2.6B, in bf16.
    sizes = {layers: LoopSpec.from_config(OuroConfig(num_hidden_layers=layers)) for layers in (24, 48)}
    assert sizes[24].kv_bytes_per_token() == 768 * 2**10
    assert sizes[48].kv_bytes_per_token() == 1536 * 2**10


def test_spec_refuses_a_configuration_without_loops() -> None:
    with pytest.raises(ValueError, match="'llama' is not a looped model"):
        LoopSpec.from_config(AutoConfig.for_model("llama"))
