"""The LoopLM objective as a training job: its loss, the tokens that it learns, its warnings, and `rltt pretrain`."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from plain_decoder import PlainDecoder
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.data import prompt_ids
from rltt.data.arithmetic import arithmetic_problems
from rltt.errors import DataError
from rltt.models.load import end_of_response_id, load_policy
from rltt.recipe import load_recipe
from rltt.train import run
from rltt.train.pretrain import GateCollapseWarning, LoopLMTrainer, StopWhen, pad_collator, tokenize_responses

pytestmark = pytest.mark.usefixtures("quick_collections")

LOOPS = 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)


@pytest.fixture(scope="module")
def problems() -> Dataset:
    """Prompts and responses of very different lengths."""
    rows = [problem for level in (1, 5, 3, 1) for problem in arithmetic_problems(level, 4, "train")]
    columns = {
        "prompt": [p.prompt for p in rows],
        "response": [p.response for p in rows],
        "row": [p.where for p in rows],
    }
    return Dataset.from_dict(columns)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The arithmetic tokenizer with turns that end in a token of their own."""
    from rltt.data.tokenizer import arithmetic_tokenizer

    tokenizer = arithmetic_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def trainer_of(
    model: Any, rows: Dataset, out: Path, beta: float = 0.1, epsilon: float = 0.0, **options: Any
) -> LoopLMTrainer:
    args = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        **options,
    }
    return LoopLMTrainer(
        model,
        beta=beta,
        epsilon=epsilon,
        args=TrainingArguments(**args),
        train_dataset=rows,
        data_collator=pad_collator(0),
    )


def logged(trainer: LoopLMTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


# ------------------------------------------------------------------------------------------------------------ the loss


def plain_numbers(model: Any, rows: Dataset) -> tuple[Tensor, Tensor]:
    """Cross entropy and exit probability [N, T] of every response token, in float64, one sequence at a time."""
    plain = PlainDecoder.of(model)
    losses, pdfs = [], []
    for row in rows:
        states = plain.loop_states(torch.tensor(row["input_ids"]), LOOPS)
        for position, label in enumerate(row["labels"]):
            if label == -100:
                continue
            before = position - 1  # a token is predicted from the one before it
            losses.append([-plain.logits(state[before]).log_softmax(-1)[label].item() for state in states])
            left, pdf = 1.0, []
            for state in states[:-1]:
                leaves = torch.sigmoid(plain.gate(state)[before]).item()
                pdf.append(left * leaves)
                left *= 1 - leaves
            pdfs.append([*pdf, left])
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(pdfs, dtype=torch.float64)


@pytest.mark.parametrize(("beta", "epsilon"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.5, 1.0)])
def test_the_loss_is_the_objective_in_float64(
    tiny_ouro: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    beta: float,
    epsilon: float,
) -> None:
    model = load_policy(str(tiny_ouro))
    with torch.no_grad():
        model.model.early_exit_gate.weight.mul_(10)  # exits that differ from token to token
    rows = tokenize_responses(problems.select(range(8)), tokenizer, 64)
    losses, pdfs = plain_numbers(model, rows)
    assert losses.shape == (sum(label != -100 for row in rows for label in row["labels"]), LOOPS)
    assert pdfs.std(0).min() > 0.01
    # (1-ε)·Σ p·CE + ε·mean CE + β·Σ p·log(p·T)
    expected = (1 - epsilon) * (pdfs * losses).sum(-1) + epsilon * losses.mean(-1)
    expected = (expected + beta * (pdfs * (pdfs * LOOPS).log()).sum(-1)).mean()

    trainer = trainer_of(model, rows, tmp_path, beta, epsilon)
    batch = pad_collator(0)([rows[index] for index in range(8)])
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), abs=2e-5)

    trainer.train()  # the same rows in another order
    (step,) = logged(trainer)
    assert step["loss"] == pytest.approx(expected.item(), abs=2e-5)
    for t in range(LOOPS):
        assert step[f"loop{t + 1}/loss"] == pytest.approx(losses[:, t].mean().item(), abs=2e-5)
        assert step[f"loop{t + 1}/exit_prob"] == pytest.approx(pdfs[:, t].mean().item(), abs=2e-5)


def test_the_update_does_not_depend_on_micro_batches(
    tiny_ouro: Path, problems: Dataset, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = tokenize_responses(problems, tokenizer, 64)
    assert len({sum(label != -100 for label in row["labels"]) for row in rows}) > 2
    weights, steps = [], []
    for micro_batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        model = load_policy(str(tiny_ouro))
        options = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
        # With plain gradient descent a wrong scale shows; Adam would hide it.
        options |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "max_steps": 2}
        trainer = trainer_of(model, rows, tmp_path, epsilon=0.1, **options)
        trainer.train()
        weights.append(model.state_dict())
        steps.append(logged(trainer))
    start = load_policy(str(tiny_ouro)).state_dict()
    assert not torch.equal(weights[0]["lm_head.weight"], start["lm_head.weight"])
    for other, log in zip(weights[1:], steps[1:], strict=True):
        for name, weight in other.items():
            torch.testing.assert_close(weight, weights[0][name], atol=1e-6, rtol=1e-4, msg=name)
        for found, expected in zip(log, steps[0], strict=True):
            for key in ("loss", "grad_norm", "loop1/loss", "loop3/loss", "loop1/exit_prob"):
                assert found[key] == pytest.approx(expected[key], rel=1e-4), key


def test_the_loss_falls_in_every_loop(
    tiny_ouro: Path, problems: Dataset, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = tokenize_responses(problems, tokenizer, 64)
    trainer = trainer_of(
        load_policy(str(tiny_ouro)), rows, tmp_path, max_steps=30, per_device_train_batch_size=16, learning_rate=5e-3
    )
    trainer.train()
    first, last = logged(trainer)[0], logged(trainer)[-1]
    for key in ("loss", "loop1/loss", "loop2/loss", "loop3/loss"):
        assert last[key] < 0.7 * first[key], key
    assert all(math.isfinite(value) for step in logged(trainer) for value in step.values())


# --------------------------------------------------------------------------------------------------------- the tokens


def test_only_the_response_is_learned_and_it_ends(problems: Dataset, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_responses(problems, tokenizer, 64)
    assert len(rows) == len(problems)
    for row, problem in zip(rows, problems, strict=True):
        prompt = tokenizer(problem["prompt"])["input_ids"]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"][: len(prompt)] == [-100] * len(prompt)
        learned = row["labels"][len(prompt) :]
        assert learned == row["input_ids"][len(prompt) :]
        assert learned[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learned[:-1]) == problem["response"]


def test_what_is_not_learned_does_not_count(
    tiny_ouro: Path, problems: Dataset, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Padding and other prompts' lengths change nothing; another response does."""
    model = load_policy(str(tiny_ouro))
    rows = tokenize_responses(problems.select(range(6)), tokenizer, 64)  # two of them far longer than the rest
    trainer = trainer_of(model, rows, tmp_path)
    collate = pad_collator(0)

    def total(batch: dict[str, Tensor]) -> tuple[float, int]:
        tokens = int((batch["labels"] != -100).sum())
        return trainer.compute_loss(model, batch).item() * tokens, tokens

    whole, single = total(collate(list(rows))), [total(collate([row])) for row in rows]
    assert whole[1] == sum(tokens for _, tokens in single)
    assert whole[0] == pytest.approx(sum(value for value, _ in single), rel=1e-5)
    batch = collate(list(rows))
    batch["input_ids"][batch["attention_mask"] == 0] = 5
    assert total(batch)[0] == pytest.approx(whole[0], rel=1e-6)


def test_batches_are_padded_on_the_right(problems: Dataset, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = pad_collator(9)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_a_chat_response_ends_with_the_end_of_turn(problems: Dataset, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    end = chat_tokenizer.convert_tokens_to_ids("<end>")
    assert end_of_response_id(chat_tokenizer, chat=True) == end
    assert end_of_response_id(chat_tokenizer, chat=False) == chat_tokenizer.eos_token_id
    prompts = [[{"role": "user", "content": prompt}] for prompt in problems["prompt"]]
    chats = Dataset.from_dict({"prompt": prompts, "response": problems["response"], "row": problems["row"]})
    rows = tokenize_responses(chats, chat_tokenizer, 80)
    turn = chat_tokenizer.convert_tokens_to_ids("<turn>")
    for row, prompt in zip(rows, prompt_ids(prompts, chat_tokenizer), strict=True):
        assert row["input_ids"][: len(prompt)] == prompt  # as in a rollout
        assert (prompt[0], prompt[-2:]) == (turn, [end, turn])
        assert row["labels"][: len(prompt)] == [-100] * len(prompt)
        assert row["labels"][-1] == end


def test_a_row_that_the_model_cannot_hold_is_named(problems: Dataset, tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(row["input_ids"]) for row in tokenize_responses(problems, tokenizer, 64)]
    longest = lengths.index(max(lengths))
    assert len(tokenize_responses(problems, tokenizer, lengths[longest])) == len(problems)
    with pytest.raises(DataError) as caught:
        tokenize_responses(problems, tokenizer, lengths[longest] - 1)
    assert str(caught.value) == (
        f"{problems[longest]['row']}: prompt and response have {lengths[longest]} tokens, more than the "
        f"{lengths[longest] - 1} positions of the model"
    )
    with pytest.raises(DataError, match=r"needs a response in every row: name its column in data\.columns\.response"):
        tokenize_responses(problems.remove_columns("response"), tokenizer, 64)


# ------------------------------------------------------------------------------------------------------------ warnings


@pytest.mark.parametrize(("bias", "loops", "collapsed"), [(20.0, 3, True), (0.0, 3, False), (0.0, 1, False)])
def test_a_collapsed_gate_is_said(
    tiny_ouro: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    bias: float,
    loops: int,
    collapsed: bool,
) -> None:
    model = load_policy(str(tiny_ouro), loops)
    with torch.no_grad():
        model.model.early_exit_gate.bias.fill_(bias)
    trainer = trainer_of(model, tokenize_responses(problems, tokenizer, 64), tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught if warning.category is GateCollapseWarning]
    assert len(said) == collapsed
    if collapsed:
        assert said[0].startswith("step 1: the exit gate has collapsed, 100% of the probability leaves after loop 1")
        assert "Raise pretrain.beta or pretrain.warmup_steps" in said[0]


# ----------------------------------------------------------------------------------------------------------- the jobs

RECIPE = """\
name: looplm
policy:
  new: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, initializer_range: 0.02}
  loops: 2
data: {train: {path: arithmetic, difficulty: 1, size: 64}}
pretrain: {max_steps: 8, batch_size: 8, learning_rate: 1.0e-2, warmup_steps: 2}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "looplm.yaml").write_text(RECIPE)
    (folder / "rewards.py").write_text("def perfect(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    return folder / "looplm.yaml"


@pytest.fixture(scope="module")
def pretrained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "looplm"
    done = CliRunner().invoke(app, ["pretrain", str(recipe), f"run_dir={path}"])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"finished: {path}\n")
    return path


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_pretrain_writes_a_run(pretrained: Path, recipe: Path) -> None:
    assert (pretrained / "pretrain.jsonl").is_file()
    assert not (pretrained / "metrics.jsonl").exists()
    summary = json.loads((pretrained / "summary.json").read_text())
    assert (summary["name"], summary["status"], summary["steps"]) == ("looplm", "finished", 8)
    assert load_recipe(pretrained / "recipe.yaml") == load_recipe(recipe, [f"run_dir={pretrained}"])
    model = AutoModelForCausalLM.from_pretrained(pretrained / "policy")
    assert model.loop_spec.loops == 2
    assert model.loop_spec.exit_gate


def test_pretrain_logs_every_loop(pretrained: Path) -> None:
    rows = rows_of(pretrained / "pretrain.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert row.keys() >= {
            "loss",
            "lr",
            "grad_norm",
            *(f"loop{t}/{x}" for t in (1, 2) for x in ("loss", "exit_prob")),
        }
        assert "loop3/loss" not in row
        assert row["loop1/exit_prob"] + row["loop2/exit_prob"] == pytest.approx(1)
        assert all(math.isfinite(value) for value in row.values())
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_learning_rate_warms_up_and_falls_like_a_cosine(pretrained: Path) -> None:
    rates = [row["lr"] for row in rows_of(pretrained / "pretrain.jsonl")]
    fall = [1e-2 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert rates == pytest.approx([0.0, 5e-3, *fall])


def test_the_micro_batch_of_a_recipe_changes_nothing(pretrained: Path, recipe: Path, tmp_path: Path) -> None:
    overrides = ["pretrain.per_device_train_batch_size=4", f"run_dir={tmp_path / 'halves'}"]
    halves = rows_of(run.pretrain(load_recipe(recipe, overrides)) / "pretrain.jsonl")
    for found, expected in zip(halves, rows_of(pretrained / "pretrain.jsonl"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


def test_pretraining_goes_on_from_a_checkpoint(pretrained: Path, recipe: Path, tmp_path: Path) -> None:
    overrides = [f"policy={{path: {pretrained / 'policy'}}}", "pretrain.max_steps=1", f"run_dir={tmp_path / 'on'}"]
    (row,) = rows_of(run.pretrain(load_recipe(recipe, overrides)) / "pretrain.jsonl")
    assert row["loss"] < rows_of(pretrained / "pretrain.jsonl")[0]["loss"]


def test_ctrl_c_keeps_the_pretrained_weights(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(LoopLMTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                raise KeyboardInterrupt
            return super().compute_loss(*args, **kwargs)

    monkeypatch.setattr(run, "LoopLMTrainer", Interrupted)
    path = tmp_path / "interrupted"
    ended = CliRunner().invoke(app, ["pretrain", str(recipe), f"run_dir={path}"])
    assert ended.exit_code == 130
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 3)
    load_policy(str(path / "policy"))


WARM_START = """\
rewards: ["rewards.py:perfect"]
rollout: {num_generations: 2, max_completion_length: 8}
train: {prompts_per_step: 4, max_steps: 1}
"""


@pytest.mark.parametrize(("reward", "steps"), [("rewards.py:perfect", 2), ("math", 8)])
def test_the_warm_start_stops_at_its_solve_rate(recipe: Path, tmp_path: Path, reward: str, steps: int) -> None:
    """A reward that is always 1 is reached at the first check; an untrained model does not solve half of anything."""
    warm = recipe.parent / "warm.yaml"
    warm.write_text(RECIPE + WARM_START)
    stop = ["pretrain.stop_at_solve_rate=0.5", "pretrain.check_every=2", f"rewards=['{reward}']"]
    path = run.train(load_recipe(warm, [*stop, f"run_dir={tmp_path / 'warm'}"]))
    assert len(rows_of(path / "pretrain.jsonl")) == steps
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["pretrain_steps"], summary["steps"]) == (steps, 1)


def test_the_check_of_a_warm_start_changes_nothing(pretrained: Path, recipe: Path, tmp_path: Path) -> None:
    """Sampling on the way neither draws from the run's random numbers nor leaves the model in another mode."""
    warm = recipe.parent / "warm.yaml"
    warm.write_text(RECIPE + WARM_START)
    stop = ["pretrain.stop_at_solve_rate=0.99", "pretrain.check_every=1", "rewards=[math]"]
    path = run.train(load_recipe(warm, [*stop, f"run_dir={tmp_path / 'checked'}"]))
    assert rows_of(path / "pretrain.jsonl") == rows_of(pretrained / "pretrain.jsonl")
    start, policy = (load_file(folder / "model.safetensors") for folder in (path / "start", pretrained / "policy"))
    assert all(torch.equal(weight, policy[name]) for name, weight in start.items())


def test_stop_when_asks_every_few_steps(
    tiny_ouro: Path, problems: Dataset, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    asked: list[int] = []

    def reached(step: int) -> bool:
        asked.append(step)
        return step >= 4

    rows = tokenize_responses(problems, tokenizer, 64)
    trainer = trainer_of(load_policy(str(tiny_ouro)), rows, tmp_path, max_steps=10)
    trainer.add_callback(StopWhen(reached, every=2))
    trainer.train()
    assert asked == [2, 4]
    assert trainer.state.global_step == 4


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_pretrained_is_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("golds.jsonl").write_text('{"prompt": "Ann has 1 book.", "gold": "1"}\n')
    with pytest.raises(DataError, match="needs a response in every row"):
        run.pretrain(load_recipe(recipe, ["data.train=golds.jsonl", "run_dir=b"]))
    with pytest.raises(
        DataError, match=r"arithmetic-1\[train\]:\d+: prompt and response have \d+ tokens, more than the 20"
    ):
        run.pretrain(load_recipe(recipe, ["policy.new.max_position_embeddings=20", "run_dir=c"]))
    assert not [folder.name for folder in Path().iterdir() if folder.name in "abc"]
