"""Make `.venv` from the lock: `python3 -m helpers.course.environment`. Standard library only; parses on Python 3.8.

The lock is complete, so packages are installed without resolving (`--no-deps`) and with their hashes. PyTorch has locks
of its own because its CPU build and PyPI's build are different files. A stamp is written last: an interrupted or failed
install leaves none, and the next call starts again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from helpers.doctor import collect, preflight

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "complete"
LOG = VENV / "install.log"
LOCK = ROOT / "requirements.lock"
TORCH_CPU = ROOT / "requirements-torch-cpu.lock"
TORCH_PYPI = ROOT / "requirements-torch-pypi.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TOOLS = ("setuptools", "wheel")


class InstallError(Exception):
    """An install step failed; the message is one line that says which, why and where the log is."""


def key() -> str:
    """What the environment was made from: locks, Python version, and the folder (its scripts hold absolute paths)."""
    digest = hashlib.sha256(f"{sys.version}\n{ROOT}\n".encode())
    for lock in (LOCK, TORCH_CPU, TORCH_PYPI):
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    return STAMP.exists() and STAMP.read_text() == key()


def entries(lock_text: str) -> dict[str, str]:
    """Package name -> its lines (requirement and hashes) of a lock; a package with two markers keeps both."""
    found: dict[str, str] = {}
    name = ""
    for line in lock_text.splitlines(keepends=True):
        if line[0].isalnum():
            name = line.partition("==")[0]
        if name:
            found[name] = found.get(name, "") + line
    return found


def pip(title: str, *arguments: str) -> None:
    """Run pip in the environment and say in one line how far it is; its own output goes to the log."""
    command = [
        str(VENV / "bin" / "python"),
        "-um",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        *arguments,
    ]
    started, count, last_error = time.monotonic(), 0, "pip ended with an error"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=str(ROOT))
    with LOG.open("a") as log:
        print(*command, file=log)
        for line in process.stdout:
            log.write(line)
            count += line.startswith("Collecting ")
            if line.startswith("ERROR: "):
                last_error = line[len("ERROR: ") :].strip()
            if sys.stdout.isatty():
                step = "installing" if line.startswith("Installing ") else f"{count} collected"
                print(f"\r{title}: {step}".ljust(72), end="\r", flush=True)
    if process.wait():
        raise InstallError(f"{title}: {last_error} (pip's output is in {LOG})")
    print(f"{title}: {time.monotonic() - started:.0f} s".ljust(72), flush=True)


def locked(lock: Path, *options: str) -> list[str]:
    return ["--require-hashes", "--no-build-isolation", *options, "-r", str(lock)]


def install_torch(choice: str) -> None:
    """The CPU build from what pip has at hand, else from PyTorch's own index; PyPI's build only with consent."""
    if choice == "pypi":
        pip("PyTorch, PyPI's build", *locked(TORCH_PYPI))
        return
    try:
        pip("PyTorch, CPU build", *locked(TORCH_CPU))
        return
    except InstallError:
        print("pip has no CPU build of PyTorch at hand: taking it from PyTorch's own index")
    try:
        pip("PyTorch, CPU build", *locked(TORCH_CPU, "--retries", "1", "--index-url", CPU_INDEX))
    except InstallError:
        question = "PyTorch's CPU build cannot be reached. PyPI's build brings 3 GB of CUDA libraries."
        if not (sys.stdin.isatty() and input(f"{question} Take it? [y/N] ").strip().lower() in ("y", "yes")):
            raise InstallError(f"{question} To take it: make env TORCH=pypi") from None
        install_torch("pypi")


def make_empty() -> None:
    shutil.rmtree(str(VENV), ignore_errors=True)
    interpreter = os.path.realpath(sys.executable)  # not the link inside the environment that was just removed
    subprocess.run([interpreter, "-m", "venv", str(VENV)], check=True)


def create(choice: str) -> None:
    print("Making .venv: about 0.9 GB to download, 4 GB on disk")
    make_empty()
    packages = entries(LOCK.read_text())
    build_lock = VENV / "build.lock"
    build_lock.write_text("".join(packages[name] for name in BUILD_TOOLS))
    pip("Build tools", *locked(build_lock))
    install_torch(choice)
    pip(f"{len(packages)} locked packages", *locked(LOCK))
    pip("The course itself", "--no-index", "--no-build-isolation", "-e", str(ROOT))
    partial = STAMP.with_suffix(".partial")
    partial.write_text(key())
    os.replace(str(partial), str(STAMP))


def main() -> int:
    choice = os.environ.get("TORCH", "cpu")
    if choice not in ("cpu", "pypi"):
        print(f"TORCH={choice} is unknown: use TORCH=cpu (default) or TORCH=pypi")
        return 1
    if is_current():
        return 0
    findings = preflight(collect())
    print(*findings, sep="\n")
    if any(finding.level == "fail" for finding in findings):
        return 1
    try:
        create(choice)
    except (InstallError, subprocess.CalledProcessError) as error:
        print(f"environment: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
