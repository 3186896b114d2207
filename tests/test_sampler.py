"""The sampler against what a child was told to do, /proc, sums by hand, and a stand-in for NVML without a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import sampler
from helpers.sampler import Samples, parse_smi, sample

MIB = 2**20


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """A machine without a GPU, whatever this one has; tests that want one bring their own."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def child():
    """Starts `python -c code`, waits for its first line, and ends it after the test."""
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(samples: Samples, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(samples) < count:
        assert time.monotonic() < deadline, f"{len(samples)} samples after 30 s"
        time.sleep(0.02)


def test_rss_of_a_tree_is_what_its_processes_allocated_and_what_proc_says(child):
    parent = child(
        f"""
        import subprocess, sys, time
        block = b"x" * {200 * MIB}
        code = "import time; block = b'x' * {300 * MIB}; print(1, flush=True); time.sleep(600)"
        below = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        below.stdout.readline()
        print(below.pid, flush=True)
        time.sleep(600)
        """
    )
    pids = [parent.pid, *map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())]
    with sample(parent.pid, interval=0.05) as samples:
        wait_for(samples, 3)
    proc_kib = sum(int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) for pid in pids)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    rss = samples.columns["rss_gib"][-1]
    assert rss == pytest.approx(proc_kib / MIB, rel=0.01)
    assert 500 / 1024 < rss < 600 / 1024


def test_growth_shows_as_peak_above_the_first_sample(child):
    grower = child(
        f"""
        import sys, time
        print("small", flush=True)
        time.sleep(1)
        block = b"x" * {256 * MIB}
        time.sleep(600)
        """
    )
    with sample(grower.pid, interval=0.05) as samples:
        deadline = time.monotonic() + 30
        while samples.summary().get("peak_rss_gib", 0) < 0.25 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert samples.summary()["peak_rss_gib"] - samples.columns["rss_gib"][0] == pytest.approx(0.25, abs=0.01)


def processor_seconds(process: subprocess.Popen) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_processor_time_is_what_the_kernel_counted(child):
    busy = child("print(1, flush=True)\nwhile True: pass")
    idle = child("import time\nprint(1, flush=True)\ntime.sleep(600)")
    for process in (busy, idle):
        with sample(process.pid, interval=0.3) as samples:
            wait_for(samples, 1)
            before = processor_seconds(process)
            wait_for(samples, 6)
            after = processor_seconds(process)
        times, percents = samples.columns["t_s"], samples.columns["cpu_percent"]
        assert percents[0] is None
        sampled = sum(percents[i] / 100 * (times[i] - times[i - 1]) for i in range(1, 6))
        assert sampled == pytest.approx(after - before, abs=0.25)


def test_a_dying_process_ends_the_series(child):
    dying = child("import time\nprint(1, flush=True)\ntime.sleep(600)")
    with sample(dying.pid, interval=0.05) as samples:
        wait_for(samples, 2)
        dying.kill()
        dying.wait()
        (thread,) = (t for t in threading.enumerate() if t.name == "sampler")
        thread.join(timeout=30)
        assert not thread.is_alive()
        count = len(samples)
    assert len(samples) == count
    assert all(len(column) == count for column in samples.columns.values())
    assert None not in samples.columns["rss_gib"]


def test_a_zombie_ends_the_series_too(child):
    dying = child("import time\nprint(1, flush=True)\ntime.sleep(600)")
    with sample(dying.pid, interval=0.05) as samples:
        wait_for(samples, 2)
        dying.kill()
        (thread,) = (t for t in threading.enumerate() if t.name == "sampler")
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_no_thread_outlives_the_block_and_a_short_block_has_two_samples():
    with pytest.raises(ZeroDivisionError), sample(interval=60) as samples:
        wait_for(samples, 1)
        1 / 0  # noqa: B018
    assert len(samples) == 2
    assert not [t for t in threading.enumerate() if t.name == "sampler"]
    json.dumps(samples.columns)


def test_a_process_or_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"pid=999999999"), sample(999_999_999):
        pass
    with pytest.raises(ValueError, match=r"gpu=3"), sample(gpu=3):
        pass


def series(times, watts) -> Samples:
    samples = Samples()
    for t, w in zip(times, watts, strict=True):
        samples.append({"t_s": t, "power_w": w})
    return samples


def test_joules_by_hand():
    assert series([0, 0.5, 1, 4], [300] * 4).joules() == 1200  # constant power: watts times seconds
    assert series([0, 2], [0, 100]).joules() == 100  # a ramp: the triangle
    assert series([0, 1, 2, 3], [100, None, 100, None]).joules() == 200  # a gap is bridged, not taken as 0 W
    assert series([0, 1], [None, None]).joules() is None
    assert series([0], [100]).joules() is None
    assert Samples().joules() is None
    assert series([0, 2], [50, 50]).joules_per_token(25) == 4
    assert series([0, 2], [None, None]).joules_per_token(25) is None
    with pytest.raises(ValueError, match="at least 1"):
        series([0, 2], [50, 50]).joules_per_token(0)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.floats(0, 1000), st.floats(-10, 10))
def test_joules_of_linear_power_are_exact(steps, start_watts, slope):
    times = [0.0]
    for step in steps:
        times.append(times[-1] + step)
    samples = Samples()
    samples.columns = {"t_s": times, "power_w": [start_watts + slope * t for t in times]}
    end = times[-1]
    assert samples.joules() == pytest.approx(start_watts * end + slope * end**2 / 2, rel=1e-9, abs=1e-6)


def test_summary_leaves_missing_readings_out():
    samples = series([0, 1, 2], [100, None, 300])
    assert samples.summary() == {"peak_power_w": 300, "mean_power_w": 200}
    assert series([0], [None]).summary() == {"peak_power_w": None, "mean_power_w": None}


def test_nvidia_smi_lines():
    assert parse_smi("40960, 97, 312.55, 1410, 1593\n") == {
        "gpu_memory_gib": 40.0,
        "gpu_util_percent": 97.0,
        "power_w": 312.55,
        "sm_clock_mhz": 1410.0,
        "memory_clock_mhz": 1593.0,
    }
    mig = parse_smi("1024, [N/A], [Not Supported], 1410, [Insufficient Permissions]")
    assert [*mig.values()] == [1.0, None, None, 1410.0, None]
    assert set(parse_smi("").values()) == {None}


@given(st.text())
def test_no_line_of_nvidia_smi_breaks_the_parser(line):
    assert tuple(parse_smi(line)) == sampler.GPU_COLUMNS


def test_nvidia_smi_stands_in_for_nvml(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '2048, 50, 120.5, 1000, [N/A]'\n")
    smi.chmod(0o755)
    with sample(interval=0.02) as samples:
        wait_for(samples, 3)
    assert set(samples.columns) == {"t_s", *sampler.GPU_COLUMNS}
    assert set(samples.columns["power_w"]) == {120.5}
    assert set(samples.columns["memory_clock_mhz"]) == {None}
    assert samples.joules() == pytest.approx(120.5 * (samples.columns["t_s"][-1] - samples.columns["t_s"][0]), rel=1e-3)


def test_nvml_units_and_a_missing_sensor(monkeypatch):
    class NVMLError(Exception):
        pass

    def no_sensor(_handle):
        raise NVMLError("Not Supported")

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(used=3 * 2**30),
        nvmlDeviceGetUtilizationRates=no_sensor,
        nvmlDeviceGetPowerUsage=lambda _: 345_600,
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1980, 2: 3201}[kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with sample(gpu=0, interval=0.02) as samples:
        wait_for(samples, 2)
    assert [samples.columns[name][0] for name in sampler.GPU_COLUMNS] == [3.0, None, 345.6, 1980, 3201]
    assert "rss_gib" not in samples.columns
