"""Reading data: real public sets, every way a source can be broken, and the dataset that the trainer gets."""

import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rltt.data import DropReport, Problem, arithmetic_tokenizer, build_dataset, last_boxed, load_split, read_problems
from rltt.data import sources as sources_module
from rltt.errors import DataError
from rltt.recipe import DataSection, DataSource

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public data sets in ../shared/data")

ROW = {"question": "What is 2 + 3?", "answer": "5"}


def section(train: str | Path, **keys) -> DataSection:
    train_keys = {key: keys.pop(key) for key in ("config", "split", "limit") if key in keys}
    return DataSection(train=DataSource(path=str(train), **train_keys), **keys)


def read(path: str | Path, **keys) -> list[Problem]:
    recipe = section(path, **keys)
    return read_problems(recipe.train, recipe)


def refusal(path: str | Path, **keys) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **keys)
    return str(caught.value)


def jsonl(path: Path, *rows: object) -> Path:
    """Writes rows as JSON, and text as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The answer in a box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}", None),  # the only brace after the opening one is a printed one
        (r"\boxed{a \\} b}", r"a \\"),  # a line break, then a real brace
        (r"\boxed{4} and then \boxed{5", "4"),  # cut off
        (r"\boxed{1 + \boxed{2}}", "2"),
        (r"\boxed{1 + \boxed{2}", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {17}", "17"),
        (r"$x = \boxed 9$.", "9"),  # MATH, training row 1011
        (r"\boxed 1,234, and", "1,234"),
        (r"\boxed -3/4", "-3/4"),
        (r"\boxed{7}, as asked in \boxed form", "7"),
        (r"\boxedtext{5}", None),
        (r"} \boxed{5} }", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def test_last_boxed_is_linear_in_a_hostile_text():
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" * 50_000 + "5" + "}" * 50_000) == "5"


# ---------------------------------------------------------------------------------------------------------------------
# Real data


@needs_shared
@pytest.mark.parametrize(
    ("name", "count", "has_responses"),
    [
        ("gsm8k/train.jsonl", 7473, True),
        ("gsm8k/test.jsonl", 1319, True),
        ("math/train.jsonl", 7498, True),  # 7,500 rows, two of which have an empty box for an answer
        ("math/test.jsonl", 5000, True),
        ("math/math500.jsonl", 500, False),
        ("svamp/test.jsonl", 1000, False),
        ("asdiv/test.jsonl", 2215, False),
        ("mawps/singleop.jsonl", 562, False),
    ],
)
@pytest.mark.filterwarnings("ignore:2 of 7500 rows")
def test_public_sets_load(name, count, has_responses):
    problems = read(SHARED / name)
    assert len(problems) == count
    assert all(problem.prompt.strip() and problem.gold.strip() for problem in problems)
    assert not any("####" in problem.gold or "boxed" in problem.gold for problem in problems)
    assert all((problem.response is not None) == has_responses for problem in problems)
    if "gsm8k" in name or "svamp" in name or "mawps" in name:
        assert all(float(problem.gold) is not None for problem in problems)  # every gold is a number


@needs_shared
def test_rows_of_math_without_an_answer_are_named():
    with pytest.warns(UserWarning, match=r"2 of 7500 rows .* left out: .*train.jsonl:5342, .*train.jsonl:5344"):
        problems = read(SHARED / "math/train.jsonl")
    by_row = {int(problem.where.rpartition(":")[2]): problem for problem in problems}
    assert by_row[889].gold == "2"  # \boxed 2
    assert by_row[253].gold == "17"  # \boxed {17}, and once more
    assert by_row[1].columns == {"level": "Level 5", "type": "Algebra"}


@needs_shared
def test_golds_and_responses_of_real_rows():
    first = read(SHARED / "gsm8k/train.jsonl", limit=7473)[0]
    assert (first.gold, first.where) == ("72", f"{SHARED / 'gsm8k/train.jsonl'}:1")
    assert first.response is not None
    assert first.response.endswith("#### 72")
    assert first.columns == {}
    assert "109200000" in {problem.gold for problem in read(SHARED / "gsm8k/train.jsonl")}  # written 109,200,000
    asdiv = read(SHARED / "asdiv/test.jsonl")
    assert asdiv[0].gold == "9"  # written "9 (apples)"
    assert {"Mrs. Hilt", "3:30 p.m.", "5:6"} <= {problem.gold for problem in asdiv}
    assert read(SHARED / "asdiv/test.jsonl", gold="text")[0].gold == "9 (apples)"
    assert read(SHARED / "math/math500.jsonl")[0].gold == r"\left( 3, \frac{\pi}{2} \right)"


@needs_shared
def test_limit_and_holdout_are_spread_over_a_sorted_file():
    subjects = {problem.columns["type"] for problem in read(SHARED / "math/test.jsonl", limit=50)}
    assert len(subjects) == 7
    train, evaluation = load_split(section(SHARED / "math/test.jsonl", holdout=50))
    assert (len(train), len(evaluation)) == (4950, 50)
    assert {problem.columns["type"] for problem in evaluation} == subjects
    assert not {problem.where for problem in train} & {problem.where for problem in evaluation}
    assert [problem.where for problem in train] == sorted(
        (problem.where for problem in train), key=lambda where: int(where.rpartition(":")[2])
    )


# ---------------------------------------------------------------------------------------------------------------------
# Golds, responses and columns


@pytest.mark.parametrize(
    ("answer", "kind", "gold"),
    [
        ("work #### 1 #### 1,080", "auto", "1080"),
        ("#### 1,2", "auto", "1,2"),  # a pair, not thousands
        ("#### -1,450,000.50", "hash", "-1450000.50"),
        (r"\boxed{1} so \boxed{x^{2}}", "auto", "x^{2}"),
        (r"work \boxed{1} #### 2", "auto", "2"),
        (r"work \boxed{1} #### 2", "boxed", "1"),
        (r"work \boxed{1} #### 2", "text", r"work \boxed{1} #### 2"),
        (" 12 ", "auto", "12"),
        ("14  (seats)", "auto", "14"),
        ("(1, 2)", "auto", "(1, 2)"),
        ("f(x)", "auto", "f(x)"),
        ("5 (2)", "auto", "5 (2)"),
        (18, "auto", "18"),
        (18.0, "auto", "18"),
        (-0.25, "text", "-0.25"),
        (1e-7, "auto", "0.0000001"),
        (120.0, "auto", "120"),
    ],
)
def test_gold_reading(tmp_path, answer, kind, gold):
    file = jsonl(tmp_path / "rows.jsonl", {"question": "q", "answer": answer})
    assert read(file, gold=kind)[0].gold == gold


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "gold", "response", "rest"),
    [
        ({"prompt": "p", "gold": "g"}, {}, "p", "g", None, {}),
        ({"problem": "p", "solution": r"s \boxed{g}", "level": 3}, {}, "p", "g", r"s \boxed{g}", {"level": 3}),
        ({"problem": "p", "solution": "s", "answer": "g"}, {}, "p", "g", "s", {}),
        ({"problem": "q", "prompt": "p", "gold": "g", "answer": 1}, {}, "p", "g", None, {"problem": "q", "answer": 1}),
        ({"b": "p", "r": 7, "w": "w"}, {"prompt": "b", "gold": "r", "response": "w"}, "p", "7", "w", {}),
        ({"question": "p", "answer": "w #### 7"}, {}, "p", "7", "w #### 7", {}),
        ({"prompt": "p", "gold": "g", "response": None}, {}, "p", "g", None, {}),
    ],
)  # fmt: skip
def test_column_choice(tmp_path, row, columns, prompt, gold, response, rest):
    file = jsonl(tmp_path / "rows.jsonl", row)
    assert read(file, columns=columns) == [Problem(prompt, gold, response, rest, f"{file}:1")]


def test_every_format_gives_the_same_problems(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": f"{n} + 1?\nThink.", "answer": str(n + 1), "tag": "t"} for n in range(3)]
    jsonl(tmp_path / "rows.jsonl", rows[0], "", *rows[1:])
    (tmp_path / "rows.json").write_text("\ufeff" + json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    read_by_format = {kind: read(tmp_path / f"rows.{kind}") for kind in ("jsonl", "json", "csv", "parquet")}
    for problems in read_by_format.values():
        assert [(p.prompt, p.gold, p.columns) for p in problems] == [
            (r["question"], r["answer"], {"tag": "t"}) for r in rows
        ]
    lines = {kind: [int(p.where.rpartition(":")[2]) for p in problems] for kind, problems in read_by_format.items()}
    # Lines of the file where it has lines: jsonl's second is blank, each record of the csv covers two.
    assert lines == {"jsonl": [1, 3, 4], "json": [1, 2, 3], "csv": [2, 4, 6], "parquet": [1, 2, 3]}


def test_limit_beyond_the_file_takes_all_of_it(tmp_path):
    assert len(read(jsonl(tmp_path / "rows.jsonl", ROW, ROW), limit=50)) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Broken sources


@pytest.mark.parametrize(
    ("row", "keys", "fault"),
    [
        ('{"question": "q", "answer"', {}, "rows.jsonl:2: not JSON: Expecting ':' delimiter (column 27)"),
        ([1, 2], {}, "rows.jsonl:2: expected an object with named fields, found a list"),
        ("7", {}, "rows.jsonl:2: expected an object with named fields, found the number 7"),
        ("true", {}, "rows.jsonl:2: expected an object with named fields, found true or false"),
        ({"answer": "5"}, {}, "rows.jsonl:2: field 'question' is missing"),
        ({"question": "q"}, {}, "rows.jsonl:2: field 'answer' is missing"),
        ({"question": None, "answer": "5"}, {}, "rows.jsonl:2: field 'question' should be text, found null"),
        ({"question": 3, "answer": "5"}, {}, "rows.jsonl:2: field 'question' should be text, found the number 3"),
        ({"question": [{"role": "user"}], "answer": "5"}, {}, "field 'question' should be text, found a list"),
        ({"question": "q", "answer": {"v": 1}}, {}, "field 'answer' should be text or a number, found an object"),
        ({"question": "q", "answer": True}, {}, "field 'answer' should be text or a number, found true or false"),
        ({"question": "q", "answer": None}, {}, "field 'answer' should be text or a number, found null"),
        ('{"question": "q", "answer": NaN}', {}, "field 'answer' should be text or a number, found the number nan"),
        ({"question": " \n", "answer": "5"}, {}, "rows.jsonl:2: field 'question' is empty"),
        ({"question": "q", "answer": ""}, {}, "rows.jsonl:2: field 'answer' is empty"),
        ({"question": "q \ud83d", "answer": "5"}, {}, "field 'question' holds half a surrogate pair"),
        ({"question": "q", "answer": "work ####"}, {}, "field 'answer' has nothing after its last '####'"),
        ({"question": "q", "answer": "5"}, {"gold": "hash"}, "field 'answer' has no '####' before its answer"),
        ({"question": "q", "answer": "5"}, {"gold": "boxed"}, r"field 'answer' has no complete \boxed{}"),
        ({"question": "q", "answer": r"\boxed{5"}, {}, r"field 'answer' has no complete \boxed{}"),
        ({"question": "q", "answer": "5"}, {"columns": {"response": "work"}}, "field 'work' is missing"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path, row, keys, fault):
    good = {**ROW, "answer": r"\boxed{5} #### 5", "work": "w"}
    file = jsonl(tmp_path / "rows.jsonl", good, row, good)
    message = refusal(file, **keys)
    assert message.startswith(f"1 of 3 rows of {file} is malformed:\n")
    assert fault in message


def test_all_malformed_rows_are_found_and_the_first_ten_listed_in_order(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROW, *["not json", {"question": "q"}] * 7)
    message = refusal(file, limit=1)  # also beyond the limit
    assert message.startswith(f"14 of 15 rows of {file} are malformed:")
    assert [line.partition("rows.jsonl:")[2].partition(":")[0] for line in message.splitlines()[1:-1]] == [
        str(line) for line in range(2, 12)
    ]
    assert message.endswith("and 4 more; `rltt check-data` lists all")


def test_a_file_of_nothing_but_broken_rows(tmp_path):
    assert "2 of 2 rows" in refusal(jsonl(tmp_path / "rows.jsonl", "a", "b"))


def test_csv_rows_of_the_wrong_width(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,answer\nq,1\n\nq\nq,1,2\n")
    message = refusal(file)
    assert "rows.csv:4: field 'answer' is missing" in message
    assert "rows.csv:5: has 3 cells, but the header has 2 columns" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "empty.jsonl is empty"),
        ("blank.jsonl", "\n\n", "blank.jsonl has no rows"),
        ("header.csv", "question,answer\n", "header.csv has no rows"),
        ("twice.csv", "question,answer,answer\nq,1,2\n", "twice.csv names a column twice: answer"),
        ("quote.csv", 'question,answer\n"q,1\n', "quote.csv is not readable as CSV: unexpected end of data, line 2"),
        ("rows.parquet", "not parquet", "rows.parquet is not readable as parquet: "),
        ("object.json", '{"question": "q"}', "object.json does not hold a list of objects"),
        ("lines.json", '{"a": 1}\n{"a": 2}\n', "Extra data, line 2, column 1 (one object a line? Name it .jsonl)"),
        ("broken.json", '[{"a": 1},', "broken.json is not JSON: Expecting value, line 1"),
        ("rows.txt", "q", "rows.txt: unknown extension '.txt'; rltt reads .jsonl, .json, .csv, .parquet files."),
        ("rows", "q", "rows: no extension; rltt reads"),
        ("latin.jsonl", b'{"question": "caf\xe9"}', "latin.jsonl is not UTF-8 text"),
        ("names.jsonl", '{"frage": "q", "answer": "1"}', "no column for the prompt: found 'frage', 'answer', looked"),
        ("names.jsonl", '{"prompt": "q", "loesung": "1"}', "no column for the gold: found 'prompt', 'loesung', looked"),
        ("one.jsonl", '{"answer": "q", "prompt": "p", "x": []}\n{"answer": []}', "field 'prompt' is missing"),
        ("box.jsonl", '{"prompt": "p", "gold": "\\\\boxed{}"}', "1 of 1 rows of"),
    ],
)  # fmt: skip
def test_a_broken_file_says_how(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal(tmp_path / name)


def test_a_missing_file_suggests_the_nearest_name(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROW)
    jsonl(tmp_path / "holdout.jsonl", ROW)
    message = f"{tmp_path / 'trian.jsonl'} does not exist; the nearest name in that folder is train.jsonl."
    assert refusal(tmp_path / "trian.jsonl") == message
    assert "there is no folder" in refusal(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "bare").mkdir()
    assert "the folder holds no data files" in refusal(tmp_path / "bare" / "train.jsonl")


def test_a_missing_file_without_a_data_extension_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", ROW)
    assert "the nearest name in that folder is train.jsonl" in refusal("data/train.txt")


def test_an_unknown_column_names_the_nearest(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROW)
    message = refusal(file, columns={"gold": "anwser"})
    assert "data.columns.gold is 'anwser'" in message
    assert "found 'question', 'answer'; did you mean 'answer'?" in message
    assert refusal(file, columns={"gold": "zzz"}).endswith("found 'question', 'answer'.")


@pytest.mark.parametrize("key", ["split", "config"])
def test_keys_without_effect_on_a_file_are_refused(tmp_path, key):
    file = jsonl(tmp_path / "rows.jsonl", ROW)
    source = DataSource.model_construct(path=str(file), **{key: "train"})  # the recipe refuses it too
    with pytest.raises(DataError, match=f"rows.jsonl is a file and has no {key}: remove {key} 'train'"):
        read_problems(source, section(file))


# ---------------------------------------------------------------------------------------------------------------------
# Hub ids and dataset folders (a folder goes the same way as a Hub id: through load_dataset)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset folder as a clone of a Hub repository has it: two configurations, two splits."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "repository"
    configs = []
    for config in ("algebra", "geometry"):
        (repository / config).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [{"problem": f"{config} {split} {n}", "solution": rf"so \boxed{{{n}}}"} for n in range(2)]
            jsonl(repository / config / f"{split}.jsonl", *rows)
        files = "".join(f"\n  - split: {s}\n    path: {config}/{s}.jsonl" for s in ("train", "test"))
        configs.append(f"- config_name: {config}\n  data_files:{files}\n")
    (repository / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    return repository


def test_dataset_folder(folder):
    problems = read(folder, config="geometry", split="test")
    assert problems[1] == Problem("geometry test 1", "1", r"so \boxed{1}", {}, f"{folder}/geometry[test]:2")


def test_a_preset_joins_configurations_and_names_each(folder, monkeypatch):
    preset = sources_module.Preset(configs=("algebra", "geometry"), gold="boxed")
    monkeypatch.setitem(sources_module.PRESETS, str(folder), preset)
    train, evaluation = load_split(section(folder, eval=DataSource(path=str(folder))))
    assert [p.prompt for p in train] == ["algebra train 0", "algebra train 1", "geometry train 0", "geometry train 1"]
    assert [p.where for p in evaluation][-2:] == [f"{folder}/geometry[test]:1", f"{folder}/geometry[test]:2"]
    # A gold column or form in the recipe counts for more than the preset.
    assert read(folder, gold="text")[0].gold == r"so \boxed{0}"
    assert read(folder, columns={"gold": "problem", "prompt": "solution"})[0].gold == "algebra train 0"


def test_presets_of_the_hub_ids(monkeypatch):
    """What would be asked of the Hub, which the tests cannot reach."""
    import datasets

    asked = []

    def load_dataset(path, config, *, split, download_mode):
        asked.append((path, config, split))
        return [{"problem": "p", "solution": r"s \boxed{3}", "answer": "#### 3"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    gsm8k = section("openai/gsm8k", columns={"prompt": "problem"})
    assert load_split(gsm8k)[0][0].where == "openai/gsm8k[train]:1"
    assert read_problems(gsm8k.train, gsm8k)[0].gold == "3"
    read("HuggingFaceH4/MATH-500")
    assert read("HuggingFaceH4/MATH-500", split="train")[0].gold == "#### 3"  # golds there are bare text
    assert [config for _, config, _ in asked] == ["main", "main", None, None]
    assert [split for _, _, split in asked] == ["train", "train", "test", "train"]
    asked.clear()
    math = read("EleutherAI/hendrycks_math", columns={"gold": "solution"})
    assert [config for _, config, _ in asked] == [
        "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
        "precalculus",
    ]  # fmt: skip
    assert math[6].where == "EleutherAI/hendrycks_math/precalculus[train]:1"


def test_dataset_errors_say_what_there_is(folder, tmp_path):
    assert "[validation] cannot be loaded: Unknown split" in refusal(folder, config="algebra", split="validation")
    assert "Available: ['algebra', 'geometry']" in refusal(folder, config="topology")
    (tmp_path / "bare").mkdir()
    assert "doesn't contain any data files" in refusal(tmp_path / "bare")
    # Also a file that broke since it was last read: datasets' cache would hide it.
    (folder / "algebra" / "train.jsonl").write_text("{broken")
    assert "cannot be loaded: An error occurred while generating the dataset: " in refusal(folder, config="algebra")
    assert "Couldn't reach 'openai/gsm8k' on the Hub" in refusal("openai/gsm8k")


# ---------------------------------------------------------------------------------------------------------------------
# Training and evaluation


def test_load_split_without_evaluation(tmp_path):
    train, evaluation = load_split(section(jsonl(tmp_path / "rows.jsonl", ROW)))
    assert (len(train), evaluation) == (1, [])


def test_evaluating_on_the_training_rows_is_refused(tmp_path):
    rows = [{"question": f"q{n}", "answer": n} for n in range(10)]
    file = jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError, match=r"4 of 4 evaluation rows are also trained on \(.*rows.jsonl:2, .*, …\)"):
        load_split(section(file, eval=DataSource(path=str(file), limit=4)))


def test_prompts_shared_by_different_rows_are_kept_with_a_warning(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {"question": "a", "answer": 1}, {"question": "b", "answer": 1})
    other = jsonl(tmp_path / "other.jsonl", {"question": "b", "answer": 1}, {"question": "c", "answer": 1})
    with pytest.warns(
        UserWarning, match=r"1 of 2 evaluation prompts also occur in the training data \(.*other.jsonl:1\)"
    ):
        rows, evaluation = load_split(section(train, eval=DataSource(path=str(other))))
    assert (len(rows), len(evaluation)) == (2, 2)


def test_holdout_leaves_rows_to_train_on(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROW, ROW)
    with pytest.raises(DataError, match=r"data.holdout is 2, but .*rows.jsonl has 2 rows: none are left"):
        load_split(section(file, holdout=2))


def test_arithmetic_trains_and_evaluates_on_its_own_splits():
    recipe = DataSection(
        train=DataSource(path="arithmetic", size=300, limit=200),
        eval=DataSource(path="arithmetic", size=50, difficulty=2),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train, evaluation = load_split(recipe)
    assert (len(train), len(evaluation)) == (200, 50)
    assert train[0].where.startswith("arithmetic-1[train]:")
    assert evaluation[0].where == "arithmetic-2[test]:1"


# ---------------------------------------------------------------------------------------------------------------------
# The dataset for the trainer

CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}= {% endif %}"
)
PROBLEMS = [
    Problem("Ann has 2 cups.", "2", r"\boxed{2}", {"level": 1}, "a:1"),
    Problem("Ann has 2 cups and 3 pens.", "3", r"\boxed{3}", {}, "a:2"),
    Problem("Ben has 3.", "3", None, {"level": 2}, "a:3"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return arithmetic_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def test_plain_prompts_and_columns(tokenizer):
    dataset, report = build_dataset(PROBLEMS, section("x.jsonl", prompt_template=r"{prompt} \boxed{}?"), tokenizer)
    assert dataset["prompt"][:2] == [r"Ann has 2 cups. \boxed{}?", r"Ann has 2 cups and 3 pens. \boxed{}?"]
    assert dataset.column_names == ["prompt", "gold", "row", "level"]  # no response: one problem has none
    assert dataset["row"][:] == ["a:1", "a:2", "a:3"]
    assert dataset["level"][:] == [1, None, 2]
    assert report == DropReport(3, 0, None, None, ())
    assert str(report) == "all 3 prompts kept (no max_prompt_length)"
    assert build_dataset(PROBLEMS[:2], section("x.jsonl"), tokenizer)[0]["response"][:] == [r"\boxed{2}", r"\boxed{3}"]


def test_chat_prompts_are_messages(chat_tokenizer):
    recipe = section("x.jsonl", system_prompt="Add.", prompt_template="Q: {prompt}")
    dataset, _ = build_dataset(PROBLEMS, recipe, chat_tokenizer)
    assert dataset[2]["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "Q: Ben has 3."},
    ]
    plain, _ = build_dataset(PROBLEMS, section("x.jsonl", chat_template=False), chat_tokenizer)
    assert plain[2]["prompt"] == "Ben has 3."


def test_length_filter_counts_the_prompt_as_the_model_sees_it(tokenizer, chat_tokenizer):
    dataset, report = build_dataset(PROBLEMS, section("x.jsonl", max_prompt_length=5), tokenizer)
    assert dataset["row"][:] == ["a:1", "a:3"]
    assert (report.kept, report.dropped, report.longest, report.first) == (2, 1, 8, ("a:2",))
    assert str(report) == "1 of 3 prompts dropped (33.3%), longer than 5 tokens; the longest has 8 (a:2)"
    # With a chat: the role (an unknown word), the text, <eos> and the generation prompt.
    dataset, report = build_dataset(PROBLEMS, section("x.jsonl", max_prompt_length=8), chat_tokenizer)
    assert dataset["row"][:] == ["a:1", "a:3"]
    assert report.longest == 11
    _, report = build_dataset(PROBLEMS, section("x.jsonl", max_prompt_length=11), chat_tokenizer)
    assert str(report) == "all 3 prompts kept: the longest has 11 of at most 11 tokens"


def test_dropping_everything_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"max_prompt_length is 2, and all 3 prompts are longer: the shortest has 4"):
        build_dataset(PROBLEMS, section("x.jsonl", max_prompt_length=2), tokenizer)


def test_chat_settings_that_cannot_work(tokenizer, chat_tokenizer):
    with pytest.raises(DataError, match="the policy's tokenizer has no chat template: leave it out"):
        build_dataset(PROBLEMS, section("x.jsonl", chat_template=True), tokenizer)
    with pytest.raises(DataError, match="system_prompt needs a chat, but the policy's tokenizer has no chat template"):
        build_dataset(PROBLEMS, section("x.jsonl", system_prompt="s"), tokenizer)
    # The recipe refuses this pair too, where it can know.
    values = {**dict(section("x.jsonl")), "system_prompt": "s", "chat_template": False}
    recipe = DataSection.model_construct(**values)
    with pytest.raises(DataError, match=r"system_prompt needs a chat, but data.chat_template is false"):
        build_dataset(PROBLEMS, recipe, chat_tokenizer)


def test_columns_that_collide_get_another_name(tokenizer):
    problems = [Problem("p", "g", None, {"completions": 1, "row": 2, "images": 3, "level": 4}, "a:1")]
    dataset, _ = build_dataset(problems, section("x.jsonl"), tokenizer)
    assert dataset.column_names == [
        "prompt", "gold", "row", "original_completions", "original_row", "original_images", "level"
    ]  # fmt: skip
    clash = [Problem("p", "g", None, {"row": 2, "original_row": 3}, "a:1")]
    with pytest.raises(DataError, match="the columns 'row', a name that rltt needs, and 'original_row': rename one"):
        build_dataset(clash, section("x.jsonl"), tokenizer)


@pytest.mark.parametrize("values", [(1, "one"), ([1], 2), ({"a": 1}, {"a": "b"}), (10**30, 1), ("\ud83d", "x")])
def test_a_column_that_fits_no_type_is_named(tokenizer, values):
    problems = [Problem("p", "g", None, {"meta": value}, f"a:{n}") for n, value in enumerate(values)]
    with pytest.raises(DataError, match="column 'meta' fits no type: "):
        build_dataset(problems, section("x.jsonl"), tokenizer)


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'tokenizers', 'datasets', 'pyarrow', 'trl'}"
    code = f"import sys, rltt.data; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
