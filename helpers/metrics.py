"""vLLM's /metrics text (0.25 to 0.33) as golden metrics, each with its formula and its PromQL.

A counter says nothing by itself: what happened under a load is the difference of two scrapes, `golden(before, after)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate

RENAMED = {"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"}
HISTOGRAMS = {
    "queue_time": ("vllm:request_queue_time_seconds", "request_latency"),
    "ttft": ("vllm:time_to_first_token_seconds", "time_to_first_token"),
    "itl": ("vllm:inter_token_latency_seconds", "inter_token_latency"),
    "tpot": ("vllm:request_time_per_output_token_seconds", "inter_token_latency"),
    "e2e": ("vllm:e2e_request_latency_seconds", "request_latency"),
}
CUMULATIVE = ("_total", "_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Golden:
    """One metric. `value` is None where it cannot be known, and `note` then says why.

    A quantile also has `bounds`, the edges of the bucket it lies in: all that the server really knows about it.
    `resolved` is False if that is the first bucket (from 0) or the last (to infinity): the value is then made up.
    """

    value: float | dict[str, float] | None
    unit: str
    formula: str
    promql: str
    note: str = ""
    bounds: tuple[float, float] | None = None
    resolved: bool | None = None


class Samples:
    """The samples of one scrape; several engines or models of a server are added up."""

    def __init__(self, series: dict[tuple[str, frozenset], float]):
        self.series = series

    def find(self, name: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series of that name, or of the name it had before."""
        for known in (name, RENAMED.get(name)):
            found = [(dict(labels), value) for (series, labels), value in self.series.items() if series == known]
            if found:
                return found
        return []

    def total(self, name: str) -> float | None:
        values = [value for _, value in self.find(name)]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        values = [value for _, value in self.find(name)]
        return sum(values) / len(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float] | None:
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.find(name):
            sums[labels.get(label, "")] += value
        return dict(sums) or None

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, cumulative count), as `histogram_quantile` takes them."""
        sums = self.by(f"{name}_bucket", "le") or {}
        return sorted((float(bound), count) for bound, count in sums.items())

    def since(self, before: Samples) -> tuple[Samples, bool]:
        """Growth since an earlier scrape (gauges stay as they are), and whether the server was restarted in between.

        A restarted server counts from 0, so its own counts are the growth that is known. Prometheus's increase() does
        the same, but for each series by itself, which takes a histogram apart.
        """
        start = "process_start_time_seconds"
        restarted = before.total(start) != self.total(start) or any(
            self.series.get(key, 0.0) < value for key, value in before.series.items() if key[0].endswith(CUMULATIVE)
        )
        if restarted:
            return self, True
        grown = {
            key: value - before.series.get(key, 0.0) if key[0].endswith(CUMULATIVE) else value
            for key, value in self.series.items()
        }
        return Samples(grown), False


def parse(text: str) -> Samples:
    """Prometheus's text format. ValueError names the line that is not."""
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[tuple[str, frozenset], float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        try:
            found = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except (ValueError, IndexError, KeyError):
            raise ValueError(f"line {number} is not in Prometheus's text format: {line[:80]!r}") from None
        for sample in found:
            series[sample.name, frozenset(sample.labels.items())] = sample.value
    return Samples(series)


def histogram_quantile(q: float, buckets: list[tuple[float, float]]) -> tuple[float, tuple[float, float]] | None:
    """Prometheus's histogram_quantile of [(upper bound, cumulative count)], 0 < q <= 1: (value, bounds of its bucket).

    Linear within the bucket, the first of which starts at 0 (Prometheus, "Query functions"). In the bucket up to
    infinity it is the highest finite bound. None without observations or without a finite and an infinite bucket.
    """
    if not 0 < q <= 1:
        raise ValueError(f"a quantile is above 0 and at most 1, not {q}")
    if len(buckets) < 2 or buckets[-1][0] != math.inf or not buckets[-1][1]:
        return None
    uppers = [bound for bound, _ in buckets]
    counts = list(accumulate((count for _, count in buckets), max))
    rank = q * counts[-1]
    i = next(i for i, count in enumerate(counts) if count >= rank)
    low, below = (uppers[i - 1], counts[i - 1]) if i else (0.0, 0.0)
    if uppers[i] == math.inf:
        return low, (low, math.inf)
    return low + (uppers[i] - low) * (rank - below) / (counts[i] - below), (low, uppers[i])


def golden(
    before: str | Samples,
    after: str | Samples | None = None,
    *,
    seconds: float | None = None,
    max_num_batched_tokens: int | None = None,
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.99),
) -> dict[str, Golden]:
    """Golden metrics between two scrapes `seconds` apart, or since the server's start if there is only one.

    Names: prefix_hit_rate, kv_cache_usage, batch_efficiency, preemptions, running, waiting, success (by reason),
    prompt_throughput, generation_throughput, request_throughput, and mean, p50, p90, p99 (as asked) of queue_time,
    ttft, itl, tpot and e2e. Every one is present; what the text does not tell has the value None and a note.
    """
    before = parse(before) if isinstance(before, str) else before
    after = parse(after) if isinstance(after, str) else after
    now, restarted = (before, False) if after is None else after.since(before)

    metrics = {
        "prefix_hit_rate": _ratio(
            now,
            "fraction of prompt tokens",
            "vllm:prefix_cache_hits_total",
            "vllm:prefix_cache_queries_total",
        ),
        "kv_cache_usage": _gauge(
            now.mean("vllm:kv_cache_usage_perc"),
            "vllm:kv_cache_usage_perc",
            "fraction of blocks",
            "blocks that only the prefix cache still holds count as free",
        ),
        "batch_efficiency": _batch_efficiency(now, max_num_batched_tokens),
        "preemptions": _count(now, "vllm:num_preemptions_total"),
        "running": _gauge(now.total("vllm:num_requests_running"), "vllm:num_requests_running", "requests"),
        "waiting": _gauge(now.total("vllm:num_requests_waiting"), "vllm:num_requests_waiting", "requests"),
        "success": _success(now),
        "prompt_throughput": _throughput(now, "vllm:prompt_tokens_total", "tokens/s", seconds),
        "generation_throughput": _throughput(now, "vllm:generation_tokens_total", "tokens/s", seconds),
        "request_throughput": _throughput(now, "vllm:request_success_total", "requests/s", seconds),
    }
    for short, (name, family) in HISTOGRAMS.items():
        metrics[f"{short}_mean"] = _ratio(now, "s", f"{name}_sum", f"{name}_count")
        for q in quantiles:
            metrics[f"{short}_p{100 * q:g}"] = _quantile(now, name, family, q)
    if restarted:
        for name, metric in metrics.items():
            notes = ("the server was restarted: since then", metric.note)
            metrics[name] = replace(metric, note="; ".join(filter(None, notes)))
    return metrics


def _absent(name: str) -> str:
    return f"no {name} in the text: another server, or another version of vLLM"


def _gauge(value: float | None, name: str, unit: str, note: str = "") -> Golden:
    return Golden(value, unit, name, name, note if value is not None else _absent(name))


def _count(now: Samples, name: str) -> Golden:
    value = now.total(name)
    return Golden(value, "count", f"increase of {name}", f"sum(increase({name}[5m]))", _absent(name) * (value is None))


def _success(now: Samples) -> Golden:
    name, label = "vllm:request_success_total", "finished_reason"
    value = now.by(name, label)
    promql = f"sum by ({label}) (increase({name}[5m]))"
    return Golden(value, "requests", f"increase of {name} by {label}", promql, _absent(name) * (value is None))


def _throughput(now: Samples, name: str, unit: str, seconds: float | None) -> Golden:
    amount = now.total(name)
    note = _absent(name) if amount is None else "" if seconds else "give the seconds between two scrapes"
    value = None if note else amount / seconds
    return Golden(value, unit, f"increase of {name} / seconds", f"sum(rate({name}[5m]))", note)


def _ratio(now: Samples, unit: str, upper: str, lower: str) -> Golden:
    numerator, denominator = now.total(upper), now.total(lower)
    formula, promql = f"increase of {upper} / increase of {lower}", f"sum(rate({upper}[5m])) / sum(rate({lower}[5m]))"
    if numerator is None or denominator is None:
        return Golden(None, unit, formula, promql, _absent(upper if numerator is None else lower))
    if not denominator:
        return Golden(None, unit, formula, promql, f"{lower} did not grow: nothing happened")
    return Golden(numerator / denominator, unit, formula, promql)


def _batch_efficiency(now: Samples, limit: int | None) -> Golden:
    name = "vllm:iteration_tokens_total"
    tokens = _ratio(now, "fraction of max_num_batched_tokens", f"{name}_sum", f"{name}_count")
    caveat = "an approximation: the tokens of a chunked prompt count in the step that finishes its prefill"
    note = tokens.note or ("" if limit else "give max_num_batched_tokens, the size of a full batch")
    return Golden(
        None if note else tokens.value / limit,
        tokens.unit,
        f"({tokens.formula}) / max_num_batched_tokens",
        f"{tokens.promql} / {limit or 'max_num_batched_tokens'}",
        note or caveat,
    )


def _quantile(now: Samples, name: str, family: str, q: float) -> Golden:
    formula = f"{q:g} quantile over the buckets of {name}, linear within one"
    promql = f"histogram_quantile({q:g}, sum by (le) (rate({name}_bucket[5m])))"
    buckets = now.buckets(name)
    found = histogram_quantile(q, buckets)
    if found is None:
        return Golden(None, "s", formula, promql, f"{name} has no observations" if buckets else _absent(name))
    value, (low, high) = found
    resolved = low > 0 and high < math.inf
    note = (
        ""
        if resolved
        else (
            f"not resolved: somewhere between {low:g} and {high:g} s, one bucket; "
            f"start vLLM (0.32 or newer) with finer --custom-histogram-buckets for {family!r}, or measure at the client"
        )
    )
    return Golden(value, "s", formula, promql, note, (low, high), resolved)
