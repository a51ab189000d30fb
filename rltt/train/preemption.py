"""SIGTERM, as schedulers send it before they take a machine away: the run is saved and ends with status 0.

During training the step at hand is finished and saved as a checkpoint; at any other time the run ends at once, as
nothing is lost. A second SIGTERM ends the process without waiting.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..launch import ERRORS
from .checkpoint import CheckpointedTrainer


class Preempted(SystemExit):
    """The run was asked to end, is saved, and can go on: exit status 0."""

    code = 0


class Preemption:
    """Whether the process was asked to end.

    Attributes:
        asked: a SIGTERM came.
        can_wait: training is under way and will see to it at the end of a step; otherwise `Preempted` is raised.
    """

    def __init__(self) -> None:
        self.asked = False
        self.can_wait = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked or _another_failed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.asked = True
        if not self.can_wait:
            raise Preempted
        # Not through the console: a handler may come while it is printing.
        os.write(2, b"SIGTERM: the run will be saved after this step, and end; a second one ends it at once\n")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts, the end of a step is waited for; `Preempted` is raised after it."""
        self.can_wait = True
        try:
            yield
        finally:
            self.can_wait = False
        if self.asked:
            raise Preempted


@contextmanager
def preemption() -> Iterator[Preemption]:
    """Listen for SIGTERM while this lasts; outside of the main thread, which alone may, nothing is listened for."""
    state = Preemption()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    before = signal.signal(signal.SIGTERM, state.handle)
    try:
        yield state
    finally:
        signal.signal(signal.SIGTERM, before)


def _another_failed() -> bool:
    """Whether another process of the launch has left an error: the launcher then ends the rest by this signal too."""
    folder = os.environ.get(ERRORS)
    return folder is not None and any(Path(folder).glob("error-*.json"))


class StopAtStep(TrainerCallback):
    """Saves and ends training at the end of a step, when any of the processes was asked to end."""

    def __init__(self, trainer: CheckpointedTrainer, state: Preemption) -> None:
        self.trainer = trainer
        self.asked = state

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.world_size > 1:
            flag = torch.tensor(float(self.asked.asked), device=args.device)
            self.asked.asked = bool(self.trainer.accelerator.reduce(flag, reduction="sum"))
        if self.asked.asked:
            self.trainer.ended_early = True
            control.should_save = control.should_training_stop = True
