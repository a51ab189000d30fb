"""Each per-loop measure against a naive float64 computation, on every family; the recommendation; the command."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_decoder import PlainDecoder
from plain_plt import PlainPLT
from test_plt import make_model
from torch import Tensor
from torch.nn.functional import softmax
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.diagnostics.attention import LayerAttention, future_of, log_attention, measure_attention
from rltt.diagnostics.diagnose import diagnose
from rltt.diagnostics.light import LIGHT, measure_lightly
from rltt.diagnostics.measures import MEASURES, RunningMean, measure_batch
from rltt.diagnostics.recommend import recommend
from rltt.errors import PolicyError
from rltt.models.configuration import LoopedLlamaConfig, OuroConfig
from rltt.models.looped import LoopedForCausalLM
from rltt.models.looped_dense import LoopedLlamaForCausalLM
from rltt.models.looplm import OuroForCausalLM

SIZE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
IDS = torch.randint(1, 50, (17,), generator=torch.Generator().manual_seed(3))


def make(kind: str, loops: int = 3) -> LoopedForCausalLM:
    torch.manual_seed(0)
    if kind in ("plt", "iquest"):
        return make_model(kind, loops)
    if kind == "plt, no norm between":
        return make_model("plt", loops, plt_normalize_per_loop=False)
    if kind == "looped dense":
        config: Any = LoopedLlamaConfig(**SIZE, total_ut_steps=loops, loop_mixing="scalar", loop_mixing_init=0.7)
        model = LoopedLlamaForCausalLM(config)
    else:
        model = OuroForCausalLM(OuroConfig(**SIZE, total_ut_steps=loops))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


KINDS = ["looplm", "looped dense", "plt", "plt, no norm between", "iquest"]


# ------------------------------------------------------------------------------------------------- plainly, in float64


class Naive:
    """Everything of one sequence with whole attention matrices, one number at a time, from hooks on linear layers."""

    def __init__(self, model: LoopedForCausalLM, ids: Tensor, loops: int) -> None:
        self.model, self.ids, self.loops = model.double(), ids, loops
        spec = model.loop_spec
        self.embedding = model.model.embed_tokens.weight.detach()[ids]
        self.attention: list[list[Tensor]] = []  # [loop][layer] -> [N, S, S]
        self.gates: list[list[Tensor]] = []
        self.shared: dict[int, Tensor] = {}
        self.h, self.normed = [self.embedding], []
        with torch.no_grad():
            for r in range(loops):
                self.normed_, handed = self.block(self.loop_input(r), r)
                self.h.append(handed)
                self.normed.append(self.normed_)
            kept = list(self.attention), list(self.gates)
            self.images = [self.block(h, r + 1)[1] for r, h in enumerate(self.h[1:])]
            self.attention, self.gates = kept
            self.logits = [state @ model.lm_head.weight.T for state in self.normed]
        self.spec = spec

    def loop_input(self, r: int) -> Tensor:
        spec, h = self.model.loop_spec, self.h[r]
        if r == 0 or spec.input.kind == "state":
            return h
        if spec.input.kind == "mix":
            w = torch.sigmoid(self.model.model.input_mixing.logit.double())
            return w * self.embedding + (1 - w) * h
        shifted = torch.cat([torch.zeros_like(h[:1]), h[:-1]])
        return spec.input.embedding_scale * self.embedding + spec.input.state_scale * shifted

    def block(self, x: Tensor, r: int) -> tuple[Tensor, Tensor]:
        """The layers, from the library's own linear layers and norms, with attention written out."""
        backbone, spec = self.model.model, self.model.loop_spec
        self.attention.append([])
        self.gates.append([])
        for i, layer in enumerate(backbone.layers):
            normed = layer.input_layernorm(x)
            attended = layer.self_attn.o_proj(self.attend(layer.self_attn, normed, x, r, i))
            if isinstance(self.model, OuroForCausalLM):
                x = x + layer.input_layernorm_2(attended)
                x = x + layer.post_attention_layernorm_2(layer.mlp(layer.post_attention_layernorm(x)))
            else:
                x = x + attended
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = backbone.norm(x)
        return normed, normed if spec.norm_each_loop else x

    def attend(self, module: Any, normed: Tensor, layer_input: Tensor, r: int, i: int) -> Tensor:
        positions, spec = len(normed), self.model.loop_spec
        query, key, value = (
            p(normed).view(positions, -1, spec.head_dim).transpose(0, 1)
            for p in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = (torch.stack([self.rotate(head) for head in heads]) for heads in (query, key))
        heads = len(query)
        repeat = heads // len(key)
        weights = self.weights(query, key, positions)
        own = weights
        if spec.attention_gate is not None:
            if r == 0:
                self.shared[i] = torch.stack([key, value])
            else:
                assert spec.window is not None
                g = self.model.model.gates[i](layer_input[None], query[None])[0].T[..., None]
                self.gates[-1].append(g)
                far, near = self.weights(query, self.shared[i][0], positions), self.weights(query, key, spec.window)
                mixed = g * (far @ self.shared[i][1].repeat_interleave(repeat, 0))
                mixed = mixed + (1 - g) * (near @ value.repeat_interleave(repeat, 0))
                self.attention[-1].append(g * far + (1 - g) * near)
                return mixed.transpose(0, 1).flatten(1)
        self.attention[-1].append(own)
        return (own @ value.repeat_interleave(repeat, 0)).transpose(0, 1).flatten(1)

    def weights(self, query: Tensor, key: Tensor, window: int) -> Tensor:
        scores = query @ key.repeat_interleave(len(query) // len(key), 0).mT / query.shape[-1] ** 0.5
        i = torch.arange(len(self.ids))
        seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
        return softmax(scores.masked_fill(~seen, -math.inf), -1)

    def rotate(self, x: Tensor) -> Tensor:
        theta = self.model.config.rope_parameters["rope_theta"]
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)[None]
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def measures(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [math.nan] * self.loops for name in MEASURES}
        for r in range(1, self.loops + 1):
            h, before, at = self.h[r], self.h[r - 1], r - 1
            tokens = range(len(self.ids))
            found["step_size"][at] = mean(math.sqrt(sum((h[i] - before[i]) ** 2)) for i in tokens)
            found["fixed_point_gap"][at] = mean(math.sqrt(sum((h[i] - self.images[at][i]) ** 2)) for i in tokens)
            rms = (h**2).mean(-1, keepdim=True).sqrt()
            found["effective_rank"][at] = erank(h / rms)
            matrices = self.attention[at]
            found["attention_entropy"][at] = mean(entropy(row) for m in matrices for head in m for row in head)
            found["head_effective_rank"][at] = mean(erank(m[:, q]) for m in matrices for q in tokens)
            found["head_similarity"][at] = mean(
                torch.cosine_similarity(m[a, q], m[b, q], dim=0).item()
                for m in matrices
                for q in tokens
                for a in range(len(m))
                for b in range(len(m))
                if a != b
            )
            p = softmax(self.logits[at], -1)
            found["output_entropy"][at] = mean(map(entropy, p))
            found["true_token_rank"][at] = mean(
                (p[i].argsort(descending=True) == self.ids[i + 1]).nonzero().item() + 1 for i in tokens[:-1]
            )
            if r == 1:
                continue
            u, v = h - before, before - self.h[r - 2]
            found["cos_theta"][at] = mean(cosine(u[i], v[i]) for i in tokens)
            if self.spec.input.shift:
                found["offset_cost"][at] = mean((before[i] - before[i - 1]).norm().item() for i in tokens[1:])
            if self.gates[at]:
                found["gate_mean"][at] = mean(g.mean().item() for g in self.gates[at])
            found["output_kl"][at] = mean(map(kl, p, softmax(self.logits[at - 1], -1)))
            found["attention_kl"][at] = mean(
                kl(row, row_before)
                for m, m_before in zip(matrices, self.attention[at - 1], strict=True)
                for head, head_before in zip(m, m_before, strict=True)
                for row, row_before in zip(head, head_before, strict=True)
            )
        return found


def mean(values: Any) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed)


def cosine(u: Tensor, v: Tensor) -> float:
    """0 where one of them is rounding alone."""
    return (u @ v / u.norm() / v.norm()).item() if min(u.norm(), v.norm()) > 1e-5 else 0.0


def entropy(p: Tensor) -> float:
    return -sum(x * math.log(x) for x in p.tolist() if x > 0)


def kl(p: Tensor, q: Tensor) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p.tolist(), q.tolist(), strict=True) if x > 0)


def erank(matrix: Tensor) -> float:
    singular = torch.linalg.svdvals(matrix)
    return math.exp(entropy(singular / singular.sum()))


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_measures_against_float64(kind: str, loops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltt.diagnostics.attention.ELEMENTS", 4 * 5 * 17)  # several chunks of queries
    monkeypatch.setattr("rltt.diagnostics.outputs.ELEMENTS", 50 * 4)
    model = make(kind, loops)
    (found,) = measure_batch(model, [IDS], loops)
    expected = Naive(model, IDS, loops).measures()
    for name in MEASURES:
        torch.testing.assert_close(
            found.by_loop[name],
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=2e-4,
            atol=1e-5,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )
    shown = {name for name in MEASURES if not found.by_loop[name].isnan().all()}
    two_loops = {"cos_theta", "attention_kl", "output_kl"}
    absent = set() if kind.startswith("plt") else {"offset_cost"}
    absent |= set() if kind.startswith("plt") or kind == "iquest" else {"gate_mean"}
    absent |= two_loops | {"offset_cost", "gate_mean"} if loops == 1 else set()
    assert shown == set(MEASURES) - absent


@pytest.mark.parametrize("kind", ["looplm", "plt", "iquest"])
def test_the_naive_states_are_those_of_the_plain_decoders(kind: str) -> None:
    model = make(kind)
    naive = Naive(model, IDS, 3)
    plain = PlainDecoder.of(model) if kind == "looplm" else PlainPLT.of(model)
    if kind == "looplm":
        states = [model.model(IDS[None], use_cache=False).loop_states[r][0].detach() for r in range(3)]
    else:
        states = plain.loop_states(IDS, 3)
    for found, expected in zip(naive.normed, states, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_sequences_alone_and_the_model_stays_as_it_was(kind: str) -> None:
    model = make(kind)
    usual = model.config._attn_implementation
    before = model(IDS[None]).logits
    together = measure_batch(model, [IDS[:9], IDS, IDS[3:]], 3)
    for found, ids in zip(together, [IDS[:9], IDS, IDS[3:]], strict=True):
        (alone,) = measure_batch(model, [ids], 3)
        for name in MEASURES:
            torch.testing.assert_close(found.by_loop[name], alone.by_loop[name], rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(found.peaks, alone.peaks)
    assert model.config._attn_implementation == usual
    assert hooks_of(model) == 0
    assert torch.equal(model(IDS[None]).logits, before)


def hooks_of(model: LoopedForCausalLM) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_light_measures_are_the_same_and_leave_no_trace(kind: str, loops: int) -> None:
    model = make(kind, loops).train()
    model.gradient_checkpointing_enable()
    usual, random, hooks = model.config._attn_implementation, torch.get_rng_state(), hooks_of(model)
    found = measure_lightly(model, IDS)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == usual
    assert all(module.training for module in model.modules())
    assert hooks_of(model) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    (full,) = measure_batch(model.eval(), [IDS], loops)
    assert set(found) == set(LIGHT)
    for name in LIGHT:
        torch.testing.assert_close(found[name], full.by_loop[name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_light_measures_of_16_bit_weights_and_of_states_that_are_not_finite() -> None:
    model = make("looplm")
    exact = measure_lightly(model, IDS)
    narrow = measure_lightly(model.bfloat16(), IDS)
    for name in LIGHT:
        torch.testing.assert_close(narrow[name], exact[name], rtol=0.1, atol=0.1, equal_nan=True)
    model.model.norm.weight.data[3] = float("inf")
    assert all(values.isnan().all() for values in measure_lightly(model, IDS).values())


def test_shares_and_peaks() -> None:
    model = make("looplm")
    found = diagnose(model, [IDS, IDS[:9]], 3)
    naive = [Naive(model, ids, 3) for ids in (IDS, IDS[:9])]
    shifts = [
        [[kl(*(softmax(n.logits[r - d][i], -1) for d in (0, 1))) for r in (1, 2)] for i in range(len(n.ids))]
        for n in naive
    ]
    by_loop = [mean(mean(token[r] for token in text) for text in shifts) for r in (0, 1)]
    assert found.shares["output"] == pytest.approx([x / sum(by_loop) for x in by_loop], rel=1e-3)
    first = [token[0] > token[1] for text in shifts for token in text]
    assert found.shares["peak"] == pytest.approx([mean(first), 1 - mean(first)])
    assert found.peak_loop == (2 if mean(first) >= 0.5 else 3)
    assert sum(x for x in found.shares["attention"] if x is not None) == pytest.approx(1)
    assert found.about["tokens"] == 26


def test_attention_stays_finite_where_weights_vanish() -> None:
    torch.manual_seed(0)
    query, key = 40 * torch.randn(2, 4, 6, 8), 40 * torch.randn(2, 2, 6, 8)
    now, before = (LayerAttention(q, k, 1.0) for q, k in zip(query, key, strict=True))
    found = measure_attention(now, before)
    assert found.kl is not None
    assert torch.isfinite(found.kl)
    assert found.kl > 100
    exact = [
        log_attention(LayerAttention(a.query.double(), a.key.double(), 1.0), 0, 6, future_of(0, 6, a.key.device))
        for a in (now, before)
    ]
    expected = (exact[0].exp() * (exact[0] - exact[1]).nan_to_num(0.0)).sum() / 24
    torch.testing.assert_close(found.kl, expected, rtol=1e-4, atol=0)


def test_running_mean() -> None:
    values = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e3
    running = RunningMean()
    for value in values:
        running.add(value)
    torch.testing.assert_close(running.mean, values.mean(0))
    torch.testing.assert_close(running.stderr, values.std(0) / 3)


def test_16_bit_weights_are_refused_in_memory() -> None:
    with pytest.raises(PolicyError, match="measured in fp32"):
        measure_batch(make("looplm").bfloat16(), [IDS], 2)


# ------------------------------------------------------------------------------------------------------ recommendation


@pytest.mark.parametrize(
    ("ranks", "stderr", "verdict", "loops"),
    [
        ([150.0, 174.6, 172.5, 158.2], 0.1, "stop", 2),  # the paper's, with a loop 1
        ([150.0, 160.0, 170.0], 0.1, "another loop may pay", 4),
        ([150.0, 160.0, 160.1], 0.1, "undecided", None),
        ([150.0, 140.0], 0.1, "stop", 1),
        ([150.0, 140.0], 9.0, "undecided", None),
        ([150.0, 160.0, 160.1, 150.0], 0.1, "stop", 3),
        ([150.0], 0.1, "undecided", None),
        ([150.0, 151.0], None, "another loop may pay", 3),
    ],
)
def test_recommendation(ranks: list[float], stderr: float | None, verdict: str, loops: int | None) -> None:
    changes = [b - a for a, b in itertools.pairwise(ranks)]
    found = recommend(
        ranks, changes, [stderr] * len(changes), samples=1 if stderr is None else 9, trained_loops=2, offset=True
    )
    assert (found.verdict, found.loops) == (verdict, loops)
    assert any("trained with 2" in limit for limit in found.limits) == (len(ranks) != 2)
    assert any("standard error" in limit for limit in found.limits) == (stderr is None)


# ------------------------------------------------------------------------------------------------------- rltt diagnose


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "200"})


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_command(tiny_ouro: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    result = run(tiny_ouro, "--data", "arithmetic", "--out", out, "--limit", 6, "--batch-size", 4)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "diagnostics.json").read_text())
    assert [row["loop"] for row in found["loops"]] == [1, 2, 3]
    assert all(set(row) == {"loop", *MEASURES} for row in found["loops"])
    assert found["loops"][1]["offset_cost"] is None
    assert found["loops"][1]["gate_mean"] is None
    assert found["loops"][0]["cos_theta"] is None
    assert found["samples"] == 6
    assert found["recommendation"]["verdict"] in ("another loop may pay", "stop", "undecided")
    assert len(found["recommendation"]["evidence"]["effective_rank"]) == 3
    text = (out / "diagnostics.md").read_text()
    assert "| Loop | δ^(r) | Δp^(r) | Eff. rank | cos θ^(r) |" in text
    assert all(f"| r={r} | " in text for r in (1, 2, 3))
    assert "<u>" in text
    for name in ("curves.png", "head_similarity.png", "gain_cost.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    for shown in ("δ^(r)", "Eff. rank", found["recommendation"]["verdict"]):
        assert shown in result.output

    before = (out / "diagnostics.json").read_bytes()
    again = run(tiny_ouro, "--data", "arithmetic", "--out", out, "--limit", 2)
    assert again.exit_code == 2
    assert "is not overwritten" in again.output
    assert (out / "diagnostics.json").read_bytes() == before


def test_a_terminal_of_80_columns_shows_every_heading(shared_data: Path, tmp_path: Path) -> None:
    golden = shared_data / "golden" / "loopcoder-v2"  # has all measures
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": list(range(1, 20))}])
    options = ["diagnose", str(golden), "--data", str(rows), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    tables = [line for line in result.output.splitlines() if line.startswith("┃")]
    for heading in ("δ^(r)", "att. entropy", "head sim.", "gate", "Ω^(r)", "FP gap", "true token", "peak tokens"):
        assert any(heading in line for line in tables), heading
    assert result.stderr == ""


def test_one_loop(tiny_ouro: Path, tmp_path: Path) -> None:
    result = run(tiny_ouro, "--data", "arithmetic", "--out", tmp_path / "one", "--limit", 2, "--loops", 1)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "one" / "diagnostics.json").read_text())
    (row,) = found["loops"]
    nothing = {name for name, value in row.items() if value is None}
    assert nothing == {"cos_theta", "offset_cost", "attention_kl", "gate_mean", "output_kl"}
    assert found["shares"] == []
    assert found["peak_loop"] is None
    assert found["recommendation"]["loops"] is None


@pytest.mark.parametrize("name", ["loopcoder-v2", "iquest-loop", "ouro"])
def test_golden_checkpoints_stored_in_bf16_are_measured_in_fp32(shared_data: Path, tmp_path: Path, name: str) -> None:
    from rltt.models.load import load_policy

    stored = tmp_path / "bf16"
    load_policy(str(shared_data / "golden" / name), dtype=torch.bfloat16).save_pretrained(stored)
    data = write_rows(tmp_path / "ids.jsonl", [{"input_ids": IDS.tolist()}])
    result = run(stored, "--data", data, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    assert (found["stored_dtype"], found["measured_dtype"]) == ("bfloat16", "float32")
    model = load_policy(str(stored))
    expected = Naive(model, IDS, model.loop_spec.loops).measures()
    for row in found["loops"]:
        for measure in MEASURES:
            exact = expected[measure][row["loop"] - 1]
            assert row[measure] == (None if math.isnan(exact) else pytest.approx(exact, rel=3e-4, abs=1e-5)), measure


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "empty.jsonl", "is empty"),
        ("  \n", "empty.txt", "is empty"),
        ('{"text": ""}\n', "short.jsonl", "fewer than 2 tokens"),
        ('{"input_ids": [1]}\n', "one.jsonl", "fewer than 2 tokens"),
        ('{"input_ids": [1, 99999]}\n', "foreign.jsonl", "token 99999 is not in the policy's vocabulary"),
        ('{"input_ids": [1, "a"]}\n', "words.jsonl", "list of whole numbers"),
        ('{"text": 3}\n', "number.jsonl", "column 'text' must hold text, found int"),
        ('{"body": "a b c"}\n', "body.jsonl", "name what to read with --columns"),
    ],
)
def test_bad_data(tiny_ouro: Path, tmp_path: Path, content: str, name: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    result = run(tiny_ouro, "--data", tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_no_such_model_or_column(tiny_ouro: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere", "--data", "arithmetic", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "no such folder" in result.output
    data = write_rows(tmp_path / "rows.jsonl", [{"body": "three plus four"}])
    result = run(tiny_ouro, "--data", data, "--out", tmp_path / "out", "--columns", "bod")
    assert result.exit_code == 2
    assert "no column 'bod'" in result.output
    assert run(tiny_ouro, "--data", data, "--out", tmp_path / "out", "--columns", "body").exit_code == 0


def test_a_text_file_is_cut_into_pieces(tiny_ouro: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("three plus four is seven " * 9)
    result = run(tiny_ouro, "--data", tmp_path / "book.txt", "--out", tmp_path / "out", "--max-length", 10)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    assert found["samples"] > 2
    assert found["max_length"] == 10
