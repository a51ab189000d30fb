"""Recipes: what loads, what is refused, and whether the message helps."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltt.errors import RecipeError
from rltt.recipe import DataSource, Recipe, RewardEntry, load_recipe
from rltt.recipe.section import keys_of, section_at

BASE = """\
name: gsm8k
policy: {path: ByteDance/Ouro-1.4B, loops: 4}
data: {train: openai/gsm8k, eval: {path: openai/gsm8k, split: test, limit: 200}}
rewards: [math]
objective: {credit: exit_pdf, loss_type: grpo, beta: 0.001}
rollout: {engine: hf, num_generations: 8, temperature: 0.9, max_completion_length: 512}
train: {prompts_per_step: 32, max_steps: 140, learning_rate: 1e-5, seed: 0}
"""
FROM_SCRATCH = """\
name: quickstart
policy: {new: {hidden_size: 96}, loops: 4}
data: {train: {path: arithmetic, size: 512}, holdout: 64}
rewards: [math]
rollout: {max_completion_length: 32}
pretrain: {stop_at_solve_rate: 0.4}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).replace(str(path), "r.yaml")


# What loads


def test_defaults_and_given_values(write):
    recipe = load_recipe(write(BASE))
    assert recipe.policy.loops == 4
    assert recipe.data.train == DataSource(path="openai/gsm8k")
    assert recipe.rewards == [RewardEntry(use="math", weight=1.0)]
    assert recipe.train.learning_rate == 1e-5
    assert recipe.train.per_device_train_batch_size is None
    assert recipe.objective.detach_exit is True
    assert recipe.pretrain is None
    assert recipe.run_directory == Path("runs/gsm8k")


@pytest.mark.parametrize("text", [BASE, FROM_SCRATCH])
def test_a_resolved_recipe_loads_to_an_equal_one(write, text):
    recipe = load_recipe(write(text), ["run_dir=/x", "train.learning_rate=3e-06", "data.columns={gold: '1e-6'}"])
    dumped = recipe.to_yaml()
    assert load_recipe(write(dumped, "resolved.yaml")) == recipe
    written = yaml.safe_load(dumped)
    assert set(written) == set(Recipe.model_fields)
    assert set(written["train"]) == set(recipe.train.__class__.model_fields)
    assert written["data"]["columns"] == {"gold": "1e-6"}


@pytest.mark.parametrize("number", ["1e-6", "1.0e-6", "1E-06", "0.000001", "+1e-6"])
def test_numbers_with_exponents_are_numbers(write, number):
    assert load_recipe(write(BASE.replace("1e-5", number))).train.learning_rate == 1e-6
    assert load_recipe(write(BASE), [f"train.learning_rate={number}"]).train.learning_rate == 1e-6


def test_a_whole_number_stands_for_a_float_and_a_date_for_a_name(write):
    recipe = load_recipe(write(BASE), ["objective.beta=1", "name=2026-01-01"])
    assert recipe.objective.beta == 1.0
    assert recipe.name == "2026-01-01"


def test_a_merge_key_may_repeat_what_it_merges(write):
    text = BASE.replace("rewards: [math]", "rewards: [&m {use: math, weight: 0.5}, {<<: *m, use: x, weight: 2.0}]")
    assert [entry.weight for entry in load_recipe(write(text)).rewards] == [0.5, 2.0]


def test_a_recipe_cannot_be_edited(write):
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(write(BASE)).train.seed = 1


# Overrides


@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (["run_dir=/some/where"], lambda r: str(r.run_directory), "/some/where"),
        (["objective.credit=final"], lambda r: r.objective.credit, "final"),
        (["data.train=a.jsonl"], lambda r: r.data.train, DataSource(path="a.jsonl")),
        (["data.train=a.jsonl", "data.train.limit=4"], lambda r: r.data.train, DataSource(path="a.jsonl", limit=4)),
        (["data.train.limit=4"], lambda r: r.data.train, DataSource(path="openai/gsm8k", limit=4)),
        (["data.train.limit=4", "data.train=a.csv"], lambda r: r.data.train.limit, None),
        (["data.eval.limit=null"], lambda r: r.data.eval.limit, None),
        (["data.eval="], lambda r: r.data.eval, None),
        (["data.columns.gold=final_answer"], lambda r: r.data.columns, {"gold": "final_answer"}),
        (["rewards=[math, {use: 'my.py:score', weight: 0.5}]"], lambda r: r.rewards[1].weight, 0.5),
        (["rewards=[{use: 'm:f', args: {a: 1}}, {use: 'm:f', args: {a: 2}}]"], lambda r: r.rewards[1].args, {"a": 2}),
        (["policy.convert.mixing=identity"], lambda r: r.policy.convert.mixing, "identity"),
        (["pretrain.max_steps=7"], lambda r: r.pretrain.max_steps, 7),
        (["train.seed=1", "train.seed=2"], lambda r: r.train.seed, 2),
        (["data.prompt_template='{prompt} a=b'"], lambda r: r.data.prompt_template, "{prompt} a=b"),
    ],
)
def test_overrides(write, overrides, read, expected):
    assert read(load_recipe(write(BASE), overrides)) == expected


EVALUATED = (
    BASE
    + """
evaluate: {every: 5, num_generations: 2, temperature: 0}
"""
)


@pytest.mark.parametrize(
    ("text", "overrides", "dropped"),
    [
        (EVALUATED, ["data.eval=null"], ["evaluate.every", "evaluate.num_generations", "evaluate.temperature"]),
        (BASE.replace("seed: 0", "save_total_limit: 7"), ["train.save_steps=null"], ["train.save_total_limit"]),
        (
            BASE.replace("exit_pdf", "progressive, credit_alpha: 2"),
            ["objective.credit=final"],
            ["objective.credit_alpha"],
        ),
        (
            EVALUATED + "pretrain: {stop_at_solve_rate: 0.5, check_every: 5}",
            ["pretrain.stop_at_solve_rate=null", "data.eval=null"],
            ["pretrain.check_every", "evaluate.every"],
        ),
    ],
)
def test_keys_of_the_file_that_an_override_leaves_without_effect_are_dropped(write, text, overrides, dropped):
    recipe, default = load_recipe(write(text), overrides), load_recipe(write(BASE), ["pretrain={}"])
    for key in dropped:
        section, name = key.split(".")
        assert getattr(getattr(recipe, section), name) == getattr(getattr(default, section), name)


@pytest.mark.parametrize(
    ("text", "overrides", "key"),
    [
        (EVALUATED, ["data.eval=null", "evaluate.every=3"], "evaluate.every"),
        (EVALUATED, ["evaluate={every: 3}", "data.eval=null"], "evaluate.every"),
        (BASE.replace("seed: 0", "save_steps: null, save_total_limit: 7"), ["train.seed=3"], "train.save_total_limit"),
    ],
)
def test_keys_without_effect_are_refused_where_they_were_given(write, text, overrides, key):
    assert message(write(text), *overrides).startswith(f"r.yaml: {key}: has no effect unless")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps", "override 'train.max_steps': write it as key=value, such as train.max_steps=10"),
        ("=3", "override '=3': write it as key=value"),
        ("train..seed=3", "override 'train..seed=3': write it as key=value"),
        ("name.x=3", "override 'name.x=3': name is 'gsm8k'; set name as a whole"),
        ("rewards.weight=3", "override 'rewards.weight=3': rewards is a list; set rewards as a whole"),
        ("rewards=[math", "override 'rewards=[math': line 1: expected ',' or ']'"),
        ("objectiv.beta=1", "r.yaml: objectiv: unknown key; the nearest is 'objective'"),
    ],
)
def test_wrong_overrides(write, override, expected):
    assert expected in message(write(BASE), override)


# Wrong recipes: each override makes the base wrong in one way


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # unknown keys
        ("objective.bta=1", "objective.bta: unknown key; the nearest is 'objective.beta'"),
        ("learning_rate=1", "learning_rate: unknown key; the nearest is 'train.learning_rate'"),
        ("train.temperature=1", "train.temperature: unknown key; the nearest is 'rollout.temperature'"),
        ("rollout.n=1", "rollout.n: unknown key; the keys here are engine, num_generations, temperature, max_comp"),
        ("polcy={}", "polcy: unknown key; the nearest is 'policy'"),
        ("rewards=[{use: math, wieght: 1}]", "rewards[0].wieght: unknown key; the nearest is 'rewards[0].weight'"),
        ("data.eval.splt=x", "data.eval.splt: unknown key; the nearest is 'data.eval.split'"),
        ("data.columns={answer: x}", "data.columns.answer: found 'answer'; expected 'prompt', 'gold' or 'response'"),
        ("3=1", "3: unknown key"),
        # missing
        ("policy=", "policy: found nothing; expected a section"),
        ("rewards=[{weight: 1}]", "rewards[0].use: missing. Registered name such as math, file.py:function"),
        ("data.eval={limit: 3}", "data.eval.path: missing. Hub id, a .jsonl"),
        # types
        ("train.max_steps=many", "train.max_steps: found 'many'; expected a whole number"),
        ("train.max_steps=1.5", "train.max_steps: found the number 1.5; expected a whole number"),
        ("train.max_steps=true", "train.max_steps: found true; expected a whole number"),
        ("train.learning_rate='1e-5'", "train.learning_rate: found '1e-5'; expected a number"),
        ("train.gradient_checkpointing=1", "train.gradient_checkpointing: found the number 1; expected true or false"),
        ("name=12", "name: found the number 12; expected text, in quotes"),
        ("rewards=math", "rewards: found 'math'; expected a list, such as [math]"),
        ("rewards=[3]", "rewards[0]: found the number 3; expected a section"),
        ("data.columns=[gold]", "data.columns: found a list; expected a mapping"),
        ("objective=grpo", "objective: found 'grpo'; expected a section"),
        # values
        ("name=a/b", "name: found 'a/b'; expected letters, digits"),
        ("name=.hidden", "name: found '.hidden'; expected letters, digits"),
        ("run_dir=''", "run_dir: found ''; expected some text"),
        ("train.learning_rate=0", "train.learning_rate: found the number 0; expected a value above 0"),
        ("train.learning_rate=.nan", "train.learning_rate: found the number nan; expected a finite number"),
        ("rewards=[{use: math, weight: .inf}]", "rewards[0].weight: found the number inf; expected a finite number"),
        ("rollout.num_generations=1", "rollout.num_generations: found the number 1; expected a value of at least 2"),
        ("rollout.temperature=0", "rollout.temperature: found the number 0; expected a value above 0"),
        ("objective.beta=-0.1", "objective.beta: found the number -0.1; expected a value of at least 0"),
        ("objective.credit=exit", "objective.credit: found 'exit'; expected 'final', 'uniform', 'progressive', 'ex"),
        ("objective.loss_type=ppo", "objective.loss_type: found 'ppo'; expected 'reinforce', 'grpo'"),
        ("objective.loss_type=bnpo", "objective.loss_type: 'bnpo' depends on the micro-batch size by design; use 'da"),
        ("rollout.engine=sglang", "rollout.engine: found 'sglang'; expected 'hf' or 'vllm'"),
        (
            "rollout.vllm_tensor_parallel_size=2",
            "rollout.vllm_tensor_parallel_size: has no effect unless engine is 'vllm'",
        ),
        ("policy.loops=0", "policy.loops: found the number 0; expected a value of at least 1"),
        ("data.gold=last", "data.gold: found 'last'; expected 'auto', 'hash', 'boxed' or 'text'"),
        ("data.prompt_template=Solve it", "data.prompt_template: found 'Solve it'; it must contain {prompt}"),
        ("data.train={path: arithmetic, difficulty: 6}", "data.train.difficulty: found the number 6; expected a valu"),
        ("rewards=[my.py]", "rewards[0].use: found 'my.py'; name the function in the file, such as my.py:score"),
        ("rewards=['my.py:']", "rewards[0].use: found 'my.py:'; write it as file.py:function"),
        ("pretrain.stop_at_solve_rate=1", "pretrain.stop_at_solve_rate: found the number 1; expected a value below 1"),
        # values that cannot work together
        ("policy.new={}", "policy.path: give either policy.path (a checkpoint) or policy.new"),
        ("policy={loops: 4}", "policy.path: give either policy.path (a checkpoint) or policy.new"),
        ("policy={new: {}}", "policy.loops: missing; a new or converted model has no depth of its own"),
        ("policy={path: x, convert: {}}", "policy.loops: missing; a new or converted model has no depth of its own"),
        ("policy={new: {}, loops: 2, convert: {}}", "policy.convert: has no effect unless policy.path is given"),
        ("policy={new: {}, loops: 2, revision: x}", "policy.revision: has no effect unless policy.path is given"),
        ("policy={new: {hidden_size: 36}, loops: 2}", "policy.new.hidden_size: must be a multiple of 2 * num_attent"),
        ("policy={new: {num_key_value_heads: 3}, loops: 2}", "policy.new.num_key_value_heads: must divide num_atten"),
        ("policy={new: {window: 8}, loops: 2}", "policy.new.window: has no effect unless family is 'plt'"),
        ("policy.convert={window: 8}", "policy.convert.window: has no effect unless family is 'plt'"),
        ("policy.convert={family: plt, mixing: identity}", "policy.convert.mixing: has no effect unless family is"),
        ("policy.convert={mixing: identity, mixing_init: 0.5}", "policy.convert.mixing_init: has no effect unless"),
        ("data.holdout=3", "data.holdout: the rows for evaluation already come from data.eval"),
        ("data={train: {path: x, limit: 5}, holdout: 5}", "data.holdout: 5 of the 5 rows of data.train leave none"),
        ("data={train: {path: arithmetic, size: 9}, holdout: 9}", "data.holdout: 9 of the 9 rows of data.train lea"),
        ("data.train.size=10", "data.train.size: has no effect unless path is 'arithmetic'"),
        ("data.train={path: x.jsonl, split: test}", "data.train.split: has no effect unless path is a data set on"),
        ("data.train={path: arithmetic, config: x}", "data.train.config: has no effect unless path is a data set on"),
        ("objective.credit_alpha=2", "objective.credit_alpha: has no effect unless credit is 'progressive'"),
        ("objective={credit: final, detach_exit: false}", "objective.detach_exit: has no effect unless credit is 'e"),
        ("objective.credit=learned", "objective.credit: 'learned' weights get no gradient from loss_type 'grpo'; use"),
        ("objective={loss_type: reinforce, epsilon: 0.1}", "objective.epsilon: has no effect unless loss_type is one"),
        ("objective={loss_type: sapo, epsilon_high: 0.3}", "objective.epsilon_high: has no effect unless loss_type"),
        ("objective={loss_type: cispo, epsilon_high: 5, delta: 3}", "objective.delta: has no effect unless loss_typ"),
        ("objective={loss_type: cispo}", "objective.epsilon_high: 'cispo' caps the ratio itself at this value"),
        (
            "objective={loss_type: vespo, importance_sampling_level: sequence}",
            "objective.importance_sampling_level: has no effect unless loss_type is one of",
        ),
        ("train.warmup_steps=5", "train.warmup_steps: has no effect unless lr_scheduler_type is another"),
        (
            "train={save_steps: null, save_total_limit: 1}",
            "train.save_total_limit: has no effect unless save_steps is given",
        ),
        (
            "train.per_device_train_batch_size=24",
            "train.per_device_train_batch_size: 24 does not divide the 256 completions of an update",
        ),
        ("pretrain.check_every=5", "pretrain.check_every: has no effect unless stop_at_solve_rate is given"),
        ("rewards=[math, math]", "rewards[1].use: 'math' is listed twice"),
        ("rewards=[math, {use: x, solved_at: 2}]", "rewards[1].solved_at: has no effect: the first reward alone"),
        ("data={train: x, chat_template: false, system_prompt: x}", "data.system_prompt: has no effect unless a chat"),
    ],
)
def test_wrong_recipes(write, overrides, expected):
    text = message(write(BASE), overrides)
    assert text.startswith("r.yaml: ")
    assert f"r.yaml: {expected}" in text
    assert "\n" not in text, "one mistake, one line"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.system_prompt=x"], "data.system_prompt: the built-in tokenizer of policy.new has no chat template"),
        (["data.chat_template=true"], "data.chat_template: the built-in tokenizer of policy.new has no chat template"),
        (["data.holdout=0", "evaluate.every=5"], "evaluate.every: has no effect unless data.eval or data.holdout"),
    ],
)
def test_wrong_recipes_across_sections(write, overrides, expected):
    assert expected in message(write(FROM_SCRATCH), *overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "r.yaml: empty; a recipe has at least name, policy and data"),
        ("# nothing yet\n", "r.yaml: empty"),
        ("- name", "r.yaml: found a list; a recipe is a mapping"),
        ("quickstart", "r.yaml: found 'quickstart'; a recipe is a mapping"),
        ("name: [a\n", "r.yaml: line 2: "),
        ("name: a\n\tpolicy: x", "r.yaml: line 2: "),
        ("name: a\x00", "r.yaml: unacceptable character"),
        ("name: !!python/object/apply:os.getcwd []", "r.yaml: line 1: could not determine a constructor for the tag"),
        ("name: a\nname: b", "r.yaml: line 2: the key 'name' is given twice, first on line 1"),
        (BASE + "train:\n  seed: 1\n", "r.yaml: line 8: the key 'train' is given twice, first on line 7"),
        (BASE.replace("loops: 4", "loops: 4, loops: 3"), "r.yaml: line 2: the key 'loops' is given twice"),
        ("{[a, b]: 1}", "r.yaml: line 1: found unhashable key"),
    ],
)
def test_wrong_files(write, text, expected):
    assert expected in message(write(text))


def test_wrong_paths(write, tmp_path):
    assert message(tmp_path / "none.yaml").endswith("no such file")
    assert message(write(BASE, "r.json")).endswith("a recipe is a .yaml file")
    (tmp_path / "folder.yaml").mkdir()
    assert message(tmp_path / "folder.yaml").endswith("no such file")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    assert "not text in UTF-8 (byte 9)" in message(tmp_path / "latin.yaml")


def test_all_problems_are_told_at_once(write):
    lines = message(write("policy: {pth: x, loops: 0}\ntrain: {max_steps: a}")).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["name", "policy.loops", "policy.pth", "data", "train.max_steps"]
    two_conflicts = message(write(BASE), "objective={credit_alpha: 2, loss_type: cispo}")
    assert len(two_conflicts.splitlines()) == 2


# What each job needs


def test_training_needs_a_reward(write):
    load_recipe(write(BASE)).require("train")
    with pytest.raises(RecipeError, match=r"recipe 'gsm8k': rewards: training needs at least one, such as \[math\]"):
        load_recipe(write(BASE), ["rewards=[]"]).require("train")


def test_completions_must_fit_a_new_policy(write):
    load_recipe(write(FROM_SCRATCH)).require("train")
    recipe = load_recipe(write(FROM_SCRATCH), ["rollout.max_completion_length=200", "data.max_prompt_length=100"])
    with pytest.raises(RecipeError, match="max_completion_length: prompt and completion can reach 300 tokens"):
        recipe.require("train")


def test_pretraining_needs_its_section_and_cannot_sample(write):
    with pytest.raises(RecipeError, match="recipe 'gsm8k': pretrain: missing; add the section"):
        load_recipe(write(BASE)).require("pretrain")
    with pytest.raises(RecipeError, match=r"pretrain.stop_at_solve_rate: only the warm start of `rltt train` samples"):
        load_recipe(write(FROM_SCRATCH)).require("pretrain")
    load_recipe(write(FROM_SCRATCH), ["pretrain.stop_at_solve_rate=null", "rewards=[]"]).require("pretrain")


# Local paths


def test_paths_beside_the_recipe(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/rows.jsonl", "recipes/my.py", "recipes/policies/tiny/config.json", "here.jsonl"):
        write("", name)
    write("", "recipes/here.jsonl")
    write(BASE, "recipes/r.yaml")

    def load(*overrides: str) -> Recipe:
        return load_recipe("recipes/r.yaml", overrides)

    recipe = load("data.train=rows.jsonl", "rewards=['my.py:score', math]", "policy.path=policies/tiny")
    assert recipe.data.train.path == "recipes/rows.jsonl"
    assert recipe.rewards[0].use == "recipes/my.py:score"
    assert recipe.policy.path == "recipes/policies/tiny"
    # What exists from the current directory is meant first; what exists nowhere is left as it is.
    assert load("data.train=here.jsonl").data.train.path == "here.jsonl"
    assert load("data.train=none.jsonl").data.train.path == "none.jsonl"
    # Names that are no paths stay names although a folder is called the same.
    for name in ("math", "arithmetic"):
        (tmp_path / "recipes" / name).mkdir()
    recipe = load("data.train=arithmetic")
    assert (recipe.data.train.path, recipe.rewards[0].use) == ("arithmetic", "math")


# The schema


def test_every_key_says_what_it_is():
    for key in keys_of(Recipe):
        *parents, last = key.split(".")
        section = section_at(Recipe, tuple(parents))
        assert section is not None
        description = section.model_fields[last].description
        assert description, key
        assert description.endswith("."), key


def test_importing_recipes_loads_no_torch():
    code = "import sys, rltt.recipe; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
