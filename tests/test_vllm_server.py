"""`rltt serve` and the trainer's end of it, with vLLM's real server on a CPU.

Weights reach a server over NCCL, which needs GPUs. The server of these tests reads the checkpoint that the policy was
loaded from, so that the first rollout, and what stale weights look like, can be seen without that channel.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import yaml
from datasets import Dataset
from requests.adapters import HTTPAdapter
from transformers import TrainerCallback

from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer
from rltt.errors import ParityError, UserError
from rltt.train.checkpoint import checkpoints_in

if find_spec("vllm") is None:
    if os.environ.get("CI"):
        raise ImportError("vLLM is not installed, and these tests must run here; see the README's test command")
    pytest.skip("needs vLLM; see the README's test command", allow_module_level=True)

from rltt.rollout.vllm.server import ServerEngine
from rltt.rollout.vllm.watch import EngineError, EngineRestarted

pytestmark = pytest.mark.usefixtures("quick_collections")


def score(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


@pytest.fixture(scope="module")
def checkpoint(tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with depths that differ."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    policy = load_policy(str(tiny_ouro))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.save_pretrained(folder)
    load_tokenizer(str(tiny_ouro)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(served: tuple[str, int]) -> str:
    """The address of an `rltt serve`."""
    return served[0]


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address and the process group of an `rltt serve`, which is gone afterwards with all that it started."""
    folder = tmp_path_factory.mktemp("serve")
    recipe = {
        "name": "served",
        "policy": {"path": str(checkpoint), "loops": 3},
        "data": {"train": {"path": "arithmetic", "size": 16}, "max_prompt_length": 40},
        "rollout": {"engine": "vllm", "max_completion_length": 16},
        "rewards": ["math"],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-c",
                    "from rltt.cli.main import app; app()",
                    "serve",
                    str(folder / "recipe.yaml"),
                    "rollout.temperature=0.8",
                ),
                *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
                *("--model", str(checkpoint), "--load-format", "auto"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail((folder / "log").read_text()[-4000:])
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except requests.exceptions.RequestException:
            time.sleep(1)
    yield url, process.pid
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    deadline = time.monotonic() + 60  # the engine and Python's resource tracker end when they see that it has
    group = ["pgrep", "-lg", str(process.pid)]
    while left := subprocess.run(group, capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def make_trainer(checkpoint: Path, out: Path, server: str, **changes: Any) -> RLTTTrainer:
    policy = load_policy(str(checkpoint), loops=changes.pop("loops", None))
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server,
        "credit": "uniform",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 0.8,
        "parity_check_rollouts": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    config = RLTTConfig(str(out), **options | changes)
    data = Dataset.from_dict({"prompt": ["ada has 3 apples and gets 4 more .", "2 + 3 ="] * 8})
    return RLTTTrainer(policy, score, config, data, processing_class=load_tokenizer(str(checkpoint)))


def test_rollouts_of_the_server_are_the_policys_until_it_is_updated(
    checkpoint: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerEngine, "_open_weight_channel", lambda self: None)
    monkeypatch.setattr(ServerEngine, "sync_weights", lambda self: None)
    trainer = make_trainer(checkpoint, tmp_path, server)
    with pytest.raises(ParityError, match="culprit: stale weights\nstale weights: nothing else explains"):
        trainer.train()
    first, *more = [row for row in trainer.state.log_history if "loss" in row]
    assert not more
    assert first["parity/tokens"] > 50
    assert 0 < first["parity/max"] <= 1e-4


def test_without_a_gpu_the_weights_cannot_travel(checkpoint: Path, tmp_path: Path, server: str) -> None:
    with pytest.raises(UserError, match="the policy is on cpu, and its weights reach a server over NCCL"):
        make_trainer(checkpoint, tmp_path, server)


def test_a_server_of_another_recipe_is_refused(checkpoint: Path, tmp_path: Path, server: str) -> None:
    with pytest.raises(UserError, match="depth 3 in place of 2; start it with `rltt serve`, and the same recipe"):
        make_trainer(checkpoint, tmp_path, server, loops=2)
    with pytest.raises(UserError, match="dtype 'float32' in place of 'bfloat16'"):
        make_trainer(checkpoint, tmp_path, server, bf16=True)


def test_a_server_that_does_not_answer_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no vLLM server answered at http://127\.0\.0\.1:9 for 0 seconds; start one"):
        make_trainer(checkpoint, tmp_path, "http://127.0.0.1:9", vllm_server_timeout=0.0)


@pytest.mark.parametrize(
    ("fault", "first", "again"),
    [
        (signal.SIGSTOP, "EngineHangError: no answer within 3 s", "took a connection, and has not answered for 1 sec"),
        (signal.SIGKILL, "ConnectionError: ", "no vLLM server answered at http"),
    ],
    ids=["hangs", "is killed"],
)
def test_a_server_that_fails_ends_the_run_with_a_checkpoint(
    checkpoint: Path,
    tmp_path: Path,
    served: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    fault: signal.Signals,
    first: str,
    again: str,
) -> None:
    """Last in this file: the server is gone afterwards."""
    url, group = served
    monkeypatch.setattr(ServerEngine, "_open_weight_channel", lambda self: None)
    monkeypatch.setattr(ServerEngine, "sync_weights", lambda self: None)

    class Fault(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            os.killpg(group, fault)

    options = {"parity_check_rollouts": 10, "learning_rate": 1e-6, "vllm_timeout": 3.0, "vllm_server_timeout": 1.0}
    options |= {"save_strategy": "steps", "save_steps": 100}
    trainer = make_trainer(checkpoint, tmp_path / "out", url, **options)
    trainer.add_callback(Fault())
    trainer.vllm_generation.vllm_client.session.mount("http://", HTTPAdapter())  # TRL's tries again for a minute
    with (
        pytest.warns(EngineRestarted, match=f"failed: {first}.*it is started anew"),
        pytest.raises(EngineError) as caught,
    ):
        trainer.train()
    assert f"rollout engine failed: {first}" in str(caught.value)
    assert again in str(caught.value)
    assert [saved.step for saved in checkpoints_in(tmp_path / "out")] == [1]
    if fault == signal.SIGSTOP:
        os.killpg(group, signal.SIGCONT)
        trainer = make_trainer(checkpoint, tmp_path / "out", url, **options | {"vllm_timeout": 60.0})
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 2
