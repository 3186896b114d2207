"""Both drivers on a real vLLM server: their numbers against vLLM's own result files and the server's own counters."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from server_tools import free_port

from helpers import coursemodel, load
from helpers.load import LoadPlan, drivers
from helpers.load.readers import read_bench_serve
from helpers.load.traces import write_sharegpt
from helpers.metrics import golden, parse
from helpers.serving import serve

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.vllm
LENGTHS = {"input_len": 64, "output_len": 12}
SLO = {"ttft_ms": 300.0, "tpot_ms": 60.0, "e2el_ms": 900.0}


@pytest.fixture(scope="module")
def server():
    with serve(coursemodel.path(), load_format="dummy", max_model_len=2048, progress=False) as server:
        yield server


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    report = "the bearing shows a crack of nine millimetres near the flange and no porosity was found "
    talks = [(report[i % 70 :] + report * (i % 5), report[: 20 + 2 * i]) for i in range(40)]
    return write_sharegpt(talks, tmp_path_factory.mktemp("trace") / "trace.json")


def settled_metrics(server):
    """The server's counters once the last request is booked, which may be after its answer."""
    while parse(server.metrics_text()).total("vllm:num_requests_running"):
        time.sleep(0.05)
    return server.metrics_text()


def stream(server, plans, driver, raw_dir):
    tokenizer = coursemodel.path()
    return load.stream(
        plans, base_url=server.base_url, tokenizer=tokenizer, driver=driver, raw_dir=raw_dir, progress=False
    )


def measured(server, results, count):
    """[(result, metrics before, metrics after)] of the next loads of a stream."""
    found = []
    for _ in range(count):
        before = settled_metrics(server)
        found.append((next(results), before, settled_metrics(server)))
    return found


@pytest.fixture(scope="module")
def plans(trace):
    return [
        LoadPlan("closed", 16, concurrency=4, seed=1, **LENGTHS),
        LoadPlan("open", 16, rate=8.0, burstiness=0.5, seed=2, **LENGTHS),
        LoadPlan("closed", 8, concurrency=2, dataset=trace, seed=3),
    ]


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("raw")


@pytest.fixture(scope="module")
def vllm_stream(server, plans, raw_dir):
    """All loads of vLLM's driver in one process; the last one outlives its server."""
    return stream(server, [*plans, LoadPlan("closed", 2000, concurrency=2, **LENGTHS)], "vllm", raw_dir)


@pytest.fixture(scope="module")
def by_vllm(server, plans, vllm_stream):
    """With vLLM's own goodput asked for, to compare with, and a dead proxy, which is not for this machine's servers."""
    ours = drivers.bench_arguments
    limits = ["--goodput", *(f"{name.removesuffix('_ms')}:{limit}" for name, limit in SLO.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers, "bench_arguments", lambda *plan: ours(*plan) + limits)
        patch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        patch.delenv("no_proxy", raising=False)
        patch.delenv("NO_PROXY", raising=False)
        return measured(server, vllm_stream, len(plans))


@pytest.fixture(scope="module")
def by_locust(server, plans, raw_dir):
    return measured(server, stream(server, [plans[0], plans[2]], "locust", raw_dir), 2)


def test_the_summary_is_the_one_that_vllm_writes(by_vllm, raw_dir):
    for number, (result, _, _) in enumerate(by_vllm):
        [written] = read_bench_serve(raw_dir / f"bench_serve_{number}.json")
        summary = result.summary()
        shared = set(summary) & set(written)
        assert len(shared) == 8 + 4 * 5
        assert {key: summary[key] for key in shared} == pytest.approx({key: written[key] for key in shared}, rel=1e-9)
        assert result.goodput(**SLO) == pytest.approx(written["request_goodput"], rel=1e-9)


def test_client_and_server_count_the_same(by_vllm, by_locust):
    for result, before, after in by_vllm + by_locust:
        grown, restarted = parse(after).since(parse(before))
        summary = result.summary()
        assert not restarted
        assert summary["completed"] == result.plan.num_requests
        assert grown.total("vllm:prompt_tokens_total") == summary["total_input_tokens"]
        assert grown.total("vllm:generation_tokens_total") == summary["total_output_tokens"]
        assert grown.total("vllm:request_success_total") == summary["completed"]
        assert grown.total("vllm:time_to_first_token_seconds_count") == summary["completed"]
        metrics = golden(before, after, seconds=result.duration)
        assert metrics["success"].value["length"] == summary["completed"]
        assert metrics["prompt_throughput"].value == pytest.approx(
            summary["total_token_throughput"] - summary["output_throughput"]
        )
        assert 0 < metrics["ttft_mean"].value <= summary["mean_ttft_ms"] / 1000
        assert 0 < metrics["e2e_mean"].value <= summary["mean_e2el_ms"] / 1000


def test_every_golden_metric_is_there_after_a_load(by_vllm):
    _, before, after = by_vllm[0]
    for name, metric in golden(before, after, seconds=1.0, max_num_batched_tokens=2048).items():
        assert metric.value is not None, f"{name}: {metric.note}"


def test_both_drivers_put_the_same_load(by_vllm, by_locust):
    for (vllm, _, _), (locust, _, _) in zip([by_vllm[0], by_vllm[2]], by_locust, strict=True):
        assert vllm.completed == locust.completed
        assert vllm.summary()["total_output_tokens"] == locust.summary()["total_output_tokens"]
    sizes = [
        sorted((request.input_tokens, request.output_tokens) for request in result.requests)
        for result, _, _ in (by_vllm[2], by_locust[1])
    ]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 4


SCHEDULES = """
import asyncio, json
from types import SimpleNamespace
import numpy as np
from vllm.benchmarks import serve
from helpers.load.vllm_runner import planned_arrivals

now = 0.0

async def sleep(seconds):
    global now
    now += seconds

serve.asyncio, serve.time = SimpleNamespace(sleep=sleep), SimpleNamespace(time=lambda: now)

async def sent(count, rate, burstiness):
    return [now async for _ in serve.get_request([object()] * count, rate, burstiness)]

found = []
for seed, case in enumerate([(1, 0.5, 1.0), (20, 4.0, 1.0), (50, 8.0, 0.3), (50, 8.0, 40.0)]):
    np.random.seed(seed)
    now, planned = 0.0, planned_arrivals(*case)
    found.append([planned, asyncio.run(sent(*case))])
print(json.dumps(found))
"""


def test_the_planned_arrivals_are_those_of_vllm():
    """On a clock that only vLLM's own sleeping moves."""
    run = subprocess.run([sys.executable, "-c", SCHEDULES], cwd=ROOT, capture_output=True, text=True, check=True)
    for planned, sent in json.loads(run.stdout.splitlines()[-1]):
        assert planned == pytest.approx(sent, rel=1e-9)


def test_an_open_loop_knows_when_it_meant_to_send(by_vllm):
    """asyncio never wakes early, so a negative delay would mean that another schedule was reckoned than was kept."""
    (closed, _, _), (result, _, _), _ = by_vllm
    delays = [request.delay for request in result.requests]
    assert min(delays) > -0.001
    planned = [request.start - request.delay for request in result.requests]
    assert planned == sorted(planned)
    assert result.duration >= result.plan.num_requests / result.plan.rate
    assert result.summary()["p99_delay_ms"] == result.percentile("delay", 99)
    assert {request.delay for request in closed.requests} == {None}


def test_a_server_that_dies_under_load(server, by_vllm, vllm_stream):
    """The last test of this server: it is stopped while requests are under way."""
    booked = parse(server.metrics_text()).total("vllm:request_success_total")

    def stop_when_busy():
        while parse(server.metrics_text()).total("vllm:request_success_total") < booked + 4:
            time.sleep(0.1)
        server.stop()

    stopper = threading.Thread(target=stop_when_busy)
    stopper.start()
    result = next(vllm_stream)
    stopper.join()
    assert result.completed >= 4
    assert result.failed > 1
    assert result.completed + result.failed == 2000
    assert all(reason and "\n" not in reason for reason in result.errors)
    assert any("Cannot connect" in reason for reason in result.errors)
    assert next(vllm_stream, None) is None
