"""Rollouts from vLLM's own server, on other GPUs than the trainer's: `rltt serve`, and the trainer's end of it.

The server starts from the policy's configuration with random weights. TRL's client sends every weight over NCCL before
the first rollout and after each update, and drops what the server has cached. Which server that is does not matter to
the parity gate: it sees log-probs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from ...errors import UserError
from ...models.looped import LoopedForCausalLM
from .cpu import prepare_environment
from .engine import Engine

# What the trainer counts on, whatever model is served.
OPTIONS: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "weight_transfer_config": {"backend": "nccl"}}


class ServerEngine(Engine):
    """The trainer's end of a vLLM server.

    Args:
        loops: the policy's depth T.
        options: those of `Engine`, and TRL's `server_base_url`, `server_timeout` and `group_port`.

    Raises:
        UserError: nothing answers, the server was started for another depth or dtype, or no GPU can send weights.
    """

    def __init__(self, *, loops: int, **options: Any) -> None:
        self.loops = loops
        super().__init__(mode="server", generation_kwargs={}, **options)

    def _init_vllm(self) -> None:
        if not self.accelerator.is_main_process:  # as in TRL, the main process alone talks to the server
            return
        url = self.server_base_url
        try:
            with suppress(requests.exceptions.ConnectionError):  # not there yet: TRL's client waits for it
                requests.get(f"{url}/health", timeout=max(1.0, self.server_timeout))
        except requests.exceptions.Timeout as error:  # TRL's client would wait for ever
            raise UserError(
                f"rollout.vllm_server: the vLLM server at {url} took a connection, and has not answered for "
                f"{max(1.0, self.server_timeout):g} seconds: it hangs, and has to be started anew"
            ) from error
        try:
            self.vllm_client = VLLMClient(url, group_port=self.group_port, connection_timeout=self.server_timeout)
            self._served = self.vllm_client.get_server_info()
        except requests.exceptions.ConnectionError as error:
            raise UserError(
                f"rollout.vllm_server: no vLLM server answered at {url} for {self.server_timeout:g} seconds; start one "
                "with `rltt serve`, and the same recipe"
            ) from error
        except RuntimeError as error:  # a server, but without the endpoints that TRL needs
            raise UserError(f"rollout.vllm_server: {error}; start it with `rltt serve`, and the same recipe") from error
        self._check()
        self._open_weight_channel()

    def _open_weight_channel(self) -> None:
        device = self.accelerator.device
        if device.type != "cuda":
            raise UserError(
                f"rollout.vllm_server: the policy is on {device.type}, and its weights reach a server over NCCL, "
                "between GPUs; remove the key to run the engine inside the training process"
            )
        self.vllm_client.init_communicator(device=device)

    def _check(self) -> None:
        """That the server computes what the training path does, as far as its configuration tells."""
        model = self._served["model_config"]
        found = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "depth": (model["hf_overrides"] or {}).get("total_ut_steps"),
            "logprobs_mode": model["logprobs_mode"],
            "weight_transfer_config": self._served["weight_transfer_config"],
        }
        wanted = {"dtype": str(self.compute_dtype).removeprefix("torch."), "depth": self.loops, **OPTIONS}
        if wrong := [f"{key} {found[key]!r} in place of {wanted[key]!r}" for key in found if found[key] != wanted[key]]:
            raise UserError(
                f"rollout.vllm_server: {self.server_base_url} serves another model than this recipe's: "
                f"{', '.join(wrong)}; start it with `rltt serve`, and the same recipe"
            )

    @property
    def dtype(self) -> torch.dtype:
        """What the server computes in."""
        return getattr(torch, self._served["model_config"]["dtype"].removeprefix("torch."))

    def stale_weights(self) -> None:
        """A server's memory is out of reach."""
        return


def serve(policy: LoopedForCausalLM, dtype: torch.dtype, options: Sequence[str]) -> int:
    """Run vLLM's server for this policy until it ends, and return its exit status.

    Args:
        policy: whose configuration is served. Its weights are sent by the trainer.
        options: further options of `vllm serve`.
    """
    config = deepcopy(policy.config)
    config.architectures = [type(policy).__name__]
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="rltt-serve-") as folder:
        config.save_pretrained(folder)
        command: list[str] = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
            *("--load-format", "dummy", "--skip-tokenizer-init"),
            *("--dtype", str(dtype).removeprefix("torch.")),
            *("--hf-overrides", json.dumps({"total_ut_steps": policy.loop_spec.loops})),
            *("--logprobs-mode", OPTIONS["logprobs_mode"]),
            *("--weight-transfer-config", json.dumps(OPTIONS["weight_transfer_config"])),
            *options,
        ]
        process = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"})
        with _ended_with_us(process):
            return process.wait()


@contextmanager
def _ended_with_us(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """A SIGTERM to this process reaches the server too; it is gone when the context ends."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()
        process.wait()
