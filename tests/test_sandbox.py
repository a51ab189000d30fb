"""Programs that try to get out of the sandbox, or to use up the machine."""

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rltt.rewards.sandbox import Limits, run

if shutil.which("bwrap") is None and not os.environ.get("CI"):
    pytest.skip("needs bubblewrap", allow_module_level=True)  # in CI they fail instead

SHORT = Limits(wall=3, cpu=2, processes=16, memory=256 * 2**20)


@pytest.fixture(autouse=True)
def nothing_left():
    """No process of a run is left: each has /main.py on its command line."""
    yield
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if line.endswith(b"/main.py\0")]


def test_output_and_input():
    result = run("import sys; print(input()); print('e', file=sys.stderr); sys.exit(3)", stdin="hello\n")
    assert (result.status, result.stdout, result.stderr, result.returncode) == ("failed", "hello\n", "e\n", 3)
    assert run("print(1)").status == "ok"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: print('x' * 1000)", "output_limit"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(2**30)", "failed"),
        ("import os\nfor _ in range(200): os.fork() or __import__('time').sleep(60)", "failed"),
        ("import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)", None),
        ("import os\nfor _ in range(5):\n  if os.fork() == 0: os._exit(0)\nprint('zombies')", "ok"),
        ("open('big', 'wb').write(bytes(2**25))", "failed"),
        ("open('/outside', 'w')", "failed"),
        ("open('/usr/outside', 'w')", "failed"),
        ("open('/etc/shadow')", "failed"),
        ("open('small', 'w').write('x')", "ok"),
    ],
)
def test_what_programs_do(source, status):
    result = run(source, limits=SHORT)
    assert status is None or result.status == status, result
    assert result.seconds < 5


def test_cpu_seconds_are_limited():
    # The CPU seconds end first, also on a busy machine.
    assert run("while True: pass", limits=replace(SHORT, wall=60)).status == "failed"


def test_a_daemon_is_gone():
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(60)\n  os._exit(0)"
    assert run(code, limits=SHORT).seconds < 5


def test_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    (tmp_path / "secret").write_text("s")
    result = run(f"import os\nprint('SECRET' in os.environ, os.path.exists({str(tmp_path / 'secret')!r}))")
    assert result.stdout == "False False\n"


def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)")
    assert result.status == "failed"
    assert "OSError" in result.stderr or "Error" in result.stderr
