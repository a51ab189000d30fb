"""RLTTTrainer: TRL's updates where the credit is GRPO's, its own where it is not, and numbers that can be trusted."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rltt.data.arithmetic import arithmetic_problems
from rltt.errors import PolicyError, UserError
from rltt.models.configuration import LoopedLlamaConfig
from rltt.models.load import load_policy
from rltt.models.looped_dense import LoopedLlamaForCausalLM
from rltt.models.looplm import OuroForCausalLM
from rltt.train.config import _UNSAFE, RLTTConfig
from rltt.train.token_means import TokenMeans
from rltt.train.trainer import RLTTTrainer

pytestmark = pytest.mark.usefixtures("quick_collections")

TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
LOOPS = 3


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that any completion gets some of: 0, 1/3, …, 2."""
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


def in_order(*rewards: float | None) -> Callable[..., list[float | None]]:
    """A reward function that gives the completions of each rollout these rewards, in the order of the prompts."""

    def crafted(completions: list[str], **_: Any) -> list[float | None]:
        assert len(completions) == len(rewards)
        return list(rewards)

    return crafted


class Workbench:
    """Makes trainers on the tiny LoopLM: 16 completions of at most 8 tokens in a rollout, groups of 4."""

    def __init__(self, policy: Path, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
        self.policy, self.tokenizer, self.out = policy, tokenizer, out
        problems = arithmetic_problems(1, 32, "train")
        self.data = Dataset.from_dict(
            {"prompt": [p.prompt for p in problems], "gold": [p.gold for p in problems], "row": list(range(32))}
        )

    def config(self, config_class: type = RLTTConfig, **options: Any) -> Any:
        return config_class(
            **{
                "output_dir": str(self.out),
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 8,
                "max_steps": 1,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "gradient_checkpointing": False,
                "report_to": [],
                "use_cpu": True,
                "bf16": False,
                "seed": 0,
                "disable_tqdm": True,
                **options,
            }
        )

    def trainer(
        self,
        model: Any = None,
        reward: Any = letters,
        trainer_class: type = RLTTTrainer,
        data: Dataset | None = None,
        rollout_writer: Any = None,
        config: Any = None,
        **options: Any,
    ) -> Any:
        extra = {} if rollout_writer is None else {"rollout_writer": rollout_writer}
        return trainer_class(
            model=load_policy(str(self.policy)) if model is None else model,
            reward_funcs=reward,
            args=self.config(**options) if config is None else config,
            train_dataset=self.data if data is None else data,
            processing_class=self.tokenizer,
            **extra,
        )

    def train(self, **options: Any) -> Any:
        trainer = self.trainer(**options)
        trainer.train()
        return trainer


@pytest.fixture
def bench(tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Workbench:
    return Workbench(tiny_ouro, tokenizer, tmp_path)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest change of any weight."""
    return max((after[name] - weight).abs().max().item() for name, weight in before.items())


def steps(trainer: Any) -> list[dict[str, float]]:
    """The log of each update."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


# ------------------------------------------------------------------------------------------------------- GRPO is TRL's

OFF_POLICY = {"beta": 0.05, "num_iterations": 2, "steps_per_generation": 4}


def assert_same_updates(bench: Workbench, **options: Any) -> None:
    """Three updates of `credit: final` and of TRL's trainer give the same weights, to the bit, and the same log."""
    options = {"max_steps": 3, "temperature": 0.9, "per_device_train_batch_size": 4, **options}
    trl = bench.train(trainer_class=GRPOTrainer, config=bench.config(GRPOConfig, **options))
    ours = bench.train(config=bench.config(credit="final", **options))
    before = load_file(bench.policy / "model.safetensors")
    assert moved(before, weights(ours)) > 1e-3
    for name, weight in weights(trl).items():
        assert torch.equal(weights(ours)[name], weight), name
    for expected, found in zip(steps(trl), steps(ours), strict=True):
        # Not kl, entropy and clip ratios: ours weigh tokens, TRL's weigh micro-batches.
        names = ("loss", "grad_norm", "learning_rate", "reward", "frac_reward_zero_std", "completions/mean_length")
        shared = [name for name in names if name in expected]
        assert {"loss", "grad_norm"} <= set(shared)
        assert [found[name] for name in shared] == pytest.approx([expected[name] for name in shared], abs=1e-5)


@pytest.mark.parametrize("options", [{"beta": 0.0}, OFF_POLICY], ids=["on policy", "off policy with KL"])
@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_credit_final_updates_as_trl_bit_for_bit(bench: Workbench, loss_type: str, options: dict[str, Any]) -> None:
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    assert_same_updates(bench, loss_type=loss_type, **options, **level)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_rewards": "batch", "epsilon_high": 0.01},
        {"scale_rewards": "none", "delta": 1.01},
        {"mask_truncated_completions": True, "loss_type": "dapo"},
        {"top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"},
        {"entropy_coef": 0.1, "use_bias_correction_kl": False},
        {"gradient_checkpointing": True},
        # Enough rows that the order of summation in the head's gradient depends on which rows are scored.
        {"per_device_train_batch_size": 16, "steps_per_generation": 2, "max_completion_length": 24},
    ],
    ids=lambda options: " ".join(options),
)
def test_credit_final_updates_as_trl_with_its_other_options(bench: Workbench, options: dict[str, Any]) -> None:
    assert_same_updates(bench, **{"loss_type": "grpo", "learning_rate": 1e-2, **OFF_POLICY, **options})


def test_every_loss_type_of_trl_is_tested_for_parity() -> None:
    from rltt.objective.policy_loss import REDUCTION

    assert set(REDUCTION) == {*TRL_LOSSES, "reinforce"}


# ------------------------------------------------------------------------------------------------------- other credits


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "reinforce"])
@pytest.mark.parametrize("credit", ["uniform", "exit_pdf", "progressive"])
def test_an_update_does_not_depend_on_the_micro_batch(bench: Workbench, credit: str, loss_type: str) -> None:
    # SGD without clipping: the change of a weight is its gradient, and a wrong factor would show.
    options = {"credit": credit, "loss_type": loss_type, "beta": 0.05, "optim": "sgd", "max_grad_norm": 0.0}
    options["learning_rate"] = 1.0
    results = []
    for micro_batch in (4, 16):
        cut = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 16 // micro_batch}
        results.append(bench.train(**options, **cut))
    before = load_file(bench.policy / "model.safetensors")
    small, whole = map(weights, results)
    change = {name: whole[name] - before[name] for name in before}
    scale = max(c.abs().max().item() for c in change.values())
    assert scale > 1e-3
    for name, weight in before.items():
        torch.testing.assert_close(small[name] - weight, change[name], atol=2e-5 * scale, rtol=1e-4, msg=name)
        torch.testing.assert_close(small[name], whole[name], atol=1e-6, rtol=1e-5)
    # What is measured does not depend on it either.
    log_small, log_whole = (steps(result)[0] for result in results)
    measured = ["loss", "entropy", "kl", *(f"loop{t}/{name}" for t in (1, 2, 3) for name in ("logp", "kl_to_last"))]
    assert [log_small[key] for key in measured] == pytest.approx([log_whole[key] for key in measured], abs=1e-5)


def test_each_credit_gives_its_own_update(bench: Workbench) -> None:
    options = {"loss_type": "reinforce", "gradient_checkpointing": False, "optim": "sgd"}
    runs = {
        name: bench.train(credit=credit, **options, **more)
        for name, credit, more in [
            ("final", "final", {}),
            ("uniform", "uniform", {}),
            ("exit_pdf", "exit_pdf", {}),
            ("exit_pdf undetached", "exit_pdf", {"detach_exit": False}),
            ("progressive", "progressive", {}),
            ("progressive 3", "progressive", {"credit_alpha": 3.0}),
        ]
    }
    after = {name: weights(run) for name, run in runs.items()}
    names = list(after)
    for i, first in enumerate(names):
        assert all(moved(after[first], after[second]) > 1e-7 for second in names[i + 1 :]), first
    logged = {name: [steps(run)[0][f"loop{t}/credit"] for t in (1, 2, 3)] for name, run in runs.items()}
    assert logged["final"] == [0, 0, 1]
    assert logged["uniform"] == pytest.approx([1 / 3] * 3)
    assert logged["progressive"] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert logged["progressive 3"] == pytest.approx([1 / 36, 8 / 36, 27 / 36])
    assert logged["exit_pdf"] == pytest.approx([steps(runs["exit_pdf"])[0][f"loop{t}/exit_prob"] for t in (1, 2, 3)])

    before, gate = load_file(bench.policy / "model.safetensors"), "model.early_exit_gate.bias"
    assert torch.equal(after["exit_pdf"][gate], before[gate])
    assert not torch.equal(after["exit_pdf undetached"][gate], before[gate])
    trains = {name: run.model.model.early_exit_gate.weight.requires_grad for name, run in runs.items()}
    assert trains == {name: name == "exit_pdf undetached" for name in names}  # no parameter waits for a gradient


def test_uniform_credit_of_one_loop_is_grpo(bench: Workbench) -> None:
    after = []
    for credit in ("uniform", "final"):
        model = load_policy(str(bench.policy), loops=1)
        after.append(weights(bench.train(model=model, credit=credit, loss_type="grpo", optim="sgd")))
    for name, weight in after[0].items():
        torch.testing.assert_close(weight, after[1][name], atol=1e-6, rtol=1e-5)


def test_off_policy_each_loop_has_its_own_ratio(bench: Workbench) -> None:
    """Two updates from one rollout, written out: old log-probs of every loop, from before the first update."""
    seen: list[dict[str, Any]] = []

    class Spy(RLTTTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            start, width = inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]
            expected = []
            with torch.no_grad():
                plain = load_policy(str(bench.policy))  # the weights that sampled
                for t in (1, 2, 3):
                    logits = plain(ids, attention_mask=mask, loops=t).logits.double() / self.temperature
                    log_probs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
                    expected.append(log_probs[:, start - 1 :][:, :width] * inputs["completion_mask"])
            seen.append({"expected": torch.stack(expected, -1), "found": inputs["old_loop_log_probs"]})
            return super()._compute_loss(model, inputs)

    options = {"steps_per_generation": 4, "per_device_train_batch_size": 4, "max_steps": 2, "temperature": 0.8}
    bench.train(trainer_class=Spy, credit="uniform", loss_type="grpo", learning_rate=1e-2, **options)
    assert len(seen) == 4
    for pair in seen:
        torch.testing.assert_close(pair["found"].double(), pair["expected"], atol=1e-4, rtol=1e-4)


def test_learned_credit_moves_and_survives_saving_and_resuming(bench: Workbench) -> None:
    options = {"credit": "learned", "loss_type": "reinforce", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"lr_scheduler_type": "constant", "credit_learning_rate": 0.05}
    whole = bench.train(**options)
    logits = whole.model.credit.logits.detach()
    assert logits.abs().max() > 0.02  # four steps of Adam at the policy's rate of 1e-3 could not reach 0.005
    logged = [[step[f"loop{t}/credit"] for t in (1, 2, 3)] for step in steps(whole)]
    assert logged[0] == pytest.approx([1 / 3] * 3)
    assert max(abs(a - b) for a, b in zip(logged[-1], logged[0], strict=True)) > 0.01
    saved = load_file(bench.out / "checkpoint-4" / "model.safetensors")
    assert torch.equal(saved["credit.logits"], logits)

    policy = load_policy(str(bench.out / "checkpoint-4"))  # a policy again, without what trained it
    assert policy.credit is None
    assert torch.equal(policy.lm_head.weight, whole.model.lm_head.weight)

    resumed = bench.trainer(**options)
    resumed.train(resume_from_checkpoint=str(bench.out / "checkpoint-2"))
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], weight, atol=1e-6, rtol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_kl_starts_at_zero_and_grows_while_the_reference_stays(bench: Workbench, beta: float) -> None:
    trainer = bench.trainer(beta=beta, max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant")
    initial = load_file(bench.policy / "model.safetensors")
    assert all(not parameter.requires_grad for parameter in trainer.ref_model.parameters())
    trainer.train()
    kl = [step["kl"] for step in steps(trainer)]
    assert kl[0] == 0
    assert kl[2] > kl[1] > 1e-4
    assert moved(initial, weights(trainer)) > 1e-2
    assert all(torch.equal(weight, initial[name]) for name, weight in trainer.ref_model.state_dict().items())


def test_the_kl_is_anchored_to_the_weights_in_memory(bench: Workbench) -> None:
    model = load_policy(str(bench.policy))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.set_loops(2)
    edited = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = bench.train(model=model, beta=0.1)
    assert trainer.ref_model.loop_spec.loops == 2
    assert all(torch.equal(weight, edited[name]) for name, weight in trainer.ref_model.state_dict().items())
    assert steps(trainer)[0]["kl"] == 0
    assert "loop2/logp" in steps(trainer)[0]
    assert "loop3/logp" not in steps(trainer)[0]


def test_beta_holds_the_policy_back(bench: Workbench) -> None:
    options = {"max_steps": 6, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    free, held = (steps(bench.train(beta=beta, **options))[-1]["kl"] for beta in (0.0, 5.0))
    assert held < free / 2


# ------------------------------------------------------------------------------------------------------------ refusals

UNSAFE_VALUES = {
    "off_policy_mask_threshold": 0.5,
    "use_adaptive_entropy": True,
    "router_aux_loss_coef": 0.01,
    "sync_ref_model": True,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "generation_kwargs": {"top_p": 0.5},
    "cache_implementation": "static",
    "use_transformers_continuous_batching": True,
    "use_liger_kernel": True,
    "vllm_importance_sampling_correction": False,
    "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "a+",
}


def test_precision_fits_the_machine_and_beta_is_not_negative(tmp_path: Path) -> None:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    assert RLTTConfig(str(tmp_path)).bf16 == on_gpu
    with pytest.raises(ValueError, match="beta must not be negative, found -1"):
        RLTTConfig(str(tmp_path), beta=-1.0)


def test_every_unsafe_option_is_tested() -> None:
    assert set(UNSAFE_VALUES) == {option for option, *_ in _UNSAFE}


@pytest.mark.parametrize(("option", "neutral", "why"), _UNSAFE, ids=[option for option, *_ in _UNSAFE])
def test_an_unsafe_option_is_refused_by_name(bench: Workbench, option: str, neutral: Any, why: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{option}={UNSAFE_VALUES[option]!r} is not supported for looped")
    ) as caught:
        bench.config(**{option: UNSAFE_VALUES[option]})
    assert why in str(caught.value)
    assert str(caught.value).endswith(f"leave it at {neutral!r}")
    assert getattr(bench.config(**{option: neutral}), option) == neutral


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": True, "loss_type": "vespo"}, "needs vllm_importance_sampling_mode 'token_mask'"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "'use_reentrant': True"),
        ({"credit": "last"}, "credit must be one of final, uniform, progressive, exit_pdf, learned; found 'last'"),
        ({"loss_type": "ppo"}, "loss_type must be one of reinforce, grpo, .*; found 'ppo'"),
        ({"credit": "progressive", "credit_alpha": -1.0}, r"credit_alpha must not be negative, found -1\.0"),
        ({"credit": "learned", "loss_type": "grpo"}, "'learned' gets no gradient from loss_type 'grpo'"),
    ],
    ids=["vespo", "reentrant", "credit", "loss", "alpha", "learned"],
)
def test_wrong_options_are_refused(bench: Workbench, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.config(**options)


def small_looped_llama(**fields: Any) -> LoopedLlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LoopedLlamaForCausalLM(LoopedLlamaConfig(vocab_size=100, **sizes, **fields))


def test_policies_that_cannot_be_trained_are_refused(bench: Workbench) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(PolicyError, match="must be a looped model, found LlamaForCausalLM; see `rltt convert`"):
        bench.trainer(model=LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)))
    adaptive = load_policy(str(bench.policy))
    adaptive.config.early_exit_threshold = 0.9
    with pytest.raises(PolicyError, match=r"early_exit_threshold is 0\.9.*set it to 1\.0"):
        bench.trainer(model=adaptive)
    with pytest.raises(PolicyError, match="'exit_pdf' needs an exit gate"):
        bench.trainer(model=small_looped_llama(use_exit_gate=False), credit="exit_pdf")


def test_a_policy_without_a_gate_trains_with_another_credit(bench: Workbench) -> None:
    torch.manual_seed(0)
    trainer = bench.train(model=small_looped_llama(use_exit_gate=False), credit="uniform", loss_type="grpo")
    assert trainer.model.model.input_mixing.logit.grad is None or math.isfinite(steps(trainer)[0]["grad_norm"])
    assert "loop1/exit_prob" not in steps(trainer)[0]
    assert "loop2/credit" in steps(trainer)[0]


def test_too_few_prompts_and_unsupported_arguments_are_refused(bench: Workbench) -> None:
    with pytest.raises(UserError, match="one rollout takes 4 prompts, but the training data has 3"):
        bench.trainer(data=bench.data.select(range(3)))
    bench.trainer(data=bench.data.select(range(4)))
    with pytest.raises(UserError, match="must be an RLTTConfig, found GRPOConfig"):
        bench.trainer(config=bench.config(GRPOConfig))
    with pytest.raises(UserError, match="peft_config must be a LoraConfig, found object"):
        RLTTTrainer(load_policy(str(bench.policy)), letters, bench.config(), bench.data, peft_config=object())


def test_a_path_is_a_policy_too(bench: Workbench) -> None:
    trainer = bench.trainer(model=str(bench.policy))
    assert type(trainer.model) is OuroForCausalLM
    assert trainer.model.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------------- numbers


def test_metrics_have_their_names_and_are_finite(bench: Workbench) -> None:
    trainer = bench.train(max_steps=2, beta=0.01)
    per_loop = {f"loop{t}/{x}" for t in (1, 2, 3) for x in ("logp", "kl_to_last", "entropy", "credit", "exit_prob")}
    expected = per_loop | {
        *("loss", "reward", "reward_std", "frac_reward_zero_std", "solve_rate", "mixed_groups", "kl", "grad_norm"),
        *("entropy", "learning_rate", "completions/mean_length", "completions/clipped_ratio", "clip_ratio/low_mean"),
        *("clip_ratio/high_mean", "clip_ratio/region_mean", "seconds/rollout", "seconds/reward", "seconds/score"),
        *("seconds/update", "rewards/letters/mean", "rewards/letters/std"),
    }
    assert len(steps(trainer)) == 2
    for step in steps(trainer):
        assert expected <= set(step)
        assert all(math.isfinite(value) for value in step.values())
        assert sum(step[f"loop{t}/exit_prob"] for t in (1, 2, 3)) == pytest.approx(1)
        assert sum(step[f"loop{t}/credit"] for t in (1, 2, 3)) == pytest.approx(1)
        assert step["loop3/kl_to_last"] == 0
        assert step["loop1/kl_to_last"] > 1e-4
        assert step["loop3/entropy"] == step["entropy"]
        assert min(step[f"seconds/{name}"] for name in ("rollout", "score", "update")) > 0


def test_seconds_of_a_step_add_up(bench: Workbench) -> None:
    step = steps(bench.train(max_steps=2))[1]
    parts = sum(step[f"seconds/{name}"] for name in ("rollout", "reward", "score", "update"))
    assert parts == pytest.approx(step["step_time"], rel=0.1, abs=0.05)


def test_solve_rate_and_mixed_groups_count_what_was_solved(bench: Workbench) -> None:
    crafted = in_order(1, 0, 0, 0, *[1] * 4, *[0] * 4, 1, 0.5, 0.4, 0)
    step = steps(bench.train(reward=crafted))[0]
    assert (step["solve_rate"], step["mixed_groups"]) == (6 / 16, 2 / 4)
    step = steps(bench.train(reward=crafted, solved_at=0.5))[0]
    assert (step["solve_rate"], step["mixed_groups"]) == (7 / 16, 2 / 4)
    # The first function decides; what it has no answer for is not counted.
    first = in_order(1, 0, None, None, *[None] * 4, *[0] * 4, *[1] * 4)
    second = in_order(*[0.25] * 16)
    with pytest.raises(UserError, match="different names, found crafted, crafted"):
        bench.train(reward=[first, second])
    second.__name__ = "second"
    step = steps(bench.train(reward=[first, second], reward_weights=[1.0, 2.0]))[0]
    assert step["solve_rate"] == pytest.approx(5 / 10)
    assert step["mixed_groups"] == 1 / 4


def test_rewards_that_teach_nothing_change_nothing(bench: Workbench) -> None:
    trainer = bench.train(reward=in_order(*[1] * 8, *[0] * 8), max_steps=2, credit="uniform", weight_decay=0.0)
    before = load_file(bench.policy / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
    assert [(step["loss"], step["frac_reward_zero_std"]) for step in steps(trainer)] == [(0, 1)] * 2


def test_equal_rewards_change_nothing_whatever_their_value(bench: Workbench) -> None:
    # The mean of 8 times 0.9 is not 0.9 in fp32, and Adam makes a whole step of any remainder.
    trainer = bench.train(reward=in_order(*[0.9] * 16), num_generations=8, weight_decay=0.0)
    before = load_file(bench.policy / "model.safetensors")
    assert moved(before, weights(trainer)) == 0


def test_rollout_writer_gets_every_completion_with_what_it_was_worth(bench: Workbench) -> None:
    rollouts: list[list[dict[str, Any]]] = []
    rewards = [1.0, 0.0, 0.0, 0.0, *[1.0] * 4, None, None, 1.0, 0.0, *[None] * 4]
    sent: list[tuple[list[str], list[str]]] = []

    def recorded(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        sent.append((prompts, completions))
        return list(rewards)

    trainer = bench.train(
        reward=[recorded, in_order(*[0.5] * 8, *[None] * 8)], rollout_writer=rollouts.append, max_steps=2
    )
    assert [len(rows) for rows in rollouts] == [16, 16]
    assert [{row["step"] for row in rows} for rows in rollouts] == [{1}, {2}]
    total = [1.5, 0.5, 0.5, 0.5, *[1.5] * 4, None, None, 1.0, 0.0, *[None] * 4]
    deviation = 0.5  # of (1.5, .5, .5, .5)
    advantages = [0.75 / deviation, *[-0.25 / deviation] * 3, *[0] * 6, 0.5 / 0.5**0.5, -0.5 / 0.5**0.5, *[0] * 4]
    by_row = {example["row"]: (example["prompt"], example["gold"]) for example in bench.data}
    for rows, (prompts, completions) in zip(rollouts, sent, strict=True):
        assert [row["prompt"] for row in rows] == prompts
        assert [row["completion"] for row in rows] == completions
        assert [row["rewards"]["recorded"] for row in rows] == rewards
        assert [row["reward"] for row in rows] == total
        assert [row["solved"] for row in rows] == rewards
        assert [row["advantage"] for row in rows] == pytest.approx(advantages, rel=1e-3)
        assert all((row["prompt"], row["gold"]) == by_row[row["row"]] for row in rows)
        assert len({row["row"] for row in rows}) == 4
    assert steps(trainer)[0]["reward"] == pytest.approx(sum(r for r in total if r is not None) / 10)


def test_token_means_weigh_tokens_not_micro_batches() -> None:
    means, accelerator = TokenMeans(), Accelerator(cpu=True)
    means.add("x", torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]))
    means.add("x", torch.tensor([[10.0, 99.0, 99.0]]), torch.tensor([[1, 0, 0]]))
    means.add("x", torch.tensor([[99.0, 99.0]]), torch.tensor([[0, 0]]))
    means.add("sequences", torch.tensor([[1.0], [5.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]))
    means.add("sequences", torch.tensor([[7.0], [99.0]]), torch.tensor([[1, 1, 1], [0, 0, 0]]))
    means.add("nothing", torch.tensor([[99.0]]), torch.tensor([[0]]))
    assert means.pop(accelerator) == {"x": 20 / 5, "sequences": 13 / 3}
    assert means.pop(accelerator) == {}


def test_logged_token_means_weigh_tokens(bench: Workbench) -> None:
    """The logged log-prob is the mean over all tokens of the step, and another than the mean of micro-batch means."""
    parts: list[tuple[float, int]] = []

    class Spy(RLTTTrainer):
        def _measure(self, scores: Any, *rest: Any) -> None:
            mask = rest[-1]
            parts.append(((scores.log_probs[..., 0] * mask).sum().item(), int(mask.sum())))
            super()._measure(scores, *rest)

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_generations": 2}
    step = steps(bench.train(trainer_class=Spy, mask_truncated_completions=True, temperature=2.0, **options))[0]
    assert len(parts) == 8
    assert len({count for _, count in parts}) > 1
    assert step["loop1/logp"] == pytest.approx(sum(s for s, _ in parts) / sum(n for _, n in parts), rel=1e-5)
    assert step["loop1/logp"] != pytest.approx(sum(s / max(n, 1) for s, n in parts) / 8, rel=1e-3)


def test_evaluation_between_two_logs_keeps_training_numbers_apart(bench: Workbench) -> None:
    options = {"max_steps": 4, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"per_device_eval_batch_size": 4, "learning_rate": 1e-2}
    seen: dict[str, list[tuple[float, int]]] = {"train": [], "eval": []}

    class Spy(RLTTTrainer):
        def _measure(self, scores: Any, *rest: Any) -> None:
            mask = rest[-1]
            mode = "train" if self.model.training else "eval"
            seen[mode].append(((scores.log_probs[..., 0] * mask).sum().item(), int(mask.sum())))
            super()._measure(scores, *rest)

    trainer = Spy(
        model=load_policy(str(bench.policy)),
        reward_funcs=letters,
        args=bench.config(**options),
        train_dataset=bench.data,
        eval_dataset=bench.data.select(range(4)),
        processing_class=bench.tokenizer,
    )
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    half = len(seen["eval"]) // 2
    for entry, parts in zip(evaluations, (seen["eval"][:half], seen["eval"][half:]), strict=True):
        assert entry["eval_loop1/logp"] == pytest.approx(sum(s for s, _ in parts) / sum(n for _, n in parts), rel=1e-5)
        assert math.isfinite(entry["eval_loss"])
        assert 0 <= entry["eval_solve_rate"] <= 1
    (step,) = steps(trainer)
    mean = sum(s for s, _ in seen["train"]) / sum(n for _, n in seen["train"])
    assert step["loop1/logp"] == pytest.approx(mean, rel=1e-5)
