"""What the figures show is what they are given: medians, ranges, units, captions."""

import pytest

from helpers import plots
from helpers.records import Record

MACHINE = {"cpu": "EPYC", "cores": 2, "gpu": None}


def record(users: int, values: list[float]) -> Record:
    repeats = [{"median_tpot_ms": value} for value in values]
    return Record(
        "t", "cpu", "closed", "course", MACHINE, {"vllm": "0.32.0", "torch": "2.13.0"}, {"concurrency": users}, repeats
    )


def test_a_curve_has_the_median_and_the_range_of_its_repeats():
    curve = plots.Curve.of_records("a", [record(8, [3.0, 1.0, 2.0]), record(1, [5.0])])
    assert curve.column("median_tpot_ms") == ([1, 8], [5.0, 2.0], [5.0, 1.0], [5.0, 3.0])
    assert curve.column("p99_ttft_ms") == ([], [], [], [])


def test_every_panel_names_its_unit_and_the_caption_its_machine():
    runs = [record(1, [5.0]), record(8, [2.0])]
    figure = plots.over_load([plots.Curve.of_records("a", runs)], {"median_tpot_ms": "TPOT, ms"}, plots.source(runs))
    (axis,) = figure.axes
    assert axis.get_title(loc="left") == "TPOT, ms"
    assert axis.get_xlabel() == "concurrent requests"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "8"]
    caption = figure.get_supxlabel()
    assert "EPYC, 2 cores" in caption and "vLLM 0.32.0" in caption and runs[0].date[:10] in caption


def test_dummy_weights_are_named_in_the_caption():
    run = record(1, [5.0])
    run.speed_only = True
    assert plots.source([run]).endswith("dummy weights")
    assert plots.source([]) == "nothing recorded"


def test_the_parts_of_a_bar_add_up():
    figure = plots.stacked({"card": {"weights": 14.0, "KV cache": 6.0}}, "GiB", "computed")
    (axis,) = figure.axes
    assert sum(patch.get_width() for patch in axis.patches) == pytest.approx(20.0)
    assert axis.get_xlabel() == "GiB"


def test_the_ridge_of_a_roof_is_where_its_two_lines_meet():
    figure = plots.roofline({"card": (2e12, 3e14)}, {"points": [(1.0, 1e12)]}, "computed")
    x, y = figure.axes[0].lines[0].get_data()
    assert x[1] == pytest.approx(150.0) and y[1] == y[2] == 3e14
