"""Checkpoints that are whole or not there: what a run needs to go on as if it had never stopped.

    checkpoint-25/
      manifest.json        size and SHA-256 of every other file; written last, checked before anything is loaded
      model.safetensors …  the policy, with learned credit weights, in HF format
      optimizer.pt, scheduler.pt, rng_state*.pth, trainer_state.json   as transformers writes them
      identity.json        step, processes, and fingerprints of the reference and of the training data
      process_0.pt         what each process holds besides: the rollout that is not used up, counters

A checkpoint is written into `.partial/`, flushed to the disk, and renamed. Whatever ends the process, a folder that is
named `checkpoint-…` is complete; what happens to it later (a failing disk, a copy that broke off) the manifest tells.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from ..errors import CheckpointError

MANIFEST = "manifest.json"
IDENTITY = "identity.json"
PARTIAL = ".partial"
_NAME = re.compile(r"checkpoint-(\d+)")
# torch writes through a stream of its own, which reports a full disk as a RuntimeError of one of these texts.
_TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "file write failed", "iostream error", "unexpected pos")
_OPTIMIZER_OPTIONS = ("initial_lr", "betas", "eps", "weight_decay")
_FINGERPRINT_VALUES = 4096


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    step: int


# ------------------------------------------------------------------------------------------------------ finding one


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """All that are in a folder, whole or not, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if path.is_dir() and (match := _NAME.fullmatch(path.name))]
    return sorted((Checkpoint(path, int(match[1])) for match, path in found), key=lambda checkpoint: checkpoint.step)


def verify(path: Path, contents: bool = True) -> None:
    """Compare every file with the manifest.

    Args:
        contents: read them all; without it sizes are compared, which takes no time.

    Raises:
        CheckpointError: a file is missing, or is not as it was written; the message names it.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no {MANIFEST}: it is not a whole checkpoint of rltt") from None
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    for name, wanted in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != wanted["size"]:
                raise CheckpointError(f"{file}: has {size:,} bytes, but {wanted['size']:,} were written")
            if contents and _sha256(file) != wanted["sha256"]:
                raise CheckpointError(f"{file}: its content is not what was written (SHA-256 differs)")
        except FileNotFoundError:
            raise CheckpointError(f"{file}: is missing") from None
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def last_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a folder, and what is wrong with each that is newer.

    Raises:
        CheckpointError: there are checkpoints, and none is whole; or one may not be read.
    """
    damage = []
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            verify(checkpoint.path)
        except CheckpointError as error:
            if isinstance(error.__cause__, PermissionError):  # it may well be whole
                raise
            damage.append(str(error))
            continue
        return checkpoint, damage
    if damage:
        raise CheckpointError("\n".join(["no checkpoint is whole; remove them to train from the start:", *damage]))
    return None, []


# ---------------------------------------------------------------------------------------------------------- writing


class CheckpointedTrainer(Trainer):
    """A transformers Trainer whose checkpoints are atomic, and which goes on from one as if it had never stopped.

    Attributes:
        best_step: the step whose checkpoint is never removed, or None.
        ended_early: training is being stopped from outside: the checkpoint of now is one to go on from.
    """

    best_step: int | None = None
    best_metric: float | None = None
    ended_early = False
    reference_fingerprint: str | None = None
    _writing = False
    _data_fingerprint: str | None = None
    _complete = False
    _evaluated: tuple[int, float] | None = None
    _options: list[dict[str, Any]]

    def process_state(self) -> dict[str, Any]:
        """What this process holds beyond weights, optimizer and random numbers, in types that torch loads safely."""
        return {}

    def load_process_state(self, state: dict[str, Any]) -> None:
        """Take `process_state` back."""

    def note_evaluation(self, result: float) -> None:
        """Tell how good the policy of this step is, larger being better: the best checkpoint is kept."""
        self._evaluated = (self.state.global_step, result)

    # TRL's own writes a model card with each checkpoint, and nothing else that applies here.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, folder = self.state.global_step, Path(self.args.output_dir)
        partial = folder / PARTIAL / f"checkpoint-{step}"
        with self._explained(folder):
            if self.is_world_process_zero():
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            with self._elsewhere():
                Trainer._save_checkpoint(self, model, trial)
            torch.save(self.process_state(), partial / f"process_{self.args.process_index}.pt")
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                self._complete_and_publish(partial, folder)
            self.accelerator.wait_for_everyone()

    def save_before_end(self) -> None:
        """Save the last finished step, if it is not saved yet, before an error in the step at hand ends the run.

        Not of several processes: the others may be stuck, or gone.
        """
        step = self.state.global_step
        if self.args.world_size == 1 and step and not (Path(self.args.output_dir) / f"checkpoint-{step}").is_dir():
            self._save_checkpoint(self.model, None)

    def _complete_and_publish(self, partial: Path, folder: Path) -> None:
        step, final = self.state.global_step, folder / partial.name
        if best := self.state.best_global_step:  # transformers looked for it among what is being written
            best_path = folder / f"checkpoint-{best}"
            found = best == step or best_path.is_dir()
            self.state.best_model_checkpoint = str(best_path) if found else None
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
        (partial / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nothing reads
        if self._evaluated and self._evaluated[0] == step:
            result = self._evaluated[1]
            if self.best_metric is None or result > self.best_metric:
                self.best_step, self.best_metric = step, result
        (partial / IDENTITY).write_text(json.dumps(self._identity(), indent=2) + "\n", encoding="utf-8")
        write_manifest(partial, step)
        publish(partial, final)
        shutil.rmtree(folder / PARTIAL)
        keep = {step, self.best_step, self.state.best_global_step}
        rotate(folder, self.args.save_total_limit, {kept for kept in keep if kept is not None})

    def _identity(self) -> dict[str, Any]:
        ended = self.control.should_training_stop and not self.ended_early
        return {
            "step": self.state.global_step,
            "ended": ended and self.state.global_step < self.args.max_steps,
            "max_steps": self.args.max_steps,
            "processes": self.args.world_size,
            "reference": self.reference_fingerprint,
            "data": self.data_fingerprint,
            "best_step": self.best_step,
            "best_metric": self.best_metric,
        }

    @property
    def data_fingerprint(self) -> str | None:
        """SHA-256 of the training rows in their order; None for a stream."""
        if self._data_fingerprint is None and isinstance(self.train_dataset, Dataset):
            self._data_fingerprint = fingerprint_of_rows(self.train_dataset)
        return self._data_fingerprint

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / PARTIAL) if self._writing else folder

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """While this lasts, transformers sees only the folder of partial checkpoints: it cannot remove whole ones."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._elsewhere():
            return super()._finalize_training(*args, **kwargs)

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Tell a user what could not be written, and free the room that the attempt took."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, RuntimeError) and not any(text in str(error) for text in _TORCH_WRITE_ERRORS):
                raise
            file = getattr(error, "filename", None) or _last_written(folder / PARTIAL) or folder
            free = shutil.disk_usage(folder).free if folder.is_dir() else 0
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            older = checkpoints_in(folder)
            raise CheckpointError(
                f"{file}: cannot write the checkpoint of step {self.state.global_step}: "
                f"{getattr(error, 'strerror', None) or error} ({free / 1e6:,.0f} MB are free)\n"
                + (f"the last checkpoint is {older[-1].path}" if older else "there is no earlier checkpoint")
                + "; make room, and start the run again to go on"
            ) from error

    # ------------------------------------------------------------------------------------------------- going on

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a checkpoint is checked before it is used.

        Args:
            resume_from_checkpoint: a folder, or True for the newest whole checkpoint of the output folder.

        Raises:
            CheckpointError: it is damaged, or belongs to another reference, other data or another number of processes.
        """
        if resume_from_checkpoint is True:
            newest, _ = last_whole(Path(self.args.output_dir))
            if newest is None:
                raise CheckpointError(f"{self.args.output_dir}: holds no checkpoint to go on from")
            resume_from_checkpoint = str(newest.path)
        elif resume_from_checkpoint and (Path(resume_from_checkpoint) / MANIFEST).is_file():
            verify(Path(resume_from_checkpoint))
        if resume_from_checkpoint:
            self._take_identity(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _take_identity(self, path: Path) -> None:
        file = path / IDENTITY
        if not file.is_file():  # one that TRL or transformers wrote
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        mine = {
            "processes": self.args.world_size,
            "reference": self.reference_fingerprint,
            "data": self.data_fingerprint,
        }
        for key, what in (
            ("processes", "was written by {found} processes, and there are {mine} now"),
            ("reference", "its KL is measured to another reference than the policy that this run starts from"),
            ("data", "was made on other training rows than these: a data file has changed"),
        ):
            if found[key] is not None and found[key] != mine[key]:
                raise CheckpointError(f"{path}: " + what.format(found=found[key], mine=mine[key]))
        self.best_step, self.best_metric = found["best_step"], found["best_metric"]
        ended = found["ended"] and found["max_steps"] == self.args.max_steps
        self._complete = ended or found["step"] >= self.args.max_steps > 0

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # save_steps of now, not those of the checkpoint
        return result

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the options of now are kept for after a checkpoint is loaded."""
        scheduler = super().create_scheduler(*args, **kwargs)
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        self._options = [{key: group[key] for key in _OPTIMIZER_OPTIONS if key in group} for group in groups]
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._use_options_of_now()
        file = Path(checkpoint or "") / f"process_{self.args.process_index}.pt"
        if checkpoint is not None and file.is_file():
            self.load_process_state(torch.load(file, map_location=self.args.device, weights_only=True))

    def _use_options_of_now(self) -> None:
        """Checkpoints hold learning rates and schedule of the run as it was, which may have been given others since."""
        scheduler = self.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return
        assert self.optimizer is not None
        scheduler.base_lrs = [options["initial_lr"] for options in self._options]
        rates = [
            base * schedule(scheduler.last_epoch)
            for base, schedule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, options, rate in zip(self.optimizer.param_groups, self._options, rates, strict=True):
            group |= options | {"lr": rate}
        scheduler._last_lr = rates

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._complete:  # transformers would make one step more
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)


def write_manifest(folder: Path, step: int) -> None:
    """Flush every file of a checkpoint to the disk, and note its size and SHA-256."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        files[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        out.write(json.dumps({"step": step, "files": files}, indent=2) + "\n")
        out.flush()
        os.fsync(out.fileno())
    _fsync_folder(folder)


def publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name. One of the same step that is there already makes room."""
    if final.exists():
        shutil.rmtree(partial.parent / "replaced", ignore_errors=True)
        os.replace(final, partial.parent / "replaced")
    os.replace(partial, final)
    _fsync_folder(final.parent)


def rotate(folder: Path, limit: int | None, keep: set[int]) -> None:
    """Remove the oldest checkpoints beyond `limit` whole ones, but none of the steps in `keep`.

    Damaged ones do not count: they go when as many whole ones as `limit` are newer. What makes one whole here is the
    size of its files; the newest was read when its manifest was written, right before this.

    Args:
        limit: None or 0 is no limit.
    """
    if not limit:
        return
    present = checkpoints_in(folder)
    room = limit - sum(_sizes_are_right(kept.path) for kept in present if kept.step in keep)
    for checkpoint in reversed(present):
        if checkpoint.step in keep:
            continue
        if room > 0:
            room -= _sizes_are_right(checkpoint.path)
        else:
            shutil.rmtree(checkpoint.path, ignore_errors=True)


def _sizes_are_right(path: Path) -> bool:
    try:
        verify(path, contents=False)
    except CheckpointError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------ fingerprints


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Tells one policy from another: SHA-256 of names, shapes, and up to 4,096 evenly spread values of each weight."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if "lora_" in name:  # the reference is the model under the adapters
            continue
        flat = weight.detach().flatten()
        stride = max(1, len(flat) // _FINGERPRINT_VALUES)
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_of_rows(dataset: Dataset) -> str:
    """SHA-256 of all rows in their order."""
    digest = hashlib.sha256()
    for rows in dataset.iter(batch_size=10_000):
        digest.update(json.dumps(rows, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_written(folder: Path) -> Path | None:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
