"""The objective against float64 references that are written here from the equations, one token at a time."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rltt.models.exit_gate import exit_log_pdf
from rltt.objective import credit as schemes
from rltt.objective.advantage import group_advantages, mixed_groups
from rltt.objective.kl import k3, kl_to_last_loop
from rltt.objective.logprobs import CPU_TILE, TRL_TILE, loop_log_probs
from rltt.objective.looplm import kl_to_uniform, looplm_token_loss
from rltt.objective.policy_loss import REDUCTION, PolicyLoss, reduce_tokens

B, C, T = 4, 5, 3
LENGTHS = (5, 2, 4, 1)
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def completion_mask() -> Tensor:
    return torch.tensor([[1.0] * length + [0.0] * (C - length) for length in LENGTHS])


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def naive_exit_pdf(gate: Tensor) -> Tensor:
    """p_t = λ_t ∏_{s<t} (1-λ_s), the last loop takes the remainder; differentiable, float64. [..., T]."""
    leave = 1 / (1 + torch.exp(-gate.double()))
    probabilities, stay = [], torch.ones_like(leave[..., 0])
    for t in range(gate.shape[-1] - 1):
        probabilities.append(stay * leave[..., t])
        stay = stay * (1 - leave[..., t])
    return torch.stack([*probabilities, stay], dim=-1)


# ------------------------------------------------------------------------------------------------------------ exit gate


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_exit_pdf_equals_its_definition(loops: int) -> None:
    gate = 3 * normal(6, loops, seed=0)
    torch.testing.assert_close(exit_log_pdf(gate).exp().double(), naive_exit_pdf(gate), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_exit_pdf_sums_to_one_and_stays_finite(scale: float) -> None:
    gate = torch.tensor(list(itertools.product([-scale, 0.0, scale], repeat=4)), requires_grad=True)
    log_pdf = exit_log_pdf(gate)
    assert log_pdf.isfinite().all()
    torch.testing.assert_close(log_pdf.exp().sum(-1), torch.ones(len(gate)), atol=1e-6, rtol=0)
    kl_to_uniform(log_pdf).sum().backward()
    assert gate.grad is not None
    assert gate.grad.isfinite().all()


def test_tiny_exit_probabilities_keep_their_logarithm() -> None:
    # In probabilities all of these are 0 or 1 in fp32; in log space each keeps its own value.
    log_pdf = exit_log_pdf(torch.tensor([-200.0, 150.0, 80.0, 0.0]))
    torch.testing.assert_close(log_pdf, torch.tensor([-200.0, 0.0, -150.0, -230.0]))


# --------------------------------------------------------------------------------------------------------------- credit


@pytest.mark.parametrize("loops", [1, 3, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0])
def test_fixed_schemes_equal_their_definition(loops: int, alpha: float) -> None:
    powers = [t**alpha for t in range(1, loops + 1)]
    assert schemes.final(loops).tolist() == [0.0] * (loops - 1) + [1.0]
    assert schemes.uniform(loops).tolist() == pytest.approx([1 / loops] * loops)
    assert schemes.progressive(loops, alpha).tolist() == pytest.approx([p / sum(powers) for p in powers])


def test_learned_credit_is_a_softmax_that_starts_uniform() -> None:
    learned = schemes.LearnedCredit(T)
    assert learned().tolist() == pytest.approx([1 / T] * T)
    with torch.no_grad():
        learned.logits.copy_(torch.tensor([0.5, -1.0, 2.0]))
    powers = [math.exp(x) for x in (0.5, -1.0, 2.0)]
    assert learned().tolist() == pytest.approx([p / sum(powers) for p in powers])


@pytest.mark.parametrize("loss_type", ["reinforce", "grpo"])
@pytest.mark.parametrize("scheme", ["final", "uniform", "progressive", "exit_pdf", "exit_pdf undetached", "learned"])
def test_each_scheme_and_its_gradient(scheme: str, loss_type: str) -> None:
    """Σ_t ω_t·term_t, averaged over a response and over responses: value, and gradient to ℓ, gate and credit logits."""
    mask, advantages = completion_mask(), torch.tensor(ADVANTAGES)[:, None]
    log_probs = (0.3 * normal(B, C, T, seed=1) - 2).requires_grad_()
    old = log_probs.detach() + 0.2 * normal(B, C, T, seed=2)
    gate = normal(B, C, T, seed=3).requires_grad_()
    learned = schemes.LearnedCredit(T)
    with torch.no_grad():
        learned.logits.copy_(torch.tensor([0.5, -1.0, 1.5]))

    credit = {
        "final": lambda: schemes.final(T),
        "uniform": lambda: schemes.uniform(T),
        "progressive": lambda: schemes.progressive(T, 2.0),
        "exit_pdf": lambda: schemes.exit_pdf(exit_log_pdf(gate)),
        "exit_pdf undetached": lambda: schemes.exit_pdf(exit_log_pdf(gate), detach=False),
        "learned": learned,
    }[scheme]()
    policy_loss = PolicyLoss(loss_type)
    terms = []
    for t in range(T):
        ratio = policy_loss.ratio(log_probs[..., t], old[..., t], mask)
        terms.append(policy_loss.term(log_probs[..., t], old[..., t], ratio, advantages, mask))
    loss = reduce_tokens((credit * torch.stack(terms, dim=-1)).sum(-1), mask, REDUCTION[loss_type])
    loss.backward()

    # The same, token by token and loop by loop, on float64 leaves of its own.
    ref_log_probs = log_probs.detach().double().requires_grad_()
    ref_gate = gate.detach().double().requires_grad_()
    ref_logits = learned.logits.detach().double().requires_grad_()
    pdf = naive_exit_pdf(ref_gate)
    expected = torch.zeros((), dtype=torch.float64)
    for i, j, t in itertools.product(range(B), range(C), range(T)):
        if j >= LENGTHS[i]:
            continue
        weight = {
            "final": float(t == T - 1),
            "uniform": 1 / T,
            "progressive": (t + 1) ** 2 / (1 + 4 + 9),
            "exit_pdf": pdf[i, j, t].detach(),
            "exit_pdf undetached": pdf[i, j, t],
            "learned": torch.exp(ref_logits[t]) / torch.exp(ref_logits).sum(),
        }[scheme]
        if loss_type == "reinforce":
            term = -ADVANTAGES[i] * ref_log_probs[i, j, t]
        else:
            ratio = torch.exp(ref_log_probs[i, j, t] - old[i, j, t].double())
            term = -torch.min(ratio * ADVANTAGES[i], ratio.clamp(0.8, 1.2) * ADVANTAGES[i])
        expected = expected + weight * term / LENGTHS[i] / B
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for found, reference in ((log_probs, ref_log_probs), (gate, ref_gate), (learned.logits, ref_logits)):
        gradient = torch.zeros_like(reference) if found.grad is None else found.grad.double()
        wanted = torch.zeros_like(reference) if reference.grad is None else reference.grad
        torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=1e-5)
    assert (gate.grad is not None) == (scheme == "exit_pdf undetached")
    assert (learned.logits.grad is not None) == (scheme == "learned")
    if loss_type == "reinforce" and scheme not in ("exit_pdf undetached", "exit_pdf", "learned"):
        # On paper: ∂loss/∂ℓ_ijt = -A_i·ω_t / (|y_i|·B).
        for i, j, t in itertools.product(range(B), range(C), range(T)):
            analytic = -ADVANTAGES[i] * credit[t].item() / (LENGTHS[i] * B) if j < LENGTHS[i] else 0.0
            assert log_probs.grad[i, j, t].item() == pytest.approx(analytic, abs=1e-7)


# --------------------------------------------------------------------------------------------------------- policy terms


def naive_term(loss: PolicyLoss, log_probs: list[float], old: list[float], advantage: float) -> list[float]:
    """One loop's terms of one completion, in Python floats."""
    log_ratios = [a - b for a, b in zip(log_probs, old, strict=True)]
    if loss.importance_sampling_level == "sequence":
        log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
    terms = []
    for log_prob, log_ratio in zip(log_probs, log_ratios, strict=True):
        ratio = math.exp(log_ratio)
        if loss.loss_type == "reinforce":
            term = -advantage * log_prob
        elif loss.loss_type == "cispo":
            term = -min(ratio, loss.epsilon_high) * advantage * log_prob
        elif loss.loss_type == "sapo":
            tau = loss.sapo_temperature_pos if advantage > 0 else loss.sapo_temperature_neg
            term = -advantage * logistic(tau * (ratio - 1)) * 4 / tau
        elif loss.loss_type == "vespo":
            whole = sum(a - b for a, b in zip(log_probs, old, strict=True))
            positive = advantage >= 0
            k, lam = (
                (loss.vespo_k_pos, loss.vespo_lambda_pos) if positive else (loss.vespo_k_neg, loss.vespo_lambda_neg)
            )
            term = -math.exp(lam) * math.exp(whole) ** k * math.exp(-lam * math.exp(whole)) * advantage * log_prob
        else:
            bounded = min(max(ratio, 1 - loss.epsilon_low), 1 + loss.epsilon_high)
            first = ratio if loss.delta is None else min(ratio, loss.delta)
            term = -min(first * advantage, bounded * advantage)
        terms.append(term)
    return terms


LOSSES = [
    *(PolicyLoss(loss_type) for loss_type in REDUCTION),
    PolicyLoss("grpo", epsilon_low=0.1, epsilon_high=0.3),
    PolicyLoss("grpo", delta=1.05),
    PolicyLoss("grpo", importance_sampling_level="sequence"),
    PolicyLoss("luspo", importance_sampling_level="sequence"),
    PolicyLoss("cispo", epsilon_high=1.1),
    PolicyLoss("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0),
    PolicyLoss("vespo", vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=2.5, vespo_lambda_neg=1.5),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss_type}-{loss.importance_sampling_level}")
def test_each_loss_types_term(loss: PolicyLoss) -> None:
    mask, advantages = completion_mask(), torch.tensor(ADVANTAGES)[:, None]
    log_probs = 0.5 * normal(B, C, seed=1) - 2
    old = log_probs + 0.4 * normal(B, C, seed=2)
    ratio = loss.ratio(log_probs, old, mask)
    found = loss.term(log_probs, old, ratio, advantages, mask).expand(B, C)
    for i, length in enumerate(LENGTHS):
        row = slice(0, length)
        expected = naive_term(loss, log_probs[i, row].tolist(), old[i, row].tolist(), ADVANTAGES[i])
        assert found[i, row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_type", REDUCTION)
def test_on_policy_all_forms_have_the_gradient_of_reinforce(loss_type: str) -> None:
    mask, advantages = completion_mask(), torch.tensor(ADVANTAGES)[:, None]
    log_probs = (normal(B, C, seed=1) - 2).requires_grad_()
    old = log_probs.detach()
    loss = PolicyLoss(loss_type, epsilon_high=2.0 if loss_type == "cispo" else 0.2)
    ratio = loss.ratio(log_probs, old, mask)
    (loss.term(log_probs, old, ratio, advantages, mask) * mask).sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages * mask, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clipping_stops_the_gradient_on_the_side_that_went_too_far(advantage: float) -> None:
    log_probs = torch.tensor([[-0.5, 0.0, 0.5]], requires_grad=True)  # ρ = 0.61, 1, 1.65
    loss, mask = PolicyLoss("grpo"), torch.ones(1, 3)
    ratio = loss.ratio(log_probs, torch.zeros(1, 3), mask)
    loss.term(log_probs, torch.zeros(1, 3), ratio, torch.tensor([[advantage]]), mask).sum().backward()
    moved = (log_probs.grad != 0).tolist()[0]
    assert moved == ([True, True, False] if advantage > 0 else [False, True, True])


def test_cispo_and_vespo_weights_carry_no_gradient() -> None:
    mask, advantages = torch.ones(1, 2), torch.tensor([[0.8]])
    for loss_type in ("cispo", "vespo"):
        log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        old = torch.tensor([[-1.1, -1.8]])
        loss = PolicyLoss(loss_type, epsilon_high=5.0)
        ratio = loss.ratio(log_probs, old, mask)
        loss.term(log_probs, old, ratio, advantages, mask).sum().backward()
        if loss_type == "cispo":
            weight = [math.exp(0.1), math.exp(-0.2)]
        else:
            weight = [math.exp(3.0 + 2.0 * -0.1 - 3.0 * math.exp(-0.1))] * 2
        assert log_probs.grad.tolist()[0] == pytest.approx([-0.8 * w for w in weight], rel=1e-4)


def test_vespo_stays_finite_far_off_policy() -> None:
    mask, advantages = torch.ones(2, 4), torch.tensor([[1.0], [-1.0]])
    log_probs = torch.tensor([[-1e4] * 4, [0.0] * 4], requires_grad=True)
    old = torch.tensor([[0.0] * 4, [-1e4] * 4])
    loss = PolicyLoss("vespo")
    term = loss.term(log_probs, old, loss.ratio(log_probs, old, mask), advantages, mask)
    term.sum().backward()
    assert term.isfinite().all()
    assert log_probs.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------------------------- KL


def test_k3_equals_its_definition_and_is_zero_only_at_equality() -> None:
    log_probs = (normal(B, C, seed=1) - 2).requires_grad_()
    reference = normal(B, C, seed=2) - 2
    found = k3(reference, log_probs)
    found.sum().backward()
    for i, j in itertools.product(range(B), range(C)):
        d = reference[i, j].item() - log_probs[i, j].item()
        assert found[i, j].item() == pytest.approx(math.exp(d) - d - 1, rel=1e-4, abs=1e-6)
        assert log_probs.grad[i, j].item() == pytest.approx(1 - math.exp(d), rel=1e-4, abs=1e-6)
    assert (found > 0).all()
    assert (k3(reference, reference) == 0).all()


def test_kl_to_last_loop_equals_its_definition() -> None:
    log_probs = normal(B, C, T, seed=1) - 2
    found = kl_to_last_loop(log_probs)
    difference = log_probs.double() - log_probs[..., -1:].double()
    torch.testing.assert_close(found.double(), difference.exp() - difference - 1, atol=1e-5, rtol=1e-4)
    assert (found[..., -1] == 0).all()


def test_kl_to_last_loop_estimates_the_kl_from_the_last_loop() -> None:
    last, early = (torch.log_softmax(normal(7, seed=seed), -1) for seed in (1, 2))
    # Expectation over tokens of the last loop, exactly.
    estimate = (last.exp() * kl_to_last_loop(torch.stack([early, last], -1)[None])[0, :, 0]).sum()
    assert estimate.item() == pytest.approx((last.exp() * (last - early)).sum().item(), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- advantages


def naive_advantages(rewards: list[float | None], size: int, scale: str) -> list[float]:
    def deviation(values: list[float]) -> float:
        mean = sum(values) / len(values) if values else 0.0
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0

    everyone = deviation([r for r in rewards if r is not None])
    advantages = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        known = [r for r in group if r is not None]
        divisor = {"group": deviation(known) + 1e-4, "batch": everyone + 1e-4, "none": 1.0}[scale]
        advantages += [0.0 if r is None else (r - sum(known) / len(known)) / divisor for r in group]
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 0.0, 0.0, 0.0, 0.5, 2.0, -1.0, 0.25],
        [1.0, None, 0.0, 0.0, None, None, None, None],
        [1.0, 1.0, 1.0, 1.0, None, 0.5, None, None],
        [None] * 8,
    ],
    ids=["all known", "one group unknown", "equal, and alone", "none known"],
)
def test_advantages(rewards: list[float | None], scale: str) -> None:
    tensor = torch.tensor([math.nan if r is None else r for r in rewards])
    found = group_advantages(tensor, 4, scale)
    assert found.tolist() == pytest.approx(naive_advantages(rewards, 4, scale), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, 0.9, 1 / 3, -2.3])
def test_a_group_of_equal_rewards_has_advantage_zero(value: float, scale: str) -> None:
    # Exactly: Adam would blow the smallest remainder of rounding up to a whole step.
    for size in (2, 3, 6, 7, 8, 16):
        rewards = torch.tensor([value] * size + [0.0, 1.0] * size)
        assert (group_advantages(rewards, size, scale)[:size] == 0).all()


def test_mixed_groups_counts_groups_with_both_outcomes() -> None:
    nan = math.nan
    groups = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [nan, 1, 0, nan], [nan, 1, 1, nan], [nan, nan, nan, nan]]
    assert mixed_groups(torch.tensor(groups).flatten(), 4).item() == pytest.approx(2 / 6)


# ----------------------------------------------------------------------------------------------------------- reductions


def reduced(reduction: str, pieces: list[slice], per_token: Tensor, mask: Tensor) -> Tensor:
    """The loss of a batch cut into micro-batches, put together as the trainer does."""
    shares = []
    for piece in pieces:
        share = reduce_tokens(per_token[piece], mask[piece], reduction, total_tokens=mask.sum(), max_length=9)
        shares.append(share if reduction == "token_mean" else share / len(pieces))
    return torch.stack(shares).sum()


WHOLE, HALVES, SINGLES = [slice(0, 4)], [slice(0, 2), slice(2, 4)], [slice(i, i + 1) for i in range(4)]


@pytest.mark.parametrize("reduction", sorted({*REDUCTION.values()}))
def test_reductions_equal_their_definition(reduction: str) -> None:
    per_token, mask = normal(B, C, seed=1), completion_mask()
    sums = [sum(per_token[i, :length].tolist()) for i, length in enumerate(LENGTHS)]
    expected = {
        "response_mean": sum(s / n for s, n in zip(sums, LENGTHS, strict=True)) / B,
        "response_sum": sum(sums) / B,
        "token_mean": sum(sums) / sum(LENGTHS),
        "micro_batch_token_mean": sum(sums) / sum(LENGTHS),
        "constant": sum(sums) / (B * 9),
    }[reduction]
    assert reduced(reduction, WHOLE, per_token, mask).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pieces", [HALVES, SINGLES], ids=["halves", "singles"])
@pytest.mark.parametrize("reduction", sorted({*REDUCTION.values()}))
def test_only_bnpo_depends_on_the_micro_batch(reduction: str, pieces: list[slice]) -> None:
    mask, results = completion_mask(), []
    for cut in (WHOLE, pieces):
        per_token = normal(B, C, seed=1).requires_grad_()
        loss = reduced(reduction, cut, per_token, mask)
        loss.backward()
        results.append((loss.detach(), per_token.grad))
    (whole, whole_gradient), (cut, cut_gradient) = results
    if reduction == "micro_batch_token_mean":
        assert (whole - cut).abs() > 0.01
        assert (whole_gradient - cut_gradient).abs().max() > 0.01
    else:
        torch.testing.assert_close(cut, whole)
        torch.testing.assert_close(cut_gradient, whole_gradient)


def test_an_empty_completion_counts_as_zero() -> None:
    per_token, mask = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert reduce_tokens(per_token, mask, "response_mean").item() == 0.5
    assert reduce_tokens(per_token, torch.zeros(2, 3), "micro_batch_token_mean").item() == 0.0


def test_reductions_name_what_they_need() -> None:
    per_token = torch.ones(1, 1)
    with pytest.raises(ValueError, match="token_mean needs total_tokens"):
        reduce_tokens(per_token, per_token, "token_mean")
    with pytest.raises(ValueError, match="constant needs max_length"):
        reduce_tokens(per_token, per_token, "constant")


# ------------------------------------------------------------------------------------------------------------ log-probs

H, V, S = 8, 23, 6


def scoring_problem(vocabulary: int = V) -> tuple[list[Tensor], Tensor, Tensor]:
    """States of T loops, a head, and labels where prompt, padding and one gap are not scored."""
    states = [normal(2, S, H, seed=t).requires_grad_() for t in range(T)]
    head = (0.5 * normal(vocabulary, H, seed=9)).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, S), generator=torch.Generator().manual_seed(3))
    labels[0, :3] = labels[1, :2] = labels[1, 4] = -100
    return states, head, labels


def naive_log_probs(states: list[Tensor], head: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """ℓ and entropy [B, S-1, T] by whole logits, in float64."""
    log_probs, entropies = [], []
    for state in states:
        distribution = torch.log_softmax(state.double() @ head.double().T / temperature, dim=-1)[:, :-1]
        entropies.append(-(distribution.exp() * distribution).sum(-1))
        log_probs.append(distribution.gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1))
    scored = (labels[:, 1:] != -100)[..., None]
    return torch.stack(log_probs, -1) * scored, torch.stack(entropies, -1) * scored


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(
    "vocabulary", [V, CPU_TILE.columns + 7, TRL_TILE.columns + 7], ids=["one tile", "more tiles", "more of TRL's tiles"]
)
def test_loop_log_probs_and_gradient(vocabulary: int, temperature: float, compact: bool) -> None:
    states, head, labels = scoring_problem(vocabulary)
    weights = normal(2, S - 1, T, seed=7)
    scores = loop_log_probs(states, head, labels, temperature, compact=compact)
    (scores.log_probs * weights).sum().backward()

    ref_states = [state.detach().double().requires_grad_() for state in states]
    ref_head = head.detach().double().requires_grad_()
    log_probs, entropy = naive_log_probs(ref_states, ref_head, labels, temperature)
    (log_probs * weights).sum().backward()

    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs.double(), log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=1e-5, rtol=1e-5)
    for found, reference in zip([*states, head], [*ref_states, ref_head], strict=True):
        torch.testing.assert_close(found.grad.double(), reference.grad, atol=1e-5, rtol=1e-4)
    assert (scores.log_probs[labels[:, 1:] == -100] == 0).all()


def test_gradient_of_loop_log_probs_by_finite_differences() -> None:
    states, head, labels = scoring_problem()
    weights = normal(2, S - 1, T, seed=7)

    def value(changed: list[Tensor]) -> float:
        return (loop_log_probs(changed, head, labels, 0.8).log_probs * weights).double().sum().item()

    (loop_log_probs(states, head, labels, 0.8).log_probs * weights).sum().backward()
    step = 1e-2
    for t in range(T):
        direction = normal(2, S, H, seed=20 + t)
        ends = []
        for sign in (1, -1):
            changed = [state.detach() + sign * step * direction * (s == t) for s, state in enumerate(states)]
            ends.append(value(changed))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx((states[t].grad * direction).sum().item(), rel=2e-3, abs=1e-3)


@pytest.mark.parametrize("grad_loops", [(T - 1,), (0, 2), ()])
def test_only_grad_loops_carry_a_gradient(grad_loops: tuple[int, ...]) -> None:
    states, head, labels = scoring_problem()
    everything = loop_log_probs(states, head, labels)
    some = loop_log_probs(states, head, labels, grad_loops=grad_loops)
    torch.testing.assert_close(some.log_probs, everything.log_probs)
    torch.testing.assert_close(some.entropy, everything.entropy)
    assert some.log_probs.requires_grad == bool(grad_loops)
    if grad_loops:
        some.log_probs.sum().backward()
    for t, state in enumerate(states):
        assert (state.grad is not None and bool(state.grad.abs().sum() > 0)) == (t in grad_loops)


@pytest.mark.parametrize("compact", [True, False])
def test_without_any_label_scores_and_gradients_are_zero(compact: bool) -> None:
    states, head, labels = scoring_problem()
    scores = loop_log_probs(states, head, torch.full_like(labels, -100), compact=compact)
    assert (scores.log_probs == 0).all()
    assert (scores.entropy == 0).all()
    scores.log_probs.sum().backward()
    assert all((tensor.grad == 0).all() for tensor in [*states, head])


def test_loop_log_probs_holds_no_logits_for_the_backward() -> None:
    # What autograd keeps may grow with the hidden states, never with tokens times vocabulary.
    states, labels = [normal(2, 40, H, seed=t).requires_grad_() for t in range(T)], torch.ones(2, 40, dtype=torch.long)
    head, kept = normal(5000, H, seed=9).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loop_log_probs(states, head, labels)
    assert kept
    assert max(kept) <= head.numel()
    assert head.numel() < 2 * 39 * 5000


# --------------------------------------------------------------------------------------------------- LoopLM objective


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.15])
def test_looplm_objective_equals_its_definition(beta: float, epsilon: float) -> None:
    cross_entropy, gate = normal(6, T, seed=1).abs() + 1, 2 * normal(6, T, seed=2)
    found = looplm_token_loss(cross_entropy, exit_log_pdf(gate), beta, epsilon)
    for row in range(6):
        stay, p = 1.0, []
        for t in range(T):
            leave = logistic(gate[row, t].item()) if t < T - 1 else 1.0
            p.append(stay * leave)
            stay *= 1 - leave
        losses = cross_entropy[row].tolist()
        expected = (1 - epsilon) * sum(p_t * loss for p_t, loss in zip(p, losses, strict=True))
        expected += epsilon / T * sum(losses)
        expected += beta * sum(p_t * math.log(p_t * T) for p_t in p)  # of the raw p, not of the smoothed weights
        assert found[row].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_gradient_of_the_looplm_objective_by_finite_differences(epsilon: float) -> None:
    cross_entropy = (normal(T, seed=1).abs() + 1).requires_grad_()
    gate = normal(T, seed=2).requires_grad_()
    looplm_token_loss(cross_entropy, exit_log_pdf(gate), 0.15, epsilon).backward()

    def value(losses: list[float], logits: list[float]) -> float:
        pdf = naive_exit_pdf(torch.tensor(logits, dtype=torch.float64))
        weights = (1 - epsilon) * pdf + epsilon / T
        regulariser = (pdf * torch.log(pdf)).sum() + math.log(T)
        return ((weights * torch.tensor(losses, dtype=torch.float64)).sum() + 0.15 * regulariser).item()

    def slope(t: int, of_gate: bool) -> float:
        ends = []
        for change in (1e-5, -1e-5):
            values = [cross_entropy.tolist(), gate.tolist()]
            values[of_gate][t] += change
            ends.append(value(*values))
        return (ends[0] - ends[1]) / 2e-5

    for t in range(T):
        assert cross_entropy.grad[t].item() == pytest.approx(slope(t, of_gate=False), abs=1e-5)
        assert gate.grad[t].item() == pytest.approx(slope(t, of_gate=True), abs=1e-5)
    assert gate.grad[-1] == 0  # the last loop takes the remainder: its own logit has no say
    assert gate.grad[:-1].abs().min() > 1e-3


def test_kl_to_uniform_is_zero_for_uniform_and_log_t_for_a_collapsed_gate() -> None:
    uniform = torch.log(torch.tensor([1 / 3, 1 / 3, 1 / 3]))
    assert kl_to_uniform(uniform).item() == pytest.approx(0.0, abs=1e-6)
    assert kl_to_uniform(exit_log_pdf(torch.tensor([500.0, 0.0, 0.0]))).item() == pytest.approx(math.log(3))
