"""Execute notebooks as a reader would, cell by cell, and keep the executed copies."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

CELL_TIMEOUT = 600  # seconds; a cell that serves a model and puts it under load takes one to two minutes on two cores


class NotebookError(Exception):
    """A cell failed; the message says which, where the notebook executed so far is, and the cell's own error."""


def first_words(source: str, width: int = 48) -> str:
    """The first line of code in a cell, comments skipped, cut to `width` characters."""
    lines = [line.strip() for line in source.splitlines()]
    line = next((line for line in lines if line and not line.startswith(("#", "%"))), lines[0] if lines else "")
    return line if len(line) <= width else line[: width - 1] + "…"


def run(paths, out_dir="out", timeout: float = CELL_TIMEOUT) -> list[Path]:
    """Execute each notebook in its own folder and return the executed copies, which lie in `out_dir`.

    `timeout` is in seconds per cell. Raises NotebookError at the first cell that fails, FileNotFoundError before
    anything runs if a notebook is missing. The kernel ends with its notebook.
    """
    paths = [Path(path) for path in paths]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"no such notebook: {', '.join(missing)}")
    return [_execute(path, Path(out_dir) / path.name, timeout) for path in paths]


def _execute(path: Path, target: Path, timeout: float) -> Path:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        config=Config(KernelManager={"transport_encryption": "auto"}),  # else the kernel warns on stderr
    )
    code_cells = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for _, cell in code_cells:
        cell.outputs, cell.execution_count = [], None
    try:
        with client.setup_kernel():
            for number, (index, cell) in enumerate(code_cells, 1):
                where = f"{path.stem}  {number:>2}/{len(code_cells)}"
                print(f"{where}  {first_words(cell.source):<48}", end="", flush=True)
                started = time.monotonic()
                try:
                    client.execute_cell(cell, index)
                except CellExecutionError as error:
                    reason = f"{error.ename}: {error.evalue}"
                except CellTimeoutError:
                    reason = f"no answer within {timeout:g} s"
                except DeadKernelError:
                    reason = "the kernel died (out of memory, or killed)"
                else:
                    print(f"  {time.monotonic() - started:6.1f} s", flush=True)
                    continue
                print("  failed", flush=True)
                raise NotebookError(
                    f"{path}, code cell {number}: {reason}\n\n{cell.source}\n\nexecuted so far: {target}"
                )
            client.set_widgets_metadata()
    finally:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        nbformat.write(notebook, partial)
        os.replace(partial, target)
    return target


def main(argv: list[str] | None = None) -> int:
    """Command line: notebooks, `--out`, `--timeout`. Exit status 1 if one fails."""
    parser = argparse.ArgumentParser(prog="workbook run", description="Execute notebooks on this machine.")
    parser.add_argument("notebooks", nargs="+", help="notebooks to execute, in this order")
    parser.add_argument("--out", default="out", help="folder of the executed copies (default: out)")
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT, help="seconds that one cell may take")
    arguments = parser.parse_args(argv)
    try:
        executed = run(arguments.notebooks, arguments.out, arguments.timeout)
    except (NotebookError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was executed is in {arguments.out}", file=sys.stderr)
        return 130
    print("Executed:", *executed, "Open them in a browser with: make lab", sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
