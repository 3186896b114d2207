"""What a notebook checks, each as one line that ends in yes or NO.

The line holds only what does not change from run to run (counts, names, bytes); times stay in the figure above it.
"""

from __future__ import annotations

from helpers.capacity import MemoryPlan
from helpers.load import LoadResult
from helpers.metrics import HISTOGRAMS, Golden, Samples
from helpers.roofs import Roofs


def line(statement: str, holds: bool) -> str:
    return f"{statement}: {'yes' if holds else 'NO'}"


def all_answered(results: list[LoadResult]) -> str:
    """No request failed, of any load."""
    sent = sum(len(result.requests) for result in results)
    return line(f"all {sent} requests were answered", sum(result.completed for result in results) == sent)


def _ends(results: list[LoadResult], metric: str) -> tuple[LoadResult, LoadResult, bool]:
    """The loads with the least and the most arrivals, and whether the metric is larger in the second."""

    def load(result: LoadResult) -> float:
        return result.plan.concurrency or result.plan.rate

    least, most = min(results, key=load), max(results, key=load)
    return least, most, most.summary()[metric] > least.summary()[metric]


def throughput_grows(results: list[LoadResult]) -> str:
    """More users together get more tokens per second."""
    least, most, holds = _ends(results, "output_throughput")
    return line(f"more tokens per second with {most.plan.concurrency} users than with {least.plan.concurrency}", holds)


def latency_rises(results: list[LoadResult]) -> str:
    """Each of many users waits longer for a token."""
    least, most, holds = _ends(results, "median_tpot_ms")
    return line(f"a longer TPOT with {most.plan.concurrency} users than with {least.plan.concurrency}", holds)


def queue_grows(results: list[LoadResult]) -> str:
    """Above its capacity a server's queue shows in TTFT."""
    return line("a longer p99 TTFT at the highest rate than at the lowest", _ends(results, "p99_ttft_ms")[2])


def kv_tokens(plan: MemoryPlan, facts: dict) -> str:
    """The pool that the plan predicts is the pool that vLLM logged, within the 1 % that a log of 0.01 GiB allows."""
    logged = facts.get("kv_tokens", 0)
    statement = f"KV cache planned for {plan.kv_tokens:,} tokens, vLLM logged {logged:,}; equal within 1 %"
    return line(statement, abs(plan.kv_tokens - logged) <= 0.01 * logged)


def at_or_above_floor(name: str, measured_ms: float, floor_ms: float) -> str:
    """No measurement beats its floor; one that seems to has a wrong unit, a wrong model or a cache behind it."""
    return line(f"{name} at or above its roofline floor", measured_ms >= floor_ms)


def under_the_roof(points: list[tuple[float, float]], roofs: Roofs) -> str:
    """Every point (FLOP per byte, FLOP/s) lies under both ceilings."""
    holds = all(flops <= min(roofs.flops, intensity * roofs.bandwidth) for intensity, flops in points)
    return line(f"all {len(points)} points under the roof", holds)


def server_counted(golden: dict[str, Golden], results: list[LoadResult]) -> str:
    """The server's counters grew by what the clients sent; a warm-up request counts there and not here."""
    sent = sum(len(result.requests) + result.plan.num_warmups for result in results)
    counted = sum((golden["success"].value or {}).values())
    return line(f"the clients sent {sent} requests, the server finished {counted:.0f}", counted == sent)


def resolvable(metric: str, value_ms: float, samples: Samples) -> str:
    """Whether the server's histogram has a bucket bound below a value, so that it can tell it from 0."""
    bounds = [bound for bound, _ in samples.buckets(HISTOGRAMS[metric][0])]
    if not bounds:
        return line(f"{metric} of {value_ms:g} ms can be read off the server's histogram (it has none)", False)
    first = f"its first bucket ends at {1e3 * bounds[0]:g} ms"
    return line(
        f"{metric} of {value_ms:g} ms can be read off the server's histogram ({first})", bounds[0] < value_ms / 1e3
    )


def same_tokens(facts: dict, changed: dict, option: str) -> str:
    """Changing an option left the KV pool as it was."""
    return line(
        f"{facts['kv_tokens']:,} KV tokens before, {changed['kv_tokens']:,} after changing {option}: the same",
        facts["kv_tokens"] == changed["kv_tokens"],
    )


def slower(before: LoadResult, after: LoadResult, option: str) -> str:
    """The same load gives fewer tokens per second after the change."""
    holds = after.summary()["output_throughput"] < before.summary()["output_throughput"]
    return line(f"{before.plan.concurrency} users get fewer tokens per second with {option}", holds)
