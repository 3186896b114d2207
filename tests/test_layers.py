"""The house: lower floors never import higher ones, and the two lowest load nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [
    {"models", "hardware", "records", "claims", "roofs"},
    {"capacity", "cost", "serving", "serverlog", "guard", "sampler", "load", "metrics"},
    {"coursemodel", "doctor"},
    {"course", "plots", "widgets", "verdicts", "record_set", "cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = {"torch", "vllm", "transformers", "locust", "pandas", "matplotlib", "triton"}
SOURCES = sorted((ROOT / "helpers").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ROOMS = {module_name(path).split(".")[1] for path in SOURCES if "." in module_name(path)}


def rooms_imported(source: str, package: str) -> set[str]:
    """Rooms (first name under `helpers`) that a source imports, lazily or not; `package` resolves relative imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(parent + ([node.module] if node.module else []))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("helpers.")}


def test_every_room_has_a_floor():
    assert ROOMS - set(FLOOR_OF) == set(), "name the floor of a new module in tests/test_layers.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_goes_up(path):
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    floor = FLOOR_OF[name.split(".")[1]] if "." in name else -1
    higher = {room for room in rooms_imported(path.read_text(), package) if FLOOR_OF.get(room, -1) > floor}
    assert higher == set()


@pytest.mark.parametrize(
    ("source", "package", "rooms"),
    [
        ("import helpers.cli", "helpers", {"cli"}),
        ("from helpers import models, plots", "helpers", {"models", "plots"}),
        ("def f():\n    from helpers.load.plan import LoadPlan", "helpers", {"load"}),
        ("from . import cli", "helpers", {"cli"}),
        ("from ..widgets import slider", "helpers.load", {"widgets"}),
        ("from .plan import LoadPlan", "helpers.load", {"load"}),
        ("import json, os", "helpers", set()),
    ],
)
def test_imports_are_found_however_they_are_written(source, package, rooms):
    assert rooms_imported(source, package) == rooms


def test_ground_and_first_floor_load_nothing_heavy():
    modules = ["helpers", *(f"helpers.{room}" for room in sorted(ROOMS & (FLOORS[0] | FLOORS[1])))]
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nprint(*{HEAVY} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
