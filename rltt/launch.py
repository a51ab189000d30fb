"""`rltt train --num-processes N`: the same command in N processes, started by torchrun's own launcher.

Only the main process speaks. What the others print goes to files, and when a process fails the error that came first is
shown once: the others fail right after it, on a connection that is gone, and would bury it.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from .errors import UserError
from .files import write_text
from .processes import part

ERRORS = "RLTT_ERRORS"
"""Environment variable: the folder in which a launched process leaves the error that ended it."""


@dataclass(frozen=True)
class Layout:
    """Where the processes of a launch run.

    Attributes:
        processes: on each machine; one a GPU.
        nodes: machines.
        node_rank: index of this machine.
        main_address: name of machine 0 on the network; None with one machine.
        main_port: a free port on machine 0; None takes any free one, which needs a single machine.
    """

    processes: int
    nodes: int = 1
    node_rank: int = 0
    main_address: str | None = None
    main_port: int | None = None

    def check(self) -> None:
        """Raise UserError for what cannot be launched."""
        if not 0 <= self.node_rank < self.nodes:
            raise UserError(
                f"--node-rank: found {self.node_rank}; with --nodes {self.nodes} it is 0 to {self.nodes - 1}"
            )
        if self.nodes > 1 and self.main_address is None:
            raise UserError("--main-address: missing; with several nodes it is the name of node 0, the same on all")
        if launched():
            raise UserError(
                "--num-processes: this process was launched as one of several already (WORLD_SIZE is "
                f"{os.environ['WORLD_SIZE']}); leave it out under torchrun or accelerate launch"
            )

    def options(self) -> list[str]:
        """Options of torchrun."""
        each = ["--nproc-per-node", str(self.processes)]
        if self.nodes == 1 and self.main_port is None:
            # By default the processes look for each other under the machine's name, which some machines cannot resolve.
            return ["--standalone", "--local-addr", "127.0.0.1", *each]
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank), *each),
            *("--master-addr", self.main_address or "127.0.0.1", "--master-port", str(self.main_port or 29500)),
        ]

    def torchrun(self, arguments: Sequence[str]) -> str:
        """The line that starts `rltt` with these arguments by hand or from a scheduler."""
        return shlex.join(["torchrun", *self.options(), "-m", "rltt", *arguments])

    def accelerate(self, arguments: Sequence[str]) -> str:
        """The same with accelerate, which counts the processes of all machines.

        On a machine without GPUs it starts one process, whatever it is asked for.
        """
        options = ["--num_processes", str(self.processes * self.nodes)]
        if self.processes * self.nodes > 1:
            options.append("--multi_gpu")
        if self.nodes > 1:
            options += ["--num_machines", str(self.nodes), "--machine_rank", str(self.node_rank)]
            options += ["--main_process_ip", str(self.main_address)]
        if self.nodes > 1 or self.main_port is not None:
            options += ["--main_process_port", str(self.main_port or 29500)]
        return shlex.join(["accelerate", "launch", *options, "--module", "rltt", *arguments])


SHUTDOWN_SECONDS = 300
"""How long processes that were asked to end may take for the step at hand and its checkpoint."""


def launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(layout: Layout, arguments: Sequence[str]) -> tuple[int, str]:
    """Run `rltt` with these arguments in every process of the layout.

    Args:
        arguments: of the `rltt` command, without those of the launch.

    Returns:
        The exit status, and the error that ended the launch, which has been printed.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logs = Path(tempfile.mkdtemp(prefix="rltt-launch-"))
    quiet = ",".join(f"{rank}:3" for rank in range(1, layout.processes)) or "0"
    if layout.node_rank > 0:
        quiet = "3"
    options = torchrun.parse_args(
        [*layout.options(), "--redirects", quiet, "--log-dir", str(logs), "-m", "rltt", *arguments]
    )
    if options.standalone:  # what torchrun's own main makes of it
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", uuid.uuid4().hex
    config, command, rest = torchrun.config_from_args(options)
    config.shutdown_timeout = SHUTDOWN_SECONDS
    os.environ[ERRORS] = str(logs)
    # Unset, torchrun sets it to 1, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // layout.processes)))
    _silence_torchrun()
    try:
        elastic_launch(config, command)(*rest)
    except SignalException as error:  # the processes have got it too, and time to save
        name = signal.Signals(error.sigval).name
        return 128 + error.sigval, f"ended by {name}; what the other processes printed is in {logs}"
    except ChildFailedError as error:
        status, text = first_error(error, logs)
        print(f"{text}\nwhat the other processes printed is in {logs}", file=sys.stderr)
        return status, text
    shutil.rmtree(logs)
    return 0, ""


def _silence_torchrun() -> None:
    """Its reports of failed children are replaced by `first_error`."""
    import logging

    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def first_error(error: Any, logs: Path) -> tuple[int, str]:
    """Exit status and message of what ended a launch.

    Args:
        error: torchrun's ChildFailedError.
        logs: where the processes have left their errors.
    """
    # A process that was killed leaves no file; those that then lost their connection to it do. The launcher ends the
    # rest with SIGTERM.
    killed = [
        (rank, failure)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and failure.signal_name() != "SIGTERM"
    ]
    if killed:
        rank, failure = killed[0]
        hint = "; often the machine's memory was full" if failure.signal_name() == "SIGKILL" else ""
        text = f"error: process {rank} was ended by {failure.signal_name()}{hint}"
        return 128 - failure.exitcode, "\n".join([text, *_last_words(logs, rank)])
    left = sorted((json.loads(file.read_text(encoding="utf-8")) for file in logs.glob("error-*.json")), key=_when)
    if not left:
        rank, failure = error.get_first_failure()
        return max(failure.exitcode, 1), f"error: process {rank} ended with status {failure.exitcode}"
    where = "" if left[0]["rank"] == 0 else f"process {left[0]['rank']}: "
    return left[0]["status"], where + left[0]["text"]


def _last_words(logs: Path, rank: int, lines: int = 10) -> list[str]:
    """The last lines of what a process had printed as errors; those of the main process were on the terminal."""
    printed = [log.read_text(errors="replace") for log in logs.glob(f"*/*/{rank}/stderr.log")]
    return [f"       {line}" for line in "".join(printed).splitlines()[-lines:]]


def _when(report: dict[str, Any]) -> float:
    return report["time"]


def leave_error(text: str, status: int) -> None:
    """In a launched process: leave the error that ends it to the launcher, which shows the first of all, and end.

    Elsewhere: return.
    """
    folder = os.environ.get(ERRORS)
    if folder is None or not launched():
        return
    rank = int(os.environ["RANK"])
    report = {"rank": rank, "time": time.time(), "status": status, "text": text}
    write_text(Path(folder, f"error-{rank}.json"), json.dumps(report))  # whole, should the launcher end this process
    sys.stdout.flush()
    os._exit(status)  # not through torch's exit handlers, which wait for processes that are gone


@contextmanager
def errors_left() -> Iterator[None]:
    """In a launched process: leave the traceback of what ends it unexpectedly to the launcher, or part as one."""
    try:
        yield
    except (UserError, typer.Exit):  # the command line's
        raise
    except Exception:
        leave_error(traceback.format_exc().rstrip(), 1)
        raise
    part()
