"""The standard set of a tier: closed loop at each concurrency, open loop at each rate, one record a point.

A record is written when the first repeat of its point ends and rewritten with every further one: an interrupted set
keeps what was finished, and a second call measures only what is missing.
"""

from __future__ import annotations

import fcntl
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from helpers import capacity, coursemodel, hardware, load, metrics, records, sampler, serving
from helpers.hardware import Tier
from helpers.load import LoadPlan, LoadResult
from helpers.records import Record
from helpers.sampler import Samples
from helpers.serving import Server

SEED_STEP = 100_000
SERVERS = 3
SHOWN = {
    "request_throughput": "req/s",
    "median_ttft_ms": "ms TTFT",
    "median_tpot_ms": "ms TPOT",
    "failed": "failed",
    "joules_per_token": "J/token",
}
GAUGES = ("kv_cache_usage", "running", "waiting")
NOTES = (
    f"Attempt n of a point (from 0, failed ones counted) uses the seed {SEED_STEP} * n + the record's. Prefix caching"
    " is off: random prompts over a small vocabulary repeat, and a repeated prompt would be answered from the cache."
)

# For predictions only. A server needs more than the floors: one stream of Qwen2.5-7B (bf16, 1024 in, 128 out) on an
# H200 took 4.67 ms a token and 31.4 ms to the first (vLLM 0.32.0, 2026-11-30), some 1.5 and 2 times the floors. Where
# there are no floors: seconds of a prefill of 128 tokens and of a decode step, course model, float32, two EPYC cores.
ABOVE_TPOT_FLOOR, ABOVE_TTFT_FLOOR = 1.5, 2.0
WITHOUT_FLOORS = 0.1, 0.016
START_SECONDS = {True: 130, False: 40}
PROMPTS_SECONDS = 2


def plans(tier: Tier) -> list[LoadPlan]:
    """The points of a tier: the ends of both lists first, then their middles, so that an early end leaves a curve.

    Closed loop: the tier's number of prompts, but at most four a user (16 for few users) and 512. Open loop: ten
    seconds of arrivals, at least 12. No two points share a seed.
    """
    lengths = {"input_len": tier.input_len, "output_len": tier.output_len}
    closed = [
        LoadPlan("closed", min(tier.num_prompts(n), max(16, 4 * n), 512), concurrency=n, seed=n, **lengths)
        for n in coarse_to_fine(tier.concurrency)
    ]
    opened = [
        LoadPlan("open", max(12, round(10 * rate)), rate=rate, seed=10_000 + round(10 * rate), **lengths)
        for rate in coarse_to_fine(tier.rates)
    ]
    return closed + opened


def coarse_to_fine(values: list) -> list:
    """The first, the last, then the middle of every gap: [1, 2, 4, 8, 16] -> [1, 16, 4, 2, 8]."""
    order, gaps = [0, len(values) - 1], [(0, len(values) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [values[i] for i in dict.fromkeys(order)] if values else []


def warm_up(tier: Tier) -> LoadPlan:
    """The uncounted load after each start of the server: two requests from each of up to 16 users."""
    users = min(16, max(tier.concurrency))
    lengths = {"input_len": tier.input_len, "output_len": tier.output_len}
    return LoadPlan("closed", 2 * users, concurrency=users, seed=SEED_STEP - 1, **lengths)


def predicted_seconds(plan: LoadPlan, tier: Tier) -> float:
    """Duration of a load with its preparation, predicted: prefills take turns, all users share the decode steps."""
    ttft, tpot = WITHOUT_FLOORS
    with suppress(ValueError):  # a model whose shape is not known can be measured all the same
        if tier.gpu:
            scheme = "awq" if "awq" in tier.model.lower() else "bf16"
            ttft = ABOVE_TTFT_FLOOR * capacity.ttft_floor(tier.model, tier.gpu, plan.input_len, scheme)
            tpot = ABOVE_TPOT_FLOOR * capacity.tpot_floor(tier.model, tier.gpu, scheme)
    answer = (plan.output_len - 1) * tpot
    if plan.kind == "closed":
        seconds = plan.num_requests * (ttft + answer / plan.concurrency)
    else:
        seconds = max(plan.num_requests / plan.rate, plan.num_requests * ttft) + ttft + answer
    return PROMPTS_SECONDS + seconds


@dataclass
class Point:
    """A load and its record so far; the record has an id once it is on disk."""

    plan: LoadPlan
    record: Record


def points(tier: Tier, folder: Path, repeats: int, only: tuple[str, ...] = ()) -> list[Point]:
    """Every point of the set with what the folder holds of it (same machine, versions, model and parameters).

    only: "closed", "open" or names such as "64 users"; ValueError for one that names nothing.
    """
    every = plans(tier)
    known = list(dict.fromkeys(name for plan in every for name in (plan.kind, plan.name)))
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"tier {tier.name} has no point {unknown[0]!r}; there are {', '.join(known)}")
    model, machine, versions = model_name(tier), hardware.machine(), hardware.versions()
    on_disk, _ = records.load_all(folder)
    found = []
    for plan in every:
        if only and not {plan.kind, plan.name} & set(only):
            continue
        parameters = {k: v for k, v in asdict(plan).items() if k not in ("kind", "seed") and v is not None}
        new = Record(
            title=f"{model.rpartition('/')[2]}, {plan.name}",
            tier=tier.name,
            kind=plan.kind,
            model=model,
            machine=machine,
            versions=versions,
            parameters={**parameters, "serve": serve_options(tier)},
            planned_repeats=repeats,
            seed=plan.seed,
            warmup=warm_up(tier).num_requests,
            speed_only=tier.speed_only,
            notes=NOTES,
        )
        same = [old for old in on_disk if _conditions(old) == _conditions(new)]
        old = max(same, key=lambda record: len(record.repeats), default=new)
        found.append(Point(plan, replace(old, planned_repeats=max(old.planned_repeats, repeats))))
    return found


def _conditions(record: Record) -> tuple:
    names = ("tier", "kind", "model", "machine", "versions", "parameters", "seed", "warmup", "speed_only", "provenance")
    return tuple(getattr(record, name) for name in names)


def model_name(tier: Tier) -> str:
    """The model as records call it: "course", or the Hugging Face id also where a folder of its shape is served."""
    if Path(tier.model) == coursemodel.path():
        return "course"
    return Path(tier.model).name.replace("--", "/", 1) if os.path.isdir(tier.model) else tier.model


def serve_options(tier: Tier) -> dict:
    options = {**tier.serve, "enable_prefix_caching": False}
    return {**options, "load_format": "dummy"} if tier.speed_only else options


def missing(found: list[Point], repeats: int) -> list[tuple[Point, int]]:
    """(point, number of the attempt) of all that is to be measured: a first repeat of every point, then a second."""
    rounds = []
    for point in found:
        done, failed = len(point.record.repeats), len(point.record.failures)
        rounds += [(repeat, point, repeat + failed) for repeat in range(done, repeats)]
    return [(point, attempt) for _, point, attempt in sorted(rounds, key=lambda entry: entry[0])]


def describe(tier: Tier, found: list[Point], repeats: int) -> str:
    """The plan as text, with its predicted duration."""
    rows = tuple(
        (p.plan.kind, p.plan.name, p.plan.num_requests, len(p.record.repeats), predicted_seconds(p.plan, tier))
        for p in found
    )
    left = missing(found, repeats)
    minutes = sum(predicted_seconds(point.plan, tier) for point, _ in left) / 60
    return (
        f"{model_name(tier)}{' (dummy weights: speed only)' if tier.speed_only else ''} on tier {tier.name},"
        f" {tier.input_len} tokens in, {tier.output_len} out, {repeats} repeats\n"
        f"{records.Table(('loop', 'point', 'prompts', 'repeats done', 'seconds a repeat (predicted)'), rows)}\n"
        f"{len(left)} loads to run, {minutes:.1f} min (predicted), after a start of {START_SECONDS[bool(tier.gpu)]} s"
    )


def measure(
    tier: Tier,
    folder: str | Path,
    *,
    repeats: int = 3,
    only: tuple[str, ...] = (),
    serve: Callable = serving.serve,
    stream: Callable = load.stream,
    sample: Callable = sampler.sample,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Measure what is missing of the set and return its records, complete or not.

    A load that fails is noted in its record and the set goes on. When the server or the load's process dies, a new
    server is started, and the point that it died of is left to the next call; RuntimeError when a third server dies
    before the end, or when a new one answers nothing.
    """
    folder = Path(folder)
    with alone(folder):
        found = points(tier, folder, repeats, only)
        say(describe(tier, found, repeats))
        left = missing(found, repeats)
        total = len(left)
        for _ in range(SERVERS):
            if not left:
                break
            with serve(tier.model, progress=sys.stderr.isatty(), **serve_options(tier)) as server:
                say(f"server ready after {server.start_seconds:.0f} s: {server.command}")
                for point, line in session(tier, server, left, stream, sample):
                    keep(point.record, folder)
                    say(f"[{total - len(left)}/{total}] {line}")
        if left:
            raise RuntimeError(f"stopped after {SERVERS} servers: {len(left)} of {total} loads were not run")
        return [point.record for point in found]


def session(
    tier: Tier, server: Server, left: list[tuple[Point, int]], stream: Callable, sample: Callable
) -> Iterator[tuple[Point, str]]:
    """Work off `left` on one server: (point, line to show) after each load. Ends early when server or load dies."""
    words = shlex.split(server.command)
    words[2] = model_name(tier)  # not the path of somebody's folder
    facts = {
        **server.log.facts(),
        "model": model_name(tier),
        "start_seconds": round(server.start_seconds, 1),
        "command": shlex.join(words),
    }
    loads = [warm_up(tier), *(replace(p.plan, seed=p.plan.seed + number * SEED_STEP) for p, number in left)]
    results = stream(
        loads,
        base_url=server.base_url,
        model_name=server.model_name,
        tokenizer=tokenizer_folder(server.model_path),
        progress=False,
    )
    with closing(results):
        first = next(results)
        if not first.completed:
            raise RuntimeError(f"the server answered no request of the warm-up: {next(iter(first.errors))}")
        started, predicted = time.monotonic(), 0.0
        while left:
            point, number = left.pop(0)
            point.record.facts = point.record.facts or facts
            result = None
            try:
                before = server.metrics_text()
                with sample(server.pid) as samples:
                    result = next(results)
                if not result.completed:
                    raise load.LoadError(next(iter(result.errors)))
                outcome = add_repeat(point.record, result, samples, before, server.metrics_text())
            except (RuntimeError, OSError, ValueError) as error:
                outcome = f"failed: {error}"
                point.record.failures.append(f"attempt {number}: {error}")
            predicted += predicted_seconds(point.plan, tier)
            elapsed = time.monotonic() - started
            rest = sum(predicted_seconds(p.plan, tier) for p, _ in left) * elapsed / predicted
            yield point, f"{point.record.title}: {outcome} | {elapsed:.0f} s, some {rest:.0f} s left"
            if result is None or not server.running:
                left[:] = [entry for entry in left if entry[0] is not point]
                return


def add_repeat(record: Record, result: LoadResult, samples: Samples, before: str, after: str) -> str:
    """Append a repeat: the client's summary, the sampler's, the server's metrics of this load, joules per token."""
    during = window(samples, result.duration)
    summary = result.summary()
    values = {
        **summary,
        **during.summary(),
        **server_metrics(before, after, result.duration, record.facts.get("max_num_batched_tokens")),
        "joules_per_token": during.joules_per_token(summary["total_output_tokens"]),
    }
    record.repeats.append({name: value for name, value in values.items() if value is not None and math.isfinite(value)})
    rows = len(record.series.get("repeat", ()))
    new = {**during.columns, "repeat": [len(record.repeats)] * len(during)}
    for name in {*record.series, *new}:
        record.series[name] = record.series.get(name, [None] * rows) + new.get(name, [None] * len(during))
    shown = ", ".join(f"{values[name]:.4g} {unit}" for name, unit in SHOWN.items() if values[name] is not None)
    return f"repeat {len(record.repeats)} of {record.planned_repeats}, {shown}"


def server_metrics(before: str, after: str, seconds: float, batched_tokens: int | None) -> dict[str, float]:
    """The golden metrics of a load by the name server_NAME (server_NAME_s in seconds).

    Without the gauges, which say nothing once the load has ended, and quantiles that the buckets do not resolve.
    """
    golden = metrics.golden(before, after, seconds=seconds, max_num_batched_tokens=batched_tokens)
    return {
        f"server_{name}{'_s' if metric.unit == 's' else ''}": metric.value
        for name, metric in golden.items()
        if isinstance(metric.value, int | float) and metric.resolved is not False and name not in GAUGES
    }


def window(samples: Samples, seconds: float) -> Samples:
    """The last `seconds` of the samples: before them the load's process was still making prompts."""
    during = Samples()
    times = samples.columns.get("t_s", [])
    for i, t in enumerate(times):
        if t >= times[-1] - seconds:
            during.append({name: column[i] for name, column in samples.columns.items()})
    return during


def keep(record: Record, folder: Path) -> None:
    """Write the record: a new file at first, then into that file, unless somebody else has changed it meanwhile."""
    if record.id:
        with suppress(ValueError):
            records.update(record, folder)
            return
    else:
        record.date = records.now()
    record.id = records.save(record, folder).stem


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder until the block or the process ends; ValueError when another set is written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another set is being recorded into {folder}: wait, or give another folder") from None
        yield
    finally:
        os.close(handle)


def tokenizer_folder(model_path: str) -> str:
    """The folder with the model's tokenizer; for a Hugging Face id that of the local cache, which the server filled."""
    if os.path.isdir(model_path):
        return model_path
    from huggingface_hub import snapshot_download

    return snapshot_download(model_path, allow_patterns=["*token*", "vocab*", "merges*"], local_files_only=True)
