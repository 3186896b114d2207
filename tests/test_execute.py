"""The notebook runner, on notebooks of a few cells that the tests write."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from helpers.course import execute


@pytest.fixture
def notebook(tmp_path):
    def write(*cells: str, name: str = "small.ipynb") -> Path:
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A heading")])
        document.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(document, tmp_path / name)
        return tmp_path / name

    return write


def outputs(path: Path) -> list[str]:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


def test_executed_copy_holds_outputs_and_the_source_is_untouched(notebook, tmp_path, capsys):
    source = notebook("# a comment\nx = 6", "import os\nprint(x * 7, os.getcwd())")
    before = source.read_bytes()
    (executed,) = execute.run([source], tmp_path / "out", timeout=60)
    assert outputs(executed) == ["", f"42 {tmp_path}\n"]
    assert source.read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["small.ipynb"]
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"small +1/2 +x = 6 +[\d.]+ s", first)
    assert re.fullmatch(r"small +2/2 +import os +[\d.]+ s", second)


def test_failing_cell_is_named_and_earlier_outputs_are_kept(notebook, tmp_path, capsys):
    source = notebook("print('before')", "1 / 0", "print('after')")
    assert execute.main([str(source), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "code cell 2: ZeroDivisionError: division by zero" in message
    assert str(tmp_path / "out" / "small.ipynb") in message
    first, _, third = outputs(tmp_path / "out" / "small.ipynb")
    assert (first, third) == ("before\n", "")


def test_stored_outputs_of_cells_that_did_not_run_are_not_kept(notebook, tmp_path):
    source = notebook("1 / 0", "print('stale')")
    document = nbformat.read(source, as_version=4)
    document.cells[2].outputs = [nbformat.v4.new_output("stream", text="from another run\n")]
    nbformat.write(document, source)
    with pytest.raises(execute.NotebookError):
        execute.run([source], tmp_path / "out", timeout=60)
    assert outputs(tmp_path / "out" / "small.ipynb")[1] == ""


def test_killed_kernel_is_reported(notebook, tmp_path):
    source = notebook("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(execute.NotebookError, match="code cell 1: the kernel died"):
        execute.run([source], tmp_path / "out", timeout=60)


def test_cell_that_takes_too_long_is_reported(notebook, tmp_path):
    source = notebook("import time\ntime.sleep(60)")
    with pytest.raises(execute.NotebookError, match="code cell 1: no answer within 2 s"):
        execute.run([source], tmp_path / "out", timeout=2)


def test_missing_notebook_is_named_before_anything_runs(notebook, tmp_path):
    present = notebook("print(1)")
    with pytest.raises(FileNotFoundError, match=r"absent\.ipynb"):
        execute.run([present, tmp_path / "absent.ipynb"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_kernel_outlives_the_runner(notebook, tmp_path, ending):
    started = tmp_path / "kernel.pid"
    source = notebook(
        f"import os, pathlib\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))",
        "import time\ntime.sleep(60)",
    )
    command = [sys.executable, "-m", "helpers.course.execute", str(source), "--out", str(tmp_path / "out")]
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    kernel = psutil.Process(int(started.read_text()))
    runner.send_signal(ending)
    runner.wait(timeout=60)
    psutil.wait_procs([kernel], timeout=30)
    assert not kernel.is_running()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", ""),
        ("# only a comment", "# only a comment"),
        ("%matplotlib inline\n\nx = 1", "x = 1"),
        ("y" * 100, "y" * 47 + "…"),
    ],
)
def test_first_words(source, words):
    assert execute.first_words(source) == words
