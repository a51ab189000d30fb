"""Parallel Loop Transformers against a plain float64 forward, against golden numbers, and against themselves by other
ways: cached, padded, packed, decoded in parallel.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from plain_plt import PlainPLT
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from rltt.models.configuration import IQuestLoopCoderConfig, IQuestPLTCoderConfig
from rltt.models.looped import Score
from rltt.models.plt import (
    IQuestLoopCoderForCausalLM,
    IQuestPLTCoderForCausalLM,
    IQuestPLTCoderModel,
    PLTForCausalLM,
    shift,
)
from rltt.models.plt_cache import PLTCache
from rltt.models.spec import LoopInput, LoopSpec

LOOPS, LAYERS, VOCABULARY, PAD, LEFT = 3, 2, 50, 0, 4
KINDS = ("plt", "iquest")
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "initializer_range": 0.12,
}


def make_model(kind: str = "plt", loops: int = LOOPS, seed: int = 0, **fields) -> PLTForCausalLM:
    """A random model with every weight, norms and gates too, away from its initial value. The window is short."""
    torch.manual_seed(seed)
    if kind == "iquest":
        config = IQuestLoopCoderConfig(**COMMON | {"loop_num": loops, "loop_window_size": LEFT + 1} | fields)
        model = IQuestLoopCoderForCausalLM(config).eval()
    else:
        own = {"plt_num_loops": loops, "plt_window_size": [LEFT, 0], "plt_emb_scale": 0.7, "plt_hidden_scale": 0.6}
        model = IQuestPLTCoderForCausalLM(IQuestPLTCoderConfig(**COMMON | own | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "gate_proj" in name or "plt_gate" in name:
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Input ids and attention mask of a batch."""
    width = max(map(len, sequences))

    def fill(sequence: Tensor, value: int) -> Tensor:
        missing = width - len(sequence)
        return pad(sequence, (missing, 0) if side == "left" else (0, missing), value=value)

    return torch.stack([fill(s, PAD) for s in sequences]), torch.stack([fill(torch.ones_like(s), 0) for s in sequences])


def logits_of_loops(model: PLTForCausalLM, ids: Tensor, **kwargs) -> Tensor:
    """[R, B, S, V]."""
    with torch.no_grad():
        return torch.stack([model.lm_head(state) for state in model.model(ids, **kwargs).loop_states])


# ---------------------------------------------------------------------------------------------------- golden numbers


@pytest.mark.parametrize("name", ["loopcoder-v2", "iquest-loop"])
def test_golden_logits_at_each_loop_and_depth(shared_data: Path, name: str) -> None:
    folder = shared_data / "golden" / name
    golden = load_file(folder / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, PLTForCausalLM)
    found = logits_of_loops(model, golden["input_ids"])
    torch.testing.assert_close(found, golden["logits"], atol=1e-4, rtol=0)
    assert (found[0] - golden["logits"][1]).abs().max() > 0.05
    for depth in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(folder, total_ut_steps=depth)
        with torch.no_grad():
            logits = model(golden["input_ids"]).logits
        torch.testing.assert_close(logits, golden["logits"][depth - 1], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- the forward, plainly

VARIANTS: dict[str, tuple[str, dict]] = {
    "as the paper": ("plt", {"plt_emb_scale": None, "plt_hidden_scale": None}),
    "scales": ("plt", {"plt_emb_scale": 0.31, "plt_hidden_scale": 1.4}),
    "hidden alone": ("plt", {"plt_emb_scale": 0.0, "plt_hidden_scale": 1}),
    "no norm between loops": ("plt", {"plt_normalize_per_loop": False}),
    "gate on the query": ("plt", {"plt_gate_use_hidden_states": False}),
    "one head of keys": ("plt", {"num_key_value_heads": 1}),
    "biases, wide heads": ("plt", {"attention_bias": True, "head_dim": 12}),
    "no window": ("plt", {"plt_window_size": [0, 0]}),
    "long window": ("plt", {"plt_window_size": [64, 0]}),
    "norm's epsilon": ("plt", {"rms_norm_eps": 0.1}),
    "iquest": ("iquest", {}),
    "iquest, one head of keys": ("iquest", {"num_key_value_heads": 1, "loop_window_size": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_loop_equals_a_plain_float64_forward(variant: str) -> None:
    kind, fields = VARIANTS[variant]
    model, ids = make_model(kind, loops=4, **fields), tokens(11)
    plain = PlainPLT.of(model)
    expected = torch.stack([plain.logits(state) for state in plain.loop_states(ids, 4)])
    torch.testing.assert_close(logits_of_loops(model, ids[None])[:, 0].double(), expected, atol=3e-5, rtol=1e-5)
    for depth in (1, 2, 3):
        with torch.no_grad():
            logits = model(ids[None], loops=depth).logits[0]
        torch.testing.assert_close(logits.double(), expected[depth - 1], atol=3e-5, rtol=1e-5)


def test_variants_differ() -> None:
    ids = tokens(1, 11)
    plt = [make_model(**fields) for kind, fields in VARIANTS.values() if kind == "plt" and "num_key" not in str(fields)]
    outputs = [logits_of_loops(model, ids)[-1] for model in plt]
    assert all((a - b).abs().max() > 1e-2 for a, b in itertools.combinations(outputs, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_one_loop_is_the_dense_model(kind: str) -> None:
    model, ids = make_model(kind, loops=1), tokens(2, 9)
    weights = {name: weight for name, weight in model.state_dict().items() if "gate" not in name or "mlp" in name}
    dense = LlamaForCausalLM(LlamaConfig(**COMMON, rms_norm_eps=model.config.rms_norm_eps)).eval()
    dense.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    generated = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(generated, dense.generate(ids, max_new_tokens=12, do_sample=False))


def test_shift_is_one_position_to_the_right() -> None:
    state = torch.arange(1.0, 7.0).view(1, 3, 2)
    assert shift(state).tolist() == [[[0, 0], [1, 2], [3, 4]]]
    assert shift(state, before=torch.full((1, 1, 2), 9.0)).tolist() == [[[9, 9], [1, 2], [3, 4]]]
    follows = torch.tensor([[True, False, True]])
    assert shift(state, follows=follows).tolist() == [[[0, 0], [0, 0], [3, 4]]]


def test_a_new_model_blends_both_attentions_evenly() -> None:
    model = IQuestPLTCoderForCausalLM(IQuestPLTCoderConfig(**COMMON))
    for gate in model.model.gates:
        assert not gate.weight.any()
        assert not gate.bias.any()
        assert torch.equal(gate.gate_norm.weight, torch.ones(32))
        g = gate(torch.randn(1, 5, 32), torch.randn(1, 4, 5, 8))
        assert torch.equal(g, torch.full((1, 5, 4), 0.5))


def test_gates_are_scalars_of_heads_between_zero_and_one() -> None:
    seen = []
    for kind in KINDS:
        model = make_model(kind)
        for gate in model.model.gates:
            gate.register_forward_hook(lambda _, args, output: seen.append(output))
        model(tokens(1, 7))
    assert len(seen) == 2 * LAYERS * (LOOPS - 1)  # never in loop 1
    assert all(g.shape == (1, 7, 4) and (g > 0).all() and (g < 1).all() for g in seen)
    assert all(g.std() > 0.02 for g in seen)


# ------------------------------------------------------------------------------------------- padding, packing, kernels


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_batch_equals_single_sequences(kind: str, side: str) -> None:
    model, sequences = make_model(kind), [tokens(n, seed=n) for n in (3, 12, 7)]
    ids, mask = padded(sequences, side)
    for positions in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
        batch = logits_of_loops(model, ids, attention_mask=mask, **positions)
        for row, sequence in enumerate(sequences):
            single = logits_of_loops(model, sequence[None])[:, 0]
            torch.testing.assert_close(batch[:, row][:, mask[row] == 1], single, atol=2e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_one_another() -> None:
    model, sequences = make_model(), [tokens(n, seed=n) for n in (5, 9, 2)]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])[None]
    packed = logits_of_loops(model, torch.cat(sequences)[None], position_ids=positions, use_cache=False)[:, 0]
    single = torch.cat([logits_of_loops(model, s[None])[:, 0] for s in sequences], dim=1)
    torch.testing.assert_close(packed, single, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_equals_eager(kind: str) -> None:
    sdpa, eager = make_model(kind), make_model(kind, attn_implementation="eager")
    assert (sdpa.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    ids, mask = padded([tokens(4), tokens(9)], "left")
    expected, found = (logits_of_loops(m, ids, attention_mask=mask)[:, mask == 1] for m in (eager, sdpa))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_mask_that_is_not_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padding mask \[B, S\], found \(1, 1, 4, 4\)"):
        make_model()(tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))


# ---------------------------------------------------------------------------------------------------------- gradients


def test_gradient_of_loop_3_to_the_keys_of_loop_1_by_finite_differences() -> None:
    model, ids = make_model().double(), tokens(2, 10)
    delta = torch.zeros(2, 10, 16, dtype=torch.float64, requires_grad=True)  # added to the keys of loop 1
    calls = itertools.count()
    model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda _, args, keys: keys + delta if next(calls) == 0 else keys
    )

    def loss() -> Tensor:
        nonlocal calls
        calls = itertools.count()
        logits = model.lm_head(model.model(ids, use_cache=False).loop_states[2])
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    gradient, step = delta.grad.clone(), 1e-4
    entries = [(0, 0, 3), (0, 4, 0), (1, 1, 9), (1, 6, 15), (0, 8, 7)]  # key 1 of row 1 is out of late windows
    for entry in entries:
        differences = []
        for sign in (1, -1):
            with torch.no_grad():
                delta[entry] = sign * step
                differences.append(sign * loss().item())
                delta[entry] = 0.0
        assert gradient[entry].item() == pytest.approx(sum(differences) / (2 * step), rel=1e-5, abs=1e-10)
    assert gradient[tuple(zip(*entries, strict=True))].abs().min() > 1e-6


def test_keys_of_loop_1_get_a_gradient_through_the_later_loops_alone() -> None:
    # In the last layer loop 1's own attention is of no consequence: with b = 0 nothing of its state is handed on.
    model, ids = make_model(plt_hidden_scale=0.0), tokens(1, 8)
    last = model.model.layers[-1].self_attn
    keys = []
    last.k_proj.register_forward_hook(lambda _, args, output: (output.retain_grad(), keys.append(output))[0])
    model(ids, labels=ids, score=Score()).scores.log_probs[..., -1].sum().backward()
    assert len(keys) == LOOPS
    assert keys[0].grad.abs().max() > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    ids, gradients = tokens(2, 8), []
    for checkpointing in (False, True):
        model = make_model(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, score=Score()).scores.log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-5, msg=name)
        assert gradient.abs().max() > 0, name


def test_scores_are_the_log_probs_of_each_depth() -> None:
    model, ids = make_model(), tokens(2, 8)
    with torch.no_grad():
        output = model(ids, labels=ids, score=Score(temperature=0.7))
    log_probs = (logits_of_loops(model, ids)[:, :, :-1].double() / 0.7).log_softmax(-1)
    expected = log_probs.gather(-1, ids[None, :, 1:, None].expand(LOOPS, -1, -1, -1))[..., 0].movedim(0, -1)
    torch.testing.assert_close(output.scores.log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    assert output.exit_log_pdf is None


# ------------------------------------------------------------------------------------------------- cache and generation


@pytest.mark.parametrize("chunks", [[20], [7, 3, 6, 4], [1] * 20, [12, *[1] * 8]], ids=["one", "few", "single", "both"])
@pytest.mark.parametrize(("kind", "parallel"), [("plt", True), ("plt", False), ("iquest", False)])
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_cached_in_chunks_equals_one_forward(kind: str, parallel: bool, loops: int, chunks: list[int]) -> None:
    model = make_model(kind, loops)
    model.config.parallel_decode = parallel
    ids, mask = padded([tokens(20, seed=2), tokens(15, seed=3)], "left")
    expected = logits_of_loops(model, ids, attention_mask=mask, use_cache=False)
    cache, found, start = model.model.new_cache(), [], 0
    for length in chunks:
        stop = start + length
        found.append(logits_of_loops(model, ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache))
        start = stop
    torch.testing.assert_close(torch.cat(found, 2)[:, mask == 1], expected[:, mask == 1], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("kind", "loops"), [("plt", 1), ("plt", 2), ("plt", 4), ("iquest", 3)])
def test_generate_with_left_padding_equals_greedy_forwards(kind: str, loops: int, parallel: bool) -> None:
    model, prompts, count = make_model(kind, loops), [tokens(n, seed=n) for n in (2, 9, 5)], 14
    model.config.parallel_decode = parallel
    ids, mask = padded(prompts, "left")
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)
    assert type(out.past_key_values) is PLTCache
    for row, prompt in enumerate(prompts):
        sequence = prompt
        for step in range(count):
            with torch.no_grad():
                logits = model(sequence[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(out.logits[step][row], logits, atol=1e-5, rtol=1e-5)
            sequence = torch.cat([sequence, logits.argmax().view(1)])
        assert torch.equal(out.sequences[row, ids.shape[1] :], sequence[len(prompt) :])


@pytest.mark.parametrize("loops", [2, 4])
def test_several_samples_of_a_prompt_are_those_of_sequential_decoding(loops: int) -> None:
    model, (ids, mask) = make_model(loops=loops), padded([tokens(3), tokens(8), tokens(5)], "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "num_return_sequences": 4, "do_sample": True, "top_k": 0}
    outputs = {}
    for parallel in (True, False):
        model.config.parallel_decode = parallel
        torch.manual_seed(0)
        outputs[parallel] = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    assert torch.equal(outputs[True].sequences, outputs[False].sequences)
    parallel, sequential = (torch.stack(outputs[way].logits) for way in (True, False))
    torch.testing.assert_close(parallel, sequential, atol=1e-5, rtol=1e-5)
    assert len(outputs[True].sequences.unique(dim=0)) == 12  # each sample went its own way through the cache


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_reorders_windows_and_states(kind: str) -> None:
    model, (ids, mask) = make_model(kind), padded([tokens(3), tokens(8)], "left")
    options = {"attention_mask": mask, "max_new_tokens": 10, "num_beams": 3, "do_sample": False, "length_penalty": 0.0}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("loops", [2, 4])
def test_parallel_decode_runs_the_layers_once_a_token(loops: int) -> None:
    calls, logits = {}, {}
    ids = tokens(2, 9)
    for parallel in (True, False):
        model, rows = make_model(loops=loops, parallel_decode=parallel), []
        model.model.layers[0].register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].shape))
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 11}
        logits[parallel] = torch.stack(model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits)
        calls[parallel] = rows[loops:]  # after the prompt, which runs loop after loop
    assert calls[True] == [(2, loops, 32)] * 10
    assert calls[False] == [(2, 1, 32)] * 10 * loops
    torch.testing.assert_close(logits[True], logits[False], atol=1e-5, rtol=1e-5)


def test_cache_grows_as_that_of_a_dense_model() -> None:
    def elements(model: PLTForCausalLM, length: int) -> int:
        with torch.no_grad():
            cache = model(tokens(1, length), use_cache=True).past_key_values
        held = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
        if cache.last_states is not None:
            held += [cache.last_states, *itertools.chain(*cache.window_keys, *cache.window_values)]
        return sum(tensor.numel() for tensor in held)

    values = 2 * 2 * 8  # keys and values of 2 heads of 8 channels
    for loops in (1, 2, 4):
        model = make_model(loops=loops)
        windows, states = (loops - 1) * LAYERS * LEFT * values, (loops - 1) * 32
        for length in (6, 40):
            assert elements(model, length) == LAYERS * length * values + windows + states * (loops > 1)
        spec = model.loop_spec
        assert spec.kv_bytes_per_token(4) == 4 * LAYERS * values
        assert spec.kv_bytes_of_windows(4) == 4 * (loops - 1) * LAYERS * (LEFT + 1) * values


def test_a_cache_of_another_kind_or_depth_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"PLTCache for 3 loops, found DynamicCache; use `new_cache\(\)`"):
        model(tokens(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="PLTCache for 3 loops, found one for 2"):
        model(tokens(1, 4), past_key_values=model.model.new_cache(2))
    with pytest.raises(ValueError, match=r"cache_implementation='static'"):
        model.generate(tokens(1, 4), max_new_tokens=2, cache_implementation="static")


# ---------------------------------------------------------------------------------- configuration, spec, saved and back


def test_released_configurations() -> None:
    loopcoder, iquest = IQuestPLTCoderConfig(), IQuestLoopCoderConfig()
    spec = LoopSpec.from_config(loopcoder)
    assert (spec.loops, spec.layers, spec.kv_heads, spec.head_dim, spec.window) == (2, 14, 8, 128, 65)
    assert spec.input == LoopInput("add", 1.0, 1.0, shift=1)
    assert (spec.attention_gate, spec.exit_gate, spec.norm_each_loop, spec.parallel_decode) == (
        "input",
        False,
        True,
        True,
    )
    assert spec.kv_bytes_per_token() == 14 * 2 * 8 * 128 * 2
    assert loopcoder.rope_parameters["rope_theta"] == 5e5
    spec = LoopSpec.from_config(iquest)
    assert (spec.loops, spec.layers, spec.window, spec.input.kind, spec.attention_gate) == (2, 80, 64, "state", "query")
    assert not spec.norm_each_loop
    assert not spec.parallel_decode


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (IQuestPLTCoderConfig, {"plt_num_loops": 0}, "plt_num_loops must be at least 1, found 0"),
        (IQuestPLTCoderConfig, {"plt_window_size": [64, 1]}, r"must be \[positions to the left, 0\], found \[64, 1\]"),
        (IQuestPLTCoderConfig, {"plt_window_size": [-1, 0]}, r"must be \[positions to the left, 0\]"),
        (IQuestLoopCoderConfig, {"loop_num": 0}, "loop_num must be at least 1, found 0"),
        (IQuestLoopCoderConfig, {"loop_window_size": 0}, "loop_window_size must be at least 1, found 0"),
    ],
)
def test_values_that_no_forward_could_honour_are_refused(config: type, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_weights_have_upstreams_names_and_come_back(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    model.set_loops(2)
    model.save_pretrained(tmp_path)
    saved, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    gates = {
        "plt": [
            f"model.layers.{i}.self_attn.plt_gate.{n}" for i in range(2) for n in ("weight", "bias", "gate_norm.weight")
        ],
        "iquest": [f"model.gate_projections.{i}.{n}" for i in range(2) for n in ("weight", "bias")],
    }[kind]
    dense = set(LlamaForCausalLM(LlamaConfig(**COMMON)).state_dict())
    assert set(saved) == dense | set(gates)
    assert config["plt_num_loops" if kind == "plt" else "loop_num"] == 2
    assert "total_ut_steps" not in config
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert LoopSpec.from_config(AutoConfig.from_pretrained(tmp_path)) == model.loop_spec
    assert loaded.loop_spec.loops == 2
    assert torch.equal(logits_of_loops(loaded, tokens(1, 9)), logits_of_loops(model, tokens(1, 9)))


def test_the_backbone_loads_alone(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is IQuestPLTCoderModel
    with torch.no_grad():
        found, expected = backbone(tokens(1, 6)).last_hidden_state, model.model(tokens(1, 6)).last_hidden_state
    assert torch.equal(found, expected)
