"""From `use:` to a checked function: what can be named, and the message for each thing that can be wrong."""

import asyncio
import inspect
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rltt.errors import RewardError
from rltt.rewards import load_rewards, math_reward, resolve_reward
from rltt.rewards.registry import NamedReward, check_columns

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Entry:
    use: str
    weight: float = 1.0
    solved_at: float | None = None
    on_error: str = "fail"
    timeout: float = 10.0
    isolate: bool = False
    args: dict = field(default_factory=dict)


GOOD = '''
import functools

CALLS = []

def score(completions, **kwargs):
    """Counts letters."""
    CALLS.append(completions)
    return [float(len(completion)) for completion in completions]

def with_columns(completions, gold, *, difficulty=1, **kwargs):
    return [completion == answer for completion, answer in zip(completions, gold)]

def only_kwargs(**kwargs):
    return [None] * len(kwargs["completions"])

def calls(completions, **kwargs):
    return [len(CALLS)] * len(completions)

async def later(completions, **kwargs):
    return [1] * len(completions)

class Judge:
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)

judge = Judge()
half = functools.partial(with_columns, difficulty=2)
'''


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(GOOD)
    return path


def load_one(use: str, base: Path | None = None, **keys) -> NamedReward:
    (reward,) = load_rewards([Entry(use, **keys)], base=base)
    return reward


def test_a_name_a_file_and_a_module(good, monkeypatch):
    assert resolve_reward("math") is math_reward
    assert resolve_reward("rltt.rewards.math:math_reward") is math_reward
    monkeypatch.chdir(good.parent)
    assert resolve_reward("my_rewards.py:score")(completions=["abc"]) == [3.0]
    assert resolve_reward(f"{good}:score")(completions=["abc"]) == [3.0]
    monkeypatch.chdir("/")
    assert resolve_reward("my_rewards.py:score", base=good.parent)(completions=["abc"]) == [3.0]


def test_an_installed_entry_point(good, monkeypatch):
    """A package of someone else's adds a name, as its metadata says."""
    info = good.parent / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rltt.rewards]\nletters = my_rewards:score\nbroken = nowhere:score\n")
    monkeypatch.syspath_prepend(str(good.parent))
    assert load_one("letters").func(completions=["abcd"]) == [4.0]
    with pytest.raises(RewardError, match="entry point nowhere:score cannot be loaded: ModuleNotFoundError: No module"):
        resolve_reward("broken")
    with pytest.raises(RewardError, match=r"'lettrs' is not known; did you mean 'letters'\?.* broken, letters, math"):
        resolve_reward("lettrs")


def test_rewards_carry_name_weight_and_threshold(good):
    rewards = load_rewards([Entry(f"{good}:score", 0.5, 2.0), Entry("math"), Entry(f"{good}:score")])
    assert [(reward.name, reward.weight, reward.solved_at) for reward in rewards] == [
        ("score", 0.5, 2.0),
        ("math", 1.0, 1.0),
        ("score_2", 1.0, 1.0),
    ]
    assert [reward.func.__name__ for reward in rewards] == ["score", "math", "score_2"]
    assert rewards[0].func.__doc__ == "Counts letters."


def test_functions_of_one_file_share_its_state(good):
    score, calls = load_rewards([Entry(f"{good}:score"), Entry(f"{good}:calls")])
    before = calls.func(completions=["a"])[0]
    score.func(completions=["a"])
    assert calls.func(completions=["a"]) == [before + 1]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("with_columns", [1.0, 0.0]),
        ("only_kwargs", [None, None]),
        ("judge", [0.5, 0.5]),
        ("half", [1.0, 0.0]),
    ],
)
def test_what_a_function_may_look_like(good, name, rewards):
    reward = load_one(f"{good}:{name}", on_error="skip")
    found = reward.func(prompts=["p", "q"], completions=["a", "b"], gold=["a", "a"], completion_ids=[[1], [2]])
    assert found == rewards
    assert [type(value) for value in found] == [type(value) for value in rewards]


def test_async_functions_stay_async(good):
    reward = load_one(f"{good}:later", isolate=True)
    assert inspect.iscoroutinefunction(reward.func)
    assert asyncio.run(reward.func(completions=["a", "b"])) == [1.0, 1.0]


BEFORE_ANY_WORK = {
    "no file": ("", "my_rewrads.py:score", "there is no file .*my_rewrads.py; did you mean .*my_rewards.py?"),
    "no file in a near folder": (
        "",
        "reward/my_rewards.py:score",
        "there is no file .*; did you mean .*my_rewards.py?",
    ),
    "no file like it": ("", "zzz.py:score", r"there is no file .*zzz\.py"),
    "no function": (
        "def score(completions, **kwargs): ...\ndef other(completions, **kwargs): ...\ndef _hidden(): ...",
        "my_rewards.py:scroe",
        r"has no function 'scroe'; did you mean 'score'\? Functions there: score, other\.$",
    ),
    "no functions at all": ("X = 1", "my_rewards.py:score", r"has no function 'score'\. It defines no functions\.$"),
    "function not said": (
        "def right(completions, **kwargs): ...",
        "my_rewards.py",
        r"say which function, as in my_rewards.py:right Functions there: right\.",
    ),
    "not callable": ("score = 3", "my_rewards.py:score", r"is int '3', not a function. It should be `def score\("),
    "a builtin": ("score = max", "my_rewards.py:score", "score does not show its signature"),
    "a module": ("import math as score", "my_rewards.py:score", "is a module, not a function"),
    "missing import": (
        "import os\n\nimport not_there\n",
        "my_rewards.py:score",
        r"my_rewards.py cannot be imported: ModuleNotFoundError: No module named 'not_there' \(line 3\)",
    ),
    "syntax error": (
        "def score(completions, **kwargs):\n    return [\n",
        "my_rewards.py:score",
        r"my_rewards.py cannot be imported: SyntaxError: '\[' was never closed \(line 2\)",
    ),
    "error at import": ("x = 1 / 0", "my_rewards.py:score", r"ZeroDivisionError: division by zero \(line 1\)"),
    "exit at import": (
        "raise SystemExit('bye')",
        "my_rewards.py:score",
        r"cannot be imported: SystemExit: bye \(line 1\)",
    ),
    "no completions": (
        "def score(texts): ...",
        "my_rewards.py:score",
        r"score\(texts\) does not take `completions`. It should be `def score\(completions, \*\*kwargs\)",
    ),
    "no kwargs": (
        "def score(completions): ...",
        "my_rewards.py:score",
        r"score\(completions\) does not take `\*\*kwargs`.*every column of the data set.*It should be `def score\(",
    ),
    "by position": ("def score(completions, /, **kwargs): ...", "my_rewards.py:score", "takes completions by position"),
    "no such module": (
        "",
        "no_such_package.rewards:score",
        "module no_such_package.rewards cannot be imported: ModuleNot",
    ),
    "no such function in a module": ("", "rltt.rewards.math:math_rewrad", "did you mean 'math_reward'?"),
    "unknown name": ("", "maths", r"reward 'maths' is not known; did you mean 'math'\? Known rewards: math"),
    "empty": ("", "", "reward '' is not known"),
}


@pytest.mark.parametrize("case", BEFORE_ANY_WORK)
def test_errors_before_any_work(tmp_path, case):
    source, use, message = BEFORE_ANY_WORK[case]
    (tmp_path / "my_rewards.py").write_text(source)
    with pytest.raises(RewardError, match=message):
        load_rewards([Entry(use)], base=tmp_path)


AT_A_CALL = {
    "too few": ("return [1.0]", r"'score' returned 1 rewards for 3 completions; return one for each"),
    "too many": ("return [1.0] * 4", "'score' returned 4 rewards for 3 completions"),
    "nothing": ("pass", "'score' returned None, not a list with one number for each of the 3 completions"),
    "one number": ("return 1.0", "'score' returned float 1.0, not a list"),
    "a string": ("return 'abc'", "'score' returned str 'abc', not a list"),
    "a dict": ("return {1: 1, 2: 2, 3: 3}", "'score' returned dict .*, not a list"),
    "a generator": ("return (1.0 for _ in completions)", "'score' returned generator .*, not a list"),
    "nan": ("return [1.0, float('nan'), 1.0]", "'score' returned nan, .*, for completion 1 of 3: 'two'"),
    "inf": ("return [1.0, 1.0, float('-inf')]", "'score' returned -inf, .*, for completion 2 of 3: 'three'"),
    "strings": ("return ['1', 1, 1]", "'score' returned str '1', not a number or None, for completion 0 of 3: 'one'"),
    "lists": ("return [[1], [1], [1]]", r"'score' returned list \[1\], not a number or None, for completion 0"),
    "complex": ("return [1j] * 3", "'score' returned complex 1j, not a number"),
    "raises at one": (
        "return [1 / (completion != 'two') for completion in completions]",
        "'score' failed: ZeroDivisionError: division by zero, for completion 1 of 3: 'two'",
    ),
    "raises in a helper": (
        "return [helper(completion) for completion in completions]\ndef helper(text): return int(text)",
        "'score' failed: ValueError: invalid literal for int.* for completion 0 of 3: 'one'",
    ),
    "raises for all": ("raise RuntimeError('no network')", r"'score' failed: RuntimeError: no network\.\nTraceback"),
    "a missing column": (
        "return golds(**kwargs)\ndef golds(gold, **kwargs): ...",
        "'score' failed: TypeError: .* missing 1 required positional argument: 'gold'",
    ),
    "a coroutine": (
        "return later()\nasync def later(): ...",
        "'score' returned a coroutine; declare it with `async def`",
    ),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", AT_A_CALL)
def test_errors_at_a_call(tmp_path, case, asynchronous):
    body, message = AT_A_CALL[case]
    prefix = "async " if asynchronous else ""
    (tmp_path / "my_rewards.py").write_text(f"{prefix}def score(completions, **kwargs):\n    {body}\n")
    reward = load_one("my_rewards.py:score", base=tmp_path, isolate=asynchronous)
    call = (lambda **keywords: asyncio.run(reward.func(**keywords))) if asynchronous else reward.func
    with pytest.raises(RewardError, match=message) as caught:
        call(prompts=["p"] * 3, completions=["one", "two", "three"])
    if "failed" in message:
        assert "in score\n" in str(caught.value)  # the traceback of the function
        assert "rltt/rewards" not in str(caught.value)


def test_a_column_that_the_data_has_not(tmp_path):
    source = "def score(completions, gold, level, *, extra=1, log_metric=None, trainer_state, **kwargs): ..."
    (tmp_path / "my_rewards.py").write_text(source)
    reward = load_one("my_rewards.py:score", base=tmp_path)
    assert reward.columns == ("gold", "level")
    check_columns([reward], ["prompt", "gold", "level"])
    with pytest.raises(
        RewardError, match=r"'score' needs the column 'level', .* gold, levels, prompt; did you mean 'levels'"
    ):
        check_columns([reward], ["prompt", "gold", "levels"])


def test_a_long_completion_is_shortened(tmp_path):
    (tmp_path / "my_rewards.py").write_text("def score(completions, **kwargs):\n    return [float('nan')]\n")
    reward = load_one("my_rewards.py:score", base=tmp_path)
    with pytest.raises(RewardError) as caught:
        reward.func(completions=["x" * 10**6])
    assert len(str(caught.value)) < 400
    with pytest.raises(RewardError, match="for completion 0 of 1: 'hello'"):
        reward.func(completions=[[{"role": "assistant", "content": "hello"}]])


def test_elements_of_arrays_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    (tmp_path / "my_rewards.py").write_text("def score(completions, values, **kwargs):\n    return values\n")
    reward = load_one("my_rewards.py:score", base=tmp_path)
    for values in (numpy.array([1.0, 2.0]), numpy.array([1, 2], dtype=numpy.int32), [numpy.float32(1), True + 1]):
        rewards = reward.func(completions=["a", "b"], values=values)
        assert rewards == [1.0, 2.0]
        assert all(type(value) is float and math.isfinite(value) for value in rewards)


def test_rows_of_arrays_are_not_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    (tmp_path / "my_rewards.py").write_text("def score(completions, values, **kwargs):\n    return values\n")
    reward = load_one("my_rewards.py:score", base=tmp_path)
    with pytest.raises(RewardError, match=r"returned ndarray array.*, not a number or None, for completion 0"):
        reward.func(completions=["a", "b"], values=numpy.ones((2, 3)))


def test_the_package_imports_without_torch():
    code = (
        "import sys, rltt.rewards as r; r.load_rewards, r.verify_math, r.Outcome, r.resolve_reward; "
        "from rltt.rewards import registry; r.load_rewards([]); "
        "assert not {'torch', 'transformers', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
