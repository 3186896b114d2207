"""The runs that come with the course can be read, are measured, and say what they are."""

import re

import pytest

from helpers import records
from helpers.capacity import server_plan, tpot_floor
from helpers.hardware import gpu

RUNS, PROBLEMS = records.load_all(records.RECORDED)


def test_every_file_is_a_readable_record():
    assert not PROBLEMS
    assert len(RUNS) == len(list(records.RECORDED.glob("*.json"))) > 0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_record_is_measured_on_a_named_machine_and_hides_no_path(run):
    assert run.provenance == "measured" and run.repeats and run.notes
    assert run.machine["gpu"]["name"] and run.versions["vllm"] and run.versions["torch"]
    assert not re.search("/(root|home|tmp)/", records.dumps(run))


@pytest.mark.parametrize("run", [run for run in RUNS if run.tier == "h200"], ids=lambda run: run.id)
def test_no_recorded_step_is_faster_than_the_card(run):
    floor = tpot_floor("Qwen2.5-7B", "H200")
    assert min(run.values("median_tpot_ms")) / 1e3 > floor


@pytest.mark.parametrize("run", [run for run in RUNS if run.tier == "h200"], ids=lambda run: run.id)
def test_the_memory_plan_gives_the_pool_that_vllm_logged_on_the_card(run):
    plan = server_plan("Qwen2.5-7B", gpu("H200"), run.parameters["serve"], run.facts)
    assert plan.kv_tokens == pytest.approx(run.facts["kv_tokens"], rel=0.01)
    assert plan.weights / 2**30 == pytest.approx(run.facts["weights_gib"], rel=0.01)


def test_what_graphs_and_compilation_bring_depends_on_the_batch():
    def tpot(eager: bool, streams: int) -> float:
        runs = records.select(RUNS, tier="h200", kind="closed", concurrency=streams)
        return next(run for run in runs if run.facts["enforce_eager"] == eager).median("median_tpot_ms")

    gains = [tpot(True, streams) / tpot(False, streams) for streams in (1, 64, 256)]
    assert gains[0] > 3 and 1.3 < gains[1] < 2.5 and gains[2] < 1.15  # and 1.15 is none of the first two
