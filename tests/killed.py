"""Runs in processes of their own that kill themselves at a chosen moment. Imported by those processes."""

import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rltt.recipe import load_recipe
from rltt.train import run


def train(recipe: Path, overrides: list[str], moment: tuple[str, int, int] | None = None) -> None:
    """Train, and send a signal at the `moment`: the count-th call of a function, such as `module:Class.method`."""
    if moment is not None:
        patch(*moment)
    run.train(load_recipe(recipe, overrides))


def patch(function: str, count: int, number: int) -> None:
    module_name, _, path = function.partition(":")
    owner: Any = import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def half_a_row(recipe: Path, overrides: list[str]) -> None:
    """Die while the second row of metrics.jsonl is written."""
    rows = 0
    original = run.RunDirectory.log_metrics

    def half(self: Any, row: dict[str, Any], file: str = "metrics.jsonl") -> None:
        nonlocal rows
        rows += file == "metrics.jsonl"
        if rows == 2:
            with (self.path / file).open("a") as out:
                out.write('{"step": 99, "lo')
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, row, file)

    run.RunDirectory.log_metrics = half  # type: ignore[method-assign]
    train(recipe, overrides)


def twice(recipe: Path, overrides: list[str]) -> None:
    """Be asked to end, and then once more before the step is done."""
    patch("rltt.train.trainer:RLTTTrainer._compute_loss", 3, signal.SIGTERM)
    patch("rltt.train.trainer:RLTTTrainer._compute_loss", 4, signal.SIGTERM)
    train(recipe, overrides)
