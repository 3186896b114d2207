"""Readers of measured files: real files of several versions, what damage does, and that nothing else is ever raised."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.load.readers import ReadError, read_bench_serve, read_locust, read_nvidia_smi

FORMATS = Path(__file__).parent / "data" / "formats"
NOHEADER_FIELDS = "timestamp, index, utilization.gpu, power.draw"
FILES = [
    (read_bench_serve, "bench_serve_v010_old_keys.json"),
    (read_bench_serve, "bench_serve_v033.json"),
    (read_bench_serve, "bench_serve_v033_all_failed.json"),
    (read_bench_serve, "bench_serve_v033_append_result.jsonl"),
    (read_locust, "locust_failures.csv"),
    (read_locust, "locust_stats.csv"),
    (read_locust, "locust_stats_history.csv"),
    (read_nvidia_smi, "nvidia_smi_dmon_h200.txt"),
    (read_nvidia_smi, "nvidia_smi_dmon_pucvmet_oDT_h200.txt"),
    (read_nvidia_smi, "nvidia_smi_query_h200_l1.csv"),
    (read_nvidia_smi, "nvidia_smi_query_h200_many_fields.csv"),
    (read_nvidia_smi, "nvidia_smi_query_two_gpus_na_reconstructed.csv"),
]
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


def test_bench_serve_old_keys():
    [result] = read_bench_serve(FORMATS / "bench_serve_v010_old_keys.json")
    assert result["request_goodput"] is None
    assert "request_goodput:" not in result
    assert (result["completed"], result["failed"]) == (48, 0)
    assert result["p99_itl_ms"] == 19.417936707931467


def test_bench_serve_new_keys():
    [result] = read_bench_serve(FORMATS / "bench_serve_v033.json")
    assert result["p99_e2el_ms"] == 2504.3122745179544
    assert len(result["latencies"]) == 48


def test_bench_serve_all_failed_has_no_latency():
    [result] = read_bench_serve(FORMATS / "bench_serve_v033_all_failed.json")
    assert (result["completed"], result["failed"]) == (0, 48)
    latencies = [value for key, value in result.items() if key.endswith("_ms")]
    assert len(latencies) == 12
    assert set(latencies) == {None}
    assert result["request_throughput"] == 0.0


def test_bench_serve_several_results_in_a_file(tmp_path):
    first, second = read_bench_serve(FORMATS / "bench_serve_v033_append_result.jsonl")
    assert (first["max_concurrency"], second["max_concurrency"]) == (8, 16)
    (tmp_path / "glued.json").write_text(json.dumps(first) + json.dumps(second, indent=2) + "\n\n")
    assert read_bench_serve(tmp_path / "glued.json") == [first, second]


def test_bench_serve_without_failed_or_num_prompts(tmp_path):
    (tmp_path / "r.json").write_text('{"duration": 1.0, "completed": 3, "request_throughput": 3.0, "num_prompts": 5}')
    assert read_bench_serve(tmp_path / "r.json")[0]["failed"] == 2
    (tmp_path / "r.json").write_text('{"duration": 1.0, "completed": 3, "request_throughput": 3.0}')
    assert read_bench_serve(tmp_path / "r.json")[0]["failed"] is None


def test_locust_stats():
    rows = read_locust(FORMATS / "locust_stats.csv")
    assert [row["Name"] for row in rows] == ["/v1/chat/completions", "/v1/models", "Aggregated"]
    assert (rows[0]["Request Count"], rows[0]["Failure Count"], rows[0]["99%"]) == (294, 11, 1700)


def test_locust_history_before_the_first_request():
    rows = read_locust(FORMATS / "locust_stats_history.csv")
    assert rows[0]["50%"] is None
    assert rows[0]["Requests/s"] == 0
    assert rows[-1]["User Count"] == 16


def test_locust_failures():
    rows = read_locust(FORMATS / "locust_failures.csv")
    assert [row["Occurrences"] for row in rows] == [3, 8]
    assert "503 Server Error" in rows[0]["Error"]


def test_nvidia_smi_query_with_units():
    rows = read_nvidia_smi(FORMATS / "nvidia_smi_query_h200_l1.csv")
    busy = rows[5]
    assert (busy["power.draw"], busy["memory.total"], busy["utilization.gpu"]) == (633.07, 143771, 100)
    assert busy["fan.speed"] is None
    assert busy["mig.mode.current"] == "Disabled"
    [row] = read_nvidia_smi(FORMATS / "nvidia_smi_query_h200_many_fields.csv")
    assert (row["driver_version"], row["pstate"], row["power.limit"]) == ("580.159.04", "P0", 700)


@pytest.mark.parametrize("power", ["80.63", "80.63 W"])
def test_nvidia_smi_query_without_header(tmp_path, power):
    text = (FORMATS / "nvidia_smi_query_noheader_nounits.csv").read_text().replace("80.63", power)
    (tmp_path / "smi.csv").write_text(text)
    rows = read_nvidia_smi(tmp_path / "smi.csv", fields=NOHEADER_FIELDS)
    assert (len(rows), rows[0]["power.draw"], rows[0]["index"]) == (8, 80.63, 0)
    with pytest.raises(ReadError, match=r"smi\.csv, line 1: .*needs fields"):
        read_nvidia_smi(tmp_path / "smi.csv")


def test_nvidia_smi_query_of_two_gpus_one_of_them_lost():
    rows = read_nvidia_smi(FORMATS / "nvidia_smi_query_two_gpus_na_reconstructed.csv")
    assert [row["index"] for row in rows] == [0, 1, 0, 1]
    assert rows[0]["name"] == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert (rows[0]["utilization.gpu"], rows[0]["memory.used"]) == (None, 17820)
    assert rows[1]["temperature.memory"] is None
    assert (rows[3]["name"], rows[3]["power.draw"]) == ("NVIDIA GeForce RTX 4090", None)


def test_nvidia_smi_dmon():
    rows = read_nvidia_smi(FORMATS / "nvidia_smi_dmon_h200.txt")
    assert (len(rows), rows[0]["pwr"], rows[0]["sm"], rows[-1]["pclk"]) == (6, 635, 100, 1980)
    rows = read_nvidia_smi(FORMATS / "nvidia_smi_dmon_pucvmet_oDT_h200.txt")
    assert (rows[1]["Time"], rows[1]["pwr"], rows[-1]["txpci"]) == ("15:27:23", 130, 1)


def test_nvidia_smi_dmon_with_dashes_and_a_second_header(tmp_path):
    header = "# gpu    pwr  mtemp\n# Idx      W      C\n"
    (tmp_path / "dmon.txt").write_text(f"{header}    0     61      -\n{header}    1      -     40\n")
    rows = read_nvidia_smi(tmp_path / "dmon.txt")
    assert rows == [{"gpu": 0, "pwr": 61, "mtemp": None}, {"gpu": 1, "pwr": None, "mtemp": 40}]


@pytest.mark.parametrize(
    ("read", "text", "problem"),
    [
        (read_bench_serve, "", "line 1: the file is empty"),
        (read_bench_serve, '{"a": 1}', "line 1: not a result of `vllm bench serve`"),
        (read_bench_serve, "\n[1,\n 2", "line 3: damaged JSON"),
        (read_bench_serve, '{"duration": 1, "completed": 1, "request_throughput": 1}\n{"dur', "line 2: damaged JSON"),
        (read_bench_serve, "[" * 100_000, "line 1: damaged JSON, nested too deep"),
        (read_locust, "Date,Open,Close\n1,2,3\n", "line 1: not a stats, history or failures file of Locust"),
        (read_locust, "Error,Occurrences\nx,1\ny", "line 3: 1 cells under 2 columns"),
        (read_locust, "Error,Occurrences\nx,many\n", "line 2: Occurrences is 'many', not a number"),
        (read_locust, 'Error,Occurrences\n"cut off', "line 2: damaged CSV"),
        (read_nvidia_smi, "Error,Occurrences\nx,1\n", "line 1: no header of nvidia-smi"),
        (read_nvidia_smi, "index, power.draw [W]\n0, 80.1\n", "line 2: power.draw is '80.1', not a number in W"),
        (read_nvidia_smi, "index, power.draw [W]\n0\n", "line 2: 1 cells under 2 columns"),
        (read_nvidia_smi, "# HELP vllm:prompt_tokens\nvllm:prompt_tokens 1\n", "line 2: a row before the names"),
        (read_nvidia_smi, "# gpu pwr\n# Idx W\n 0 61 7\n", "line 3: 3 cells under 2 columns"),
        (read_nvidia_smi, "# only a comment\n", "line 1: not a file of nvidia-smi dmon"),
    ],
)
def test_damage_is_one_line_with_file_and_line(tmp_path, read, text, problem):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ReadError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, {problem}")
    assert "\n" not in str(error.value)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(ReadError, match="No such file"):
        read_locust(tmp_path / "absent.csv")
    (tmp_path / "binary").write_bytes(b"Error,Occurrences\n\xff\xfe")
    with pytest.raises(ReadError, match="line 2: not text in UTF-8"):
        read_locust(tmp_path / "binary")


@pytest.mark.parametrize(("read", "name"), FILES, ids=lambda value: getattr(value, "__name__", value))
@one_folder
@given(data=st.data())
def test_truncation_is_read_or_refused(tmp_path, read, name, data):
    whole = (FORMATS / name).read_bytes()
    kept = whole[: data.draw(st.integers(0, len(whole)))]
    (tmp_path / name).write_bytes(kept)
    try:
        rows = read(tmp_path / name)
    except ReadError as error:
        assert f"{name}, line " in str(error)
    else:
        assert len(rows) <= len(read(FORMATS / name))


@pytest.mark.parametrize("read", [read_bench_serve, read_locust, read_nvidia_smi])
@one_folder
@given(content=st.binary(max_size=200) | st.text(alphabet='#{}[]",:\n 0a-/', max_size=200).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path, read, content):
    (tmp_path / "any").write_bytes(content)
    try:
        read(tmp_path / "any")
    except ReadError as error:
        assert "any, line " in str(error)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**6), 10**6)


@one_folder
@given(results=st.lists(st.fixed_dictionaries({"duration": numbers, "completed": st.integers(1, 99)}), min_size=1))
def test_bench_serve_reads_what_was_written(tmp_path, results):
    results = [result | {"request_throughput": 1.5, "failed": 0, "label": None} for result in results]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, results)))
    assert read_bench_serve(tmp_path / "r.jsonl") == results


@one_folder
@given(
    rows=st.lists(st.tuples(st.text(st.characters(exclude_categories=["C", "Z"])), st.integers(0, 10**6)), min_size=1)
)
def test_locust_reads_what_was_written(tmp_path, rows):
    text = io.StringIO()
    csv.writer(text).writerows([("Error", "Occurrences"), *rows])
    (tmp_path / "failures.csv").write_text(text.getvalue(), newline="")
    assert [(row["Error"], row["Occurrences"]) for row in read_locust(tmp_path / "failures.csv")] == rows


@one_folder
@given(rows=st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 100), st.none() | numbers), min_size=1))
def test_nvidia_smi_reads_what_was_written(tmp_path, rows):
    def cell(value, unit):
        return "[N/A]" if value is None else f"{value} {unit}"

    lines = ["index, utilization.gpu [%], power.draw [W]"]
    lines += [f"{gpu}, {cell(use, '%')}, {cell(power, 'W')}" for gpu, use, power in rows]
    (tmp_path / "smi.csv").write_text("\n".join(lines) + "\n")
    assert [tuple(row.values()) for row in read_nvidia_smi(tmp_path / "smi.csv")] == rows

    lines = ["# gpu sm pwr", "# Idx % W"]
    lines += [" ".join("-" if value is None else str(value) for value in row) for row in rows]
    (tmp_path / "dmon.txt").write_text("\n".join(lines) + "\n")
    assert [tuple(row.values()) for row in read_nvidia_smi(tmp_path / "dmon.txt")] == rows
