from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import cli, load, records, serving
from helpers.load import LoadPlan, LoadResult, Request
from helpers.records import Record

ROOT = Path(__file__).parent.parent


def workbook(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "helpers.cli", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def make(users: int, *values: float, **changes) -> Record:
    conditions = {
        "title": f"m, {users} users",
        "tier": "cpu",
        "kind": "closed",
        "model": "m",
        "machine": {"cpu": "some"},
        "versions": {"vllm": "0.32.0"},
        "parameters": {"concurrency": users},
        "repeats": [{"median_tpot_ms": value} for value in values],
        "planned_repeats": 2,
        "date": "2026-11-30T12:00:00Z",
    }
    return Record(**conditions | changes)


@pytest.fixture
def folder(tmp_path):
    records.save(make(1, 4.0, 4.5), tmp_path)
    records.save(make(8, 9.0, 9.5, tier="h200"), tmp_path)
    return tmp_path


def test_import_of_the_package_and_the_command_is_light():
    heavy = "('numpy', 'torch', 'vllm', 'helpers.models')"
    code = f"import sys, helpers, helpers.cli; print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout.strip() == "[]"


def test_every_listed_command_explains_itself():
    listed = [
        line.split()[0] for line in workbook("--help").stdout.splitlines() if line.startswith("    ") and line[4] != " "
    ]
    assert {"doctor", "run", "plan", "serve", "load", "record", "records"} <= set(listed)
    for command in listed:
        answer = workbook(command, "--help")
        assert answer.returncode == 0 and "usage:" in answer.stdout, command


def test_version_is_that_of_the_project():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert workbook("--version").stdout == f"workbook {project['version']}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such"], ["record", "--repeats", "0"], ["plan", "Qwen2.5-7B"], ["records"]]
)
def test_wrong_arguments_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "usage: workbook" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["plan", "Qwen2.5-7B", "--gpu", "A1000"], "A1000"),
        (["plan", "no-such-model", "--gpu", "L4"], "no-such-model"),
        (["records", "list", "--folder", "no/such"], "no such folder: no/such"),
        (["record", "--tier", "tpu"], "'tpu' is unknown"),
        (["record", "--tier", "cpu", "--plan", "--only", "3 users"], "no point '3 users'"),
        (["load", "http://127.0.0.1:9", "--tokenizer", "x", "--concurrency", "1"], "no OpenAI-compatible server"),
    ],
)
def test_a_failure_is_one_line_that_names_the_command_and_the_reason(arguments, reason, capsys):
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"workbook {arguments[0]}: ") and reason in error and error.count("\n") == 1


def test_list_filters_and_names_what_it_skipped(folder, capsys):
    (folder / "broken.json").write_text("{")
    assert cli.main(["records", "list", "--folder", str(folder), "--tier", "h200", "--metric", "median_tpot_ms"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "h200-closed-m-8-users" in out and "9.25" in out
    assert f"skipped {folder}/broken.json: not JSON" in err


def test_show_prints_conditions_median_and_spread(folder, capsys):
    assert cli.main(["records", "show", "--folder", str(folder), "h200"]) == 0
    out = capsys.readouterr().out
    assert "versions: vllm 0.32.0" in out and "parameters: concurrency 8" in out
    assert out.splitlines()[-1].split() == ["median_tpot_ms", "9.25", "9", "9.5", "0.05405"]
    assert cli.main(["records", "show", "--folder", str(folder), "users"]) == 1
    assert "several records match 'users'" in capsys.readouterr().err


def test_compare_prints_the_verdict_and_the_differing_keys(folder, capsys):
    assert cli.main(["records", "compare", "--folder", str(folder), "cpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert "2.176" in out and "differs: parameters.concurrency: 1 | 8" in out and "caution" not in out


def test_check_fails_on_damaged_and_on_incomplete(folder, capsys):
    assert cli.main(["records", "check", "--folder", str(folder)]) == 0
    records.save(make(2, 5.0), folder)
    assert cli.main(["records", "check", "--folder", str(folder)]) == 1
    assert "incomplete 2026-11-30-cpu-closed-m-2-users: 1 of 2 repeats" in capsys.readouterr().err
    (folder / "2026-11-30-cpu-closed-m-2-users.json").write_text("{")
    assert cli.main(["records", "check", "--folder", str(folder)]) == 1


def test_plan_says_what_fits(capsys):
    assert cli.main(["plan", "Qwen2.5-7B", "--gpu", "A100-80GB", "--scheme", "awq"]) == 0
    assert "fits" in capsys.readouterr().out
    assert cli.main(["plan", "Qwen2.5-72B", "--gpu", "L4"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_the_plan_of_a_set_starts_nothing_and_writes_nothing(tmp_path):
    answer = workbook("record", "--tier", "h200", "--plan", "--out", str(tmp_path / "new"), HF_HUB_OFFLINE="0")
    assert answer.returncode == 0 and "(predicted)" in answer.stdout and "256 users" in answer.stdout
    assert not (tmp_path / "new").exists()


def test_claims_are_listed_by_verdict(capsys):
    assert cli.main(["claims", "--verdict", "false"]) == 0
    out = capsys.readouterr().out
    assert "[false]" in out and "proof: " in out and "[true]" not in out
    assert cli.main(["claims", "--verdict", "flase"]) == 1
    assert "no verdict 'flase'; there are true," in capsys.readouterr().err


def test_load_prints_a_row_a_load_and_fails_if_a_request_failed(monkeypatch, capsys):
    asked = []

    def stream(plans, **options):
        asked.extend(plans)
        for plan in plans:
            good = Request(0.0, 0.1, [0.02] * 4, 0.18, 16, 5)
            bad = Request(0.0, None, [], None, 16, 0, error="HTTP 500") if plan.concurrency == 8 else good
            yield LoadResult(plan, options["driver"], "m", 2.0, [good, bad])

    monkeypatch.setattr(load, "stream", stream)
    lengths = ["--input-len", "16", "--output-len", "5"]
    command = ["load", "http://127.0.0.1:1", "--tokenizer", "t", *lengths]
    assert cli.main([*command, "--concurrency", "2", "4"]) == 0
    assert asked == [
        LoadPlan("closed", 4 * n, concurrency=n, input_len=16, output_len=5, seed=i) for i, n in enumerate((2, 4))
    ]
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["2", "users", "2", "0"],
        ["4", "users", "2", "0"],
    ]
    assert cli.main([*command, "--concurrency", "8"]) == 1
    assert "8 users: 1 failed: HTTP 500" in capsys.readouterr().err


class FakeServer:
    """A server that ends by itself, or is looked at just when somebody presses Ctrl-C."""

    base_url, model_name, stopped = "http://127.0.0.1:1", "m", False

    class log:
        path = "vllm.log"

        @staticmethod
        def tail(n):
            return "the last words"

    def __init__(self, interrupted):
        self.interrupted = interrupted

    @property
    def running(self):
        if self.interrupted:
            raise KeyboardInterrupt
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped = True


@pytest.mark.parametrize(("interrupted", "status", "said"), [(True, 130, "interrupted"), (False, 1, "the last words")])
def test_serve_prints_the_address_and_stops_the_server(monkeypatch, capsys, interrupted, status, said):
    server = FakeServer(interrupted)
    monkeypatch.setattr(serving, "serve", lambda model, **options: server)
    assert cli.main(["serve", "--tier", "cpu"]) == status
    out, err = capsys.readouterr()
    assert "m at http://127.0.0.1:1/v1" in out and said in err and server.stopped
