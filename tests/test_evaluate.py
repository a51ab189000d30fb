"""Sampling from a policy and measuring it: on policies whose answers, or whose distribution, are known."""

import asyncio
import json
import math
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig
from trl import GRPOTrainer
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.data import arithmetic_problems, arithmetic_tokenizer, build_dataset, prompt_ids
from rltt.errors import DataError, PolicyError, RewardError, UserError
from rltt.evaluate import EvalResult, evaluate_policy, pass_at_k
from rltt.models.configuration import OuroConfig
from rltt.models.looplm import OuroForCausalLM
from rltt.recipe import DataSection
from rltt.rewards import NamedReward
from rltt.rollout import generate

TOKENIZER = arithmetic_tokenizer()
EOS = TOKENIZER.eos_token_id
# Prompts of very different lengths, and not in their order.
PROMPTS = [
    "How many coins now?",
    "Ann has 12 apples and buys 3 more. How many apples now?",
    "Ben",
    "A box holds 15 cups. Dan adds 4 more. Eva takes 7. How many cups in the box?",
    "Gus finds 8 pens. Hana finds 9 pens. How many pens in all?",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} = {% endfor %}{% if add_generation_prompt %}Finn has{% endif %}"
)


def tiny_policy(loops: int = 3, hidden_size: int = 32) -> OuroForCausalLM:
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        total_ut_steps=loops,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return OuroForCausalLM(config)


@pytest.fixture(scope="module")
def policy() -> OuroForCausalLM:
    """Random weights, larger than usual: its greedy completions depend on the prompt and on the depth."""
    policy = tiny_policy()
    with torch.no_grad():
        for parameter in policy.model.layers.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)
    return policy


@pytest.fixture(scope="module")
def uniform() -> OuroForCausalLM:
    """Every token is equally likely, at every position and depth."""
    policy = tiny_policy()
    torch.nn.init.zeros_(policy.lm_head.weight)
    return policy


OPTIONS: dict[str, Any] = {
    "num_generations": 1,
    "temperature": 0.0,
    "max_completion_length": 8,
    "batch_size": 8,
    "stop_token_ids": [EOS],
    "seed": 0,
}


def sample(model: OuroForCausalLM, prompts: list[Any] = PROMPTS, tokenizer: Any = TOKENIZER, **options: Any) -> Any:
    return generate(model, tokenizer, prompts, **(OPTIONS | options))


def evaluate(model: OuroForCausalLM, dataset: Dataset, function: Any, solved_at: float | None = 1.0, **options: Any):
    return evaluate_policy(model, TOKENIZER, dataset, NamedReward("r", function, 1.0, solved_at), **OPTIONS | options)


def texts(groups: Any) -> list[list[str]]:
    return [[completion.text for completion in group] for group in groups]


# ----------------------------------------------------------------------------------------------------- generation


def test_greedy_depends_neither_on_the_batch_nor_on_the_padding(policy):
    alone = sample(policy, batch_size=1)
    assert sample(policy, batch_size=8) == alone
    assert sample(policy, batch_size=2) == alone
    assert sample(policy, PROMPTS[::-1]) == alone[::-1]
    assert len({group[0].text for group in alone}) > 1, "a policy that always says the same would prove nothing"


def test_greedy_is_the_argmax_of_an_uncached_forward(policy):
    for prompt, (completion,) in zip(PROMPTS, sample(policy), strict=True):
        ids = prompt_ids([prompt], TOKENIZER)[0]
        for token in completion.tokens:
            with torch.no_grad():
                assert policy(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax() == token
            ids.append(token)


def test_depths_give_different_completions_and_the_depth_comes_back(policy):
    completions = [texts(sample(policy, loops=depth)) for depth in (1, 2, 3)]
    assert completions[0] != completions[1] != completions[2] != completions[0]
    assert completions[2] == texts(sample(policy))
    assert policy.loop_spec.loops == 3
    with pytest.raises(ValueError, match="at least 1 loop"):
        sample(policy, loops=0)
    assert policy.loop_spec.loops == 3


def test_greedy_copies_and_sampled_groups(policy, uniform):
    greedy = sample(policy, num_generations=3)
    assert all(len(group) == 3 and len(set(group)) == 1 for group in greedy)
    sampled = sample(uniform, num_generations=5, temperature=1.0, batch_size=3)
    assert all(len(group) == 5 and len(set(group)) > 1 for group in sampled)
    assert sample(uniform, num_generations=5, temperature=1.0, batch_size=3) == sampled
    assert sample(uniform, num_generations=5, temperature=1.0, batch_size=3, seed=1) != sampled
    assert sample(policy, []) == []


def test_samples_follow_the_temperature(policy):
    ids = torch.tensor(prompt_ids([PROMPTS[0]], TOKENIZER))
    for temperature in (0.5, 2.0):
        with torch.no_grad():
            expected = (policy(ids).logits[0, -1] / temperature).softmax(-1)
        (group,) = sample(
            policy,
            [PROMPTS[0]],
            num_generations=4000,
            temperature=temperature,
            max_completion_length=1,
            batch_size=1000,
        )
        counts = torch.bincount(torch.tensor([c.tokens[0] for c in group]), minlength=len(TOKENIZER)) / len(group)
        assert (counts - expected).abs().max() < 4 * math.sqrt(0.25 / len(group))
        assert (counts > 0).sum() > 50, "all of the vocabulary is sampled, not transformers' top 50"


def test_a_training_run_does_not_notice(policy):
    before = sample(policy)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    policy.train()
    policy.gradient_checkpointing_enable()
    policy.config.use_cache = False  # as TRL leaves it with gradient checkpointing
    own = policy.generation_config
    policy.generation_config = GenerationConfig(repetition_penalty=9.0, suppress_tokens=list(range(40)))
    steps: list[int] = []
    hook = policy.model.embed_tokens.register_forward_hook(lambda _, args, __: steps.append(args[0].shape[1]))
    try:
        assert sample(policy) == before
        sample(policy, temperature=1.0)
        assert torch.equal(torch.get_rng_state(), state)
        assert policy.training
        assert policy.model.layers[0].training
        assert policy.is_gradient_checkpointing
        assert policy.generation_config.repetition_penalty == 9.0
        assert sorted(steps)[:-2] == [1] * (len(steps) - 2), "after the prompt, the cache leaves one token a step"
    finally:
        hook.remove()
        policy.gradient_checkpointing_disable()
        policy.config.use_cache = True
        policy.generation_config = own
        policy.eval()


def test_what_ends_a_completion(uniform):
    groups = sample(uniform, num_generations=200, temperature=1.0, max_completion_length=30, batch_size=500)
    completions = [completion for group in groups for completion in group]
    stopped = [completion for completion in completions if not completion.truncated]
    assert all(c.tokens[-1] == EOS and EOS not in c.tokens[:-1] for c in stopped)
    assert all(len(c.tokens) == 30 and EOS not in c.tokens for c in completions if c.truncated)
    assert all("<eos>" not in c.text for c in completions)
    # Every token is the stop token with chance 1/V.
    expected = (1 - 1 / len(TOKENIZER)) ** 30
    assert fmean(c.truncated for c in completions) == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 1000))
    everything = list(range(len(TOKENIZER)))
    assert all(len(c.tokens) == 1 for group in sample(uniform, stop_token_ids=everything) for c in group)


def chat_tokenizer() -> Any:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_the_tokens_that_trl_trains_on(chat):
    tokenizer = chat_tokenizer()
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in PROMPTS] if chat else PROMPTS
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
        tools=None,
        environment_factories=None,
        _is_vlm=False,
    )
    ids, _, _ = GRPOTrainer._tokenize_prompts(trainer, prompts)
    assert prompt_ids(prompts, tokenizer) == ids
    assert [tokenizer.decode(row).endswith("Finn has") for row in ids] == [chat] * len(ids)


def test_chat_prompts_are_sampled_as_their_rendered_text(policy):
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    rendered = [f"{text} = Finn has" for text in PROMPTS]
    assert sample(policy, messages, chat_tokenizer()) == sample(policy, rendered)


# ---------------------------------------------------------------------------------------------------- measurement


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([1] * right + [0] * (n - right), k))
            assert pass_at_k(n, right, k) == pytest.approx(fmean(any(subset) for subset in subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_it_cannot_answer(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_a_uniform_policy_has_the_solve_rate_that_one_computes(uniform):
    first_tokens = set(range(30))
    dataset = Dataset.from_dict({"prompt": PROMPTS * 40})
    chance = len(first_tokens) / len(TOKENIZER)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] in first_tokens) for ids in completion_ids]

    result = evaluate(
        uniform,
        dataset,
        reward,
        num_generations=8,
        temperature=1.0,
        max_completion_length=2,
        batch_size=800,
        ks=(1, 4, 8),
    )
    # 200 prompts of 8 independent samples each: the standard error is known as well.
    assert result.stderr == pytest.approx(math.sqrt(chance * (1 - chance) / 1600), rel=0.25)
    assert abs(result.solve_rate - chance) < 4 * result.stderr
    assert (result.n, result.samples, result.ungraded) == (200, 8, 0)
    assert result.pass_at[1] == pytest.approx((result.solve_rate, result.stderr))
    for k in (4, 8):
        assert abs(result.pass_at[k].value - (1 - (1 - chance) ** k)) < 4 * result.pass_at[k].stderr
    assert result.truncated == pytest.approx((1 - 1 / len(TOKENIZER)) ** 2, abs=0.02)


def scripted(completions: list[Any], right: list[int | None], **_: Any) -> list[float | None]:
    """Of each prompt's samples, as many are right as its column `right` says; None grades none of them."""
    seen: dict[str, int] = {}
    rewards: list[float | None] = []
    for prompt, count in zip(_["prompts"], right, strict=True):
        seen[prompt] = seen.get(prompt, 0) + 1
        rewards.append(None if count is None else 2.0 if seen[prompt] <= count else 0.5)
    return rewards


def test_the_numbers_of_a_scripted_evaluation(uniform):
    dataset = Dataset.from_dict({"prompt": PROMPTS, "right": [4, 1, None, 0, 2]})
    result = evaluate(uniform, dataset, scripted, num_generations=4, temperature=1.0, ks=(2, 4))
    shares = [1.0, 0.25, 0.0, 0.5]
    assert result.solve_rate == fmean(shares)
    assert result.stderr == pytest.approx(stdev(shares) / 2)
    assert (result.n, result.samples, result.ungraded) == (4, 4, 4)
    assert result.pass_at[2].value == pytest.approx(fmean([1, 1 / 2, 0, 5 / 6]))
    assert result.pass_at[4].value == pytest.approx(fmean([1, 1, 0, 1]))
    assert str(result) == f"{result.solve_rate:.3f} ± {result.stderr:.3f} (n = 4)"
    assert json.loads(json.dumps(result.to_dict()))["pass_at"]["4"] == {
        "value": 0.75,
        "stderr": pytest.approx(result.pass_at[4].stderr),
    }
    # Solved is what reaches the reward's own threshold.
    assert evaluate(uniform, dataset, scripted, 0.5, num_generations=4, temperature=1.0).solve_rate == 1.0
    assert evaluate(uniform, dataset, scripted, 2.5, num_generations=4, temperature=1.0).solve_rate == 0.0


def test_one_prompt_has_no_standard_error(uniform):
    result = evaluate(uniform, Dataset.from_dict({"prompt": ["Ben"], "right": [1]}), scripted, num_generations=2)
    assert (result.solve_rate, result.stderr, str(result)) == (0.5, None, "0.500 (n = 1)")


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_function_gets_what_trl_would_give_it(policy, chat):
    tokenizer = chat_tokenizer()
    section = DataSection.model_validate({"train": "arithmetic", "chat_template": chat})
    dataset, _ = build_dataset(arithmetic_problems(1, 3, "test"), section, tokenizer)
    calls: list[dict[str, Any]] = []

    async def reward(**keywords: Any) -> list[float]:
        await asyncio.sleep(0)
        keywords["log_metric"]("share", 0.5)
        keywords["log_extra"]("column", ["a"])
        calls.append(keywords)
        return [1.0] * len(keywords["completions"])

    async def inside_an_event_loop() -> EvalResult:
        named = NamedReward("r", reward, 1.0, 1.0)
        return evaluate_policy(policy, tokenizer, dataset, named, **OPTIONS | {"num_generations": 2})

    assert asyncio.run(inside_an_event_loop()).solve_rate == 1.0
    ((keywords),) = calls
    assert keywords["gold"] == [gold for gold in dataset["gold"] for _ in range(2)]
    assert keywords["row"][:3] == ["arithmetic-1[test]:1", "arithmetic-1[test]:1", "arithmetic-1[test]:2"]
    assert keywords["difficulty"] == [1] * 6
    assert keywords["prompts"] == [prompt for prompt in dataset["prompt"] for _ in range(2)]
    first = sample(policy, list(dataset["prompt"]), tokenizer)[0][0]
    expected = [{"role": "assistant", "content": first.text}] if chat else first.text
    assert keywords["completions"][0] == expected
    assert keywords["completion_ids"][0] == list(first.tokens)
    assert "prompt" not in keywords


def test_evaluation_leaves_mode_depth_and_random_numbers(policy):
    policy.train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    dataset = Dataset.from_dict({"prompt": PROMPTS, "right": [1] * 5})
    evaluate(policy, dataset, scripted, loops=2, temperature=0.7, num_generations=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert policy.training
    assert policy.loop_spec.loops == 3
    policy.eval()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"ks": (4,), "temperature": 1.0}, UserError, "pass@4 needs at least 4 samples of each prompt, found 1"),
        ({"ks": (0,)}, UserError, "pass@0 needs at least 1 samples"),
        ({"ks": (2,), "num_generations": 2}, UserError, "found temperature 0, which is greedy"),
        ({"loops": 0}, PolicyError, "at least 1 loop; found depth 0"),
    ],
)
def test_wrong_measurements(uniform, options, error, said):
    with pytest.raises(error) as caught:
        evaluate(uniform, Dataset.from_dict({"prompt": ["Ben"], "right": [1]}), scripted, **options)
    assert said in str(caught.value)


def test_nothing_to_measure(uniform):
    with pytest.raises(DataError, match="no prompts"):
        evaluate(uniform, Dataset.from_dict({"prompt": [], "right": []}), scripted)
    ungraded = Dataset.from_dict({"prompt": ["Ben"], "right": [None]})
    with pytest.raises(RewardError, match="'r' gave None for all 2 completions"):
        evaluate(uniform, ungraded, scripted, num_generations=2)
    with pytest.raises(RewardError, match="'r' returned 1 rewards for 2 completions"):
        evaluate(uniform, ungraded, lambda **_: [1.0], num_generations=2)


# -------------------------------------------------------------------------------------------------------- rltt eval


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A policy of depth 2 that knows the eight problems of `known_problems` by heart, saved."""
    policy = tiny_policy(loops=2, hidden_size=64)
    rows = [TOKENIZER(rf"{p.prompt} \boxed{{{p.gold}}}")["input_ids"] + [EOS] for p in known_problems()]
    prompts = [len(TOKENIZER(p.prompt)["input_ids"]) for p in known_problems()]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor(
        [
            [-100] * prompt + row[prompt:] + [-100] * (longest - len(row))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    loss = torch.tensor(math.inf)
    while loss > 0.03:
        loss = policy(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("checkpoint")
    policy.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def known_problems() -> list[Any]:
    return arithmetic_problems(1, 8, "test")


def write_rows(path: Path, *, wrong: int) -> str:
    """The known problems as a file, the first `wrong` of them with another gold."""
    rows = [{"prompt": p.prompt, "gold": "99" if i < wrong else p.gold} for i, p in enumerate(known_problems())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rltt_eval(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "120"})


def test_the_command_measures_each_depth_and_writes_what_it_found(checkpoint, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", wrong=2)
    out = tmp_path / "result.json"
    options = ["--loops", "3,2", "--k", "1,4", "--temperature", "0.5", "--max-completion-length", "8"]
    done = rltt_eval(checkpoint, "--data", data, *options, "--json", str(out), "--batch-size", "16")
    assert done.exit_code == 0, done.output
    assert f"8 problems of {data}, graded by math" in done.stdout.replace("\n", "")
    assert "loops 2: greedy 0.750 ± 0.164 (n = 8)" in done.stdout
    assert done.stdout.count("deeper than the 2 loops it was trained with") == 1
    assert "pass@4" in done.stdout
    found = json.loads(out.read_text())
    assert list(tmp_path.glob("*.part")) == []
    assert {key: found[key] for key in ("model", "trained_loops", "data", "reward", "temperature", "seed")} == {
        "model": checkpoint,
        "trained_loops": 2,
        "data": {"path": data},
        "reward": "math",
        "temperature": 0.5,
        "seed": 0,
    }
    two, three = found["depths"]
    assert (two["loops"], three["loops"]) == (2, 3)
    assert two["greedy"]["solve_rate"] == 0.75
    assert two["greedy"]["stderr"] == pytest.approx(stdev([0, 0] + [1] * 6) / math.sqrt(8))
    assert two["sampled"]["samples"] == 4
    assert two["sampled"]["pass_at"]["1"]["value"] == pytest.approx(two["sampled"]["solve_rate"])
    assert two["sampled"]["pass_at"]["4"]["value"] >= two["sampled"]["solve_rate"] > 0.5
    assert two["greedy"]["truncated"] == 0.0


def test_the_command_with_arithmetic_a_reward_of_ones_own_and_greedy_alone(checkpoint, tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def score(completions, gold, **kwargs):\n    return [1.0 if '}' in c else 0.0 for c in completions]"
    )
    out = tmp_path / "result.json"
    options = ["--limit", "6", "--temperature", "0", "--reward", f"{reward}:score", "--json", str(out)]
    done = rltt_eval(checkpoint, "--data", "arithmetic", *options, "--max-completion-length", "8")
    assert done.exit_code == 0, done.output
    assert "6 problems of arithmetic, graded by score" in done.stdout
    (depth,) = json.loads(out.read_text())["depths"]
    assert sorted(depth) == ["greedy", "loops"]
    assert depth["loops"] == 2
    assert depth["greedy"]["solve_rate"] > 0.5
    assert "samples at" not in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--k", "4", "--temperature", "0"], "pass@4 needs samples that differ; found temperature 0"),
        (["--reward", ""], "--reward: use:"),
        (["--reward", "maths"], "'math'"),
        (["--reward", "nowhere.py:score"], "nowhere.py"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json: cannot be written"),
        (["--data", "gone.jsonl"], "gone.jsonl does not exist"),
    ],
)
def test_wrong_evaluations_fail_before_the_model_loads(options, said, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", wrong=0)
    done = rltt_eval("/no/such/model", "--data", data, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "/no/such/model" not in done.stderr


def test_a_model_that_is_not_there(tmp_path):
    done = rltt_eval("/no/such/model", "--data", write_rows(tmp_path / "rows.jsonl", wrong=0))
    assert (done.exit_code, done.stderr) == (2, "error: /no/such/model: no such folder\n")
