from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import records
from helpers.records import Record

ROOT = Path(__file__).parent.parent


def make(**changes) -> Record:
    record = Record(
        title="Qwen2.5-7B, 64 users",
        tier="h200",
        kind="closed",
        model="Qwen2.5-7B",
        machine={"gpu": "NVIDIA H200", "cores": 16},
        versions={"vllm": "0.32.0"},
        parameters={"concurrency": 64, "input_len": 1024, "output_len": 128},
        repeats=[{"ttft": 775.0, "failed": 0}, {"ttft": 760.0, "failed": 0}, {"ttft": 800.0, "failed": 0}],
        planned_repeats=3,
        date="2026-11-30T12:00:00Z",
    )
    return replace(record, **changes)


def test_the_file_says_everything_that_a_reader_needs(tmp_path):
    path = records.save(make(notes="rented", series={"power": [70.0, 690.5]}), tmp_path)
    assert path.name == "2026-11-30-h200-closed-qwen2-5-7b-64-users.json"
    text = path.read_text()
    body = json.loads(text)
    assert body["machine"] == {"gpu": "NVIDIA H200", "cores": 16} and body["versions"] == {"vllm": "0.32.0"}
    assert body["repeats"][2] == {"ttft": 800.0, "failed": 0} and body["provenance"] == "measured"
    assert list(body) == sorted(body) and text.endswith("}\n") and text.startswith('{\n "date"')


def test_a_second_of_the_same_name_gets_a_suffix_and_a_damaged_first_stays(tmp_path):
    first = records.save(make(), tmp_path)
    first.write_text("{ damaged")
    second = records.save(make(), tmp_path)
    third = records.save(make(), tmp_path)
    assert (second.name, third.name) == (f"{first.stem}-2.json", f"{first.stem}-3.json")
    assert first.read_text() == "{ damaged"
    loaded, problems = records.load_all(tmp_path)
    assert [r.id for r in loaded] == [second.stem, third.stem]
    assert len(problems) == 1 and problems[0].startswith(f"{first.name}: not JSON")


def rewritten(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-30]), "not JSON, or cut off"),
        (lambda p: p.write_bytes(b""), "not JSON, or cut off"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "utf-8"),
        (lambda p: p.write_text('{"request_throughput": 3.9}'), "not a record of this workbook"),
        (lambda p: p.write_text("[1, 2]"), "not a record of this workbook"),
        (lambda p: p.write_text("[" * 100_000), "recursion"),
        (lambda p: rewritten(p, workbook_record=2), "newer workbook (schema 2"),
        (lambda p: rewritten(p, repeats=[{"ttft": 1.0}]), "checksum"),
    ],
)
def test_what_is_no_record_is_named_with_its_reason_and_left_alone(tmp_path, damage, reason):
    good = records.save(make(title="good"), tmp_path)
    bad = records.save(make(title="bad"), tmp_path)
    damage(bad)
    before = bad.read_bytes()
    loaded, problems = records.load_all(tmp_path)
    assert [r.id for r in loaded] == [good.stem]
    assert len(problems) == 1 and problems[0].startswith(bad.name) and reason in problems[0]
    assert bad.read_bytes() == before


text = st.text(max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**12), 10**12)
leaves = st.none() | st.booleans() | numbers | text
nested = st.dictionaries(
    text, leaves | st.lists(leaves, max_size=3) | st.dictionaries(text, leaves, max_size=2), max_size=4
)
any_record = st.builds(
    make,
    title=st.text(min_size=1, max_size=30),
    tier=st.text(min_size=1, max_size=10),
    machine=nested,
    parameters=nested,
    repeats=st.lists(st.dictionaries(text, numbers, min_size=1, max_size=4), max_size=4),
    seed=st.integers(0, 2**63),
    notes=text,
    failures=st.lists(text, max_size=2),
    speed_only=st.booleans(),
)


@given(any_record)
def test_writing_and_reading_gives_the_same_record(record):
    assert records.loads(records.dumps(record)) == record


@given(any_record)
def test_a_name_is_one_plain_file_name(record):
    name = records.file_name(record)
    assert name and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and len(name) <= 120


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_is_reported_or_still_says_the_same(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = records.save(make(), folder)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "insert", "remove"]))
    byte = bytes([data.draw(st.integers(0, 255))])
    bad = {
        "cut": good[:at],
        "flip": good[:at] + byte + good[at + 1 :],
        "insert": good[:at] + byte + good[at:],
        "remove": good[:at] + good[at + 1 :],
    }[damage]
    path.write_bytes(bad)
    loaded, problems = records.load_all(folder)
    assert len(loaded) + len(problems) == 1 and path.read_bytes() == bad
    for record in loaded:
        assert record == make(id=path.stem)


def test_saving_at_once_in_several_processes_keeps_every_record(tmp_path):
    code = (
        "import sys; from helpers import records\n"
        "for i in range(20):\n"
        "    records.save(records.Record(title='same', tier='cpu', kind='closed', model='m', machine={}, versions={},\n"
        "        parameters={'writer': sys.argv[2], 'i': i}, date='2026-11-30T12:00:00Z'), sys.argv[1])\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(w)], cwd=ROOT) for w in range(4)]
    assert [w.wait(60) for w in writers] == [0] * 4
    loaded, problems = records.load_all(tmp_path)
    assert problems == []
    assert {(r.parameters["writer"], r.parameters["i"]) for r in loaded} == {
        (str(w), i) for w in range(4) for i in range(20)
    }
    assert len(loaded) == len(list(tmp_path.iterdir())) == 80


def test_a_repeat_is_added_in_place_and_no_repeat_is_ever_lost(tmp_path):
    path = records.save(make(repeats=[{"ttft": 1.0}]), tmp_path)
    (one,), _ = records.load_all(tmp_path)
    assert not one.complete and one.state == "1 of 3 repeats"
    records.update(replace(one, repeats=[{"ttft": 1.0}, {"ttft": 2.0}], failures=["repeat 3: timed out"]), tmp_path)
    (two,), problems = records.load_all(tmp_path)
    assert two.repeats == [{"ttft": 1.0}, {"ttft": 2.0}] and problems == [] and two.state == "2 of 3 repeats"
    before = path.read_bytes()
    with pytest.raises(ValueError, match="would lose"):
        records.update(replace(one, repeats=[{"ttft": 9.0}]), tmp_path)
    assert path.read_bytes() == before
    path.write_text("{ damaged")
    with pytest.raises(ValueError, match="cannot be updated"):
        records.update(two, tmp_path)
    assert path.read_text() == "{ damaged" and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(records.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.save(make(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"repeats": [{"ttft": float("nan")}]}, "ttft = nan"),
        ({"repeats": [{"ttft": "775"}]}, "ttft = '775'"),
        ({"repeats": [{}]}, "repeat 0"),
        ({"provenance": "guessed"}, "measured, predicted"),
        ({"date": "30.11.2026"}, "expected UTC"),
        ({"title": ""}, "title is empty"),
        ({"planned_repeats": "3"}, "expected int"),
        ({"series": {"t": [0, 1], "power": [70]}}, "different lengths"),
    ],
)
def test_what_cannot_be_a_record_is_refused_with_what_is_wrong(changes, reason):
    with pytest.raises(ValueError, match=reason):
        make(**changes)


def test_values_that_json_would_change_are_refused(tmp_path):
    for bad in ({"shape": (1, 2)}, {"users": {1: 2}}, {"path": Path("x")}, {"loss": float("inf")}):
        with pytest.raises(ValueError, match="JSON"):
            records.save(make(parameters=bad), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_median_and_spread_of_the_repeats():
    record = make(repeats=[{"x": 10.0}, {"x": 14.0}, {"x": 11.0, "only_once": 1.0}])
    assert record.median("x") == 11.0
    assert record.spread("x") == (10.0, 14.0, pytest.approx(4 / 11))
    assert record.spread("only_once") == (1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"no metric 'y'; it has only_once, x"):
        record.median("y")
    assert make(repeats=[], failures=["repeat 1: no answer"]).state == "failed"


def test_select_looks_at_fields_and_parameters():
    rows = [make(tier="h200"), make(tier="cpu"), make(tier="cpu", parameters={"concurrency": 1}), make(repeats=[])]
    assert records.select(rows, tier="cpu") == rows[1:3]
    assert records.select(rows, tier="cpu", concurrency=64) == [rows[1]]
    assert records.select(rows, complete=False) == [rows[3]]
    assert records.select(rows, concurency=64) == []


def with_ttft(*values: float, **changes) -> Record:
    return make(repeats=[{"ttft": v} for v in values], planned_repeats=len(values), **changes)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((10.0, 12.0), (11.0, 20.0), "within noise"),
        ((10.0, 12.0), (12.0, 20.0), "within noise"),
        ((10.0, 12.0), (12.5, 20.0), "differs"),
        ((12.5, 20.0), (10.0, 12.0), "differs"),
        ((10.0,), (10.0, 20.0), "unknown: one repeat"),
    ],
)
def test_two_records_differ_only_when_their_ranges_are_apart(a, b, verdict):
    (row,) = records.compare(with_ttft(*a), with_ttft(*b)).rows
    assert row.verdict == verdict
    assert row.ratio == pytest.approx((sum(b) / len(b)) / (sum(a) / len(a)))


def test_a_comparison_names_what_makes_it_unfair():
    ours = with_ttft(1.0, 2.0)
    assert records.compare(ours, with_ttft(1.0, 2.0)).cautions == ()
    other = with_ttft(
        1.0,
        2.0,
        provenance="predicted",
        model="Qwen2.5-14B",
        machine={"gpu": "NVIDIA A100", "cores": 16},
        parameters={"concurrency": 1, "input_len": 512, "output_len": 128},
    )
    result = records.compare(ours, other)
    assert set(result.differences) == {
        "provenance",
        "model",
        "machine.gpu",
        "parameters.input_len",
        "parameters.concurrency",
    }
    assert result.differences["machine.gpu"] == ("NVIDIA H200", "NVIDIA A100")
    cautions = "\n".join(result.cautions)
    assert "provenance differs: measured | predicted" in cautions and "machine.gpu" in cautions
    assert "concurrency" not in cautions and "differs: parameters.concurrency: 64 | 1" in str(result)
    half = replace(ours, planned_repeats=3)
    assert "not complete (2 of 3 repeats)" in records.compare(ours, half).cautions[0]


def test_tables_show_dummy_weights_and_missing_metrics():
    shown = records.table([make(speed_only=True), make(repeats=[])], ["ttft"])
    lines = str(shown).splitlines()
    assert "(dummy weights)" in lines[1] and lines[1].endswith("775") and lines[2].endswith("-")
    assert "0 of 3 repeats" in lines[2]
    assert shown._repr_html_().count("<tr>") == 3
    assert "&lt;b&gt;" in records.table([make(model="<b>")])._repr_html_()
