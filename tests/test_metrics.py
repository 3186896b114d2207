"""Golden metrics from Prometheus text: hand-computed values, Prometheus's own test data, resets, absent metrics."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.metrics import golden, histogram_quantile, parse

TEXT = (Path(__file__).parent / "data" / "formats" / "vllm_metrics_v1_033.txt").read_text()
INF = math.inf
E2E = "vllm:e2e_request_latency_seconds"


def histogram(name: str, buckets: dict[str, int], total: float = 0.0) -> str:
    lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets.items()]
    return "\n".join([*lines, f"{name}_count {max(buckets.values())}", f"{name}_sum {total}", ""])


# Prometheus, promql/testdata/histograms.test: testhistogram (start="positive")
PUBLISHED = [(0.1, 50), (0.2, 70), (1.0, 110), (INF, 120)]


@pytest.mark.parametrize(
    ("q", "value", "bounds"),
    [(0.2, 0.048, (0, 0.1)), (0.5, 0.15, (0.1, 0.2)), (0.8, 0.72, (0.2, 1)), (1, 1, (1, INF))],
)
def test_quantiles_of_prometheus_own_test_data(q, value, bounds):
    assert histogram_quantile(q, PUBLISHED) == (pytest.approx(value, rel=1e-12), bounds)


@pytest.mark.parametrize(
    "buckets",
    [[], [(INF, 5)], [(1, 5), (2, 5)], [(1, 0), (INF, 0)]],
    ids=["no buckets", "only infinity", "no infinity", "no observations"],
)
def test_no_quantile_where_prometheus_gives_nan(buckets):
    assert histogram_quantile(0.5, buckets) is None


@pytest.mark.parametrize("q", [0, -1, 1.01])
def test_quantile_out_of_range(q):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        histogram_quantile(q, PUBLISHED)


@given(
    values=st.lists(st.floats(0.001, 20), min_size=1, max_size=60),
    bounds=st.sets(st.floats(0.01, 10), min_size=1, max_size=8).map(sorted),
    q=st.floats(0.01, 1),
)
def test_the_true_value_lies_in_the_bounds(values, bounds, q):
    buckets = [(bound, sum(value <= bound for value in values)) for bound in [*bounds, INF]]
    value, (low, high) = histogram_quantile(q, buckets)
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    assert low < true <= high
    assert value == pytest.approx(min(max(value, low), high), rel=1e-12)


def test_sample_of_033():
    metrics = golden(TEXT, max_num_batched_tokens=2048)
    assert metrics["prefix_hit_rate"].value == 112687 / 363507
    assert metrics["kv_cache_usage"].value == 0.8734
    assert metrics["batch_efficiency"].value == pytest.approx(1441949 / 4200 / 2048)
    assert "approximation" in metrics["batch_efficiency"].note
    assert (metrics["preemptions"].value, metrics["running"].value, metrics["waiting"].value) == (7, 23, 4)
    assert metrics["success"].value == {"stop": 431, "length": 66, "abort": 3, "error": 0, "repetition": 0}
    assert metrics["ttft_mean"].value == pytest.approx(82.75830101596443 / 500)
    assert metrics["itl_mean"].value == pytest.approx(56.14082445898049 / 3000)
    # rank 495 of 500 in the bucket from 0.25 (385) to 0.5 (498)
    assert metrics["ttft_p99"].value == pytest.approx(0.25 + 0.25 * (495 - 385) / (498 - 385))
    assert (metrics["ttft_p99"].bounds, metrics["ttft_p99"].resolved) == ((0.25, 0.5), True)
    # rank 250: 432 of 500 requests waited less than 0.3 s, in the first bucket
    assert (metrics["queue_time_p50"].bounds, metrics["queue_time_p50"].resolved) == ((0, 0.3), False)


def test_every_metric_has_formula_unit_and_promql():
    for name, metric in golden(TEXT, max_num_batched_tokens=2048, seconds=1).items():
        assert metric.value is not None, name
        assert metric.unit
        assert "vllm:" in metric.formula
        assert "vllm:" in metric.promql
        assert metric.promql.count("(") == metric.promql.count(")")


def test_a_p99_of_134_ms_is_not_resolved():
    """The articles' p99: all requests took 0.134 s, and vLLM's first bucket of this histogram ends at 0.3 s."""
    text = histogram(E2E, {"0.3": 1000, "0.5": 1000, "+Inf": 1000}, total=134.0)
    metrics = golden(text)
    p99 = metrics["e2e_p99"]
    assert p99.value == pytest.approx(0.297)
    assert (p99.resolved, p99.bounds) == (False, (0, 0.3))
    assert "between 0 and 0.3 s" in p99.note
    assert "--custom-histogram-buckets" in p99.note
    assert metrics["e2e_mean"].value == pytest.approx(0.134)


def test_finer_buckets_resolve_it():
    text = histogram(E2E, {"0.1": 0, "0.13": 900, "0.14": 1000, "0.3": 1000, "+Inf": 1000})
    p99 = golden(text)["e2e_p99"]
    assert (p99.resolved, p99.bounds, p99.note) == (True, (0.13, 0.14), "")
    assert p99.value == pytest.approx(0.139)


def test_beyond_the_last_bucket_is_not_resolved():
    p99 = golden(histogram(E2E, {"0.3": 1, "0.5": 2, "+Inf": 100}))["e2e_p99"]
    assert (p99.value, p99.resolved, p99.bounds) == (0.5, False, (0.5, INF))


def counters(prompt: int, stop: int, start: float | None = None) -> str:
    text = f"vllm:prompt_tokens_total {prompt}\n" + f'vllm:request_success_total{{finished_reason="stop"}} {stop}\n'
    return text if start is None else f"{text}process_start_time_seconds {start}\n"


def test_growth_between_two_scrapes():
    metrics = golden(counters(1000, 10), counters(1600, 13), seconds=2.0)
    assert metrics["prompt_throughput"].value == 300
    assert metrics["request_throughput"].value == 1.5
    assert metrics["success"].value == {"stop": 3}
    assert golden(counters(1000, 10), counters(1600, 13))["prompt_throughput"].value is None


def test_quantile_of_the_growth_alone():
    """Before: 100 slow requests. After: 100 fast ones more, and only these count."""
    before = histogram(E2E, {"0.3": 0, "0.5": 0, "5.0": 100, "+Inf": 100})
    after = histogram(E2E, {"0.3": 0, "0.5": 100, "5.0": 200, "+Inf": 200})
    assert golden(before, after)["e2e_p99"].value == pytest.approx(0.3 + 0.2 * 0.99)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (counters(1000, 10), counters(60, 1)),
        (counters(1000, 10), counters(5000, 9)),
        (counters(50, 1, start=100.0), counters(60, 1, start=200.0)),
    ],
    ids=["all lower", "one lower", "another start time"],
)
def test_a_restart_counts_from_zero(before, after):
    metrics = golden(before, after, seconds=1)
    assert metrics["prompt_throughput"].value == parse(after).total("vllm:prompt_tokens_total")
    assert "restarted" in metrics["prompt_throughput"].note
    assert "restarted" not in golden(after, after, seconds=1)["prompt_throughput"].note


def test_absent_metrics_are_none_with_a_reason():
    for name, metric in golden("", seconds=1, max_num_batched_tokens=1).items():
        assert metric.value is None, name
        assert metric.note.startswith("no vllm:"), name


def test_nothing_happened_is_none_too():
    metrics = golden(TEXT, TEXT, seconds=1)
    assert metrics["prefix_hit_rate"].value is None
    assert metrics["ttft_p99"].value is None
    assert metrics["ttft_p99"].note == "vllm:time_to_first_token_seconds has no observations"
    assert metrics["generation_throughput"].value == 0
    assert metrics["kv_cache_usage"].value == 0.8734


def test_the_old_name_of_kv_cache_usage():
    metrics = golden('vllm:gpu_cache_usage_perc{engine="0"} 0.25\n')
    assert metrics["kv_cache_usage"].value == 0.25


def test_engines_are_added_up_and_their_cache_is_averaged():
    text = "".join(
        f'vllm:prompt_tokens_total{{engine="{engine}"}} {tokens}\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {usage}\n'
        f'{E2E}_bucket{{engine="{engine}",le="0.3"}} {fast}\n'
        f'{E2E}_bucket{{engine="{engine}",le="0.5"}} 10\n'
        f'{E2E}_bucket{{engine="{engine}",le="+Inf"}} 10\n'
        for engine, tokens, usage, fast in [(0, 100, 0.0, 8), (1, 200, 0.2, 4)]
    )
    metrics = golden(text, seconds=1)
    assert metrics["prompt_throughput"].value == 300
    assert metrics["kv_cache_usage"].value == pytest.approx(0.1)
    assert metrics["e2e_p90"].value == pytest.approx(0.3 + 0.2 * (18 - 12) / (20 - 12))


@pytest.mark.parametrize("bad", ['vllm:x{le="0.3 5', "vllm:x five", "<html>", 'vllm:x{engine="0"}'])
def test_text_of_another_format_names_its_line(bad):
    with pytest.raises(ValueError, match="line 2 is not in Prometheus's text format") as error:
        parse(f"vllm:prompt_tokens_total 1\n{bad}\n")
    assert "\n" not in str(error.value)


@given(text=st.text(alphabet='vlm:_{}="0.9e+-# \\\n,', max_size=80))
def test_any_text_is_parsed_or_refused(text):
    try:
        parse(text)
    except ValueError as error:
        assert "is not in Prometheus's text format" in str(error)
