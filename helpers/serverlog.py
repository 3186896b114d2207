"""What a vLLM log says: the facts of a start, and the root cause of a failed one.

Read from logs of vLLM 0.6 to 0.32, on CPU and GPU. A fact that the log does not state is absent, never guessed.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _truth(text: str) -> bool:
    return text == "True"


_NUMBER = r"(-?\d+(?:\.\d+)?)"
_COUNT = r"(\d[\d,]*)"
_SIZE = rf"{_NUMBER} ?Gi?B"
_FACTS = {
    "engine_version": (str, r"LLM engine \(v([^)]+)\)", r"█\s+version (\S+)"),
    "model": (str, r"with config: model='([^']+)'"),
    "architecture": (str, r"Resolved architecture: (\w+)"),
    "dtype": (str, r", dtype=torch\.(\w+)"),
    "quantization": (str, r", quantization=(?!None\b)(\w+),"),
    "kv_cache_dtype": (str, r", kv_cache_dtype=(\w+)"),
    "tensor_parallel_size": (int, r", tensor_parallel_size=(\d+)"),
    "enforce_eager": (_truth, r", enforce_eager=(True|False)"),
    "enable_prefix_caching": (_truth, r", enable_prefix_caching=(True|False)"),
    "enable_chunked_prefill": (_truth, r", enable_chunked_prefill=(True|False)"),
    "block_size": (int, r"Setting attention block size to (\d+) tokens", r"'block_size': (\d+)"),
    "max_model_len": (
        _count,
        rf", max_seq_len={_COUNT}",
        rf"Using max model len {_COUNT}",
        rf"Maximum concurrency for {_COUNT} tokens",
    ),
    "max_num_batched_tokens": (_count, rf"Chunked prefill is enabled with max_num_batched_tokens={_COUNT}"),
    "attention_backend": (
        str,
        r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend",
        r"Using (?:AttentionBackendEnum\.)?([A-Z][\w ]*) backend(?: on V1 engine)?\.",
    ),
    "flash_attention_version": (int, r"Using FlashAttention version (\d)"),
    "linear_kernel": (
        str,
        r"Using (\w+LinearKernel) for ",
        r"Selected (\w+LinearKernel) for ",
        r"Using (\w+) kernel\.",
    ),
    "checkpoint_gib": (float, rf"Checkpoint size: {_SIZE}"),
    # Before 0.7 the line said GB, and meant 2**30 bytes all the same.
    "weights_gib": (
        float,
        rf"Model loading took {_SIZE}",
        rf"Loading model weights took {_SIZE}",
        rf"model weights take\s+{_SIZE}",
    ),
    "load_seconds": (
        float,
        rf"Model loading took .* and {_NUMBER} seconds",
        rf"Loading weights took {_NUMBER} seconds",
    ),
    "activation_gib": (float, rf"activation peak memory(?: takes)?\s+{_SIZE}", rf"{_SIZE} for peak activation"),
    "non_torch_gib": (float, rf"non_torch_memory(?: takes)?\s+{_SIZE}", rf"{_SIZE} for non-torch memory"),
    "gpu_memory_gib": (float, rf"total_gpu_memory\s+\(?{_SIZE}", rf"Free memory on device (?:\S+ )?\([\d.]+/{_SIZE}\)"),
    "kv_memory_gib": (
        float,
        rf"Available KV cache memory: {_SIZE}",
        rf"reserved for KV Cache is {_SIZE}",
        rf"available_kv_cache_memory\s+{_SIZE}",
        rf"reserved {_SIZE} memory for KV Cache",
        rf"Explicitly set \({_NUMBER}/[\d.]+\) GiB for KV cache",
    ),
    "kv_tokens": (_count, rf"[GC]PU KV cache size: {_COUNT} tokens"),
    "gpu_blocks": (_count, rf"# (?:GPU|cuda) blocks: {_COUNT}"),
    "max_concurrency": (float, rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x"),
    "compile_seconds": (float, rf"torch\.compile (?:takes|took) {_NUMBER} s in total"),
    "graph_capture_seconds": (float, rf"Graph capturing finished in {_NUMBER} sec"),
    "graph_estimate_gib": (
        float,
        rf"graph pool memory: .* {_SIZE} \(estimated\)",
        rf"Estimated CUDA graph memory: {_SIZE}",
    ),
    "graph_gib": (float, rf"Graph capturing finished in [\d.]+ secs?, took {_SIZE}"),
    "init_seconds": (float, rf"init engine \(.*?\) took {_NUMBER} s"),
}


def facts(text: str) -> dict[str, object]:
    """What vLLM logged about its start, by name with its unit (gib = 2**30 bytes); of several ranks, the first."""
    found: dict[str, object] = {}
    for name, (convert, *patterns) in _FACTS.items():
        matches = (re.search(pattern, text) for pattern in patterns)
        if match := next(filter(None, matches), None):
            found[name] = convert(match[1])
    return found


_PREFIX = re.compile(
    r"^(?:[\w.-]+ +\| )?(?:\(\w[^)]*\) )*(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d )?(?:\[?[\w./]+\.py:\d+\] ?)?"
)
_TYPE = r"(?:\w+\.)*(?:\w+Error|\w*Exception|OutOfResources)"
_EXCEPTION = re.compile(rf"^(?P<type>{_TYPE})(?:: (?P<message>.*)|\(.*\))?$")
_OTHER = re.compile(r"^(?:[\w.]+: error: |ERROR: +)(?P<message>.*)$")
_WRAPPER = re.compile(r"[Ss]ee (?:root cause|stack trace)|for the root cause|core proc|encountered an issue")
_CHAIN = re.compile(r"^(?:The above exception was the direct cause|During handling of the above exception)")


def root_cause(text: str) -> str | None:
    """The line that says why vLLM failed, `package.Type: message`; None where the log does not tell.

    vLLM's processes report each other's death ("Engine core initialization failed. See root cause above"): these are
    passed over. The first process that logs an error has the cause; of chained exceptions the last explains it best.
    """
    levels, lines = [], []
    for line in text.splitlines():
        prefix = _PREFIX.match(line)
        levels.append(prefix["level"])
        lines.append(line[prefix.end() :].rstrip())
    raised = [i for i, line in enumerate(lines) if _EXCEPTION.match(line) and not _WRAPPER.search(line)]
    logged = [i for i in raised if levels[i] in ("ERROR", "CRITICAL")]
    if not raised:
        return next((match["message"] for line in reversed(lines) if (match := _OTHER.match(line))), None)
    cause = logged[0] if logged else raised[-1]
    for later in raised[raised.index(cause) + 1 :]:
        if not any(_CHAIN.match(line) for line in lines[cause:later]):
            break
        cause = later
    return _with_detail(lines, cause)


def _with_detail(lines: list[str], at: int) -> str:
    """The exception's line; where that says little (a bare assert, pydantic, Triton), with the line that says more."""
    match = _EXCEPTION.match(lines[at])
    if lines[at] == match["type"]:
        code = next((line.strip() for line in reversed(lines[:at]) if line.strip(" ^~")), "")
        return f"{match['type']}: {code}"
    if "validation error" in lines[at]:
        return f"{match['type']}: {lines[at + 1].strip().split(' [type=')[0]}" if at + 1 < len(lines) else lines[at]
    if re.fullmatch(r"at \d+:\d+:", match["message"] or ""):
        detail = lines[at]
        for line in lines[at + 1 :]:
            if re.match(r"  File |Traceback|\w+Error: ", line):
                break
            detail = line.strip() or detail
        return f"{match['type']}: {detail}"
    return lines[at]


class Log:
    """A server's log file, read anew at each look: vLLM keeps writing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.path.read_text(encoding="utf-8", errors="replace"))

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.text.splitlines() if line.strip()]

    def tail(self, n: int = 20) -> str:
        return "\n".join(self.lines[-n:])

    def grep(self, pattern: str) -> list[str]:
        """Lines that match a regular expression."""
        return [line for line in self.lines if re.search(pattern, line)]

    def facts(self) -> dict[str, object]:
        return facts(self.text)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """The log, folded; without the path of this Python environment, which says nothing to a reader."""
        lines = [line.replace(sys.prefix, "…") for line in self.lines]
        return (
            f"<details><summary>vLLM log, {len(lines)} lines</summary>"
            f'<pre style="max-height: 24em; overflow: auto">{html.escape(chr(10).join(lines))}</pre></details>'
        )
