"""The generator of arithmetic word problems and its tokenizer."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rltt.data import arithmetic_problems, arithmetic_tokenizer, last_boxed
from rltt.data.arithmetic import LEVELS, vocabulary
from rltt.errors import DataError

DIFFICULTIES = sorted(LEVELS)


@pytest.fixture(scope="module")
def problems():
    """Two thousand problems of each difficulty."""
    return {difficulty: arithmetic_problems(difficulty, 2000) for difficulty in DIFFICULTIES}


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_worked_line_is_right_and_ends_in_the_gold(problems, difficulty):
    for problem in problems[difficulty]:
        assert int(problem.gold) >= 0
        assert last_boxed(problem.response) == problem.gold
        steps = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", problem.response)
        assert len(steps) == {1: 1, 2: 1, 3: 2, 4: 2, 5: 3}[difficulty]
        for left, sign, right, result in steps:
            assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign] == int(
                result
            )
        if steps:
            assert steps[-1][-1] == problem.gold


@pytest.mark.parametrize("difficulty", [1, 2])
def test_one_step_problems_ask_for_the_sum_or_the_difference(problems, difficulty):
    limits = {1: range(2, 21), 2: range(10, 100)}[difficulty]
    for problem in problems[difficulty]:
        a, b = map(int, re.findall(r"\d+", problem.prompt))
        assert a in limits
        assert b in limits
        subtracts = re.search(r"loses|to \w+\.|How many more|takes", problem.prompt)
        assert int(problem.gold) == (a - b if subtracts else a + b)


def test_numbers_of_the_work_come_from_the_prompt(problems):
    for problem in itertools.chain.from_iterable(problems[difficulty] for difficulty in (3, 4, 5)):
        given = set(re.findall(r"\d+", problem.prompt))
        for left, right, result in re.findall(r"(\d+) [-+*] (\d+) = (\d+)", problem.response):
            assert {left, right} <= given
            given.add(result)


def test_difficulty_five_has_a_number_to_ignore(problems):
    for problem in problems[5]:
        assert len(re.findall(r"\d+", problem.prompt)) == 5
        assert len(re.findall(r"[-+*]", problem.response)) == 3


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_problem_comes_twice(problems, difficulty):
    assert len({problem.prompt for problem in problems[difficulty]}) == len(problems[difficulty])


def test_train_and_test_are_disjoint_at_any_pair_of_difficulties(problems):
    train = {problem.prompt for problem in itertools.chain.from_iterable(problems.values())}
    train |= {problem.prompt for problem in arithmetic_problems(1, 20_000)}
    test = {p.prompt for difficulty in DIFFICULTIES for p in arithmetic_problems(difficulty, 2000, "test")}
    assert not train & test


def test_a_size_beyond_the_space_is_refused_with_the_number_there_is():
    with pytest.raises(
        DataError, match=r"difficulty 1 has (\d+) different test problems, fewer than the size 1000000"
    ) as e:
        arithmetic_problems(1, 1_000_000, "test")
    there = int(re.search(r"has (\d+)", str(e.value))[1])
    everything = arithmetic_problems(1, there, "test")
    assert len({problem.prompt for problem in everything}) == there
    assert 0.09 < there / (126 * 4 * 8 * 8) < 0.11  # cases x sentences x names x things, a tenth for the test


def test_a_larger_size_continues_a_smaller_one(problems):
    assert arithmetic_problems(3, 100) == problems[3][:100]
    assert problems[3][0].where == "arithmetic-3[train]:1"
    assert problems[3][0].columns == {"difficulty": 3}


def test_problems_are_the_same_in_another_process(problems):
    code = "from rltt.data import arithmetic_problems as a; print([p.prompt for d in range(1, 6) for p in a(d, 20)])"
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([p.prompt for d in DIFFICULTIES for p in problems[d][:20]])


def test_a_fixed_problem():
    """Published curves name these problems: a change of the generator must not pass unseen."""
    problem = arithmetic_problems(1, 1)[0]
    assert (problem.prompt, problem.gold) == ("Hana finds 7 shells. Ann finds 3 shells. How many shells in all?", "10")


@pytest.mark.parametrize("difficulty", [0, 6, "1"])
def test_unknown_difficulty(difficulty):
    with pytest.raises(DataError, match=rf"difficulties 1 to 5, not {difficulty!r}"):
        arithmetic_problems(difficulty, 1)


def test_unknown_split():
    with pytest.raises(DataError, match="has the splits 'train' and 'test', not 'dev'"):
        arithmetic_problems(1, 1, "dev")


def test_every_sentence_keeps_fillings_apart():
    for level in LEVELS.values():
        assert len({len(form.sentences) for form in level.forms}) == 1
        for sentence in itertools.chain.from_iterable(form.sentences for form in level.forms):
            assert set(re.findall(r"{(\w+)}", sentence)) >= {"name", "things", *level.slots}


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_decoding_gives_the_text_back(problems, tokenizer, difficulty):
    for texts in zip(*((p.prompt, p.response) for p in problems[difficulty]), strict=True):
        ids = tokenizer(list(texts))["input_ids"]
        assert tokenizer.unk_token_id not in set(itertools.chain.from_iterable(ids))
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == list(texts)


def test_prompts_are_short(problems, tokenizer):
    longest = {
        difficulty: max(map(len, tokenizer([p.prompt for p in problems[difficulty]])["input_ids"]))
        for difficulty in DIFFICULTIES
    }
    assert max(longest[1], longest[2]) <= 25
    assert max(longest.values()) <= 40


def test_the_vocabulary_is_what_the_generator_says(problems, tokenizer):
    used = set()
    for problem in itertools.chain.from_iterable(problems.values()):
        used |= set(tokenizer.tokenize(problem.prompt)) | set(tokenizer.tokenize(problem.response))
    assert used == set(vocabulary())
    assert set(tokenizer.get_vocab()) == used | {"<pad>", "<eos>", "<unk>"}
    assert len(tokenizer) < 100


def test_a_completion_continues_its_prompt(problems, tokenizer):
    """Tokens of prompt and response are those of the joined text, and what follows the end is not decoded."""
    problem = problems[3][0]
    prompt, response = (tokenizer(text)["input_ids"] for text in (problem.prompt, problem.response))
    assert tokenizer(f"{problem.prompt} {problem.response}")["input_ids"] == prompt + response
    ended = [*response, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == problem.response


def test_tokens_of_a_box(tokenizer):
    assert tokenizer.tokenize(r"\boxed{198}") == [r"\boxed{", "1", "9", "8", "}"]
    assert tokenizer.decode(tokenizer(r"\boxed{198}")["input_ids"]) == r"\boxed{198}"
    assert tokenizer.tokenize("Zebras eat") == ["<unk>", "<unk>"]


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["Ann has 3", "Ben"], padding=True)
    pad = tokenizer.pad_token_id
    assert batch["input_ids"][1][:2] == [pad, pad]
    assert set(batch) == {"input_ids", "attention_mask"}
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["Ann has 3", "Ben"]
    assert tokenizer.chat_template is None


def test_saved_and_loaded_it_is_the_same(problems, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [problem.response for problem in problems[5][:100]]
    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert loaded.batch_decode(loaded(texts)["input_ids"]) == texts
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for name in ("pad_token", "eos_token", "unk_token", "padding_side", "chat_template", "model_input_names"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
