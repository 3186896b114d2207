"""What this machine is: the facts that the pre-flight rules judge. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def cpu_flags(cpuinfo: str) -> set[str]:
    """The instruction sets named in the first `flags` line of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def memory_gb(meminfo: str, cgroup_limit: str = "") -> float | None:
    """GB (10^9 bytes) that a process may take: what is available, or a container's limit if that is lower."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            limit = int(cgroup_limit) if cgroup_limit.strip().isdigit() else available
            return min(available, limit) / 1e9
    return None


def gpus(nvidia_smi: str) -> list[dict]:
    """Rows of `nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader`."""
    rows = []
    for line in nvidia_smi.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            rows.append({"name": cells[0], "driver": int(cells[1].split(".")[0]), "capability": float(cells[2])})
        except (IndexError, ValueError):  # "No devices were found", "[N/A]"
            continue
    return rows


def _query_gpus() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30).stdout.decode()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _has_nvcc() -> bool:
    """Whether there is an nvcc where vLLM 0.32 looks for the one that FlashInfer runs (vllm/utils/flashinfer.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(os.path.join(home, "bin", "nvcc")) is not None
    return shutil.which("nvcc") is not None or shutil.which("/usr/local/cuda/bin/nvcc") is not None


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def collect() -> dict:
    """Facts as a flat dict; sizes in GB (10^9 bytes), None where the machine does not say."""
    found = gpus(_query_gpus())
    return {
        "python": tuple(sys.version_info[:3]),
        "ensurepip": _installed("ensurepip"),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_flags": cpu_flags(_read("/proc/cpuinfo")),
        "memory_gb": memory_gb(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max")),
        "folder": str(ROOT),
        "disk_gb": shutil.disk_usage(str(ROOT)).free / 1e9,
        "gpu": min(found, key=lambda gpu: gpu["capability"]) if found else None,
        "nvcc": _has_nvcc(),
        "ninja": shutil.which("ninja") is not None,
        "flashinfer_kernels": _installed("flashinfer_cubin", "flashinfer_jit_cache"),
    }
