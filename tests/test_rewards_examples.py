"""The reward functions in `rewards/`: each loads as its docstring says and does what it says."""

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from rltt.rewards import load_rewards

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "rewards").glob("*.py"))


@dataclass
class Entry:
    use: str
    weight: float = 1.0
    solved_at: float | None = None
    on_error: str = "skip"
    timeout: float = 10.0
    isolate: bool = True
    args: dict = field(default_factory=dict)


def call(name: str, completions: list, **columns) -> list[float | None]:
    (reward,) = load_rewards([Entry(f"rewards/{name}.py:{name}")], base=ROOT)
    ids = columns.pop("completion_ids", [[1]] * len(completions))
    return reward.func(prompts=["p"] * len(completions), completions=completions, completion_ids=ids, **columns)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_is_short_and_loads_by_the_line_in_its_docstring(path):
    text = path.read_text()
    assert len(text.splitlines()) < (70 if path.stem == "judge" else 40)  # retries take room
    line = re.search(r"^    rewards: .*$", text, re.MULTILINE)
    assert line is not None, "no recipe line"
    entries = yaml.safe_load(line[0])["rewards"]
    rewards = load_rewards([Entry(entry) if isinstance(entry, str) else Entry(**entry) for entry in entries], base=ROOT)
    assert rewards[-1].name == path.stem


def test_exact_number():
    completions = ["#### 1,234", r"\boxed{1234.0}", "The answer is $1234.", "#### 1235", "1234", "#### x"]
    assert call("exact_number", completions, gold=["1234"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert call("exact_number", ["#### 5", "#### 1/2"], gold=["five", 0.5]) == [None, 1.0]


def test_math_boxed():
    logged = {}
    rewards = call(
        "math_boxed",
        [r"\boxed{\frac12}", r"\boxed{2}", "The answer is 0.5.", r"<think>\boxed{0.5}</think>", r"\boxed{1}"],
        gold=["0.5", "0.5", "0.5", "0.5", ""],
        log_metric=logged.__setitem__,
    )
    assert rewards == [1.0, 0.1, 0.0, 0.0, None]
    assert logged["reward/math_boxed/boxed"] == 0.6


def test_format_thinking():
    completions = {
        "<think>2 + 2</think> 4": 1.0,
        "2 + 2</think> 4": 1.0,
        "<think>2 + 2</think>": 0.0,
        "<think> </think> 4": 0.0,
        "<think>2 + 2 4": 0.0,
        "4": 0.0,
        "so <think>2 + 2</think> 4": 0.0,
        "<think>2</think> 4 <think>3</think> 5": 0.0,
    }
    assert call("format_thinking", list(completions)) == list(completions.values())


def test_length_penalty():
    lengths = [0, 384, 448, 512, 9999]
    ids = [range(length) for length in lengths]
    assert call("length_penalty", ["x"] * 5, completion_ids=ids) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_json_schema():
    completions = [
        '{"name": "Ada", "age": 36, "hobbies": []}',
        'Here:\n```json\n{"name": "Ada", "age": 36, "hobbies": ["maths"]}\n```\nDone.',
        '{"name": "Ada", "age": "36", "hobbies": []}',
        '{"name": "Ada", "age": true}',
        "[1, 2]",
        "no json",
        "[" * 10**5,
        '<think>{}</think>{"name": "Ada", "age": 36, "hobbies": []}',
    ]
    third = 1 / 3
    rewards = call("json_schema", completions)
    assert rewards == pytest.approx([1.0, 1.0, 2 * third, third, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.skipif(shutil.which("bwrap") is None and "CI" not in os.environ, reason="needs bubblewrap")
def test_unit_tests():
    codes = {
        "def f(x): return x + 1": 1.0,
        "def f(x): return x": 0.0,
        "def f(x)": 0.0,
        "import sys; sys.exit(0)": 0.0,
        "import os; os._exit(0)": 0.0,
        "import builtins; builtins.exec = builtins.compile = print": 0.0,
        "print('passed'); AssertionError = Warning\ndef f(x): return 0": 0.0,
        "import os\nos.lseek(0, 0, 0); print(os.read(0, 32).decode()); os._exit(0)": 0.0,
    }
    completions = [f"So:\n```python\n{code}\n```" for code in codes]
    tests = [["assert f(1) == 2", "assert f(2) == 3"]] * len(codes)
    assert call("unit_tests", completions, tests=tests) == list(codes.values())
    assert call("unit_tests", ["no code"], tests=["assert True"]) == [0.0]
