"""What probes have found of each prompt, kept outside of any run: one JSONL for a policy, its sampling and its reward.

The first line says what the file is about, each other line is a `Result`. Prompts are known by their content, so the
results hold whatever part of the data a recipe takes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltt.errors import DataError
from rltt.files import write_text
from rltt.recipe import Recipe

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One prompt, sampled.

    Attributes:
        id: of its content; see `row_id`.
        row: where it came from.
        samples: completions sampled.
        graded: of these, completions that the first reward gave a number.
        solved: of these, completions that count as solved.
        truncated: completions that met the length limit.
        tokens: mean length of a completion.
        outcomes: what the rewards reported of the batch that the prompt was in: shares by the metric's name.
    """

    id: str
    row: str
    samples: int
    graded: int
    solved: int
    truncated: int
    tokens: float
    outcomes: Mapping[str, float]

    @property
    def rate(self) -> float | None:
        """Share of the graded completions that are solved; None without any."""
        return self.solved / self.graded if self.graded else None


def row_id(example: Mapping[str, Any]) -> str:
    """A training row by its content: prompt as the policy sees it, gold, and what else reward functions may read."""
    content = {name: value for name, value in example.items() if name != "row"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def identity(recipe: Recipe) -> dict[str, Any]:
    """Everything in a recipe, but for the prompts, that decides how often its start solves a prompt.

    Adapters start as the policy under them, and engines have to agree with the training path: neither is part of it.
    """
    policy, rollout, reward = recipe.policy, recipe.rollout, recipe.rewards[0]
    facts: dict[str, Any] = {
        "format": FORMAT,
        "policy": policy.model_dump(include={"path", "new", "loops", "convert", "revision"}),
        "precision": recipe.train.precision,
        "sampling": rollout.model_dump(include={"temperature", "max_completion_length"}),
        "reward": reward.model_dump(include={"use", "args", "solved_at", "on_error"}),
    }
    if policy.path is not None and Path(policy.path).exists():
        facts["policy"]["path"] = str(Path(policy.path).resolve())
        facts["files"] = _stamps(Path(policy.path))
    code = Path(reward.use.rpartition(":")[0])
    if code.suffix == ".py" and code.is_file():
        facts["reward"]["use"] = f"{code.resolve()}:{reward.use.rpartition(':')[2]}"
        facts["reward"]["code"] = hashlib.sha256(code.read_bytes()).hexdigest()
    if policy.new is not None or policy.convert is not None:
        facts["seed"] = recipe.train.seed
    if recipe.pretrain is not None:  # the rows of the warm start and its checks make the policy too
        facts["pretrain"] = recipe.pretrain.model_dump()
        facts["data"] = recipe.data.model_dump(exclude={"filter"})
        facts["checks"] = recipe.evaluate.model_dump(include={"num_generations", "temperature", "batch_size"})
    return facts


def _stamps(path: Path) -> dict[str, list[int]]:
    """Size and time of each file of a local checkpoint: other weights under the same name are another policy."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


class Results:
    """The results of one policy, sampling and reward.

    Attributes:
        path: the file; it need not be there.
        known: results by the prompt's id.

    Raises:
        DataError: the file is not what a probe writes.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.identity = identity(recipe)
        text = json.dumps(self.identity, sort_keys=True)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = cache / "rltt" / "probes" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.jsonl"
        self.known: dict[str, Result] = self._read()

    def _read(self) -> dict[str, Result]:
        if not self.path.is_file():
            return {}
        known = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines()[1:], start=2):
            try:
                result = Result(**json.loads(line))
            except (json.JSONDecodeError, TypeError) as error:
                raise DataError(
                    f"{self.path}:{number}: not a result of `rltt probe` ({error}); remove the file"
                ) from None
            known[result.id] = result
        return known

    def add(self, results: list[Result]) -> None:
        """Put results of this probe beside those of earlier ones, in whose place they come for the same prompt."""
        self.known = self._read() | self.known | {result.id: result for result in results}
        lines = [{"identity": self.identity}, *map(asdict, self.known.values())]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))
