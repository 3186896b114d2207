"""The guard leaves nothing behind, tried on processes that are as hard to end as vLLM's (tests/data/stub_vllm)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_tools import STUB, Remains, free_port, listening, processes_of, wait_until

from helpers import guard

ROOT = Path(__file__).parents[1]
NOTEBOOK = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from helpers.serving import serve
with serve(sys.argv[2], port=int(sys.argv[3]), log_path=sys.argv[4], progress=False):
    print("ready", flush=True)
    time.sleep(600)
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Notebook:
    """A process that serves the stand-in for vLLM, alone in its session like a Jupyter kernel."""

    def __init__(self, folder: Path, how: str) -> None:
        self.log, self.port = folder / "server.log", free_port()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", NOTEBOOK, str(ROOT), str(folder), str(self.port), str(self.log)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(STUB), "STUB": how},
        )
        up = lambda: self.log.exists() and "engine is up" in self.log.read_text()  # noqa: E731
        wait_until(up, 30, "the engine is up")
        if how == "serve":
            assert self.process.stdout.readline() == "ready\n"
        (self.guard,) = children(self.process.pid)
        (self.server,) = children(self.guard)
        self.remains = Remains(self.log, self.port)
        assert len(self.remains.pids) == 6, "guard, server, resource tracker, engine, worker and its fork"
        assert self.remains.segments

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        wait_until(lambda: not processes_of(self.log), 30, "cleared after the test")


@pytest.fixture(params=["serve", "start"])
def notebook(request, tmp_path):
    """Once with a server that is ready and leaves its engine behind, once with a starting one, deaf to SIGTERM."""
    notebook = Notebook(tmp_path, request.param)
    assert listening(notebook.port) == (request.param == "serve")
    yield notebook
    notebook.close()


def test_kill_9_of_the_notebook(notebook):
    os.killpg(notebook.process.pid, signal.SIGKILL)
    notebook.remains.assert_gone()


def test_interrupt_of_the_notebook(notebook):
    os.killpg(notebook.process.pid, signal.SIGINT)
    _, errors = notebook.process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    notebook.remains.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_signal_to_the_guard(notebook, number):
    os.kill(notebook.guard, number)
    notebook.remains.assert_gone()


def test_kill_9_of_the_server(notebook):
    os.kill(notebook.server, signal.SIGKILL)
    notebook.remains.assert_gone()


def test_a_fork_that_holds_the_pipe_open_does_not_keep_the_server(tmp_path):
    (tmp_path / "server.log").touch()
    code = f"""
import os, subprocess, sys, time
log = open({str(tmp_path / "server.log")!r}, "wb")
subprocess.Popen([sys.executable, {guard.__file__!r}, "--", "sleep", "600"], stdin=subprocess.PIPE, stderr=log)
if os.fork() == 0:
    time.sleep(60)
time.sleep(60)
"""
    notebook = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: len(processes_of(tmp_path / "server.log")) == 2, 30, "guard and command")
        remains = Remains(tmp_path / "server.log", port=0)
        notebook.kill()
        notebook.wait()
        remains.assert_gone()
    finally:
        os.killpg(notebook.pid, signal.SIGKILL)


def test_a_notebook_that_is_gone_before_the_server_is_there(tmp_path):
    read, write = os.pipe()
    os.close(read)  # nobody is left to be told the process id
    with open(tmp_path / "server.log", "wb") as log:
        command = [sys.executable, guard.__file__, "--", "sh", "-c", "sleep 600 & wait"]
        done = subprocess.run(command, stdin=subprocess.PIPE, stdout=write, stderr=log, timeout=30)
    os.close(write)
    assert done.returncode != 0
    assert processes_of(tmp_path / "server.log") == set()


def run_guard(*command: str) -> subprocess.CompletedProcess:
    read, write = os.pipe()  # kept open: its end would end the command
    try:
        arguments = [sys.executable, "-m", "helpers.guard", *command]
        return subprocess.run(arguments, stdin=read, capture_output=True, text=True, cwd=ROOT)
    finally:
        os.close(read)
        os.close(write)


def test_the_guard_ends_with_the_exit_code_of_its_command():
    assert run_guard("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    assert run_guard("--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert run_guard("--", "true").returncode == 0


def test_standard_output_of_the_command_is_kept_apart_from_its_process_id():
    done = run_guard("--", "sh", "-c", "echo $$; echo out")
    assert done.stdout.split() == done.stderr.split()[:1]
    assert done.stderr.split()[1] == "out"


def test_the_folder_of_the_sockets_goes_with_the_guard():
    done = run_guard("--", "sh", "-c", 'touch "$VLLM_RPC_BASE_PATH/socket" && echo "$VLLM_RPC_BASE_PATH"')
    assert done.returncode == 0
    assert not Path(done.stderr.strip()).exists()


def test_usage():
    done = run_guard("sleep", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage" in done.stderr


def test_descendants_are_all_below_and_nobody_else():
    code = "import subprocess; subprocess.run(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=True)"
    first = subprocess.Popen([sys.executable, "-c", code])
    try:
        below = wait_until(lambda: (b := guard.descendants(first.pid)) and len(b) == 3 and b, 30, "sh and two sleeps")
        assert below <= guard.descendants(os.getpid())
        assert first.pid not in below and os.getpid() not in below
    finally:
        for pid in [first.pid, *guard.descendants(first.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        first.wait()
