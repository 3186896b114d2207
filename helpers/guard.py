"""The small process between a notebook and its server: when the notebook goes, however it goes, the server goes too.

    python guard.py -- command ...

The guard starts the command, prints its process id on standard output and waits. Whoever started the guard holds its
standard input open and never writes to it; a kill -9 closes it as surely as a clean exit does. On end of input, on a
signal, or when its parent changes, the guard sends SIGTERM to the command, waits, and sends SIGKILL to what is left.
When the command ends by itself, what it left behind is ended the same way. The guard exits with the command's code.

It is a subreaper: orphans of the command become its children, so the tree of processes below it is complete even when
they start sessions of their own or change their names. Python's resource trackers are spared until the rest is gone:
they remove the shared memory that killed processes leave behind. vLLM's sockets, which it leaves even after a clean
exit, lie in a folder that goes with the guard. Standard library only; Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRACE_SECONDS = 2.0
POLL_SECONDS = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def descendants(root: int) -> set[int]:
    """Process ids of everything below `root`. Processes that come or go meanwhile may be missed: look again."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = set(), [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found


def is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class Guard:
    def __init__(self, command: list[str], folder: str) -> None:
        self.ending = False
        self.code: int | None = None
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_CHILD_SUBREAPER")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        self.command = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ | {"VLLM_RPC_BASE_PATH": folder},
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

    def _end(self, *_: object) -> None:
        self.ending = True

    def reap(self) -> bool:
        """Collect ended children, adopted ones included; False when none is left, and so, for a subreaper, nothing."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if found[0] == self.command.pid:
                    self.code = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return False
        return True

    def watch(self) -> None:
        """Return when the command has ended or the notebook is gone."""
        parent = os.getppid()
        while not self.ending and self.code is None and os.getppid() == parent:
            if select.select([0], [], [], POLL_SECONDS)[0] and not os.read(0, 4096):
                return
            self.reap()

    def finish(self) -> None:
        """Leave no process below the guard."""
        if self.code is None:
            os.kill(self.command.pid, signal.SIGTERM)
        command_deadline = tracker_deadline = time.monotonic() + GRACE_SECONDS
        while self.reap():
            now = time.monotonic()
            if self.code is not None or now > command_deadline:
                left = descendants(os.getpid())
                others = {pid for pid in left if not is_resource_tracker(pid)}
                if others:
                    tracker_deadline = now + GRACE_SECONDS
                for pid in others or (left if now > tracker_deadline else ()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS / 2)


def main(arguments: list[str]) -> int:
    if arguments[:1] != ["--"] or len(arguments) < 2:
        print("usage: guard.py -- command [argument ...]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as folder:
        guard = Guard(arguments[1:], folder)
        try:
            os.write(1, f"{guard.command.pid}\n".encode())
            guard.watch()
        finally:
            guard.finish()
    return guard.code if guard.code >= 0 else 128 - guard.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
