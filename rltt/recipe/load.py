"""A recipe from a YAML file, with overrides from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rltt.errors import RecipeError
from rltt.recipe.messages import found, problems_of
from rltt.recipe.schema import Recipe
from rltt.recipe.section import Idle, Section, section_at
from rltt.recipe.yaml_dialect import parse_yaml

S = TypeVar("S", bound=Section)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` and apply `overrides`, such as `train.learning_rate=1e-5`, from left to right.

    Keys of the file that an override leaves without effect, such as those of an evaluation without data, are dropped.
    Relative paths of data files, reward files and checkpoints that do not exist from the current directory are looked
    for in the recipe's folder. Raises `RecipeError` with one line for each problem.
    """
    path = Path(path)
    values = _read(path)
    if overrides:
        idle_in_file = _idle_keys(values)
        for override in overrides:
            _apply(values, override)
        given = tuple(override.partition("=")[0] for override in overrides)
        while left_idle := {
            key
            for key in _idle_keys(values) - idle_in_file
            if not any(key == by or key.startswith(f"{by}.") for by in given)
        }:
            for key in left_idle:
                _drop(values, key)
    return check(Recipe, values, source=str(path), folder=path.parent)


def check(section: type[S], values: Any, *, source: str, folder: Path | None = None) -> S:
    """Make a `section` of `values`; a `RecipeError` lists every problem, each on a line that starts with `source`."""
    try:
        return section.model_validate(values, context={"folder": folder})
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in problems_of(details, section)]
        raise RecipeError("\n".join(f"{source}: {key}: {message}" for key, message in problems)) from None


def _idle_keys(values: dict[str, Any]) -> set[str]:
    """Keys that have no effect, outside of lists, into which overrides do not reach."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in problems_of(details, Recipe)]
        return {key for key, message in problems if isinstance(message, Idle) and "[" not in key}
    return set()


def _drop(values: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values[parent]
    del values[last]


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"{path}: a recipe is a .yaml file")
    if not path.is_file():
        raise RecipeError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 (byte {error.start})") from None
    values = parse_yaml(text, source=str(path))
    if values is None:
        raise RecipeError(f"{path}: empty; a recipe has at least name, policy and data")
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: found {found(values)}; a recipe is a mapping, with name, policy and data as keys")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `a.b=value` in `values`, making the sections on the way."""
    key, equals, text = override.partition("=")
    *parents, last = key.split(".")
    if not equals or not all((*parents, last)):
        raise RecipeError(f"override '{override}': write it as key=value, such as train.max_steps=10")
    node = values
    for depth, parent in enumerate(parents, start=1):
        child = node.get(parent)
        section = section_at(Recipe, tuple(parents[:depth]))
        if child is None:
            child = {}
        elif isinstance(child, str) and section and section.shorthand:
            child = {section.shorthand: child}
        elif not isinstance(child, dict):
            inside = ".".join(parents[:depth])
            raise RecipeError(f"override '{override}': {inside} is {found(child)}; set {inside} as a whole")
        node[parent] = child
        node = child
    node[last] = parse_yaml(text, source=f"override '{override}'")
