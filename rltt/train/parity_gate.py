"""The gate between rollout and training: measured on every rollout, checked on the first and on every n-th after it.

Shapes: B completions, C completion tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from ..errors import ParityError
from ..rollout.parity import Parity, measure_parity
from ..rollout.suspects import Diagnosis, Sampled, Setting, diagnose, other_stops, other_tokens

if TYPE_CHECKING:
    from .trainer import RLTTTrainer


@dataclass(frozen=True)
class Turn:
    """What the engine was asked and what it answered, on this process: one list for each completion."""

    prompts: list[list[int]]
    completions: list[list[int]]


@dataclass(frozen=True)
class Checked:
    """One rollout at the gate."""

    parity: Parity
    diagnosis: Diagnosis | None
    """None where nothing was wrong and nobody asked."""


class ParityGate:
    """Compares the engine's log-probs of its tokens with the training path's.

    Args:
        trainer: whose rollouts are checked.
        every: rollouts from one check to the next; the first is always checked. All are measured.

    Attributes:
        turns: what the engine did for the rollout at hand: the trainer appends, `check` empties.
        examine: diagnose even where nothing is wrong, and go on where something is: for `rltt doctor`.
        checked: the rollouts that were examined.
        rollouts: how many have come so far.
    """

    def __init__(self, trainer: "RLTTTrainer", every: int) -> None:
        self.trainer = trainer
        self.every = every
        self.turns: list[Turn] = []
        self.examine = False
        self.checked: list[Checked] = []
        self.rollouts = 0

    def check(self, batch: dict[str, Any], training: Float[Tensor, "B C"], mode: str) -> dict[str, float]:
        """Measure this rollout, and return its metrics.

        Args:
            batch: TRL's, with `sampling_per_token_logps`, the engine's.
            training: the training path's log-probs of the same tokens.

        Raises:
            ParityError: at a check, a difference is above the tolerance, or a completion does not end as it must.
        """
        turns, self.turns = self.turns, []
        parity = self._measure(batch, training)
        if mode == "train":
            due = self.rollouts % self.every == 0
            self.rollouts += 1
            if due or self.examine:
                self._judge(parity, self._rows(batch, training, turns))
        metrics = {f"parity/{name}": float(value) for name, value in asdict(parity).items()}
        if "importance_sampling_ratio" in batch:
            masked = (batch["importance_sampling_ratio"] == 0).float().mean()
            metrics["parity/masked"] = self.trainer.accelerator.gather(masked).mean().item()
        return metrics

    def _measure(self, batch: dict[str, Any], training: Float[Tensor, "B C"]) -> Parity:
        accelerator = self.trainer.accelerator
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)

        def everyones(column: Tensor) -> Tensor:
            # Each process has its own rollout; padded to one width they are compared as one.
            return accelerator.gather(accelerator.pad_across_processes(column, dim=1))

        rollout = batch["sampling_per_token_logps"]
        bound = self.trainer.args.parity_bound
        return measure_parity(everyones(training), everyones(rollout), everyones(mask.float()), bound)

    def _judge(self, parity: Parity, rows: Sequence[Sampled]) -> None:
        setting = self._setting()
        facts = bool([*other_tokens(rows), *other_stops(rows, setting)])
        wrong = parity.max > setting.tolerance or any(gather_object([facts]))
        diagnosis = self._diagnose(rows, setting) if wrong or self.examine else None
        if self.examine:
            self.checked.append(Checked(parity, diagnosis))
        elif wrong:
            assert diagnosis is not None
            raise ParityError(
                f"rollout and training differ; culprit: {diagnosis.culprit or 'unknown'}\n"
                f"{diagnosis}\n"
                f"measured: {parity}, tolerance {setting.tolerance:g}\n"
                "Training on such rollouts would optimise another model than the one that samples. `rltt doctor` "
                "measures this alone; rollout.parity_tolerance sets another bound"
            )

    def _diagnose(self, rows: Sequence[Sampled], setting: Setting) -> Diagnosis:
        """The same on every process: that of the first one that found something."""
        trainer = self.trainer
        engine = trainer.vllm_generation if trainer.use_vllm else None
        mine = diagnose(rows, trainer.policy, setting, engine)
        every: list[Diagnosis] = gather_object([mine])
        return next((diagnosis for diagnosis in every if diagnosis.findings), every[0])

    def _setting(self) -> Setting:
        trainer = self.trainer
        return Setting(
            temperature=trainer.temperature,
            stop_token_ids=list(trainer.eos_token_ids),
            max_completion_length=trainer.max_completion_length,
            tolerance=trainer.args.parity_bound,
            compute_dtype=trainer.args.compute_dtype,
            autocast=trainer.accelerator.autocast,
        )

    def _rows(self, batch: dict[str, Any], training: Float[Tensor, "B C"], turns: Sequence[Turn]) -> list[Sampled]:
        """The completions of this process, none where tools took turns with the engine."""
        if len(turns) != 1:
            return []
        rows = []
        for index, (engine_prompt, engine_completion) in enumerate(
            zip(turns[0].prompts, turns[0].completions, strict=True)
        ):
            mask = batch["completion_mask"][index].bool()
            # A truncated completion may be masked as a whole: nothing of it is scored.
            completion = batch["completion_ids"][index][mask].tolist() if mask.any() else engine_completion
            prompt_mask = batch["prompt_mask"][index].bool()
            rows.append(
                Sampled(
                    prompt=batch["prompt_ids"][index][prompt_mask].tolist(),
                    completion=completion,
                    padding=int((~prompt_mask).sum()),
                    engine_prompt=engine_prompt,
                    engine_completion=engine_completion,
                    rollout=batch["sampling_per_token_logps"][index, : len(completion)],
                    training=training[index, : len(completion)],
                )
            )
        return rows
