"""Memory, load, clocks and power as a time series, while something runs.

with sample(server.pid) as samples:
    ...
samples.summary()["peak_rss_gib"], samples.joules_per_token(12_800)
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean

GIB = 2**30
GPU_COLUMNS = ("gpu_memory_gib", "gpu_util_percent", "power_w", "sm_clock_mhz", "memory_clock_mhz")
Row = dict[str, float | None]


class Samples:
    """columns: name -> list, one value per sample, None where the device has no such reading.

    t_s                                 seconds since the block began
    rss_gib, cpu_percent                the process and all below it; a shared page counts for each; 100 % is one core
    gpu_memory_gib, gpu_util_percent    the whole GPU, whoever uses it
    power_w, sm_clock_mhz, memory_clock_mhz
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[float | None]] = {}

    def append(self, row: Row) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(None if value is None else round(value, 4))

    def __len__(self) -> int:
        return len(self.columns.get("t_s", ()))

    def summary(self) -> Row:
        """`peak_NAME` and `mean_NAME` of every column over its readings; None for a column without any."""
        result: Row = {}
        for name, column in self.columns.items():
            if name != "t_s":
                values = [value for value in column if value is not None]
                result[f"peak_{name}"] = max(values, default=None)
                result[f"mean_{name}"] = fmean(values) if values else None
        return result

    def joules(self) -> float | None:
        """Energy of the GPU from the first to the last sample: power integrated over time (trapezoid rule).

        None without a power sensor, or with less than two readings of it.
        """
        pairs = zip(self.columns.get("t_s", ()), self.columns.get("power_w", ()), strict=False)
        points = [(t, watts) for t, watts in pairs if watts is not None]
        if len(points) < 2:
            return None
        return sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairwise(points))

    def joules_per_token(self, tokens: int) -> float | None:
        if tokens <= 0:
            raise ValueError(f"joules_per_token({tokens}): give the number of tokens made in this time, at least 1.")
        joules = self.joules()
        return None if joules is None else joules / tokens


@contextmanager
def sample(pid: int | None = None, gpu: int | None = None, interval: float = 0.5) -> Iterator[Samples]:
    """Sample in the background, every `interval` seconds, until the block or the process `pid` ends.

    pid: a process, measured with all below it; None for this one, or for none where there is a GPU.
    gpu: index of a GPU; None for the first where there is one. ValueError for a process or a GPU that is not there.
    """
    readers = [_gpu_reader(gpu)]
    if pid is not None or readers == [None]:
        readers.append(_process_reader(pid))
    readers = [reader for reader in readers if reader]
    samples, stop, start = Samples(), threading.Event(), time.monotonic()

    def take() -> bool:
        row: Row = {"t_s": time.monotonic() - start}
        for reader in readers:
            values = reader()
            if values is None:
                return False
            row |= values
        samples.append(row)
        return True

    def loop() -> None:
        while take() and not stop.wait(interval):
            pass

    thread = threading.Thread(target=loop, name="sampler", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
        take()


def _process_reader(pid: int | None) -> Callable[[], Row | None]:
    """Reads a process tree; None once its root has ended."""
    import psutil

    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ValueError(f"sample(pid={pid}): there is no such process.") from None
    last_time, last_cpu = time.monotonic(), None

    def read() -> Row | None:
        nonlocal last_time, last_cpu
        if not root.is_running() or root.status() == psutil.STATUS_ZOMBIE:
            return None
        rss, cpu = 0, {}
        for process in (root, *root.children(recursive=True)):
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    times = process.cpu_times()
                    cpu[process] = times.user + times.system
            except psutil.Error:
                continue
        percent, span = None, time.monotonic() - last_time
        if last_cpu is None or span >= 0.1:  # the kernel counts processor time in steps of 0.01 s
            if last_cpu is not None:
                used = sum(seconds - last_cpu.get(process, 0.0) for process, seconds in cpu.items())
                percent = 100 * used / span
            last_time, last_cpu = last_time + span, cpu
        return {"rss_gib": rss / GIB, "cpu_percent": percent}

    def read_unless_gone() -> Row | None:
        try:
            return read()
        except psutil.NoSuchProcess:
            return None

    return read_unless_gone


def _gpu_reader(gpu: int | None) -> Callable[[], Row] | None:
    """Reads a GPU through NVML, or through nvidia-smi without its Python package; None where there is no GPU."""
    for make in (_nvml_reader, _smi_reader):
        if reader := make(gpu or 0):
            return reader
    if gpu is not None:
        raise ValueError(f"sample(gpu={gpu}): neither NVML nor nvidia-smi knows this GPU.")
    return None


def _nvml_reader(gpu: int) -> Callable[[], Row] | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
    except nvml.NVMLError:
        return None

    def get(function: Callable, *arguments: int) -> object:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None

    def read() -> Row:
        memory, use = get(nvml.nvmlDeviceGetMemoryInfo), get(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = get(nvml.nvmlDeviceGetPowerUsage)
        values = (
            memory and memory.used / GIB,
            use and use.gpu,
            milliwatts and milliwatts / 1000,
            get(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            get(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        )
        return dict(zip(GPU_COLUMNS, values, strict=True))

    return read


def _smi_reader(gpu: int) -> Callable[[], Row] | None:
    fields = "memory.used,utilization.gpu,power.draw,clocks.sm,clocks.mem"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]

    def read() -> Row:
        try:
            line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            line = ""
        return parse_smi(line)

    return read if any(value is not None for value in read().values()) else None


def parse_smi(line: str) -> Row:
    """One line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; `[N/A]` and missing cells become None."""
    cells = [cell.strip() for cell in line.split(",")]
    row: Row = {}
    for i, name in enumerate(GPU_COLUMNS):
        try:
            row[name] = float(cells[i])
        except (IndexError, ValueError):
            row[name] = None
    if row["gpu_memory_gib"] is not None:
        row["gpu_memory_gib"] /= 1024  # nvidia-smi counts memory in MiB
    return row
