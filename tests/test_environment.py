"""The environment: one set of pins in every file, complete locks, and an install that never half-succeeds."""

import itertools
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.course import environment

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pins(*groups: list[str]) -> dict[str, str]:
    """Name -> exact version; anything but `name==version` is an error."""
    found = {}
    for line in itertools.chain(*groups):
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([^ ;,*]+)", line).groups()
        found[canonicalize_name(name)] = version
    return found


def locked(path: Path) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock with its hashes."""
    logical = path.read_text().replace("\\\n", " ").splitlines()
    lines = [line for line in logical if line and not line.startswith("#")]
    return [
        (Requirement(line.split(" --hash=")[0]), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line)) for line in lines
    ]


def versions(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for requirement, _ in locked(path):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        found.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return found


def test_environment_yml_has_the_pins_of_pyproject():
    environment_yml = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment_yml["dependencies"] if isinstance(entry, dict)]
    assert pip[-1] == "-e ."
    assert pins(pip[:-1]) == pins(PROJECT["dependencies"], EXTRAS["gpu"], EXTRAS["dev"])


def test_environment_yml_brings_what_the_gpu_lane_needs():
    text = (ROOT / "environment.yml").read_text()
    conda = [entry for entry in yaml.safe_load(text)["dependencies"] if isinstance(entry, str)]
    assert {"python=3.12", "ninja", "cuda-nvcc=13.0"} <= set(conda)
    assert "Driver: 580 or newer" in text
    named = {"jupyterlab", "nbval", "vllm", "triton", "torch", "autoawq", "transformers", "matplotlib", "ipywidgets"}
    assert named <= set(pins(PROJECT["dependencies"], EXTRAS["gpu"], EXTRAS["dev"]))


def test_lock_agrees_with_the_pins():
    wanted = pins(PROJECT["dependencies"], EXTRAS["cpu"], EXTRAS["dev"])
    torch = wanted.pop("torch")
    have = versions(environment.LOCK)
    assert {name: have.get(name) for name in wanted} == {name: {version} for name, version in wanted.items()}
    assert versions(environment.TORCH_CPU) == {"torch": {f"{torch}+cpu"}}
    assert versions(environment.TORCH_PYPI)["torch"] == {torch}


@pytest.mark.parametrize(
    "lock", [environment.LOCK, environment.TORCH_CPU, environment.TORCH_PYPI], ids=lambda p: p.name
)
def test_every_entry_of_a_lock_has_a_hash(lock):
    assert [str(requirement) for requirement, hashes in locked(lock) if not hashes] == []


def test_lock_leaves_out_what_the_cpu_lane_must_not_have():
    names = set(versions(environment.LOCK))
    assert names & (LEFT_OUT | {"torch", "vllm"}) == set()
    assert {name for name in names if name.startswith(("nvidia-", "cuda-"))} == {"nvidia-ml-py"}


def test_the_cpu_build_is_locked_for_every_python_of_the_course():
    ((_, hashes),) = locked(environment.TORCH_CPU)
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    assert len(set(hashes)) == len(hashes) == high - low


def test_both_builds_of_torch_want_the_same_other_packages():
    main = versions(environment.LOCK)
    other = {name: found for name, found in versions(environment.TORCH_PYPI).items() if name in main}
    assert "triton" in other
    assert other == {name: main[name] for name in other}


def test_the_running_environment_is_the_locked_one():
    if "vllm" in {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}:
        wanted = pins(PROJECT["dependencies"], EXTRAS["gpu"])
    else:
        applying = [r for r, _ in locked(environment.LOCK) if r.marker is None or r.marker.evaluate()]
        wanted = {r.name: next(iter(r.specifier)).version for r in applying}
    differing = {name: metadata.version(name) for name, version in wanted.items() if metadata.version(name) != version}
    assert {name: version for name, version in differing.items() if not version.startswith(wanted[name] + "+")} == {}


names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)


@given(st.dictionaries(names, st.lists(st.integers(0, 2**32), min_size=1, max_size=3), min_size=1))
def test_entries_of_a_lock_keep_every_line(packages):
    blocks = {
        name: f"{name}==1.0 ; python_full_version < '3.12' \\\n"
        + " \\\n".join(f"    --hash=sha256:{h:064x}" for h in hashes)
        + "\n"
        for name, hashes in packages.items()
    }
    assert environment.entries("# a header\n" + "".join(blocks.values())) == blocks


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment module whose folder, locks and machine are the test's own; pip sees no index and no wheel."""
    for name, text in (
        ("LOCK", "setuptools==0.0.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"),
        ("TORCH_CPU", ""),
        ("TORCH_PYPI", ""),
    ):
        path = tmp_path / f"{name}.lock"
        path.write_text(text)
        monkeypatch.setattr(environment, name, path)
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    monkeypatch.setattr(environment, "STAMP", tmp_path / "venv" / "complete")
    monkeypatch.setattr(environment, "LOG", tmp_path / "venv" / "install.log")
    monkeypatch.setattr(environment, "BUILD_TOOLS", ("setuptools",))
    monkeypatch.setattr(environment, "preflight", lambda facts: [])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("TORCH", raising=False)
    return tmp_path


def test_a_failed_install_leaves_one_line_and_no_stamp(site, monkeypatch, capsys):
    def make_empty():
        python = environment.VENV / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    monkeypatch.setattr(environment, "make_empty", make_empty)
    assert environment.main() == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("environment: ")]
    assert len(said) == 1
    assert "setuptools==0.0.0" in said[0] and str(environment.LOG) in said[0]
    assert not environment.is_current()


@pytest.fixture
def pip_calls(monkeypatch):
    """Record where pip is told to take PyTorch from ("" for other packages); `refuse` names the sources that fail."""
    calls, refuse = [], set()

    def pip(title, *arguments):
        torch = {str(environment.TORCH_PYPI): "pypi", str(environment.TORCH_CPU): "at hand"}.get(arguments[-1], "")
        calls.append("index" if "--index-url" in arguments else torch)
        if calls[-1] in refuse:
            raise environment.InstallError(f"{title}: not found")

    monkeypatch.setattr(environment, "make_empty", lambda: environment.VENV.mkdir(exist_ok=True))
    monkeypatch.setattr(environment, "pip", pip)
    return calls, refuse


def test_an_interrupted_install_leaves_no_stamp(site, pip_calls, monkeypatch):
    def interrupted(choice):
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "install_torch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.main()
    assert environment.VENV.exists() and not environment.is_current()


def test_an_unfit_machine_is_told_before_anything_is_made(site, monkeypatch, capsys):
    from helpers.doctor import Finding

    monkeypatch.setattr(environment, "preflight", lambda facts: [Finding("disk", "fail", "no room")])
    assert environment.main() == 1
    assert capsys.readouterr().out == "fail  no room\n"
    assert not environment.VENV.exists()


def test_a_complete_environment_is_used_again_until_a_lock_changes(site, pip_calls):
    installed, _ = pip_calls
    assert environment.main() == 0
    first = len(installed)
    assert environment.main() == 0
    assert len(installed) == first > 0
    environment.TORCH_CPU.write_text("# another build\n")
    assert environment.main() == 0
    assert len(installed) == 2 * first


@pytest.mark.parametrize(
    ("refused", "choice", "answer", "expected"),
    [
        ((), "cpu", None, ["at hand"]),
        (("at hand",), "cpu", None, ["at hand", "index"]),
        (("at hand", "index"), "cpu", "y", ["at hand", "index", "pypi"]),
        ((), "pypi", None, ["pypi"]),
    ],
)
def test_where_torch_comes_from(pip_calls, monkeypatch, refused, choice, answer, expected):
    calls, refuse = pip_calls
    refuse.update(refused)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    environment.install_torch(choice)
    assert calls == expected


@pytest.mark.parametrize("answer", [None, "n", ""])
def test_pypis_build_is_never_taken_without_consent(pip_calls, monkeypatch, answer):
    calls, refuse = pip_calls
    refuse.update({"at hand", "index"})
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    with pytest.raises(environment.InstallError, match="make env TORCH=pypi"):
        environment.install_torch("cpu")
    assert "pypi" not in calls
