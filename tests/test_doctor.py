"""The pre-flight: rules on facts that the tests make up, parsers on text as the kernel and the driver print it."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.doctor import collect, facts, preflight, rules

ROOT = Path(__file__).resolve().parents[1]
A100 = {"name": "NVIDIA A100-SXM4-80GB", "driver": 580, "capability": 8.0}
LAPTOP = {
    "python": (3, 11, 2),
    "ensurepip": True,
    "system": "Linux",
    "machine": "x86_64",
    "cpu_flags": {"avx2", "avx512f"},
    "memory_gb": 14.2,
    "folder": "/home/student/workbook",
    "disk_gb": 50.0,
    "gpu": None,
    "nvcc": False,
    "ninja": False,
    "flashinfer_kernels": False,
}


def found(**changes) -> dict[str, rules.Finding]:
    return {finding.id: finding for finding in preflight(LAPTOP | changes)}


def problems(**changes) -> dict[str, str]:
    return {name: finding.level for name, finding in found(**changes).items() if finding.level != "ok"}


def test_a_good_laptop_has_no_problem_and_hears_nothing_of_gpus():
    assert problems() == {}
    assert not {"driver", "flashinfer"} & set(found())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": (3, 10, 13)}, {"python": "fail"}),
        ({"python": (3, 15, 0)}, {"python": "fail"}),
        ({"python": (3, 14, 1)}, {}),
        ({"ensurepip": False}, {"venv": "fail"}),
        ({"machine": "aarch64", "cpu_flags": set()}, {"machine": "fail"}),
        ({"system": "Darwin", "cpu_flags": set(), "memory_gb": None}, {"machine": "fail"}),
        ({"cpu_flags": {"avx2"}}, {"avx512": "warn"}),
        ({"cpu_flags": {"sse4_2"}}, {"avx2": "fail"}),
        ({"disk_gb": 5.9}, {"disk": "fail"}),
        ({"memory_gb": 3.9}, {"memory": "fail"}),
        ({"gpu": A100, "nvcc": True, "ninja": True}, {}),
        ({"gpu": A100, "flashinfer_kernels": True}, {}),
        ({"gpu": A100, "nvcc": True}, {"flashinfer": "warn"}),
        ({"gpu": A100, "ninja": True}, {"flashinfer": "warn"}),
        ({"gpu": A100 | {"driver": 575}, "flashinfer_kernels": True}, {"driver": "warn"}),
        ({"gpu": {"name": "NVIDIA H200", "driver": 580, "capability": 9.0}}, {}),
    ],
)
def test_each_lack_is_one_problem(changes, expected):
    assert problems(**changes) == expected


@pytest.mark.parametrize(
    ("rule", "changes", "parts"),
    [
        ("python", {"python": (3, 9, 18)}, ["3.9.18", "3.11", "PYTHON="]),
        ("venv", {"ensurepip": False}, ["apt install python3.11-venv"]),
        ("avx512", {"cpu_flags": {"avx2"}}, ["AWQ", "FP8 KV cache", "unavailable"]),
        ("disk", {"disk_gb": 1.5}, ["1.5 GB", "/home/student/workbook", "6 GB"]),
        ("memory", {"memory_gb": 1.25}, ["1.2 GB", "4 GB", "close other programs"]),
        ("driver", {"gpu": A100 | {"driver": 535}}, ["A100", "535", "580"]),
        ("flashinfer", {"gpu": A100}, ["A100", "nvcc", "ninja", "environment.yml"]),
    ],
)
def test_a_problem_says_what_where_and_what_to_do_in_one_line(rule, changes, parts):
    message = found(**changes)[rule].message
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_bounds_of_python_are_those_of_the_package():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (low, high) = (f"{major}.{minor}" for major, minor in (rules.MIN_PYTHON, (3, rules.MAX_PYTHON[1] + 1)))
    assert requires == f">={low},<{high}"


def test_cpu_flags_are_those_of_the_first_processor():
    text = "processor\t: 0\nmodel name\t: Any CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert facts.cpu_flags(text) == {"fpu", "avx2", "avx512f"}
    assert facts.cpu_flags("") == set()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("", 8.192), ("max\n", 8.192), ("2000000000\n", 2.0), ("64000000000\n", 8.192)],
)
def test_memory_is_what_is_available_or_a_lower_limit_of_the_container(limit, expected):
    meminfo = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    8000000 kB\n"
    assert facts.memory_gb(meminfo, limit) == pytest.approx(expected)
    assert facts.memory_gb("", limit) is None


def test_gpus_are_read_from_the_driver_and_nonsense_is_passed_over():
    text = "NVIDIA A100-SXM4-80GB, 580.65.06, 8.0\nTesla K80, 470.57.02, [N/A]\nNo devices were found\n"
    assert facts.gpus(text) == [A100]


def test_facts_of_this_machine_can_be_judged():
    assert collect().keys() == LAPTOP.keys()
    assert preflight(collect())


@pytest.mark.parametrize(("disk_gb", "status"), [(0, 0), (10**9, 1)])
def test_preflight_runs_on_a_bare_python(disk_gb, status):
    """-S leaves site-packages out, so anything but the standard library would fail to import."""
    code = (
        "from helpers.doctor import __main__ as doctor, rules\n"
        f"rules.DISK_GB, rules.MEMORY_GB = {disk_gb}, 0\n"
        "raise SystemExit(doctor.main(['preflight']))"
    )
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()].count("fail") == status


@pytest.mark.parametrize(
    "source",
    [
        ROOT / "helpers/__init__.py",
        ROOT / "helpers/course/__init__.py",
        ROOT / "helpers/course/environment.py",
        *(ROOT / "helpers/doctor").glob("*.py"),
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_what_runs_first_parses_on_an_old_python(source):
    """An old Python must reach the rule that says so."""
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    newer_than_3_8 = {"tomllib", "zoneinfo", "graphlib"}
    assert {name.partition(".")[0] for name in imported} <= (sys.stdlib_module_names - newer_than_3_8) | {"helpers"}
