"""Model-written Python, run in a bubblewrap sandbox (Debian: `apt-get install bubblewrap`).

    what a program may try                     bubblewrap
    reading other files, the environment       neither is there: only /usr, the interpreter and its scratch folder
    writing outside its scratch folder         read-only; the scratch folder is deleted afterwards
    the network                                none, not even the machine's own 127.0.0.1
    seeing or killing other processes          sees its own alone; all of them end with the run
    time, memory, processes, output, files     limited (`Limits`); memory is limited for each process
    a bug in the kernel                        no protection

There is no weaker way to fall back to: without a working bubblewrap `run` raises `RewardError`.
"""

import functools
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rltt.errors import RewardError

Status = Literal["ok", "failed", "timeout", "output_limit"]


@dataclass(frozen=True)
class Limits:
    """What one run may use. Sizes are in bytes, times in seconds; memory and file size hold for each process, file."""

    wall: float = 10.0
    cpu: int = 10
    memory: int = 512 * 2**20
    processes: int = 32
    output: int = 64 * 2**10
    file_size: int = 16 * 2**20


@dataclass(frozen=True)
class Result:
    """How a run ended: `failed` is any exit status but 0, also by a signal. Output is cut at `Limits.output`."""

    status: Status
    stdout: str
    stderr: str
    seconds: float
    returncode: int


# Runs inside. Root is not bound by a limit on processes, so it becomes a user of this run's own first.
_ENTER = """
import os, resource, sys
cpu, memory, processes, size, uid = map(int, sys.argv[1:6])
for name, value in [("CPU", cpu), ("AS", memory), ("NPROC", processes), ("FSIZE", size), ("NOFILE", 256), ("CORE", 0)]:
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
if uid:
    os.chown("/scratch", uid, uid)
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.execv(sys.executable, [sys.executable, "-I", "/main.py"])
"""


def run(source: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
    """Run `source` as a Python program. Raises `RewardError` where bubblewrap is missing or does not work."""
    check_available()
    return _run(source, stdin, limits or Limits())


@functools.cache
def check_available() -> None:
    """Raises `RewardError` unless bubblewrap can really run a program here."""
    if shutil.which("bwrap") is None:
        raise RewardError("code rewards need bubblewrap, which is not installed; `apt-get install bubblewrap`.")
    found = _run("print('works')", "", Limits())
    if found.stdout != "works\n":
        raise RewardError(f"bubblewrap is installed but does not work here: {found.stderr.strip() or found}")


def _run(source: str, stdin: str, limits: Limits) -> Result:
    with tempfile.TemporaryDirectory(prefix="rltt-sandbox-") as folder:
        program, scratch, given = Path(folder, "main.py"), Path(folder, "scratch"), Path(folder, "stdin")
        program.write_text(source, encoding="utf-8", errors="surrogatepass")
        program.chmod(0o644)
        given.write_text(stdin)
        scratch.mkdir()
        started = time.monotonic()
        with given.open("rb") as handle:
            process = subprocess.Popen(
                _command(program, scratch, limits),
                stdin=handle,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            early, stdout, stderr = _read(process, limits, started + limits.wall)
        finally:
            # --die-with-parent: the first process of the sandbox dies with this one, and all others with that.
            process.kill()  # does nothing when it has ended
            process.wait()
            for pipe in (process.stdout, process.stderr):
                while os.read(pipe.fileno(), 65536):  # type: ignore[union-attr]  # ends once the last writer is dead
                    pass
                pipe.close()  # type: ignore[union-attr]  # both are pipes
    status: Status = early or ("ok" if process.returncode == 0 else "failed")
    return Result(status, _text(stdout), _text(stderr), time.monotonic() - started, process.returncode)


def _command(program: Path, scratch: Path, limits: Limits) -> list[str]:
    # A user id of its own for each run, so that runs at the same time do not use up each other's processes.
    uid = 100_000 + int.from_bytes(os.urandom(3), "big") if os.getuid() == 0 else 0
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if uid:
        command.remove("--unshare-all")
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):  # until _ENTER has become the other user
            command += ["--cap-add", capability]
    roots = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    for parent in reversed(Path(prefix).parents[:-1]):  # a home folder is closed to others; its stand-in is open
        command += ["--perms", "0755", "--dir", str(parent)]
    for path in dict.fromkeys([*roots, prefix]):
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--bind", str(scratch), "/scratch", "--chdir", "/scratch"]
    command += ["--ro-bind", str(program), "/main.py", "--remount-ro", "/"]
    numbers = [limits.cpu, limits.memory, limits.processes, limits.file_size, uid]
    return [*command, os.path.realpath(sys.executable), "-I", "-c", _ENTER, *map(str, numbers)]


def _read(process: subprocess.Popen, limits: Limits, deadline: float) -> tuple[Status | None, bytes, bytes]:
    """Both outputs, each up to the limit, until the program ends; and why it was ended early."""
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    early: Status | None = None
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            selector.register(pipe, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map() and early is None:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                early = "timeout"
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                kept[key.fileobj] += data  # type: ignore[index]
                if len(kept[key.fileobj]) > limits.output:  # type: ignore[index]
                    early = "output_limit"
            if time.monotonic() > deadline:
                early = early or "timeout"
    if early is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            early = "timeout"
    stdout, stderr = (bytes(data[: limits.output]) for data in kept.values())
    return early, stdout, stderr


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
