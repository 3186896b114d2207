"""Facts and causes read by hand from logs of vLLM 0.6 to 0.32 (tests/data/server_logs), and from vLLM's own words."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.serverlog import facts, root_cause

LOGS = Path(__file__).parent / "data" / "server_logs"

FACTS = {
    "healthy-v0-066-gptq-marlin": {
        "engine_version": "0.6.6.post1",
        "model": "/models/llama-3.1-8b-gptq-int4",
        "dtype": "float16",
        "quantization": "gptq_marlin",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "max_model_len": 4096,
        "weights_gib": 5.3746,
        "activation_gib": 2.41,
        "non_torch_gib": 0.09,
        "gpu_memory_gib": 23.64,
        "kv_memory_gib": 13.41,
        "gpu_blocks": 6865,
        "max_concurrency": 26.82,
        "graph_capture_seconds": 13,
        "graph_gib": 0.21,
    },
    "healthy-v1-085": {
        "engine_version": "0.8.5.post1",
        "model": "Qwen/Qwen3-8B",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "max_model_len": 32768,
        "attention_backend": "Flash Attention",
        "weights_gib": 15.2683,
        "load_seconds": 14.871094,
        "kv_tokens": 112_624,
        "max_concurrency": 3.44,
        "compile_seconds": 21.4,
        "graph_capture_seconds": 23,
        "graph_gib": 0.49,
        "init_seconds": 46.93,
    },
    "healthy-cpu-032": {
        "engine_version": "0.32.0",
        "model": "models/tiny",
        "architecture": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_model_len": 1024,
        "checkpoint_gib": 0.0,
        "load_seconds": 0.01,
        "kv_memory_gib": 0.25,
        "kv_tokens": 262_144,
        "max_concurrency": 256.0,
        "init_seconds": 0.35,
    },
    "oom-cudagraph-capture-util-098": {
        "max_model_len": 124_000,
        "kv_memory_gib": 2.97,
        "kv_tokens": 150_745,
        "max_concurrency": 1.22,
        "graph_capture_seconds": 1,
        "graph_gib": 0.46,
    },
    "engine-core-wrapper-only": {},
    "port-in-use": {},
}

CAUSES = {
    "kv-v1-1m-context-no-estimate": "ValueError: To serve at least one request with the models's max seq len (1048576)",
    "startup-free-memory-other-process": "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than",
    "oom-sampler-warmup-1024": "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy",
    "oom-cudagraph-capture-util-098": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB.",
    "fp8-weights-on-ampere": 'triton.compiler.errors.CompilationError: ValueError("type fp8e4nv not supported in this',
    "triton-int4-dot-k-too-small": "triton.compiler.errors.CompilationError: Input shapes should have M >= 1, N >= 1",
    "transformers5-tokenizer-attr": "AttributeError: Qwen2Tokenizer has no attribute all_special_tokens_extended.",
    "tp-heads-not-divisible": "pydantic_core._pydantic_core.ValidationError: Value error, Total number of attention",
    "port-in-use": "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
}


def read(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_those_in_the_log_and_no_others(name):
    assert facts(read(name)) == FACTS[name]


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_found(name):
    assert root_cause(read(name)).startswith(CAUSES[name])


@pytest.mark.parametrize("name", ["engine-core-wrapper-only", "healthy-cpu-032", "healthy-v1-085"])
def test_where_the_log_has_no_cause_none_is_made_up(name):
    assert root_cause(read(name)) is None


# Lines that a CPU cannot make vLLM write: its own format strings, found in its source and filled with values.
SPOKEN = [
    (
        ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"),
        "Model loading took %s GiB memory and %.6f seconds",
        ("14.29", 4.5),
        {"weights_gib": 14.29, "load_seconds": 4.5},
    ),
    (
        ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"),
        "Graph capturing finished in %.0f secs, took %.2f GiB",
        (17, 0.6),
        {"graph_capture_seconds": 17, "graph_gib": 0.6},
    ),
    (
        ("v1/worker/gpu_worker.py",),
        "Available KV cache memory: %s GiB",
        ("-1.44",),
        {"kv_memory_gib": -1.44},
    ),
    (
        ("platforms/cuda.py",),
        "Using %s attention backend out of potential backends: %s.",
        ("FLASH_ATTN", "['FLASH_ATTN', 'FLASHINFER']"),
        {"attention_backend": "FLASH_ATTN"},
    ),
    (
        ("v1/attention/backends/flash_attn.py",),
        "Using FlashAttention version %s",
        (3,),
        {"flash_attention_version": 3},
    ),
    (
        ("model_executor/kernels/linear/__init__.py",),
        "Using %s for mixed-precision linear",
        ("MacheteLinearKernel",),
        {"linear_kernel": "MacheteLinearKernel"},
    ),
    (
        ("model_executor/layers/quantization/auto_awq.py",),
        "Using %s for AutoAWQMarlinLinearMethod",
        ("MarlinLinearKernel",),
        {"linear_kernel": "MarlinLinearKernel"},
    ),
    (
        ("compilation/monitor.py",),
        "%storch.compile took %.2f s in total",
        ("", 31.25),
        {"compile_seconds": 31.25},
    ),
    (
        ("v1/engine/core.py",),
        "init engine (profile, create kv cache, warmup model) took %.2f s (compilation: %.2f s)",
        (60.5, 31.25),
        {"init_seconds": 60.5},
    ),
]


@pytest.mark.parametrize(("paths", "words", "values", "expected"), SPOKEN, ids=[words for _, words, _, _ in SPOKEN])
def test_lines_of_a_gpu_are_read_as_this_vllm_writes_them(paths, words, values, expected):
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    for path in paths:
        tree = ast.parse((package / path).read_text())
        assert words in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}, (
            f"{path} of this vLLM says it differently: helpers/serverlog.py must learn the new words"
        )
    assert facts(f"(EngineCore pid=7) INFO 11-30 10:00:00 [x.py:1] {words % values}\n") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Model loading took 15.4137 GB and 9.033 seconds", {"weights_gib": 15.4137, "load_seconds": 9.033}),
        ("available_kv_cache_memory    53.29GiB", {"kv_memory_gib": 53.29}),
        ("non_torch_memory     1.79GiB", {"non_torch_gib": 1.79}),
        ("# cuda blocks: 7299, # CPU blocks: 2048", {"gpu_blocks": 7299}),
        ("Using MacheteLinearKernel for GPTQMarlinLinearMethod", {"linear_kernel": "MacheteLinearKernel"}),
        ("is convertible to awq_marlin. Using awq_marlin kernel.", {"linear_kernel": "awq_marlin"}),
        ("Using LBHNC KV cache layout.", {}),
    ],
)
def test_lines_of_older_versions(line, expected):
    assert facts(f"INFO 04-23 14:48:44 [executor_base.py:112] {line}\n") == expected


def test_of_several_ranks_the_first_speaks():
    log = "(Worker_TP1 pid=2) Available KV cache memory: 7.1 GiB\n(Worker_TP0 pid=1) Available KV cache memory: 7.2 GiB"
    assert facts(log) == {"kv_memory_gib": 7.1}


def test_an_exception_that_vllm_survived_is_not_the_cause():
    worker = "(Worker pid=2) ERROR 11-30 10:00:00 [worker.py:1] "
    log = [
        "(EngineCore pid=1) Traceback (most recent call last):",
        "(EngineCore pid=1) ImportError: no module named nice_to_have",
        worker + "Traceback (most recent call last):",
        worker + "KeyError: 'layers.0'",
        worker,
        worker + "During handling of the above exception, another exception occurred:",
        worker + "ValueError: the checkpoint lacks layers.0",
        "(EngineCore pid=1) ERROR 11-30 10:00:01 [core.py:1] Exception: WorkerProc initialization failed due to an "
        "exception in a background process. See stack trace for root cause.",
        "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert root_cause("\n".join(log)) == "ValueError: the checkpoint lacks layers.0"


def test_a_bare_assertion_is_told_with_its_code():
    worker = "(Worker pid=2) ERROR 11-30 10:00:00 [worker.py:1] "
    log = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in load',
        "    assert rows == 257",
        "    ^^^^",
        "",
    ]
    log = [worker + line for line in [*log, "AssertionError"]]
    assert root_cause("\n".join(log)) == "AssertionError: assert rows == 257"


def test_a_wrong_argument_is_the_cause():
    log = "usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice: 'bf17'\n"
    assert root_cause(log) == "argument --dtype: invalid choice: 'bf17'"


words = st.sampled_from(
    [
        "# GPU blocks: ",
        "KV cache size: ",
        "Model loading took ",
        " GiB",
        ",",
        ".",
        "-",
        "7",
        "at 1:2:",
        "ValueError: ",
        "\n",
    ]
)


@given(st.lists(words | st.text(max_size=5), max_size=30).map("".join))
def test_no_log_breaks_the_reading(text):
    facts(text)
    assert root_cause(text) is None or isinstance(root_cause(text), str)


@given(st.integers(0, 10**9), st.floats(0, 10**4, allow_nan=False), st.integers(1, 10**7))
def test_numbers_come_back(tokens, concurrency, length):
    size = f"GPU KV cache size: {tokens:,} tokens"
    assert facts(f"{size}, Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x") == {
        "kv_tokens": tokens,
        "max_model_len": length,
        "max_concurrency": float(f"{concurrency:.2f}"),
    }
