"""Plans, the arithmetic of results, and the drivers against a stand-in server that does what a test tells it."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_tools import free_port, write_tiny_model

from helpers import load
from helpers.load import LoadError, LoadPlan, LoadResult, Request
from helpers.load.readers import read_locust
from helpers.load.traces import write_sharegpt

ROOT = Path(__file__).resolve().parents[1]
CLOSED = LoadPlan("closed", 12, concurrency=3, input_len=20, output_len=5)


# plans


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "circular"}, 'kind is "closed" or "open"'),
        ({"num_requests": 0}, "num_requests is at least 1"),
        ({"concurrency": None}, "needs concurrency"),
        ({"rate": 2.0}, "has no rate"),
        ({"kind": "open", "concurrency": None}, "needs rate"),
        ({"kind": "open", "concurrency": None, "rate": math.inf}, "needs rate"),
        ({"kind": "open", "rate": 1.0}, "no limit of concurrency"),
        ({"kind": "open", "concurrency": None, "rate": 1.0, "think_time": 1.0}, "think_time belongs to"),
        ({"burstiness": 0}, "burstiness is above 0"),
        ({"think_time": -1}, "think_time is in seconds"),
        ({"think": "deep"}, "think is constant or exponential"),
        ({"num_warmups": -1}, "num_warmups is not negative"),
        ({"input_len": None}, "need input_len and output_len"),
        ({"output_len": 0}, "need input_len and output_len"),
        ({"ignore_eos": False}, "no natural end"),
        ({"dataset": "trace.json"}, "no input_len"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(changes, problem):
    values = vars(CLOSED) | changes
    with pytest.raises(ValueError, match=problem) as error:
        LoadPlan(**values)
    assert "\n" not in str(error.value)


def test_warm_up_has_other_prompts_and_no_warm_up():
    warm_up = LoadPlan("closed", 12, concurrency=3, input_len=20, output_len=5, num_warmups=4).warm_up()
    assert (warm_up.num_requests, warm_up.num_warmups, warm_up.concurrency) == (4, 0, 3)
    assert warm_up.seed != CLOSED.seed
    assert CLOSED.warm_up() is None


# results


def result_of(*requests, plan=CLOSED, duration=2.0):
    return LoadResult(plan, "vllm", "m", duration, list(requests))


BY_HAND = result_of(
    Request(start=0.0, ttft=0.1, itls=[0.02, 0.04], e2e=0.16, input_tokens=10, output_tokens=3),
    Request(start=0.0, ttft=0.3, itls=[], e2e=0.3, input_tokens=20, output_tokens=1),
    Request(start=0.1, ttft=None, itls=[0.5], e2e=None, input_tokens=30, output_tokens=0, error="refused"),
    Request(start=0.5, ttft=0.2, itls=[0.1], e2e=0.3, input_tokens=40, output_tokens=3),
)


def test_summary_by_hand():
    """TTFT 100, 200, 300 ms; TPOT (160-100)/2 and (300-200)/2 ms; gaps 20, 40, 100 ms; the failed one is left out."""
    summary = BY_HAND.summary()
    assert (summary["completed"], summary["failed"], summary["duration"]) == (3, 1, 2.0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (70, 7)
    assert (summary["request_throughput"], summary["output_throughput"]) == (1.5, 3.5)
    assert summary["total_token_throughput"] == 38.5
    expected = {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": math.sqrt(2 / 3) * 100,
        "p90_ttft_ms": 280,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 40,
        "std_tpot_ms": 10,
        "p90_tpot_ms": 48,
        "mean_itl_ms": 160 / 3,
        "median_itl_ms": 40,
        "p99_itl_ms": 98.8,
        "median_e2el_ms": 300,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert "p99_delay_ms" not in summary


def test_percentile_is_linear_between_order_statistics():
    values = [0.4, 0.1, 0.3, 0.2]
    result = result_of(*(Request(0.0, ttft, [], ttft, 1, 1) for ttft in values))
    assert [result.percentile("ttft", q) for q in (0, 50, 75, 100)] == pytest.approx([100, 250, 325, 400])
    with pytest.raises(ValueError, match="no metric 'latency'"):
        result.percentile("latency", 50)


def test_goodput_by_hand():
    """Only requests that meet every limit count, per second of the whole duration; a limit that is just met is met."""
    assert BY_HAND.goodput(ttft_ms=1000) == 1.5
    assert BY_HAND.goodput(ttft_ms=200) == 1.0
    assert BY_HAND.goodput(ttft_ms=250, tpot_ms=40) == 0.5
    assert BY_HAND.goodput(tpot_ms=30.001) == 1.0  # the single token has no TPOT to miss
    assert BY_HAND.goodput(e2el_ms=160) == 0.5
    assert BY_HAND.goodput(ttft_ms=50) == 0.0
    with pytest.raises(ValueError, match="needs a limit"):
        BY_HAND.goodput()


@pytest.mark.parametrize("requests", [[], [Request(0.0, None, [], None, 9, 0, error="refused")] * 5])
def test_nothing_succeeded_is_none_and_not_zero(requests):
    result = result_of(*requests)
    summary = result.summary()
    latencies = {value for key, value in summary.items() if key.endswith("_ms")}
    assert latencies == {None}
    assert (summary["completed"], summary["failed"], summary["request_throughput"]) == (0, len(requests), 0.0)
    assert result.percentile("ttft", 99) is None
    assert result.goodput(ttft_ms=1e9) == 0.0
    assert result_of(duration=0.0).summary()["request_throughput"] is None
    json.dumps(summary, allow_nan=False)


def test_errors_are_counted_by_reason():
    failed = [Request(0.0, None, [], None, 1, 0, error=reason) for reason in ("b", "a", "b")]
    result = result_of(*failed, Request(0.0, 0.1, [], 0.1, 1, 1))
    assert (result.completed, result.failed, list(result.errors.items())) == (1, 3, [("b", 2), ("a", 1)])


def test_delay_belongs_to_an_open_loop():
    plan = LoadPlan("open", 2, rate=1.0, input_len=1, output_len=1)
    requests = [Request(0.0, 0.1, [], 0.1, 1, 1, delay=delay) for delay in (0.001, 0.003)]
    assert result_of(*requests, plan=plan).summary()["mean_delay_ms"] == pytest.approx(2)


times = st.floats(0, 1e4)
successes = st.builds(Request, times, times, st.lists(times, max_size=5), times, st.integers(0), st.integers(0))
failures = st.builds(
    Request, times, st.none(), st.lists(times), st.none(), st.integers(0), st.just(0), error=st.text(min_size=1)
)


@given(requests=st.lists(successes | failures), delay=st.none() | times)
def test_json_round_trip_keeps_microseconds(requests, delay):
    for request in requests:
        request.delay = delay
    result = result_of(*requests)
    back = LoadResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert back.to_dict() == result.to_dict()
    assert (back.plan, back.driver, back.model_name, back.duration) == (result.plan, "vllm", "m", result.duration)
    for mine, theirs in zip(result.requests, back.requests, strict=True):
        assert (mine.error, mine.input_tokens, mine.output_tokens) == (
            theirs.error,
            theirs.input_tokens,
            theirs.output_tokens,
        )
        for name in ("start", "ttft", "e2e", "delay"):
            value = getattr(mine, name)
            assert getattr(theirs, name) == (None if value is None else pytest.approx(value, abs=5.1e-7))
        assert theirs.itls == pytest.approx(mine.itls, abs=5.1e-7)


# drivers, against a stand-in for a server


class Stub(ThreadingHTTPServer):
    """Streams `max_tokens` tokens. `act(number)`, called for each completion from 1 on, may name a misbehaviour."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.act = lambda number: None
        self.bodies, self.keys, self.lock = [], [], threading.Lock()
        self.base_url = f"http://127.0.0.1:{self.server_port}"
        self.first, self.gap = 0.0, 0.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        models = {"data": [{"id": "stub"}]}
        self.answer(*((200, json.dumps(models).encode()) if self.path == "/v1/models" else (404, b"")))

    def chunk(self, data):
        data = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, b"")
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.bodies)
        misbehaviour = self.server.act(number)
        if misbehaviour == "refuse":
            return self.answer(503, b"overloaded")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(0 if misbehaviour == "say nothing" else body["max_tokens"]):
            time.sleep(self.server.gap if i else self.server.first)
            if i == 2 and misbehaviour == "hang up":
                self.close_connection = True
                return None
            if i == 2 and misbehaviour == "error":
                self.chunk(json.dumps({"error": {"message": "the engine died"}}))
            self.chunk(json.dumps({"choices": [{"text": "" if i == 1 else "x"}]}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.chunk(json.dumps({"choices": [], "usage": usage}))
        self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        return None


@pytest.fixture
def stub():
    with Stub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def locust(stub, tokenizer, plan=CLOSED, **options):
    return load.run(plan, base_url=stub.base_url, tokenizer=tokenizer, driver="locust", progress=False, **options)


def children_left():
    """Processes that this one started and that still run after at most 5 s."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5)
    return alive


def test_locust_counts_every_token_and_time(stub, tokenizer):
    stub.first, stub.gap = 0.05, 0.02
    result = locust(stub, tokenizer)
    assert (result.completed, result.failed, result.model_name, result.driver) == (12, 0, "stub", "locust")
    for request in result.requests:
        assert (request.input_tokens, request.output_tokens, len(request.itls)) == (20, 5, 4)
        assert request.ttft >= 0.05
        assert request.e2e >= 0.05 + 4 * 0.02
        assert request.e2e == pytest.approx(request.ttft + sum(request.itls))
    assert result.percentile("ttft", 50) < result.percentile("e2el", 50)
    assert result.duration >= 4 * (0.05 + 4 * 0.02)
    assert [request.start for request in result.requests] == sorted(request.start for request in result.requests)


def test_locust_sends_what_the_plan_says(stub, tokenizer):
    locust(stub, tokenizer)
    assert all(body["model"] == "stub" and body["ignore_eos"] and body["temperature"] == 0 for body in stub.bodies)
    assert {len(body["prompt"]) for body in stub.bodies} == {20}
    assert len({tuple(body["prompt"]) for body in stub.bodies}) == 12
    first, stub.bodies = stub.bodies, []
    locust(stub, tokenizer, plan=LoadPlan(**vars(CLOSED) | {"seed": 1}))
    prompts = [{tuple(body["prompt"]) for body in bodies} for bodies in (first, stub.bodies)]
    assert prompts[0].isdisjoint(prompts[1])


def test_never_more_users_at_once_than_planned(stub, tokenizer):
    at_work, most = 0, 0
    stub.gap = 0.01

    def act(number):
        nonlocal at_work, most
        with stub.lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.05)
        with stub.lock:
            at_work -= 1

    stub.act = act
    locust(stub, tokenizer)
    assert most == 3


def test_think_time_is_waited(stub, tokenizer):
    plan = LoadPlan("closed", 6, concurrency=2, input_len=5, output_len=2, think_time=0.3)
    result = locust(stub, tokenizer, plan=plan)
    assert result.duration >= 2 * 0.3
    exponential = LoadPlan(**vars(plan) | {"think": "exponential", "think_time": 0.05})
    assert locust(stub, tokenizer, plan=exponential).completed == 6


def test_warm_ups_are_sent_and_not_counted(stub, tokenizer):
    result = locust(stub, tokenizer, plan=LoadPlan(**vars(CLOSED) | {"num_warmups": 4}))
    assert len(stub.bodies) == 16
    assert len(result.requests) == 12


def test_each_kind_of_failure_is_counted_with_its_reason(stub, tokenizer):
    behaviour = {2: "refuse", 4: "hang up", 6: "say nothing", 8: "error"}
    stub.act = behaviour.get
    result = locust(stub, tokenizer)
    assert (result.completed, result.failed, len(result.requests)) == (8, 4, 12)
    reasons = " | ".join(result.errors)
    for part in ("HTTP 503", "overloaded", "ChunkedEncodingError", "ended without a token", "the engine died"):
        assert part in reasons
    assert "\n" not in reasons
    assert all(request.ttft is None and request.output_tokens == 0 for request in result.requests if request.error)
    assert result.summary()["total_output_tokens"] == 8 * 5


def test_a_server_that_dies_gives_failed_requests(stub, tokenizer):
    """From the sixth completion on nothing listens any more."""
    stub.act = lambda number: stub.socket.close() or "hang up" if number >= 6 else None
    result = locust(stub, tokenizer, plan=LoadPlan("closed", 12, concurrency=1, input_len=5, output_len=3))
    assert len(result.requests) == 12
    assert (result.completed, result.failed) == (5, 7)
    assert any("refused" in reason for reason in result.errors)


def test_locust_csvs_hold_the_same_counts(stub, tokenizer, tmp_path):
    stub.act = {3: "refuse"}.get
    result = locust(stub, tokenizer, raw_dir=tmp_path / "raw")
    stats = {row["Name"]: row for row in read_locust(tmp_path / "raw" / "locust_0_stats.csv")}
    assert (stats["/v1/completions"]["Request Count"], stats["/v1/completions"]["Failure Count"]) == (12, 1)
    [failure] = read_locust(tmp_path / "raw" / "locust_0_failures.csv")
    assert failure["Occurrences"] == 1
    assert "503" in failure["Error"]
    assert read_locust(tmp_path / "raw" / "locust_0_stats_history.csv")
    assert stats["Aggregated"]["Max Response Time"] >= 1000 * max(r.e2e for r in result.requests if r.ok) - 1


def test_the_key_is_sent_and_never_shown(stub, tokenizer, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    stub.act = {3: "refuse"}.get
    result = locust(stub, tokenizer)
    assert set(stub.keys) == {"Bearer sk-very-secret"}
    shown = "".join(capfd.readouterr()) + json.dumps(result.to_dict())
    assert "sk-very-secret" not in shown


def test_only_the_bar_is_shown(stub, tokenizer, capfd):
    load.run(CLOSED, base_url=stub.base_url + "/v1/", tokenizer=tokenizer, driver="locust")
    out, err = capfd.readouterr()
    assert out == ""
    assert "12/12" in err


def test_loopback_is_not_sent_through_a_proxy(stub, tokenizer, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert locust(stub, tokenizer).completed == 12


def test_an_open_loop_needs_the_other_driver(stub, tokenizer):
    with pytest.raises(LoadError, match='an open loop needs driver="vllm"'):
        locust(stub, tokenizer, plan=LoadPlan("open", 2, rate=1.0, input_len=1, output_len=1))
    with pytest.raises(LoadError, match="no think time"):
        load.run(
            LoadPlan("closed", 2, concurrency=1, input_len=1, output_len=1, think_time=1.0),
            base_url=stub.base_url,
            tokenizer=tokenizer,
        )


def test_what_cannot_start_says_so_in_one_line(stub, tokenizer, tmp_path):
    options = {"base_url": stub.base_url, "tokenizer": tokenizer, "driver": "locust"}
    absent = LoadPlan("closed", 2, concurrency=1, dataset=tmp_path / "absent.json")
    short = LoadPlan("closed", 2, concurrency=1, dataset=write_sharegpt([("q", "a")], tmp_path / "short.json"))
    cases = [
        (CLOSED, {"base_url": f"http://127.0.0.1:{free_port()}"}, "no OpenAI-compatible server at .*refused"),
        (CLOSED, {"base_url": stub.base_url + "/elsewhere"}, "answers HTTP 404"),
        (CLOSED, {"model_name": "other"}, "serves stub, not other"),
        (CLOSED, {"tokenizer": tmp_path}, "has no tokenizer.json"),
        (CLOSED, {"driver": "jmeter"}, "no driver 'jmeter'"),
        (absent, {}, "not a file in ShareGPT's format"),
        (short, {"driver": "vllm"}, "no conversation of 4 to 1024 tokens"),
    ]
    for plan, changes, problem in cases:
        with pytest.raises((LoadError, ValueError), match=problem) as error:
            load.run(plan, **options | changes)
        assert "\n" not in str(error.value)
    assert not stub.bodies


def test_results_come_one_by_one_and_the_next_load_waits_to_be_asked_for(stub, tokenizer):
    results = load.stream(
        [CLOSED, CLOSED], base_url=stub.base_url, tokenizer=tokenizer, driver="locust", progress=False
    )
    next(results)
    assert len(stub.bodies) == 12
    results.close()
    assert not children_left()


def test_interrupting_kills_the_driver(stub, tokenizer):
    stub.gap = 0.05
    stub.act = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 4 else None
    plan = LoadPlan("closed", 500, concurrency=2, input_len=20, output_len=20)
    with pytest.raises(KeyboardInterrupt):
        locust(stub, tokenizer, plan=plan)
    assert 4 <= len(stub.bodies) < 500
    assert not children_left()


@pytest.mark.parametrize("driver", ["locust", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_driver_ends_with_a_killed_notebook(stub, tokenizer, driver):
    """SIGKILL of the process that called run(), as when a kernel is killed."""
    script = f"""
        from helpers import load
        plan = load.LoadPlan("closed", 500, concurrency=2, input_len=20, output_len=20)
        load.run(plan, base_url={stub.base_url!r}, tokenizer={str(tokenizer)!r}, driver={driver!r}, progress=False)
    """
    stub.gap = 0.05
    busy = threading.Event()
    stub.act = lambda number: busy.set() if number == 4 else None
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT) as notebook:
        assert busy.wait(120)
        drivers = psutil.Process(notebook.pid).children(recursive=True)
        notebook.kill()
    assert drivers
    _, alive = psutil.wait_procs(drivers, timeout=5)
    assert not alive


def test_gevent_stays_out_of_this_process(stub, tokenizer):
    script = f"""
        import sys
        from helpers import load
        plan = load.LoadPlan("closed", 2, concurrency=1, input_len=5, output_len=2)
        load.run(plan, base_url={stub.base_url!r}, tokenizer={str(tokenizer)!r}, driver="locust", progress=False)
        print(sorted({{"gevent", "locust", "vllm", "torch", "transformers"}} & set(sys.modules)))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
