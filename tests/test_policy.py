"""The rules about skipping and about comparing notebooks, tried on tests and notebooks that this file writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from helpers.doctor import collect

ROOT = Path(__file__).resolve().parents[1]
SKIPPING = """
import pytest

def test_runs(): pass

@pytest.mark.needs_command("no-such-command", "no-such-package")
def test_needs_a_package(): pass

@pytest.mark.needs_avx512
def test_needs_a_processor(): pass

@pytest.mark.xfail
def test_known_to_fail(): assert False
"""


def run_pytest(folder, *arguments, **environment) -> tuple[dict[str, int], str]:
    """Counts of the closing line ({"passed": 2, ...}) and the output."""
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WORKBOOK_NO_SKIP": "0"} | environment
    output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout
    closing = output.splitlines()[-1].strip("= ").split(" in ")[0]
    return {word: int(count) for count, word in (part.split()[:2] for part in closing.split(", "))}, output


@pytest.mark.parametrize(("no_skip", "failed"), [("0", 0), ("1", 1)])
def test_a_lack_is_skipped_by_name_and_fails_where_nothing_may_be_skipped(tmp_path, no_skip, failed):
    (tmp_path / "test_small.py").write_text(SKIPPING)
    counts, output = run_pytest(tmp_path, "-p", "tests.conftest", "test_small.py", WORKBOOK_NO_SKIP=no_skip)
    has_avx512 = "avx512f" in collect()["cpu_flags"]
    assert counts.pop("passed") == (2 if has_avx512 else 1)
    assert counts.pop("skipped", 0) == (1 - failed) + (0 if has_avx512 else 1)
    assert counts == {"xfailed": 1} | ({"error": 1} if failed else {})
    assert "no-such-command is missing: sudo apt install no-such-package" in output


@pytest.mark.parametrize(("no_skip", "counts"), [("0", {"skipped": 1}), ("1", {"error": 1})])
def test_a_file_that_skips_itself_counts_as_a_skip(tmp_path, no_skip, counts):
    (tmp_path / "test_small.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    found, _ = run_pytest(tmp_path, "-p", "tests.conftest", "test_small.py", WORKBOOK_NO_SKIP=no_skip)
    assert found == counts


@pytest.mark.parametrize(("stored", "counts"), [("41\n", {"failed": 1}), ("42\n", {"passed": 1})])
def test_notebooks_are_compared_but_for_stderr(tmp_path, stored, counts):
    cell = nbformat.v4.new_code_cell(
        "import sys, time\nprint(42)\nprint(time.time(), file=sys.stderr)", execution_count=1
    )
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=stored),
        nbformat.v4.new_output("stream", name="stderr", text="another time\n"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "small.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    assert run_pytest(tmp_path, "--nbval", ".")[0] == counts


def test_a_cell_may_not_take_nbvals_half_hour(tmp_path):
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    cell = nbformat.v4.new_code_cell("import time\ntime.sleep(30)", execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "small.ipynb")
    conftest = tmp_path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("CELL_TIMEOUT = 300", "CELL_TIMEOUT = 2"))
    counts, output = run_pytest(tmp_path, "--nbval", ".")
    assert counts == {"failed": 1} and "Timeout of 2 seconds" in output


@pytest.mark.parametrize(("here", "counts"), [("cpu", {"failed": 1}), ("h200", {"passed": 1})])
def test_a_cell_that_depends_on_the_tier_is_compared_on_its_own_tier_only(tmp_path, here, counts):
    cell = nbformat.v4.new_code_cell("print(42)", execution_count=1, metadata={"tags": ["tier"]})
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="41\n")]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"workbook": {"tier": "cpu"}})
    nbformat.write(notebook, tmp_path / "small.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    assert run_pytest(tmp_path, "--nbval", ".", WORKBOOK_TIER=here)[0] == counts
