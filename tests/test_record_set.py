from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import hardware, models, record_set, records, sampler
from helpers.guard import descendants
from helpers.load import LoadError, LoadResult, Request

ROOT = Path(__file__).parent.parent
TIER = replace(hardware.tier("cpu"), concurrency=[1, 2, 4], rates=[1.0, 2.0], input_len=16, output_len=5)
POINTS = 5


class FakeServer:
    base_url, model_name, model_path, pid = "http://127.0.0.1:1", "m", str(ROOT), os.getpid()
    start_seconds, command, running = 1.5, f"vllm serve {ROOT} --port 1", True

    class log:
        @staticmethod
        def facts():
            return {"kv_tokens": 4096}

    def __init__(self):
        self.scrapes = 0

    def metrics_text(self):
        """Every scrape counts 10 more requests, and queue times of 0.1 s for each."""
        if not self.running:
            raise OSError("connection refused")
        self.scrapes += 1
        served, labels = 10 * self.scrapes, '{model_name="m"}'
        return (
            f"process_start_time_seconds 1.0\nvllm:num_requests_running{labels} 0.0\n"
            f"vllm:request_success_total{labels} {served}\nvllm:request_queue_time_seconds_count{labels} {served}\n"
            f"vllm:request_queue_time_seconds_sum{labels} {0.1 * served}\n"
        )


class House:
    """A made-up server and load: `fate` says what becomes of the nth load of the set (warm-ups not counted)."""

    def __init__(self, fate=None):
        self.fate, self.loads, self.servers, self.options = fate or {}, [], 0, []

    @contextmanager
    def serve(self, model, **options):
        self.server, self.servers = FakeServer(), self.servers + 1
        self.options.append(options)
        yield self.server
        self.server.running = False

    def stream(self, plans, **_):
        for i, plan in enumerate(plans):
            what = "" if i == 0 else self.fate.get(len(self.loads), "")
            if i > 0:
                self.loads.append(plan)
            if what == "interrupt":
                raise KeyboardInterrupt
            if what == "load breaks":
                raise LoadError("vLLM's benchmark stopped with code 1: boom")
            if what == "server dies":
                self.server.running = False
            good = {"start": 0.0, "ttft": 0.1, "itls": [0.02] * 4, "e2e": 0.18, "input_tokens": 16, "output_tokens": 5}
            bad = {"start": 0.0, "ttft": None, "itls": [], "e2e": None, "input_tokens": 16, "output_tokens": 0}
            count = plan.num_requests if what in ("all fail", "server dies") else 1 if what == "one fails" else 0
            requests = [Request(**good)] * (plan.num_requests - count) + [Request(**bad, error="HTTP 500")] * count
            yield LoadResult(plan, "fake", "m", 2.0, requests)

    @contextmanager
    def sample(self, pid):
        samples = sampler.Samples()
        yield samples
        for t in range(5):
            samples.append({"t_s": float(t), "power_w": 50.0 if t < 2 else 300.0})

    def measure(self, folder, **options):
        options = {"repeats": 2, "say": lambda line: None} | options
        return record_set.measure(TIER, folder, serve=self.serve, stream=self.stream, sample=self.sample, **options)


def seeds(loads) -> list[int]:
    return [plan.seed for plan in loads]


def test_every_point_gets_every_repeat_round_by_round(tmp_path):
    house = House()
    house.measure(tmp_path)
    names = [plan.name for plan in house.loads]
    assert len(names) == 2 * POINTS and names[:POINTS] == names[POINTS:] and len(set(names)) == POINTS
    assert len(set(seeds(house.loads))) == len(house.loads)
    made, problems = records.load_all(tmp_path)
    assert problems == [] and len(made) == POINTS and all(r.complete and len(r.repeats) == 2 for r in made)
    assert house.servers == 1 and house.options[0]["enable_prefix_caching"] is False


def test_a_record_holds_conditions_metrics_series_and_energy_of_the_load_alone(tmp_path):
    House().measure(tmp_path, only=("4 users",))
    (record,), _ = records.load_all(tmp_path)
    assert record.id.endswith("-cpu-closed-course-4-users") and record.facts["kv_tokens"] == 4096
    assert record.facts["command"] == "vllm serve course --port 1"
    assert record.parameters["concurrency"] == 4
    assert record.parameters["serve"] == {**TIER.serve, "enable_prefix_caching": False}
    assert record.machine == hardware.machine() and record.versions == hardware.versions()
    repeat = record.repeats[0]
    assert repeat["median_ttft_ms"] == pytest.approx(100) and repeat["median_tpot_ms"] == pytest.approx(20)
    assert repeat["failed"] == 0 and repeat["request_throughput"] == 16 / 2.0
    server = {name: value for name, value in repeat.items() if name.startswith("server_")}
    assert server == {"server_request_throughput": 5.0, "server_queue_time_mean_s": pytest.approx(0.1)}
    assert record.series["t_s"] == [2.0, 3.0, 4.0] * 2 and record.series["repeat"] == [1, 1, 1, 2, 2, 2]
    assert repeat["joules_per_token"] == pytest.approx(300 * 2 / (16 * 5))


def test_an_interrupted_set_keeps_what_was_finished_and_is_resumed(tmp_path):
    first, second, third = House({POINTS + 1: "interrupt"}), House(), House()
    with pytest.raises(KeyboardInterrupt):
        first.measure(tmp_path)
    half, _ = records.load_all(tmp_path)
    assert sorted(len(r.repeats) for r in half) == [1] * (POINTS - 1) + [2]
    assert sum(r.complete for r in half) == 1
    before = {r.id: r.repeats for r in half}
    second.measure(tmp_path)
    assert len(second.loads) == POINTS - 1
    whole, _ = records.load_all(tmp_path)
    assert [r.id for r in whole] == [r.id for r in half] and all(r.complete for r in whole)
    assert all(r.repeats[: len(before[r.id])] == before[r.id] for r in whole)
    assert set(seeds(first.loads[: POINTS + 1])).isdisjoint(seeds(second.loads))
    third.measure(tmp_path)
    assert third.servers == 0 and third.loads == []
    third.measure(tmp_path, repeats=3)
    assert len(third.loads) == POINTS


def test_other_conditions_are_another_record(tmp_path, monkeypatch):
    House().measure(tmp_path, only=("1 user",))
    monkeypatch.setattr(hardware, "versions", lambda: {"vllm": "0.99.0"})
    House().measure(tmp_path, only=("1 user",))
    made, _ = records.load_all(tmp_path)
    assert len(made) == 2 and made[0].versions != made[1].versions and all(r.complete for r in made)


def test_a_load_that_fails_is_recorded_and_the_set_goes_on(tmp_path):
    house = House({1: "all fail", 2: "one fails"})
    made = house.measure(tmp_path)
    assert house.servers == 1 and len(house.loads) == 2 * POINTS
    states = Counter(record.state for record in made)
    assert states == {"complete": POINTS - 1, "1 of 2 repeats": 1}
    (unlucky,) = [record for record in made if not record.complete]
    assert unlucky.failures == ["attempt 0: HTTP 500"]
    assert sorted(record.repeats[0]["failed"] for record in made) == [0, 0, 0, 0, 1]
    again = House()
    again.measure(tmp_path)
    assert len(again.loads) == 1 and again.loads[0].seed not in seeds(house.loads)
    assert all(record.complete for record in records.load_all(tmp_path)[0])


@pytest.mark.parametrize("fate", ["server dies", "load breaks"])
def test_a_death_costs_a_new_server_and_the_other_points_are_measured(tmp_path, fate):
    house = House({1: fate})
    made = house.measure(tmp_path)
    assert house.servers == 2
    assert sorted((len(r.repeats), len(r.failures)) for r in made) == [(0, 1)] + [(2, 0)] * (POINTS - 1)
    assert [r.state for r in made if r.failures] == ["failed"]


def test_a_server_that_keeps_dying_ends_the_set(tmp_path):
    house = House(dict.fromkeys(range(10), "server dies"))
    with pytest.raises(RuntimeError, match="stopped after 3 servers: 4 of 10 loads"):
        house.measure(tmp_path)
    assert [r.state for r in records.load_all(tmp_path)[0]] == ["failed"] * 3


def test_a_record_that_was_damaged_meanwhile_is_left_alone_and_nothing_is_lost(tmp_path):
    def damage(line):
        if line.startswith("[1/2]"):
            next(tmp_path.glob("*.json")).write_text("{ damaged")

    House().measure(tmp_path, only=("1 user",), say=damage)
    (whole,), problems = records.load_all(tmp_path)
    assert len(whole.repeats) == 2 and whole.complete and len(problems) == 1


def test_two_sets_do_not_write_into_one_folder(tmp_path):
    with record_set.alone(tmp_path), pytest.raises(ValueError, match="another set"):
        House().measure(tmp_path)
    assert list(tmp_path.glob("*.json")) == []


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=40))
def test_coarse_to_fine_keeps_every_value_and_starts_with_the_ends(values):
    ordered = record_set.coarse_to_fine(values)
    assert sorted(ordered) == sorted(values)
    assert ordered[:2] == [values[0], values[-1]][: len(values)]


@pytest.mark.parametrize("name", [name for name in hardware.tier_names() if name != "recorded"])
def test_the_set_of_every_tier_is_bounded(name):
    tier = hardware.tier(name)
    plans = record_set.plans(tier)
    assert len(plans) == len(tier.concurrency) + len(tier.rates)
    assert all(plan.num_requests <= 512 for plan in plans)
    assert len({plan.seed for plan in plans} | {record_set.warm_up(tier).seed}) == len(plans) + 1
    assert all(plan.num_requests >= 2 * plan.concurrency for plan in plans if plan.kind == "closed")


def test_predicted_durations_agree_with_a_measurement():
    """Qwen2.5-7B shape on H200, vLLM 0.32.0, 1024 in and 128 out, 2026-11-30: 1.60 and 28.3 requests/s."""
    tier = hardware.tier("h200")
    by_users = {plan.concurrency: plan for plan in record_set.plans(tier) if plan.kind == "closed"}
    for users, rate in {1: 1.60, 64: 28.3}.items():
        measured = by_users[users].num_requests / rate
        predicted = record_set.predicted_seconds(by_users[users], tier) - record_set.PROMPTS_SECONDS
        assert predicted == pytest.approx(measured, rel=0.25)


def test_the_h200_set_fits_into_nine_minutes():
    tier = hardware.tier("h200")
    assert len(tier.concurrency) == 9 and len(tier.rates) == 5
    assert 3 * sum(record_set.predicted_seconds(plan, tier) for plan in record_set.plans(tier)) < 9 * 60


SMALL_SET = """
import sys
from dataclasses import replace
from helpers import cli, hardware
small = replace(hardware.tier("cpu"), concurrency=[1, 2], rates=[], input_len=32, output_len=8, min_prompts=8)
hardware.tier = lambda name: small
sys.exit(cli.main(["record", "--out", sys.argv[1], "--repeats", "2"]))
"""


def start_small_set(folder: Path, model: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_SET, str(folder)],
        cwd=ROOT,
        env=os.environ | {"WORKBOOK_MODEL": str(model)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alive(pids: set[int]) -> set[int]:
    return {process.pid for process in psutil.process_iter(["status"]) if process.info["status"] != "zombie"} & pids


@pytest.mark.vllm
def test_a_killed_set_leaves_no_server_and_is_resumed_to_one_record_a_point(tmp_path):
    """Real server, real load. The server's own clock and counters are the second witness of the client's figures."""
    model = models.write_shape_folder("course", tmp_path / "someone--course-shape")
    folder = tmp_path / "records"
    first = start_small_set(folder, model)
    for line in first.stdout:
        if line.startswith("[1/4]"):
            break
    below = descendants(first.pid)
    assert below
    first.send_signal(signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 15
    while (left := alive(below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    half, problems = records.load_all(folder)
    assert problems == [] and sum(len(record.repeats) for record in half) >= 1

    second = start_small_set(folder, model)
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    missing = 4 - sum(len(record.repeats) for record in half)
    assert f"[{missing}/{missing}]" in output and "2 of 2 records complete" in output
    made, problems = records.load_all(folder)
    assert problems == [] and sorted(r.parameters["concurrency"] for r in made) == [1, 2]
    for record in made:
        assert record.complete and record.speed_only and len(record.repeats) == 2 and record.failures == []
        assert record.model == "someone/course-shape" and str(tmp_path) not in str(record.facts)
        assert record.facts["kv_tokens"] > 0 and record.facts["enable_prefix_caching"] is False
        assert max(record.series["rss_gib"]) > 0.3
        for repeat in record.repeats:
            assert (repeat["completed"], repeat["failed"], repeat["total_output_tokens"]) == (8, 0, 64)
            assert repeat["server_generation_throughput"] == pytest.approx(repeat["output_throughput"])
            assert repeat["server_ttft_mean_s"] * 1000 <= repeat["mean_ttft_ms"]
            assert repeat["server_e2e_mean_s"] * 1000 == pytest.approx(repeat["mean_e2el_ms"], rel=0.5)
