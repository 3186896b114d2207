"""One measured run: what, where, with which versions, how many times; one JSON file each."""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = Path(__file__).with_name("recorded")
SCHEMA = 1
MARK = "workbook_record"
PROVENANCES = ("measured", "predicted")


class Spread(NamedTuple):
    """Smallest and largest repeat of a metric, and their distance relative to the median."""

    low: float
    high: float
    relative: float


def now() -> str:
    """The time in UTC, ISO 8601 to the second, as a record's date."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Record:
    """A run and its repeats.

    repeats: one dict of metric -> number per finished repeat, in the order they were measured, of planned_repeats;
    failures: one line per failed repeat. seed: the first repeat's. warmup: requests sent before the first repeat.
    series: the sampler's columns, all of one length. facts: what the server said of itself when it started.
    speed_only: dummy weights, so nothing about quality. id: the file's name without .json, once it is saved.
    """

    title: str
    tier: str
    kind: str
    model: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    parameters: dict[str, Any]
    repeats: list[dict[str, float]] = field(default_factory=list)
    planned_repeats: int = 1
    failures: list[str] = field(default_factory=list)
    seed: int = 0
    warmup: int = 0
    provenance: str = "measured"
    speed_only: bool = False
    notes: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list] = field(default_factory=dict)
    date: str = field(default_factory=now)
    id: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            kind = {"str": str, "int": int, "bool": bool}.get(f.type, list if f.type.startswith("list") else dict)
            value = getattr(self, f.name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ValueError(f"record field {f.name} is {value!r}; expected {f.type}")
        for name in ("title", "tier", "kind", "model"):
            if not getattr(self, name):
                raise ValueError(f"record field {name} is empty")
        if self.provenance not in PROVENANCES:
            raise ValueError(f"record provenance is {self.provenance!r}; expected one of {', '.join(PROVENANCES)}")
        try:
            datetime.strptime(self.date, "%Y-%m-%dT%H:%M:%SZ")
        except ValueError:
            raise ValueError(f"record date is {self.date!r}; expected UTC such as 2026-11-30T12:00:00Z") from None
        for i, metrics in enumerate(self.repeats):
            if not isinstance(metrics, dict) or not metrics:
                raise ValueError(f"repeat {i} is {metrics!r}; expected a dict of metric -> number")
            for name, value in metrics.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"repeat {i} has {name} = {value!r}; leave out a metric that is no finite number")
        if not all(isinstance(line, str) for line in self.failures):
            raise ValueError("record failures must be lines of text")
        if not all(isinstance(column, list) for column in self.series.values()):
            raise ValueError("record series must map a column's name to a list")
        if len({len(column) for column in self.series.values()}) > 1:
            raise ValueError("record series has columns of different lengths")

    @property
    def complete(self) -> bool:
        return len(self.repeats) >= self.planned_repeats

    @property
    def state(self) -> str:
        """ "complete", "2 of 3 repeats", or "failed" when no repeat succeeded and at least one failed."""
        if self.complete:
            return "complete"
        return (
            "failed" if self.failures and not self.repeats else f"{len(self.repeats)} of {self.planned_repeats} repeats"
        )

    @property
    def metrics(self) -> list[str]:
        return sorted({name for repeat in self.repeats for name in repeat})

    def values(self, metric: str) -> list[float]:
        """The metric in every repeat that has it. Raises ValueError when none has."""
        found = [repeat[metric] for repeat in self.repeats if metric in repeat]
        if not found:
            known = ", ".join(self.metrics) or "none: no repeat has finished"
            raise ValueError(f"record {self.id or self.title!r} has no metric {metric!r}; it has {known}")
        return found

    def median(self, metric: str) -> float:
        return statistics.median(self.values(metric))

    def spread(self, metric: str) -> Spread:
        values = self.values(metric)
        low, high, median = min(values), max(values), statistics.median(values)
        return Spread(low, high, (high - low) / abs(median) if median else 0.0 if high == low else math.inf)


def dumps(record: Record) -> str:
    """The record as canonical JSON: sorted keys, indent 1, a checksum over the rest, a newline at the end."""
    body = asdict(record)
    del body["id"]
    body[MARK] = SCHEMA
    try:
        text = json.dumps({**body, "sha256": _checksum(body)}, indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"record {record.title!r} cannot be written as JSON: {error}") from None
    if json.loads(text) != {**body, "sha256": _checksum(body)}:
        raise ValueError(f"record {record.title!r} holds tuples or keys that are no text; JSON would change them")
    return text + "\n"


def loads(text: str, id: str = "") -> Record:
    """The record in a file's text. Raises ValueError with the reason when it is not one, is damaged or is too new."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON, or cut off: {error}") from None
    if not isinstance(body, dict) or MARK not in body:
        raise ValueError(f"not a record of this workbook (no {MARK!r} in it)")
    schema = body[MARK]
    if not isinstance(schema, int) or schema < 1:
        raise ValueError(f"damaged: schema version {schema!r}")
    if schema > SCHEMA:
        raise ValueError(
            f"written by a newer workbook (schema {schema}, this one reads up to {SCHEMA}): update the workbook"
        )
    if body.pop("sha256", None) != _checksum(body):
        raise ValueError("edited or damaged: its checksum does not match")
    del body[MARK]
    try:
        return Record(**body, id=id)
    except TypeError as error:
        raise ValueError(f"fields do not match: {error}") from None


def _checksum(body: dict) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_name(record: Record) -> str:
    """date-tier-kind-title, for example 2026-11-30-h200-closed-qwen2-5-7b-64-users (without .json)."""
    words = f"{record.date[:10]} {record.tier} {record.kind} {record.title}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:120].rstrip("-")


def save(record: Record, folder: str | Path) -> Path:
    """Write a new file and return its path; a second of the same name gets -2, -3, ..., no existing file is touched.

    A reader never sees half a file, also when several processes save at once: the hidden temporary file, created
    exclusively, reserves the name until it is renamed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text, stem, number = dumps(record), file_name(record), 1
    while True:
        target = folder / f"{stem}{'' if number == 1 else f'-{number}'}.json"
        temporary = folder / f".{target.name}.tmp"
        number += 1
        if target.exists():
            continue
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
        if target.exists():
            os.close(handle)
            temporary.unlink()
            continue
        _write(handle, text, temporary, target)
        return target


def update(record: Record, folder: str | Path) -> Path:
    """Rewrite the file of a record that was saved before, with repeats or failures added to it.

    Raises ValueError, and leaves the file alone, when it is damaged or holds a repeat that the new record lacks.
    """
    target = Path(folder) / f"{record.id}.json"
    text = dumps(record)
    try:
        old = loads(target.read_text(encoding="utf-8"), record.id)
    except (OSError, ValueError) as error:
        raise ValueError(f"{target} cannot be updated: {error}") from None
    if record.repeats[: len(old.repeats)] != old.repeats:
        raise ValueError(f"{target} holds repeats that the update would lose; nothing was written")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _write(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), text, temporary, target)
    return target


def _write(handle: int, text: str, temporary: Path, target: Path) -> None:
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_all(folder: str | Path) -> tuple[list[Record], list[str]]:
    """Every record of a folder, in order of file name, and a line "name: reason" per .json file that is none."""
    records, problems = [], []
    for path in sorted(Path(folder).glob("*.json")):
        if path.name.startswith("."):
            continue
        try:
            records.append(loads(path.read_text(encoding="utf-8"), path.stem))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.name}: {error}")
    return records, problems


def select(records: Iterable[Record], **filters: Any) -> list[Record]:
    """The records whose fields or parameters equal the filters: select(records, tier="h200", concurrency=64)."""
    names = {f.name for f in fields(Record)} | {"complete", "state"}

    def matches(record: Record) -> bool:
        return all(
            (getattr(record, name) if name in names else record.parameters.get(name)) == value
            for name, value in filters.items()
        )

    return [record for record in records if matches(record)]


@dataclass(frozen=True)
class Table:
    """Rows of text or numbers under a header; prints as aligned text, shows as HTML in a notebook."""

    header: tuple[str, ...]
    rows: tuple[tuple, ...]
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [self.header, *([_text(value) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        numeric = [any(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.header))]
        body = (
            "  ".join(
                cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)
            )
            for row in cells
        )
        return "\n".join([*(line.rstrip() for line in body), *self.lines])

    def _repr_html_(self) -> str:
        def row(cells: Iterable, tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(_text(cell))}</{tag}>" for cell in cells) + "</tr>"

        notes = "".join(f"<div>{html.escape(line)}</div>" for line in self.lines)
        return f"<table>{row(self.header, 'th')}{''.join(row(r, 'td') for r in self.rows)}</table>{notes}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value)


def table(records: Iterable[Record], metrics: Iterable[str] = ()) -> Table:
    """One row per record: model, provenance, state, and the medians of the metrics (None where it has none)."""
    metrics = tuple(metrics)
    rows = tuple(
        (
            r.id or r.title,
            r.model + (" (dummy weights)" if r.speed_only else ""),
            r.provenance,
            r.state,
            *(r.median(m) if m in r.metrics else None for m in metrics),
        )
        for r in records
    )
    return Table(("record", "model", "provenance", "state", *metrics), rows)


class Row(NamedTuple):
    """A metric of two records: medians, b over a, and whether the ranges of the repeats are apart."""

    metric: str
    a: float
    b: float
    ratio: float
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Rows, every differing key with its two values, and a line for whatever makes the two unlike things."""

    rows: tuple[Row, ...]
    differences: dict[str, tuple[Any, Any]]
    cautions: tuple[str, ...]

    def table(self) -> Table:
        other = [f"differs: {k}: {a} | {b}" for k, (a, b) in self.differences.items() if not _unlike(k)]
        return Table(("metric", "a", "b", "b/a", "verdict"), self.rows, (*self.cautions, *other))

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


UNLIKE = ("model", "kind", "provenance", "speed_only", "machine", "input_len", "output_len", "dataset")


def _unlike(key: str) -> bool:
    return any(part in UNLIKE for part in key.split("."))


def compare(a: Record, b: Record, metrics: Iterable[str] | None = None) -> Comparison:
    """Compare the metrics that both have (or those named), b against a.

    The verdict is "within noise" when the ranges [min, max] of the repeats overlap, "differs" when they are apart, and
    "unknown: one repeat" when either has fewer than two repeats of the metric. Nothing is refused: what makes the two
    unlike (machine, model, lengths, measured against predicted) is named in the cautions.
    """
    shared = [m for m in a.metrics if m in b.metrics] if metrics is None else list(metrics)
    rows = []
    for metric in shared:
        left, right = a.median(metric), b.median(metric)
        ours, theirs = a.spread(metric), b.spread(metric)
        verdict = "within noise" if ours.low <= theirs.high and theirs.low <= ours.high else "differs"
        if min(len(a.values(metric)), len(b.values(metric))) < 2:
            verdict = "unknown: one repeat"
        rows.append(Row(metric, left, right, right / left if left else 1.0 if right == left else math.inf, verdict))
    one, two = _conditions(a), _conditions(b)
    pairs = {key: (one.get(key), two.get(key)) for key in sorted(one.keys() | two.keys())}
    differences = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    cautions = [f"caution: {key} differs: {x} | {y}" for key, (x, y) in differences.items() if _unlike(key)]
    cautions += [f"caution: {r.id or r.title} is not complete ({r.state})" for r in (a, b) if not r.complete]
    return Comparison(tuple(rows), differences, tuple(cautions))


def _conditions(record: Record) -> dict[str, Any]:
    flat = {name: getattr(record, name) for name in ("model", "tier", "kind", "provenance", "speed_only", "warmup")}
    for group in ("machine", "versions", "parameters"):
        flat |= {f"{group}.{key}": value for key, value in getattr(record, group).items()}
    return flat
