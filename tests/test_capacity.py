"""The memory plan against start logs of vLLM, floors against measured and published times, and its own laws."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import capacity
from helpers.capacity import (
    activation_bytes,
    compare,
    decode_points,
    largest_model_table,
    log_table,
    max_concurrency,
    max_context,
    memory_plan,
    plan_for_log,
    roofline,
    start_logs,
    tpot_floor,
    ttft_floor,
)
from helpers.hardware import GIB, gpu
from helpers.models import kv_bytes_per_token, shape, write_shape_folder
from helpers.serving import serve

LOGS = {row["id"]: row for row in start_logs()}
# Rows whose pool is charged per layer and KV head (the others are latent attention).
DENSE = [row for row in LOGS.values() if "arch" in row and ("kv_cache_tokens" in row or "gpu_blocks" in row)]
CONFIGURED = [row for row in LOGS.values() if "config" in row]
GIVEN = [row for row in CONFIGURED if "peak_activation_gib" in row and "gpu_memory_utilization" in row]
# Logged weights hold more than the text model: a vision tower, LoRA buffers; or AWQ repacked for another kernel.
OTHER_WEIGHTS = ("llava", "mistral-small", "qwen3-4b", "h200_qwen25-7b-awq")


def by_id(rows):
    return pytest.mark.parametrize("row", rows, ids=[row["id"] for row in rows])


def test_the_logs_are_all_there():
    assert len(LOGS) == 31 and len(DENSE) == 21 and len(GIVEN) == 16


@by_id(DENSE)
def test_kv_tokens_follow_from_the_logged_kv_memory(row):
    """The logged size is rounded to 0.01 GiB and the tokens to a block: the truth lies between the two roundings."""
    per_token = kv_bytes_per_token(
        row["arch"]["layers"],
        row["arch"]["kv_heads"],
        row["arch"]["head_dim"],
        row["kv_cache_dtype"],
        row["tensor_parallel_size"],
    )
    block = row["block_size"]
    tokens = row.get("kv_cache_tokens") or row["gpu_blocks"] * block
    exact = row.get("kv_bytes_in_use_exact")
    low = exact or (row["available_kv_gib_per_rank"] - 0.005) * GIB
    high = exact or (row["available_kv_gib_per_rank"] + 0.005) * GIB
    assert int(low // (per_token * block)) * block <= tokens <= high / per_token


@by_id([row for row in DENSE if "max_concurrency_x" in row and "config" in row])
def test_maximum_concurrency_is_the_logged_one(row):
    plan = plan_for_log({**row, "gpu_memory_utilization": row.get("gpu_memory_utilization", 0.9)})
    blocks = row.get("gpu_blocks") or row["kv_cache_tokens"] // row["block_size"]
    plan = replace(plan, kv=blocks * row["block_size"] * plan.kv_slot_bytes)
    assert plan.kv_blocks == blocks
    assert plan.concurrency == pytest.approx(row["max_concurrency_x"], abs=0.0051)


@by_id([row for row in CONFIGURED if "model_loading_gib_per_rank" in row])
def test_weights_are_within_a_percent_of_the_log(row):
    plan = plan_for_log({**row, "gpu_memory_utilization": 0.9, "max_model_len": 2048})
    tolerance = 0.05 if any(word in row["id"] for word in OTHER_WEIGHTS) else 0.01
    assert plan.weights / GIB == pytest.approx(row["model_loading_gib_per_rank"], rel=tolerance)


@by_id(GIVEN)
def test_kv_memory_is_within_five_percent_where_activation_is_known(row):
    assert plan_for_log(row, given_activation=True).kv / GIB == pytest.approx(
        row["available_kv_gib_per_rank"], rel=0.05
    )


def test_the_error_of_the_rest_is_reported():
    """With activation estimated as well: every such log has its row, and most are within 2 %.

    Computed on the 22 logs on 2026-11-30: median 1.2 %, 14 of 22 within 2 %. Above 5 % are a V0 server whose logged
    activation is too small for its sampler at 256 sequences (22 %, 1.0 GiB), a multimodal model, a notebook that sets
    max_num_seqs itself, a refused start with less than no memory, and a utilization of 0.15 (where 0.1 GiB is 6 %).
    """
    table = log_table()
    for row in table:
        given = "not logged" if row["given"] is None else f"{row['given']:7.2f} ({row['given_error']:+.1%})"
        line = (
            f"{row['id']:36} logged {row['logged']:7.2f} GiB, predicted {row['predicted']:7.2f} ({row['error']:+.1%})"
        )
        print(f"{line}, with the logged activation {given}")
    expected = {row["id"] for row in CONFIGURED if "gpu_memory_utilization" in row}
    assert {row["id"] for row in table} == expected and len(table) == 22
    errors = sorted(abs(row["error"]) for row in table)
    assert statistics.median(errors) < 0.02
    assert sum(error < 0.02 for error in errors) >= 14
    assert all(abs(row["predicted"] - row["logged"]) < 2 for row in table)


def test_a_plan_adds_up():
    plan = memory_plan("Qwen2.5-7B", "A100-80GB", cuda_graphs=0.5 * GIB)
    parts = plan.weights + plan.non_torch + plan.activation + plan.cuda_graphs + plan.kv
    assert parts == plan.budget == int(gpu("A100-80GB").memory_bytes * 0.92)


def test_the_profile_run_by_hand():
    """Qwen2.5-7B, 256 sequences: 14 bytes x 256 x 152064 logits and 2048 hidden states; 16 sequences: the MLP."""
    seven = shape("Qwen2.5-7B")
    assert activation_bytes(seven, 256, 2048) == 14 * 256 * 152_064 + 2 * 2048 * 3584
    assert activation_bytes(seven, 256, 2048, sampler="sort") == 38 * 256 * 152_064 + 2 * 2048 * 3584
    assert activation_bytes(seven, 16, 8192) == 2 * 8192 * (4 * 3584 + 3 * 18944)
    assert activation_bytes(seven, 16, 8192, tensor_parallel=2) == 2 * 8192 * (4 * 3584 + 3 * 18944 // 2)


def test_an_h200_holds_about_two_million_tokens_and_twice_that_in_fp8():
    """Measured on an H200 with vLLM 0.32.0, 2026-11-30: about 2.05 and 4.10 million."""
    assert memory_plan("Qwen2.5-7B", "H200").kv_tokens == pytest.approx(2.05e6, rel=0.05)
    assert memory_plan("Qwen2.5-7B", "H200", kv_dtype="fp8").kv_tokens == pytest.approx(4.10e6, rel=0.05)


def test_max_model_len_does_not_change_the_pool():
    long, short = (memory_plan("Qwen2.5-7B", "A100-80GB", max_model_len=n) for n in (32768, 2400))
    assert long.kv == short.kv and long.kv_tokens == short.kv_tokens
    assert long.concurrency < short.concurrency


def test_on_the_cpu_lane_the_pool_is_what_was_asked_for():
    plan = memory_plan("Qwen2.5-0.5B", kv_cache_memory_bytes=GIB, block_size=128, max_model_len=4096)
    assert plan.kv == GIB and plan.kv_blocks == GIB // (12_288 * 128) and plan.kv_tokens == plan.kv_blocks * 128
    assert plan.concurrency == plan.kv_blocks / 32


@pytest.mark.vllm
def test_a_live_server_logs_what_the_plan_says(tmp_path):
    """vLLM on the CPU, the 0.5B's shape with dummy weights and a pool that is no whole number of blocks."""
    folder = write_shape_folder("Qwen2.5-0.5B", tmp_path / "shape")
    pool = 200_000_000
    options = {"max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": pool}
    with serve(folder, load_format="dummy", dtype="bfloat16", enforce_eager=True, progress=False, **options) as server:
        facts = server.log.facts()
    plan = memory_plan("Qwen2.5-0.5B", block_size=128, **options)
    rows = {row["term"]: row for row in compare(plan, facts)}
    assert rows["kv_tokens"]["predicted"] == rows["kv_tokens"]["logged"] == pool // (12_288 * 128) * 128
    assert rows["max_concurrency"]["predicted"] == pytest.approx(rows["max_concurrency"]["logged"], abs=0.0051)


def test_a_plan_that_does_not_fit_says_why_and_what_to_change():
    weights = memory_plan("Qwen2.5-72B", "A100-80GB").explain()
    assert "weights 135.43 GiB, budget 72.91 GiB" in weights and "awq" in weights
    tight = memory_plan("Qwen2.5-7B", "RTX 4090", gpu_memory_utilization=0.62)
    assert tight.kv_tokens == 0 and "leaves no memory for the KV cache" in tight.explain()
    assert "lower max_num_seqs" in tight.explain()
    long = memory_plan("Qwen2.5-32B", "L4", "awq", max_model_len=32768)
    assert not long.fits and "cannot hold one request of max_model_len 32768" in long.explain()
    assert memory_plan("Qwen2.5-32B", "L4", "awq", max_model_len=long.kv_tokens).fits
    for plan in (tight, long, memory_plan("Qwen2.5-7B", "L4")):
        assert "\n" not in plan.explain()
    assert memory_plan("Qwen2.5-7B", "L4").explain().startswith("Qwen2.5-7B fits")


def test_a_logged_refusal_is_predicted():
    """vLLM 0.17.1 on an RTX 3090 at 0.70: "estimated maximum model length 7760", 8192 asked."""
    row = LOGS["3090_llama31-8b_v0.17.1_u0.70_fail"]
    plan = plan_for_log(row)
    assert not plan.fits and "set max_model_len to" in plan.explain()
    assert plan.kv_tokens == pytest.approx(7760, rel=0.03)
    assert plan_for_log({**row, "gpu_memory_utilization": 0.75}).fits


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gpu_memory_utilization": 0}, "must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 92}, "gpu_memory_utilization is 92"),
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not divide"),
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_dtype": "int8"}, "KV dtype 'int8' is unknown"),
        ({"scheme": "int3"}, "weight scheme 'int3' is unknown"),
        ({"card": None}, "needs a card"),
    ],
)
def test_options_that_vllm_would_refuse(options, words):
    with pytest.raises(ValueError, match=words):
        memory_plan(**{"model": "Qwen2.5-7B", "card": "L4"} | options)


PLANS = st.builds(
    memory_plan,
    model=st.sampled_from(["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Llama-2-13B"]),
    card=st.sampled_from(["T4", "L4", "A100-40GB", "H200"]),
    scheme=st.sampled_from(["bf16", "fp8", "awq"]),
    kv_dtype=st.sampled_from(["auto", "fp8"]),
    gpu_memory_utilization=st.floats(0.05, 1),
    max_model_len=st.integers(1, 40_000),
    max_num_seqs=st.integers(1, 2048),
    max_num_batched_tokens=st.integers(1, 32768),
    tensor_parallel=st.sampled_from([1, 2]),
    block_size=st.sampled_from([16, 32, 128]),
)


@given(PLANS, st.integers(1, 300), st.integers(1, 40_000))
@settings(deadline=None)
def test_contexts_and_requests_never_exceed_the_pool(plan, concurrency, context):
    longest = max_context(plan, concurrency)
    assert 0 <= longest <= plan.max_model_len
    assert longest * concurrency <= plan.kv_tokens
    most = max_concurrency(plan, context)
    blocks = math.ceil(context / plan.block_size)
    assert most * blocks * plan.block_size <= plan.kv_tokens
    if most:
        assert max_context(plan, most) >= context
    if longest:
        assert max_concurrency(plan, longest) >= concurrency
    assert plan.fits == (plan.kv_blocks >= math.ceil(plan.max_model_len / plan.block_size))
    assert plan.kv_blocks * plan.kv_slot_bytes * plan.block_size <= max(plan.kv, 0)


@given(st.floats(0.1, 0.99), st.floats(0.001, 0.01), st.integers(1, 1024), st.integers(16, 16384))
@settings(deadline=None)
def test_more_utilization_never_gives_fewer_tokens_and_bigger_batches_never_more(low, more, seqs, tokens):
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    one = memory_plan("Qwen2.5-7B", "A100-80GB", gpu_memory_utilization=low, **options)
    two = memory_plan("Qwen2.5-7B", "A100-80GB", gpu_memory_utilization=low + more, **options)
    assert two.kv_tokens >= one.kv_tokens and two.concurrency >= one.concurrency
    for key in options:
        bigger = options | {key: options[key] * 2}
        assert memory_plan("Qwen2.5-7B", "A100-80GB", gpu_memory_utilization=low, **bigger).kv <= one.kv
    eight = memory_plan("Qwen2.5-7B", "A100-80GB", kv_dtype="fp8", gpu_memory_utilization=low, **options)
    assert eight.kv == one.kv and 2 * one.kv_tokens <= eight.kv_tokens <= 2 * one.kv_tokens + one.block_size


def test_one_block_is_vllms_own():
    plan = memory_plan("Qwen2.5-0.5B", kv_cache_memory_bytes=12_288 * 16 * 4, max_model_len=64)
    assert plan.kv_blocks == 4 and plan.concurrency == 1.0
    assert max_context(plan, 1) == 48 and max_concurrency(plan, 48) == 1 and max_concurrency(plan, 49) == 0
    with pytest.raises(ValueError, match="concurrency is 0"):
        max_context(plan, 0)
    with pytest.raises(ValueError, match="context is 0 tokens"):
        max_concurrency(plan, 0)


def test_a_plan_beside_a_log():
    plan = memory_plan("Qwen2.5-7B", "H200")
    rows = compare(plan, {"weights_gib": 14.29, "kv_tokens": plan.kv_tokens, "dtype": "bfloat16"})
    assert [row["term"] for row in rows] == ["weights_gib", "kv_tokens"]
    assert rows[0]["error"] == pytest.approx(14.185 / 14.29 - 1, abs=1e-3) and rows[1]["error"] == 0


# Medians at one stream: measured on H200 with vLLM 0.32.0 (2026-11-30); A100 from Qwen's speed tables (vLLM 0.6.3).
MEASURED_TPOT = [
    ("Qwen2.5-7B", "H200", "bf16", 4.67e-3),
    ("Qwen2.5-7B", "H200", "awq", 3.86e-3),
    ("Qwen2.5-7B", "A100-80GB", "bf16", 1 / 84),
    ("Qwen2.5-7B", "A100-80GB", "awq", 1 / 148),
]


@pytest.mark.parametrize("model, card, scheme, seconds", MEASURED_TPOT)
def test_no_measured_tpot_is_below_its_floor_nor_far_above(model, card, scheme, seconds):
    floor = tpot_floor(model, card, scheme, context=1024)
    assert floor < seconds < 5 * floor


def test_the_measured_ttft_is_above_its_floor():
    floor = ttft_floor("Qwen2.5-7B", "H200", 1024)
    assert floor < 31.4e-3 < 3 * floor
    assert floor == pytest.approx(2 * 6.53e9 * 1024 / 989.4e12, rel=0.03)


def test_floors_by_hand():
    """13B in FP16 reads 26 GB less the embedding table: 12.6 ms at 2.039 TB/s. 64 requests add their KV."""
    assert tpot_floor("Llama-2-13B", "A100-80GB") == pytest.approx((26.03e9 - 0.328e9) / 2.039e12, rel=1e-3)
    step = tpot_floor("Qwen2.5-7B", "A100-80GB", batch=64, context=1024)
    assert step == pytest.approx((15.231e9 - 1.09e9 + 64 * 1024 * 57_344) / 2.039e12, rel=1e-3)
    assert tpot_floor("Qwen2.5-7B", "A100-80GB", kv_dtype="fp8", batch=64, context=1024) < step
    assert tpot_floor("Qwen2.5-7B", "A100-80GB", batch=4096) > 4096 * 2 * 7e9 / 312e12
    assert ttft_floor("Qwen2.5-7B", "A100-80GB", 1) == tpot_floor("Qwen2.5-7B", "A100-80GB")
    assert ttft_floor("Qwen2.5-7B", "H100", 8192, "fp8") < ttft_floor("Qwen2.5-7B", "H100", 8192) * 0.51


def test_a_tied_head_is_read_as_the_embedding_is_not():
    small = shape("Qwen2.5-0.5B")
    assert capacity.decode_bytes(small, 1, 0) == small.weight_bytes()
    seven = shape("Qwen2.5-7B")
    table = 2 * (seven.embedding_parameters - seven.hidden_size)
    assert capacity.decode_bytes(seven, 1, 0) == seven.weight_bytes() - table


def test_decode_climbs_the_roofline_and_stops_at_the_peak():
    points = decode_points("Qwen2.5-7B", "A100-80GB", [1, 8, 64, 512, 4096], context=64)
    assert points[0]["intensity"] == pytest.approx(1, abs=0.1)
    assert [p["intensity"] for p in points] == sorted(p["intensity"] for p in points)
    assert points[0]["flops"] == pytest.approx(points[0]["intensity"] * 2.039e12)
    assert points[-1]["flops"] == 312e12
    for point in points:
        floor = tpot_floor("Qwen2.5-7B", "A100-80GB", batch=point["batch"], context=64)
        assert point["step"] == pytest.approx(floor) and point["tokens_per_second"] == pytest.approx(
            point["batch"] / floor
        )


def test_the_roofline_bends_at_its_ridge():
    assert roofline(2e12, 3e14, 1) == 2e12
    assert roofline(2e12, 3e14, 150) == roofline(2e12, 3e14, 1000) == 3e14


def test_the_largest_qwen_for_each_card():
    """By hand from published checkpoint sizes (14.2, 27.5, 61.0, 135.4 GiB in 16 bits; AWQ 9.3, 18.0, 38.6)."""
    table = {(row["card"], row["scheme"]): row["model"] for row in largest_model_table()}
    assert table["RTX 4090", "bf16"] == table["L4", "bf16"] == "Qwen2.5-7B"
    assert table["RTX 4090", "awq"] == table["L4", "awq"] == "Qwen2.5-32B"
    assert table["RTX 4090", "fp8"] == "Qwen2.5-14B"
    assert table["A100-40GB", "bf16"] == "Qwen2.5-14B" and table["A100-40GB", "awq"] == "Qwen2.5-32B"
    assert table["A100-80GB", "bf16"] == table["H100", "bf16"] == table["H200", "bf16"] == "Qwen2.5-32B"
    assert table["A100-80GB", "awq"] == table["H100", "awq"] == table["H200", "fp8"] == "Qwen2.5-72B"
    assert table["T4", "fp16"] == "Qwen2.5-0.5B" and ("T4", "bf16") not in table


def test_a_longer_context_needs_a_smaller_model():
    (row,) = largest_model_table(["L4"], ("awq",), context=32768)
    assert row["model"] == "Qwen2.5-14B" and row["kv_tokens"] >= 32768


def test_attained_is_on_the_bandwidth_roof_when_the_step_is_the_floor():
    model, card = shape("Qwen2.5-7B"), gpu("H200")
    step = capacity.tpot_floor(model, card, batch=4, context=1000)
    intensity, flops = capacity.attained(model, 4, 1000, step)
    assert flops == pytest.approx(intensity * card.bandwidth)


def test_a_server_of_float32_has_twice_the_bytes_of_bfloat16():
    wide = capacity.server_plan(
        "Qwen2.5-0.5B", None, {"dtype": "float32", "kv_cache_memory_bytes": 2**28}, {"block_size": 128}
    )
    half = capacity.server_plan(
        "Qwen2.5-0.5B", None, {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**28}, {"block_size": 128}
    )
    assert wide.weights == 2 * half.weights
    assert wide.kv_bytes_per_token == 2 * half.kv_bytes_per_token == 24_576
    assert wide.kv_tokens == 2**28 // 24_576 // 128 * 128
