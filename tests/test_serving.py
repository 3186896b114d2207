"""serve() up to the point where vLLM takes over: options, refusals, and what a stand-in for vLLM was started with."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_tools import STUB, Remains, listening

from helpers import serving
from helpers.serving import ServeOptions, ServerFailed, ServerTimeout, attach, serve


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny <model>"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def start(monkeypatch, model):
    """serve() with the stand-in for vLLM, on any machine a GPU host unless cpu=True."""
    monkeypatch.setenv("PYTHONPATH", str(STUB))

    def start(how="serve", cpu=False, model=model, **options):
        monkeypatch.setattr(serving, "is_cpu_build", lambda: cpu)
        monkeypatch.setenv("STUB", how)
        return serve(model, **{"progress": False} | options)

    return start


def received(server) -> dict:
    """What the stand-in says it was started with."""
    return json.loads(server.metrics_text())


def test_a_server_from_start_to_end(start, model, capsys):
    with start(
        max_model_len=512, enforce_eager=True, enable_prefix_caching=False, extra_args=("--api-key", "k 1")
    ) as server:
        arguments = received(server)["arguments"]
        port = server.base_url.rpartition(":")[2]
        assert arguments[:6] == ["--model", arguments[1], "--host", "127.0.0.1", "--port", port]
        assert Path(arguments[1]).resolve() == model
        assert arguments[-2:] == ["--api-key", "k 1"]
        assert sorted(shlex.join(arguments[6:-2]).split(" --")) == [
            "--served-model-name 'tiny <model>'",
            "enforce-eager",
            "max-model-len 512",
            "no-enable-prefix-caching",
        ]
        assert shlex.split(server.command) == ["vllm", "serve", *arguments[1:]]
        assert Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")[-2] == b"k 1"
        assert (server.model_name, server.model_path) == ("tiny <model>", str(model))
        assert server.options.max_model_len == 512
        assert 0 < server.start_seconds < 60
        assert server.running
        remains = Remains(server.log.path, int(port))
    assert not server.running
    server.stop()  # a second time
    remains.assert_gone()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_is_named_by_its_shorter_path(start, model, monkeypatch, inside):
    monkeypatch.chdir(model.parent if inside else "/")
    with start() as server:
        assert received(server)["arguments"][1] == (model.name if inside else str(model)[1:])


def test_an_error_in_the_block_ends_the_server(start):
    with pytest.raises(ZeroDivisionError), start() as server:
        remains = Remains(server.log.path, int(server.base_url.rpartition(":")[2]))
        1 / 0  # noqa: B018
    remains.assert_gone()


def test_the_bar_stays_away_from_standard_output(start, capsys):
    start(progress=True).stop()
    out, err = capsys.readouterr()
    assert out == ""
    assert "vLLM ready" in err


def test_environment_for_a_folder(start, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    expected = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_INT4_W4A8": "0"}
    with start(env={"X": "y"}) as server:
        assert received(server)["env"] == expected | {"VLLM_CPU_KVCACHE_SPACE": "40", "X": "y"}
    with start(kv_cache_memory_bytes=2**28) as server:  # vLLM would take the 40 GiB instead
        assert received(server)["env"] == expected | {"VLLM_CPU_KVCACHE_SPACE": None, "X": None}


def test_a_name_of_the_hub_is_left_to_vllm(start, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    with start(model="Qwen/Qwen2.5-7B-Instruct") as server:
        told = received(server)
    assert server.model_name == "Qwen/Qwen2.5-7B-Instruct"
    assert told["env"]["HF_HUB_OFFLINE"] is None
    assert told["arguments"][:2] == ["--model", "Qwen/Qwen2.5-7B-Instruct"]


def test_cpu_defaults_give_way(start):
    with start(cpu=True) as server:
        assert server.options == ServeOptions(
            served_model_name="tiny <model>", enforce_eager=True, kv_cache_memory_bytes=2**30
        )
    with start(cpu=True, enforce_eager=False, gpu_memory_utilization=0.3) as server:
        assert "--no-enforce-eager" in server.command
        assert "kv-cache-memory" not in server.command
    with start(cpu=True, kv_cache_memory_bytes=2**28) as server:
        assert f"--kv-cache-memory-bytes {2**28}" in server.command


def test_a_failed_start_tells_the_cause_and_leaves_nothing(start, tmp_path):
    with pytest.raises(ServerFailed) as failure:
        start("fail", log_path=tmp_path / "log")
    assert failure.value.cause == "ValueError: the cause of it all"
    first, *rest = str(failure.value).splitlines()
    assert first == "vLLM did not start (exit code 1): ValueError: the cause of it all"
    assert rest[-1] == "  | RuntimeError: Engine core initialization failed. See root cause above."
    assert failure.value.log.path == tmp_path / "log"
    assert Remains(tmp_path / "log", 1).now() == {}


def test_a_start_that_takes_too_long_is_ended(start, tmp_path):
    with pytest.raises(TimeoutError, match=r"not ready after \d+ s") as failure:
        start("start", timeout=1, log_path=tmp_path / "log")
    assert isinstance(failure.value, ServerTimeout)
    assert Remains(tmp_path / "log", 1).now() == {}


def test_a_port_in_use_is_refused_before_the_start(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use"):
            start(port=port)
    with pytest.raises(ValueError, match=r"port 70000"):
        start(port=70000)


def test_a_given_port_is_used_again_at_once(start):
    with start() as server:
        port = int(server.base_url.rpartition(":")[2])
    with start(port=port):
        assert listening(port)


def test_ports_of_servers_that_start_together_differ():
    held = [serving._reserved_port(None) for _ in range(200)]
    ports = [port.__enter__() for port in held]
    try:
        assert len(set(ports)) == 200
    finally:
        for port in held:
            port.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_modellen": 5}, ["max_modellen", "'max_model_len'"]),
        ({"frobnicate": 5}, ["frobnicate", "known: dtype", "extra_args"]),
        ({"max_model_len": "4096"}, ["max_model_len='4096'", "str", "give int"]),
        ({"max_model_len": True}, ["max_model_len=True", "bool"]),
        ({"enforce_eager": 1}, ["enforce_eager=1", "give bool"]),
        ({"gpu_memory_utilization": "0.9"}, ["gpu_memory_utilization", "give float"]),
        ({"extra_args": "--api-key x"}, ["extra_args", "tuple"]),
    ],
)
def test_a_wrong_option_is_named_before_the_start(start, options, words):
    with pytest.raises(ValueError) as failure:
        start(**options)
    assert "\n" not in str(failure.value)
    assert [word for word in words if word not in str(failure.value)] == []


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"half')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (break_config, "not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "load_format='dummy'"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_the_start(start, model, damage, words):
    damage(model)
    with pytest.raises(ValueError) as failure:
        start()
    assert words in str(failure.value)
    assert str(model) in str(failure.value)


def test_a_folder_without_weights_is_served_with_dummy_ones(start, model):
    (model / "model.safetensors").unlink()
    with start(load_format="dummy") as server:
        assert "--load-format dummy" in server.command


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/no/where/at/all", "a/b/c", Path("nowhere")])
def test_a_path_that_does_not_exist_is_refused(start, name):
    with pytest.raises(ValueError, match="no such folder"):
        start(model=name)


def test_attach(start):
    with start() as server:
        other = attach(server.base_url + "/v1/")
        assert (other.base_url, other.model_name) == (server.base_url, "stub-model")
        assert received(other) == received(server)
        assert (other.log, other.pid, other.command) == (None, None, None)
        other.stop()
        assert listening(int(server.base_url.rpartition(":")[2]))
        with pytest.raises(OSError, match="404"):
            other.get("/nothing")
    with pytest.raises(OSError):
        attach(server.base_url)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["bfloat16", "float16"]),
            "tokenizer": st.text("ab /'", min_size=1),
            "max_num_seqs": st.integers(1, 10**6),
            "gpu_memory_utilization": st.floats(0.01, 1),
            "enforce_eager": st.booleans(),
            "enable_chunked_prefill": st.booleans(),
            "kv_cache_memory_bytes": st.integers(1, 10**12),
            "seed": st.none(),
        },
    )
)
def test_options_survive_the_command_line(options):
    """Read back with argparse, as vLLM does."""
    parser = argparse.ArgumentParser()
    for name, kind in {"dtype": str, "tokenizer": str, "max-num-seqs": int, "gpu-memory-utilization": float}.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    for name in ("enforce-eager", "enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    line = shlex.join(ServeOptions.from_keywords(**options).arguments())
    parsed = {name: value for name, value in vars(parser.parse_args(shlex.split(line))).items() if value is not None}
    assert parsed == {name: value for name, value in options.items() if value is not None}


def test_the_import_is_light_and_starts_nothing():
    heavy = {"torch", "vllm", "tqdm", "psutil", "pynvml"}
    code = f"import helpers.serving, helpers.sampler, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.stdout.strip(), done.returncode) == ("", 0)


def test_log_object(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\x1b[0;36mINFO\x1b[0m one <script>\n\n 10%\r100%\nlast \xff line\n")
    log = serving.Log(path)
    assert log.lines == ["INFO one <script>", " 10%", "100%", "last � line"]
    assert log.tail(1) == "last � line"
    assert log.grep(r"\d+%") == [" 10%", "100%"]
    assert "&lt;script&gt;" in log._repr_html_() and "<script>" not in log._repr_html_()
    path.write_text("later\n")
    assert log.text == str(log) == "later\n"


def test_the_default_log_is_a_file_of_its_own(start):
    with start() as one, start() as two:
        assert one.log.path != two.log.path
        assert {one.log.path.parent, two.log.path.parent} == {Path(tempfile.gettempdir())}
        deadline = time.monotonic() + 30
        while "engine is up" not in two.log.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "engine is up" in two.log.text


@pytest.mark.parametrize(
    "installed, cpu",
    [({"vllm": "0.32.0"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm-cpu": "0.32.0"}, True), ({}, False)],
)
def test_only_a_cpu_build_gets_the_defaults_of_the_cpu(monkeypatch, installed, cpu):
    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert serving.is_cpu_build() is cpu
