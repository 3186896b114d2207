"""For tests of servers: a model without weights, and what a server leaves behind."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

STUB = Path(__file__).parent / "data" / "stub_vllm"
DEADLINE_SECONDS = 5.0


def write_tiny_model(folder: Path) -> Path:
    """A Qwen2 of two layers with a tokenizer of single bytes, to be served with load_format="dummy".

    KV cache: 2 (K and V) x 2 layers x 2 heads x 64 x 2 bytes = 1,024 bytes per token in bf16.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = "<|endoftext|>"
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), end]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": len(alphabet),
        "eos_token_id": len(alphabet) - 1,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    classes = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(classes))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes_of(log: Path) -> set[int]:
    """Processes whose standard error is this log: a server's all are, whatever their session, parent and name."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            if link.readlink() == log:
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


def shared_memory_of(pids: set[int]) -> set[Path]:
    """Segments in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found.update(map(Path, re.findall(r"/dev/shm/\S+", maps)))
    return {path for path in found if path.exists()}


def sockets_of(pids: set[int]) -> set[Path]:
    """Unix sockets in the file system that these processes have open."""
    paths = {
        f"socket:[{line[6]}]": line[7] for line in _table("/proc/net/unix") if len(line) == 8 and line[7][0] == "/"
    }
    found = set()
    for link in (link for pid in pids for link in Path("/proc").glob(f"{pid}/fd/*")):
        try:
            found.add(paths.get(str(link.readlink())))
        except OSError:
            continue
    return {Path(path) for path in found - {None}}


def _table(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()]


def wait_until(condition, seconds: float, what: str):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        time.sleep(0.05)
    return value


class Remains:
    """What a server has now, to be asked for after its end."""

    def __init__(self, log: Path, port: int) -> None:
        self.log, self.port = log, port
        self.pids = processes_of(log)
        self.segments = shared_memory_of(self.pids)
        self.sockets = sockets_of(self.pids)

    def now(self) -> dict[str, object]:
        remains = {
            "processes": processes_of(self.log) | {pid for pid in self.pids if _alive(pid)},
            "port": listening(self.port) and self.port,
            "shared memory": {path for path in self.segments if path.exists()},
            "sockets": {path for path in self.sockets if path.exists()},
        }
        return {kind: what for kind, what in remains.items() if what}

    def assert_gone(self) -> None:
        """Nothing is left 5 s from now."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := self.now()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
