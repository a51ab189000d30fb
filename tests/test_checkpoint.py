"""Checkpoints: whole or not there, and a trainer that goes on from one ends where it would have ended without."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback

from rltt.data.arithmetic import arithmetic_problems
from rltt.errors import CheckpointError
from rltt.models.load import load_policy
from rltt.train.checkpoint import (
    MANIFEST,
    PARTIAL,
    checkpoints_in,
    fingerprint,
    fingerprint_of_rows,
    last_whole,
    rotate,
    verify,
    write_manifest,
)
from rltt.train.config import RLTTConfig
from rltt.train.trainer import RLTTTrainer

pytestmark = pytest.mark.usefixtures("quick_collections")


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


@pytest.fixture
def make(tiny_ouro: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., RLTTTrainer]:
    """Trainers of 8 completions an update in groups of 4, on 8 prompts: four updates are a pass over the data."""
    problems = arithmetic_problems(1, 8, "train")
    data = Dataset.from_dict({"prompt": [p.prompt for p in problems], "gold": [p.gold for p in problems]})

    def make(seen: list[Any] | None = None, data: Dataset = data, **options: Any) -> RLTTTrainer:
        args = RLTTConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_generations": 4,
                "max_completion_length": 6,
                "max_steps": 6,
                "learning_rate": 1e-2,
                "save_strategy": "steps",
                "save_steps": 1,
                "gradient_checkpointing": False,
                "report_to": [],
                "use_cpu": True,
                "disable_tqdm": True,
                **options,
            }
        )
        return RLTTTrainer(
            load_policy(str(tiny_ouro)),
            letters,
            args,
            data,
            processing_class=tokenizer,
            rollout_writer=None if seen is None else seen.append,
        )

    return make


def weights(trainer: RLTTTrainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}


def log_of(trainer: RLTTTrainer) -> list[dict[str, Any]]:
    """Without what differs by nature."""
    return [
        {key: row[key] for key in row if not key.startswith("seconds/") and key != "step_time"}
        for row in trainer.state.log_history
        if "loss" in row
    ]


WAYS = {
    "a new rollout": ({}, 3),
    "another pass over the data": ({}, 5),
    "at the end of a pass": ({}, 4),
    "inside a rollout of several updates": ({"steps_per_generation": 4}, 3),
    "inside a second pass over a rollout": ({"num_iterations": 2, "lr_scheduler_type": "cosine"}, 1),
    "learned credit": ({"credit": "learned", "loss_type": "reinforce", "credit_learning_rate": 0.1}, 3),
    "dropout": ({"temperature": 0.7, "weight_decay": 0.1, "warmup_steps": 4, "lr_scheduler_type": "linear"}, 2),
}


@pytest.mark.parametrize(("options", "step"), WAYS.values(), ids=WAYS)
def test_going_on_ends_where_the_whole_run_ends(
    make: Callable[..., RLTTTrainer], tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    whole_rollouts: list[Any] = []
    whole = make(whole_rollouts, **options)
    whole.train()
    torch.manual_seed(1234)  # whatever came before must not matter
    rollouts: list[Any] = []
    resumed = make(rollouts, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    assert log_of(resumed) == log_of(whole)
    later = [rows for rows in whole_rollouts if rows[0]["step"] > step]
    assert rollouts == later
    assert resumed.parity_gate.rollouts == whole.parity_gate.rollouts


def test_a_step_is_the_same_without_what_a_process_holds_only_if_nothing_is_held(
    make: Callable[..., RLTTTrainer], tmp_path: Path
) -> None:
    """Guards the tests above: they would notice a lost rollout, and a lost order of the data."""
    make(steps_per_generation=4).train()
    (tmp_path / "out" / "checkpoint-3" / "process_0.pt").unlink()
    (tmp_path / "out" / "checkpoint-3" / MANIFEST).unlink()
    rollouts: list[Any] = []
    make(rollouts, steps_per_generation=4).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert rollouts[0][0]["step"] == 4  # the rollout of steps 3 and 4 was made again


def test_nothing_is_trained_beyond_the_last_step(make: Callable[..., RLTTTrainer]) -> None:
    whole = make(max_steps=2)
    whole.train()
    again = make(max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(whole).items())
    longer = make(max_steps=3, save_steps=5)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3


@pytest.mark.parametrize(
    "changed", [{"max_steps": 8}, {"learning_rate": 3e-3}, {"lr_scheduler_type": "cosine"}, {"weight_decay": 0.3}]
)
def test_a_run_goes_on_with_the_options_of_now(make: Callable[..., RLTTTrainer], changed: dict[str, Any]) -> None:
    make(max_steps=2).train()
    resumed = make(**{"max_steps": 4, **changed})
    resumed.train(resume_from_checkpoint=True)
    fresh = make(**{"max_steps": 4, "save_strategy": "no", **changed})
    fresh.train()
    rates = [
        [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] for trainer in (resumed, fresh)
    ]
    assert rates[0][2:] == rates[1][2:]
    decays = [[group["weight_decay"] for group in trainer.optimizer.param_groups] for trainer in (resumed, fresh)]
    assert decays[0] == decays[1]


# ------------------------------------------------------------------------------------------------------ what is whole


@pytest.fixture
def saved(make: Callable[..., RLTTTrainer], tmp_path: Path) -> Path:
    """A folder with the checkpoints of two steps."""
    make(max_steps=2).train()
    return tmp_path / "out"


def test_a_checkpoint_holds_what_it_should(saved: Path) -> None:
    assert [checkpoint.step for checkpoint in checkpoints_in(saved)] == [1, 2]
    assert {path.name for path in saved.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    files = {path.name for path in (saved / "checkpoint-2").iterdir()}
    assert files >= {
        *("model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        *("trainer_state.json", "process_0.pt", "identity.json", "manifest.json"),
    }
    assert "training_args.bin" not in files
    noted = json.loads((saved / "checkpoint-2" / MANIFEST).read_text())["files"]
    assert noted.keys() == files - {MANIFEST}
    verify(saved / "checkpoint-2")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "truncated": (truncate, "model.safetensors", r"model\.safetensors: has [\d,]+ bytes, but [\d,]+ were written"),
    "a flipped bit": (flip, "optimizer.pt", r"optimizer\.pt: its content is not what was written"),
    "a missing file": (Path.unlink, "rng_state.pth", r"rng_state\.pth: is missing"),
    "no manifest": (Path.unlink, MANIFEST, "checkpoint-2: has no manifest.json"),
    "a truncated manifest": (truncate, MANIFEST, r"manifest\.json: cannot be read"),
}


@pytest.mark.parametrize(("damage", "name", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    saved: Path, damage: Callable[[Path], Any], name: str, message: str
) -> None:
    damage(saved / "checkpoint-2" / name)
    with pytest.raises(CheckpointError, match=message):
        verify(saved / "checkpoint-2")
    found, wrong = last_whole(saved)
    assert found is not None
    assert found.step == 1
    assert len(wrong) == 1
    damage(saved / "checkpoint-1" / name)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is whole; remove them(?s:.*)checkpoint-2.*\n.*checkpoint-1"
    ):
        last_whole(saved)


def test_a_damaged_checkpoint_is_never_loaded(saved: Path, make: Callable[..., RLTTTrainer]) -> None:
    flip(saved / "checkpoint-2" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its content"):
        make(max_steps=3).train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    trainer = make(max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3]


def test_a_half_written_checkpoint_is_not_one(saved: Path) -> None:
    os.makedirs(saved / PARTIAL)
    os.rename(saved / "checkpoint-2", saved / PARTIAL / "checkpoint-2")
    assert [checkpoint.step for checkpoint in checkpoints_in(saved)] == [1]


def test_a_checkpoint_of_another_run_is_refused(saved: Path, make: Callable[..., RLTTTrainer], tiny_ouro: Path) -> None:
    other = make(max_steps=3, data=make().train_dataset.select(range(7, -1, -1)))
    with pytest.raises(CheckpointError, match="checkpoint-2: was made on other training rows than these"):
        other.train(resume_from_checkpoint=True)
    trainer = make(max_steps=3)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] += 1
    trainer.reference_fingerprint = fingerprint(trainer.model)
    with pytest.raises(CheckpointError, match="its KL is measured to another reference"):
        trainer.train(resume_from_checkpoint=True)


def test_fingerprints_tell_weights_and_rows_apart() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    assert fingerprint(model) != fingerprint(other)
    other.load_state_dict(model.state_dict())
    assert fingerprint(model) == fingerprint(other)
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    assert fingerprint_of_rows(rows) == fingerprint_of_rows(Dataset.from_dict({"prompt": ["a", "b"]}))
    assert fingerprint_of_rows(rows) != fingerprint_of_rows(rows.select([1, 0]))


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [(None, {5}, [1, 2, 3, 4, 5]), (2, {5}, [4, 5]), (2, {1, 5}, [1, 5]), (1, {2, 5}, [2, 5]), (3, {2, 5}, [2, 4, 5])],
)
def test_the_newest_and_the_best_stay(tmp_path: Path, limit: int | None, keep: set[int], left: list[int]) -> None:
    made(tmp_path, 5)
    rotate(tmp_path, limit, keep)
    assert [checkpoint.step for checkpoint in checkpoints_in(tmp_path)] == left


def made(folder: Path, count: int) -> None:
    for step in range(1, count + 1):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(bytes(100))
        write_manifest(checkpoint, step)


@pytest.mark.parametrize(
    ("limit", "keep", "damaged", "left"),
    [
        (1, {5}, {5}, [4, 5]),  # the newest, right after it was written
        (2, {5}, {4}, [3, 4, 5]),
        (2, {5}, {3, 4}, [2, 3, 4, 5]),
        (2, {2, 5}, {2, 5}, [2, 3, 4, 5]),  # the best is damaged, and left to be looked at
        (2, {5}, {1, 2, 3, 4, 5}, [1, 2, 3, 4, 5]),
        (2, {5}, {1, 2}, [4, 5]),
    ],
)
def test_damaged_checkpoints_do_not_push_out_whole_ones(
    tmp_path: Path, limit: int, keep: set[int], damaged: set[int], left: list[int]
) -> None:
    made(tmp_path, 5)
    for step in damaged:
        truncate(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    rotate(tmp_path, limit, keep)
    assert [checkpoint.step for checkpoint in checkpoints_in(tmp_path)] == left


def test_a_run_keeps_the_last_whole_checkpoint_beside_a_damaged_one(
    make: Callable[..., RLTTTrainer], tmp_path: Path
) -> None:
    """Every checkpoint but the first is damaged while the run that wrote it goes on."""
    out = tmp_path / "out"

    class Damage(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step > 1:
                truncate(out / f"checkpoint-{state.global_step}" / "optimizer.pt")

    trainer = make(max_steps=4, save_total_limit=2)
    trainer.add_callback(Damage())
    trainer.train()
    found, wrong = last_whole(out)
    assert found is not None
    assert found.step == 1
    assert len(wrong) == 3


# ------------------------------------------------------------------------------------------------- what can go wrong


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, whose size a test sets."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97], ids=["weights", "optimizer", "at the end"])
def test_a_full_disk_is_told_and_the_checkpoint_before_survives(
    disk: Path, make: Callable[..., RLTTTrainer], share: float
) -> None:
    out = disk / "out"
    make(output_dir=str(out), max_steps=1, lr_scheduler_type="constant").train()
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    # Room for `share` of the second checkpoint.
    assert mount("-o", f"remount,size={int(size * (1 + share)) + 65536}", str(disk))
    with pytest.raises(CheckpointError) as caught:
        make(output_dir=str(out), max_steps=2, lr_scheduler_type="constant").train(resume_from_checkpoint=True)
    message = str(caught.value)
    assert message.startswith(f"{out / PARTIAL / 'checkpoint-2'}/")
    assert "cannot write the checkpoint of step 2" in message
    assert f"the last checkpoint is {out / 'checkpoint-1'}; make room, and start the run again" in message
    assert {path.name for path in out.iterdir()} == {"checkpoint-1"}

    assert mount("-o", "remount,size=20m", str(disk))
    resumed = make(output_dir=str(out), max_steps=2, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    whole = make(output_dir=str(disk / "whole"), max_steps=2, lr_scheduler_type="constant")
    whole.train()
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(whole).items())


def test_a_folder_that_may_not_be_written_is_named(disk: Path, make: Callable[..., RLTTTrainer]) -> None:
    """A read-only disk, which stops root too."""
    out = disk / "out"
    make(output_dir=str(out), max_steps=1, lr_scheduler_type="constant").train()
    trainer = make(output_dir=str(out), max_steps=2)
    assert mount("-o", "remount,ro", str(disk))
    with pytest.raises(CheckpointError, match=r"(?s)out/\.partial.*: cannot write the checkpoint of step 2: Read-only"):
        trainer.train(resume_from_checkpoint=True)
    assert {path.name for path in out.iterdir()} == {"checkpoint-1"}
    verify(out / "checkpoint-1")


def test_a_folder_of_another_user_is_named(make: Callable[..., RLTTTrainer], tmp_path: Path) -> None:
    make(max_steps=1).train()
    out = tmp_path / "out"
    if os.geteuid() == 0:  # may write anywhere: become nobody for the write
        for parent in (tmp_path, *tmp_path.parents):
            if parent == Path("/tmp") or parent == parent.parent:
                break
            parent.chmod(0o755)
        for file in (out / "checkpoint-1").iterdir():
            file.chmod(0o644)
        (out / "checkpoint-1" / "optimizer.pt").chmod(0o600)
    trainer = make(max_steps=2)
    out.chmod(0o555)
    nobody = 65534
    if os.geteuid() == 0:
        os.seteuid(nobody)
    try:
        if os.geteuid() == nobody:
            with pytest.raises(CheckpointError, match=r"^[^\n]*optimizer\.pt: cannot be read: Permission denied$"):
                last_whole(out)
            os.seteuid(0)
            (out / "checkpoint-1" / "optimizer.pt").chmod(0o644)
            os.seteuid(nobody)
        with pytest.raises(CheckpointError, match=r"(?s)\.partial.*: cannot write .* of step 2: Permission denied"):
            trainer.train(resume_from_checkpoint=True)
    finally:
        os.seteuid(os.getuid())
        out.chmod(0o755)
    assert [checkpoint.step for checkpoint in checkpoints_in(out)] == [1]
