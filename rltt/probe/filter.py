"""`data.filter`: train on the prompts whose solve rate, as `rltt probe` found it, lies in an interval.

Which rows that is, is written into the run directory when a run begins: a later probe changes nothing in a run that
goes on.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset

from ..errors import DataError
from ..files import write_text
from ..processes import is_main, of_main
from ..recipe import DataFilter, Recipe
from .results import Result, Results, row_id

KEPT = "kept_rows.json"
"""In the run directory: the names of the rows that are trained on."""

_HOW = "run `rltt probe recipe.yaml --prompts {rows}` with this recipe and the same overrides"


def require_results(recipe: Recipe) -> None:
    """Refuse a filter for which nothing was measured: asked before anything is loaded.

    Raises:
        DataError: no probe of this policy, with this sampling and this reward, was made.
    """
    if recipe.data.filter is None or not is_main() or (recipe.run_directory / KEPT).is_file():
        return
    results = Results(recipe)
    if not results.known:
        raise DataError(
            "data.filter.solve_rate: no probe of this recipe's policy was made, with its sampling and its reward; "
            f"{_HOW.format(rows='N')} (N: at least as many as there are training rows)\nlooked for {results.path}"
        )


def filtered(recipe: Recipe, dataset: Dataset, say: Callable[[str], None]) -> Dataset:
    """The training rows that `data.filter` keeps, in their order; all of them without one.

    The main process decides for all: it is the one whose machine a probe ran on.

    Raises:
        DataError: rows were not probed and the filter does not say what to do with them, none is left, or rows that
            the run began with are gone.
    """
    if recipe.data.filter is None:
        return dataset
    return dataset.select(of_main(_kept(recipe, recipe.data.filter, dataset, say) if is_main() else None))


def freeze(recipe: Recipe, dataset: Dataset) -> None:
    """Write down which rows a run begins with; those of a run that goes on are there already."""
    file = recipe.run_directory / KEPT
    if recipe.data.filter is not None and is_main() and not file.exists():
        write_text(file, json.dumps(dataset["row"][:], indent=0, ensure_ascii=False) + "\n")


def _kept(recipe: Recipe, section: DataFilter, dataset: Dataset, say: Callable[[str], None]) -> list[int]:
    """Indices of the rows."""
    file = recipe.run_directory / KEPT
    if file.is_file():
        return _as_before(file, dataset, say)
    known = Results(recipe).known
    places = [_place(known.get(row_id(example)), section) for example in dataset]
    count = Counter(places)
    if section.unprobed == "stop" and count["unprobed"]:
        raise DataError(
            f"data.filter: {count['unprobed']} of {len(dataset)} training rows were not probed; "
            f"{_HOW.format(rows=len(dataset))}, or set data.filter.unprobed to keep or drop"
        )
    wanted = {"kept", "unprobed"} if section.unprobed == "keep" else {"kept"}
    kept = [index for index, place in enumerate(places) if place in wanted]
    low, high = section.solve_rate
    reasons = {
        "below": f"below {low:g}",
        "above": f"above {high:g}",
        "ungraded": "without a graded completion",
        "unprobed": f"not probed and {'kept' if section.unprobed == 'keep' else 'dropped'}",
    }
    told = ", ".join(f"{count[place]} {reason}" for place, reason in reasons.items() if count[place])
    message = f"data.filter: {len(kept)} of {len(dataset)} training rows kept" + (f" ({told})" if told else "")
    if not kept:
        raise DataError(f"{message}; widen data.filter.solve_rate")
    say(message)
    return kept


def _place(result: Result | None, section: DataFilter) -> str:
    if result is None:
        return "unprobed"
    if result.rate is None:
        return "ungraded"
    low, high = section.solve_rate
    return "below" if result.rate < low else "above" if result.rate > high else "kept"


def _as_before(file: Path, dataset: Dataset, say: Callable[[str], None]) -> list[int]:
    wanted = set(json.loads(file.read_text(encoding="utf-8")))
    kept = [index for index, row in enumerate(dataset["row"]) if row in wanted]
    if len(kept) < len(wanted):
        raise DataError(
            f"{file}: the run began with {len(wanted)} rows, and the data have {len(kept)} of them: "
            "a data file has changed"
        )
    say(f"data.filter: the {len(kept)} of {len(dataset)} training rows that the run began with")
    return kept
