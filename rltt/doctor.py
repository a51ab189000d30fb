"""`rltt doctor`: do rollout and training of a recipe see the same policy, and if not, why?

What `rltt train` proves at its start, alone: two rollouts with an update between them, through the trainer itself, so
that also the sync of changed weights is seen. Nothing is written and no policy is kept.
"""

import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from .recipe import Recipe
from .rollout.parity import Parity, combined
from .rollout.suspects import Finding
from .train.parity_gate import Checked

ROLLOUTS = 2


@dataclass(frozen=True)
class Report:
    """What `rltt doctor` found.

    Attributes:
        engine, dtype, tolerance: what was compared, and how strictly.
        loops: the policy's depth T.
        rollouts: each rollout's numbers, as sampled before and after an update.
    """

    engine: str
    dtype: str
    loops: int
    tolerance: float
    rollouts: tuple[Checked, ...]

    @property
    def parity(self) -> Parity:
        """Over all tokens of all rollouts."""
        return combined([checked.parity for checked in self.rollouts])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Guilty suspects of any rollout, each culprit once."""
        found: dict[str, Finding] = {}
        for checked in self.rollouts:
            for finding in checked.diagnosis.findings if checked.diagnosis else ():
                found.setdefault(finding.culprit, finding)
        return tuple(found.values())

    @property
    def culprit(self) -> str | None:
        """The likeliest cause; `unknown` when there is a difference that no suspect explains."""
        if self.findings:
            return self.findings[0].culprit
        return None if self.parity.max <= self.tolerance else "unknown"

    def to_json(self) -> dict[str, Any]:
        """Numbers and names for `--json`."""
        last = self.rollouts[-1].diagnosis
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "loops": self.loops,
            "tolerance": self.tolerance,
            "parity": asdict(self.parity),
            "rollouts": [asdict(checked.parity) for checked in self.rollouts],
            "depths": [asdict(parity) | {"loop": t} for t, parity in enumerate(last.depths if last else (), start=1)],
            "culprit": self.culprit,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def render(self) -> str:
        """The same to read."""
        lines = [f"engine {self.engine}, {self.dtype}, {self.loops} loops; tolerance {self.tolerance:g}"]
        for number, checked in enumerate(self.rollouts):
            lines.append(f"{('first rollout', 'after an update')[number > 0]:>16}: {checked.parity}")
        last = self.rollouts[-1].diagnosis
        if last is not None:
            lines.append("its log-probs against the policy read at each depth (a sample of the last rollout):")
            lines += [f"{f'depth {t}':>16}: {parity}" for t, parity in enumerate(last.depths, start=1)]
        if self.culprit is None:
            return "\n".join([*lines, "rollout and training agree"])
        causes = [str(finding) for finding in self.findings] or [str(last)]
        return "\n".join([*lines, f"rollout and training differ; culprit: {self.culprit}", *causes])


def doctor(recipe: Recipe, console: Console) -> Report:
    """Two rollouts of the recipe at its own parity gate.

    Args:
        recipe: a train recipe. A warm start is left out: whether two paths agree does not depend on what was learned.

    Raises:
        UserError: what `rltt train` refuses before it starts.
    """
    from .train.callbacks import show
    from .train.run import make_trainer, prepare

    section = recipe.train
    updates = section.updates_per_rollout * section.num_iterations * (ROLLOUTS - 1) + 1
    with tempfile.TemporaryDirectory(prefix="rltt-doctor-") as folder:
        short = section.model_copy(update={"max_steps": updates, "warmup_steps": 0, "save_steps": None})
        data = recipe.data.model_copy(update={"filter": None})
        alone = recipe.model_copy(update={"run_dir": folder, "pretrain": None, "data": data, "train": short})
        ready = prepare(alone, console)
        trainer = make_trainer(ready.config, ready.policy, ready.dataset, ready.rewards)
        show(trainer)
        trainer.parity_gate.examine = True
        trainer.train()
    return Report(
        engine=recipe.rollout.engine,
        dtype=str(trainer.args.compute_dtype).removeprefix("torch."),
        loops=trainer.policy.loop_spec.loops,
        tolerance=trainer.args.parity_bound,
        rollouts=tuple(trainer.parity_gate.checked),
    )
