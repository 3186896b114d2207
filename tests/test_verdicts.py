"""Every verdict that a notebook compares can come out as NO."""

from dataclasses import replace

import pytest

from helpers import capacity, metrics, verdicts
from helpers.load import LoadPlan, LoadResult, Request
from helpers.metrics import Golden
from helpers.roofs import Roofs


def result(users=1, *, seconds=10.0, ttft=0.1, tpot=0.01, tokens=11, failed=0, kind="closed", warmups=0) -> LoadResult:
    """Two answered requests (and some failed ones) of `tokens` tokens each."""
    which = {"concurrency": users} if kind == "closed" else {"rate": float(users)}
    plan = LoadPlan(kind, 2 + failed, input_len=8, output_len=tokens, num_warmups=warmups, **which)
    good = [Request(0.0, ttft, [tpot] * (tokens - 1), ttft + tpot * (tokens - 1), 8, tokens) for _ in range(2)]
    return LoadResult(plan, "vllm", "m", seconds, good + [Request(0.0, None, [], None, 8, 0, error="503")] * failed)


CASES = {
    "answered": (
        lambda: verdicts.all_answered([result(), result()]),
        lambda: verdicts.all_answered([result(), result(failed=1)]),
    ),
    "throughput": (
        lambda: verdicts.throughput_grows([result(1, seconds=10), result(8, seconds=2)]),
        lambda: verdicts.throughput_grows([result(1, seconds=2), result(8, seconds=10)]),
    ),
    "latency": (
        lambda: verdicts.latency_rises([result(8, tpot=0.02), result(1, tpot=0.01)]),
        lambda: verdicts.latency_rises([result(8, tpot=0.01), result(1, tpot=0.02)]),
    ),
    "queue": (
        lambda: verdicts.queue_grows([result(1, kind="open"), result(9, kind="open", ttft=2.0)]),
        lambda: verdicts.queue_grows([result(1, kind="open", ttft=2.0), result(9, kind="open")]),
    ),
    "floor": (
        lambda: verdicts.at_or_above_floor("TPOT", 4.67, 2.94),
        lambda: verdicts.at_or_above_floor("TPOT", 2.0, 2.94),
    ),
    "roof": (
        lambda: verdicts.under_the_roof([(1.0, 9e9), (100.0, 9e10)], Roofs("cpu", 1e10, 1e11, "float32")),
        lambda: verdicts.under_the_roof([(1.0, 9e9), (1.0, 2e10)], Roofs("cpu", 1e10, 1e11, "float32")),
    ),
    "counted": (
        lambda: verdicts.server_counted(success(5), [result(warmups=1), result()]),
        lambda: verdicts.server_counted(success(4), [result(warmups=1), result()]),
    ),
    "tokens": (
        lambda: verdicts.same_tokens({"kv_tokens": 100}, {"kv_tokens": 100}, "block_size"),
        lambda: verdicts.same_tokens({"kv_tokens": 100}, {"kv_tokens": 50}, "block_size"),
    ),
    "slower": (
        lambda: verdicts.slower(result(8, seconds=2), result(8, seconds=10), "max_num_seqs=1"),
        lambda: verdicts.slower(result(8, seconds=10), result(8, seconds=2), "max_num_seqs=1"),
    ),
    "line": (lambda: verdicts.line("this", True), lambda: verdicts.line("this", False)),
}


def success(count: float) -> dict[str, Golden]:
    return {"success": Golden({"stop": count - 1, "length": 1.0}, "requests", "", "")}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_can_be_yes_and_no(name):
    true, false = CASES[name]
    assert true().endswith(": yes")
    assert false().endswith(": NO")


def test_a_pool_must_be_the_planned_one_within_a_percent():
    plan = capacity.memory_plan("Qwen2.5-0.5B", kv_cache_memory_bytes=2**30, block_size=16)
    assert plan.kv_tokens == 2**30 // 12_288 // 16 * 16  # the formula by hand
    for error, word in ((1.0, "yes"), (1.009, "yes"), (0.98, "NO"), (1.02, "NO"), (0.0, "NO")):
        assert verdicts.kv_tokens(plan, {"kv_tokens": round(plan.kv_tokens * error)}).endswith(word)
    assert verdicts.kv_tokens(plan, {}).endswith("NO")
    assert verdicts.kv_tokens(replace(plan, kv=2 * plan.kv), {"kv_tokens": plan.kv_tokens}).endswith("NO")


def test_a_value_below_the_first_bucket_cannot_be_read():
    name = "vllm:e2e_request_latency_seconds_bucket"
    text = f'{name}{{le="0.3"}} 5.0\n{name}{{le="+Inf"}} 5.0\n'
    assert verdicts.resolvable("e2e", 134.0, metrics.parse(text)).endswith("300 ms): NO")
    assert verdicts.resolvable("e2e", 301.0, metrics.parse(text)).endswith("yes")
    assert verdicts.resolvable("ttft", 301.0, metrics.parse(text)).endswith("NO")
