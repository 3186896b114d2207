"""The rules, one row each: when it applies, what must hold, and the line to say in either case."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MIN_PYTHON, MAX_PYTHON = (3, 11), (3, 14)
DISK_GB = 6  # the environment takes 4 GB, its downloads and the caches of a run the rest
MEMORY_GB = 4  # the course model with 8 users took 3.1 (server, benchmark and notebook, PSS, 2026-11-30)
MIN_DRIVER = 580  # CUDA 13, which PyTorch 2.13 is built with: CUDA Toolkit 13.0 release notes, table of drivers


class Finding(NamedTuple):
    """One judged rule: `level` is "ok", "warn" or "fail"; `message` is one line (what, where, what to do)."""

    id: str
    level: str
    message: str

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.message}"


class Rule(NamedTuple):
    """`good` and `bad` are format strings over the facts; `bad` is said at `level`."""

    id: str
    level: str
    holds: Callable
    good: str
    bad: str
    applies: Callable = lambda facts: True


def _x86_linux(facts: dict) -> bool:
    return facts["system"] == "Linux" and facts["machine"] == "x86_64"


PREFLIGHT = [
    Rule(
        "python",
        "fail",
        lambda facts: MIN_PYTHON <= facts["python"][:2] <= MAX_PYTHON,
        "Python {python[0]}.{python[1]}.{python[2]}",
        "Python {python[0]}.{python[1]}.{python[2]} cannot run the course, which needs 3.11 to 3.14: "
        "install one and name it, for example `make run PYTHON=python3.12`",
    ),
    Rule(
        "venv",
        "fail",
        lambda facts: facts["ensurepip"],
        "venv and pip",
        "this Python cannot make environments (no ensurepip): `sudo apt install python{python[0]}.{python[1]}-venv`",
    ),
    Rule(
        "machine",
        "fail",
        _x86_linux,
        "{system} on {machine}",
        "{system} on {machine}: vLLM's CPU build and the lock are for Linux on x86-64; use such a machine, "
        "WSL 2 or a cloud notebook",
    ),
    Rule(
        "avx2",
        "fail",
        lambda facts: "avx2" in facts["cpu_flags"],
        "AVX2",
        "this processor has no AVX2, without which vLLM's CPU build cannot start: use a newer machine",
        _x86_linux,
    ),
    Rule(
        "avx512",
        "warn",
        lambda facts: "avx512f" in facts["cpu_flags"],
        "AVX-512: AWQ and the FP8 KV cache run on this processor",
        "this processor has no AVX-512: on the CPU lane AWQ and the FP8 KV cache are unavailable, bf16 works",
        lambda facts: _x86_linux(facts) and "avx2" in facts["cpu_flags"],
    ),
    Rule(
        "disk",
        "fail",
        lambda facts: facts["disk_gb"] >= DISK_GB,
        "{disk_gb:.0f} GB of disk free in {folder}",
        "{disk_gb:.1f} GB of disk free in {folder}, and set-up needs 6 GB: free some, or clone onto another disk",
    ),
    Rule(
        "memory",
        "fail",
        lambda facts: facts["memory_gb"] >= MEMORY_GB,
        "{memory_gb:.0f} GB of memory available",
        "{memory_gb:.1f} GB of memory available, and a vLLM server under load needs 4 GB: close other programs",
        lambda facts: facts["memory_gb"] is not None,
    ),
    Rule(
        "driver",
        "warn",
        lambda facts: facts["gpu"]["driver"] >= MIN_DRIVER,
        "{gpu[name]} with driver {gpu[driver]}",
        "{gpu[name]} has driver {gpu[driver]}, and CUDA 13 needs 580 or newer: update it before using the GPU lane",
        lambda facts: facts["gpu"] is not None,
    ),
    Rule(
        "flashinfer",
        "warn",
        lambda facts: facts["flashinfer_kernels"] or (facts["nvcc"] and facts["ninja"]),
        "FlashInfer has or can compile its kernels, so the FP8 KV cache runs on {gpu[name]}",
        "nvcc or ninja is missing, and on {gpu[name]} the FP8 KV cache needs FlashInfer, which compiles its kernels: "
        "environment.yml brings both, `vllm download-kernels` prebuilt kernels",
        lambda facts: facts["gpu"] is not None and 8 <= facts["gpu"]["capability"] < 9,
    ),
]


def judge(rules: list[Rule], facts: dict) -> list[Finding]:
    """The finding of every rule that applies to the facts, in the order of the rules."""
    findings = []
    for rule in rules:
        if rule.applies(facts):
            held = rule.holds(facts)
            findings.append(
                Finding(rule.id, "ok" if held else rule.level, (rule.good if held else rule.bad).format(**facts))
            )
    return findings


def preflight(facts: dict) -> list[Finding]:
    """Judge a machine before anything is downloaded to it. `facts` as `facts.collect()` returns them."""
    return judge(PREFLIGHT, facts)
