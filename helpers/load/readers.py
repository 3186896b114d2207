"""Files that others measured: `vllm bench serve`, Locust, nvidia-smi. Every reader gives a list of dicts.

What a file does not tell (N/A, [Not Supported], -) is None. A file that is damaged, cut off or of another kind raises
ReadError, whose one line names the file and the line.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

LATENCY = re.compile(r"_(ttft|tpot|itl|e2el|client_queue_time|e2el_including_client_queue)_ms$")
LOCUST_TEXT = {"Type", "Method", "Name", "Error", "First Seen", "Last Seen"}
LOCUST_HEADERS = ({"Request Count", "Failure Count"}, {"Timestamp", "User Count"}, {"Error", "Occurrences"})
SMI_NAME = re.compile(r"[a-z][a-z0-9_.]*( \[[^]]+\])?")
SMI_TEXT = re.compile(r"timestamp|name|version|uuid|serial|bus_id|Date|Time")
MISSING = re.compile(r"N/A|\[.*\]|-")
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
NUMBER_AND_UNIT = re.compile(rf"({NUMBER.pattern}) ?(%|MiB|W|MHz)?", re.IGNORECASE)


class ReadError(ValueError):
    def __init__(self, path: str | Path, line: int, problem: str):
        super().__init__(f"{path}, line {line}: {problem}")


def read_bench_serve(path: str | Path) -> list[dict]:
    """The results in a file of `vllm bench serve --save-result` or `--append-result`, of old and new versions.

    Keys are those of today: "request_goodput:" loses its colon, "failed" is reckoned from num_prompts where it is not
    written. If every request failed the latencies, which vLLM writes as 0, are None.
    """
    text = _text(path)
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    results, at = [], 0
    while at < len(text.rstrip()):
        at += len(text[at:]) - len(text[at:].lstrip())
        line = text.count("\n", 0, at) + 1
        try:
            result, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ReadError(path, error.lineno, f"damaged JSON, {error.msg}") from None
        except RecursionError:
            raise ReadError(path, line, "damaged JSON, nested too deep") from None
        results.append(_bench_result(path, line, result))
    return results


def read_locust(path: str | Path) -> list[dict]:
    """Rows of Locust's _stats.csv, _stats_history.csv or _failures.csv, by their own column names; times in ms."""
    rows = _csv_rows(path)
    _, header = next(rows)
    if not any(known <= set(header) for known in LOCUST_HEADERS):
        raise ReadError(path, 1, "not a stats, history or failures file of Locust")
    return [
        {name: cell if name in LOCUST_TEXT else _number(path, line, name, cell) for name, cell in row.items()}
        for line, row in _named(path, header, rows)
    ]


def read_nvidia_smi(path: str | Path, fields: str | None = None) -> list[dict]:
    """Rows of `nvidia-smi --query-gpu=... --format=csv` or of `nvidia-smi dmon`.

    Numbers lose their units, which nvidia-smi fixes: MiB, %, W, MHz (dmon: MB). A file written with `noheader` needs
    `fields`, the comma-separated names that the query had.
    """
    first = _text(path).lstrip()
    return _dmon(path) if first.startswith("#") else _query(path, fields)


def _text(path: str | Path) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(path, 1, error.strerror) from None
    except UnicodeDecodeError as error:
        raise ReadError(path, error.object.count(b"\n", 0, error.start) + 1, "not text in UTF-8") from None
    if not text.strip():
        raise ReadError(path, 1, "the file is empty")
    return text


def _bench_result(path: str | Path, line: int, result: object) -> dict:
    needed = ("duration", "completed", "request_throughput")
    if not isinstance(result, dict) or any(not isinstance(result.get(key), int | float) for key in needed):
        raise ReadError(path, line, f"not a result of `vllm bench serve`, which has numbers for {', '.join(needed)}")
    result = {key.removesuffix(":"): value for key, value in result.items()}
    if "failed" not in result:
        asked = result.get("num_prompts")
        result["failed"] = asked - result["completed"] if isinstance(asked, int) else None
    if not result["completed"]:
        result |= {key: None for key in result if LATENCY.search(key)}
    return result


def _csv_rows(path: str | Path, **options) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every row that is not blank."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True, **options)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise ReadError(path, reader.line_num, f"damaged CSV, {error}") from None


def _named(path: str | Path, header: list[str], rows: Iterator) -> Iterator[tuple[int, dict[str, str]]]:
    for line, cells in rows:
        if len(cells) != len(header):
            problem = f"{len(cells)} cells under {len(header)} columns: the file is cut off or damaged"
            raise ReadError(path, line, problem)
        yield line, dict(zip(header, (cell.strip() for cell in cells), strict=True))


def _number(path: str | Path, line: int, name: str, cell: str, unit: str = "") -> float | None:
    if MISSING.fullmatch(cell):
        return None
    value = cell.removesuffix(unit).rstrip() if cell.endswith(unit) else ""
    if not NUMBER.fullmatch(value):
        wanted = f"a number in {unit}" if unit else "a number"
        raise ReadError(path, line, f"{name} is {cell!r}, not {wanted}: the file is cut off or damaged")
    return float(value)


def _query(path: str | Path, fields: str | None) -> list[dict]:
    rows = _csv_rows(path, skipinitialspace=True)
    if fields is None:
        _, header = next(rows)
        if not all(SMI_NAME.fullmatch(name.strip()) for name in header):
            problem = "no header of nvidia-smi: another kind of file, or one written with noheader, which needs fields"
            raise ReadError(path, 1, problem)
    else:
        header = fields.split(",")
    header = [name.strip() for name in header]
    units = {name: name.partition(" [")[2].rstrip("]") for name in header}
    table = []
    for line, row in _named(path, header, rows):
        values = {}
        for name, cell in row.items():
            field, unit = name.partition(" [")[0], units[name]
            if unit:
                values[field] = _number(path, line, field, cell, unit)
            else:
                values[field] = _value(field, cell)
        table.append(values)
    return table


def _value(field: str, cell: str) -> float | str | None:
    if MISSING.fullmatch(cell):
        return None
    number = NUMBER_AND_UNIT.fullmatch(cell)
    return float(number[1]) if number and not SMI_TEXT.search(field) else cell


def _dmon(path: str | Path) -> list[dict]:
    """Two lines of header (names, units), which come again every so often, then a row a GPU and second."""
    header, table = None, []
    for line, text in enumerate(_text(path).splitlines(), 1):
        cells = text.removeprefix("#").split()
        if text.startswith("#"):
            if "gpu" in cells:
                header = cells
        elif header is None:
            raise ReadError(path, line, "a row before the names of its columns: not a file of nvidia-smi dmon")
        elif cells:
            [(_, row)] = _named(path, header, [(line, cells)])
            table.append({name: _dmon_value(path, line, name, cell) for name, cell in row.items()})
    if header is None:
        raise ReadError(path, 1, "not a file of nvidia-smi dmon, whose header names gpu")
    return table


def _dmon_value(path: str | Path, line: int, name: str, cell: str) -> float | str | None:
    return cell if SMI_TEXT.search(name) else _number(path, line, name, cell)
