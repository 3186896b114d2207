"""Shapes against published parameter counts and sizes, and config.json files of every kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import models
from helpers.models import COURSE_FOLDER, WeightScheme, awq, from_config, shape, write_shape_folder

# Parameters in billions from the model cards, KV bytes per token at 16 bits by hand: 2 x layers x KV heads x head x 2.
PUBLISHED = {
    "Qwen2.5-0.5B": (0.494, 2 * 24 * 2 * 64 * 2),
    "Qwen2.5-7B": (7.616, 57_344),
    "Qwen2.5-14B": (14.77, 2 * 48 * 8 * 128 * 2),
    "Qwen2.5-32B": (32.764, 262_144),
    "Qwen2.5-72B": (72.706, 2 * 80 * 8 * 128 * 2),
    "Llama-2-13B": (13.016, 819_200),
}

# Other families: sizes of the public config.json, parameters in billions as published on the model page.
OTHERS = [
    ("llama", (4096, 14336, 32, 32, 8, 128256), {}, 8.030),  # Llama-3.1-8B
    ("llama", (3072, 8192, 28, 24, 8, 128256), {"head_dim": 128, "tie_word_embeddings": True}, 3.213),  # Llama-3.2-3B
    ("mistral", (4096, 14336, 32, 32, 8, 32000), {"sliding_window": 4096}, 7.242),  # Mistral-7B-v0.1
    ("qwen3", (1024, 3072, 28, 16, 8, 151936), {"head_dim": 128, "tie_word_embeddings": True}, 0.596),  # Qwen3-0.6B
    ("qwen3", (5120, 25600, 64, 64, 8, 151936), {"head_dim": 128}, 32.762),  # Qwen3-32B
    ("phi3", (5120, 17920, 40, 40, 10, 100352), {}, 14.660),  # Phi-4
    ("gemma", (2048, 16384, 18, 8, 1, 256000), {"head_dim": 256}, 2.506),  # Gemma-2B: one KV head
    ("gemma2", (2304, 9216, 26, 8, 4, 256000), {"head_dim": 256, "sliding_window": 4096}, 2.614),  # Gemma-2-2B
]


SIZE_KEYS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
]


def config(model_type: str, sizes: tuple, **more) -> dict:
    return {"model_type": model_type, **dict(zip(SIZE_KEYS, sizes, strict=True)), **more}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_kv_bytes_are_the_published_ones(name):
    billions, kv_bytes = PUBLISHED[name]
    assert shape(name).parameters / 1e9 == pytest.approx(billions, abs=0.001)
    assert shape(name).kv_bytes_per_token() == kv_bytes
    assert shape(name).kv_bytes_per_token("fp8") * 2 == kv_bytes


@pytest.mark.parametrize("model_type, sizes, more, billions", OTHERS)
def test_other_families_have_their_published_parameters(model_type, sizes, more, billions):
    assert from_config(config(model_type, sizes, **more)).parameters / 1e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize("name, gigabytes", [("Qwen2.5-0.5B", 0.46), ("Qwen2.5-7B", 5.57), ("Qwen2.5-32B", 19.33)])
def test_awq_checkpoints_have_their_published_size(name, gigabytes):
    assert shape(name).weight_bytes("awq") / 1e9 == pytest.approx(gigabytes, abs=0.006)


def test_compression_of_linears_and_of_the_whole_model_differ():
    seven = shape("Qwen2.5-7B")
    assert 16 / awq().bits_per_weight == pytest.approx(3.85, abs=0.005)
    assert seven.weight_bytes() / seven.weight_bytes("awq") == pytest.approx(2.73, abs=0.005)
    sixteen = 2 * (seven.parameters - seven.linear_parameters)
    linears = seven.weight_bytes("awq") - sixteen
    assert 2 * seven.linear_parameters / linears == pytest.approx(3.85, abs=0.005)


def test_smaller_groups_cost_more_and_an_untied_head_costs_its_matrix():
    small = shape("Qwen2.5-0.5B")
    sizes = [small.weight_bytes(awq(group)) for group in (32, 64, 128)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] == small.linear_parameters * 20 // 64 // 8
    assert small.weight_bytes(awq(untied_head=True)) - sizes[2] == 151936 * 896 * 2
    assert shape("Qwen2.5-7B").weight_bytes(awq(untied_head=True)) == shape("Qwen2.5-7B").weight_bytes("awq")


def test_the_weights_of_a_7b_are_within_a_percent_of_what_vllm_logs():
    assert shape("Qwen2.5-7B").weight_bytes() / 2**30 == pytest.approx(14.19, abs=0.005)
    assert shape("Qwen2.5-7B").weight_bytes() / 2**30 == pytest.approx(14.29, rel=0.01)


def test_a_7b_has_196_linears_and_its_gate_is_136_mb():
    seven = shape("Qwen2.5-7B")
    assert seven.num_layers * len(seven.linears) == 196
    rows, columns = seven.linears["gate_proj"]
    assert rows * columns * 2 == 3584 * 18944 * 2 == 135_790_592


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"])
def test_hub_ids_find_their_shape(name):
    assert shape(name) == shape("Qwen2.5-7B")


def test_a_longer_size_is_not_taken_for_a_shorter_one():
    with pytest.raises(ValueError, match="neither a folder"):
        shape("Qwen2.5-7B2")


def test_the_course_model_is_a_known_shape():
    course = shape("course")
    assert course.name == "course" and course.model_type == "qwen2"
    assert course.hidden_size % 256 == 0 and course.head_dim == 64
    weights = models.COURSE_FOLDER / "model.safetensors"
    assert weights.stat().st_size == pytest.approx(course.weight_bytes(), rel=0.01)


@pytest.mark.parametrize(
    "sliding, layers, slots",
    [
        (0, 28, 28),
        (18, 36, 36),  # gpt-oss: 18 sliding and 18 full
        (52, 62, 70),  # Gemma-3-27B, charged as 70 by vLLM's logs
        (32, 32, 32),  # Mistral-7B-v0.1: all sliding
    ],
)
def test_layers_charged_by_the_pool(sliding, layers, slots):
    types = ["sliding_attention"] * sliding + ["full_attention"] * (layers - sliding)
    model = from_config(config("x", (64, 64, layers, 4, 4, 10), layer_types=types, sliding_window=512))
    assert model.kv_layer_slots == slots


def test_sliding_layers_of_the_families():
    sizes = (64, 64, 62, 4, 4, 10)
    assert from_config(config("gemma3_text", sizes, sliding_window=1024)).sliding_layers == 52
    assert from_config(config("gemma2", (64, 64, 26, 4, 4, 10), sliding_window=4096)).sliding_layers == 13
    assert from_config(config("mistral", sizes, sliding_window=4096)).sliding_layers == 62
    assert from_config(config("mistral", sizes, sliding_window=None)).sliding_layers == 0
    qwen = config("qwen2", sizes, sliding_window=32768, max_window_layers=20)
    assert from_config({**qwen, "use_sliding_window": False}).sliding_layers == 0
    assert from_config({**qwen, "use_sliding_window": True}).sliding_layers == 42


def test_text_config_is_read_where_the_text_model_is_nested():
    inner = config("mistral", (5120, 32768, 40, 32, 8, 131072), head_dim=128)
    model = from_config({"model_type": "mistral3", "text_config": inner, "vision_config": {"hidden_size": 1024}})
    assert (model.hidden_size, model.kv_bytes_per_token()) == (5120, 163_840)


REFUSED = [
    ({"kv_lora_rank": 512}, "latent attention (kv_lora_rank)"),
    ({"num_experts": 128}, "mixture of experts (num_experts)"),
    ({"num_local_experts": 8}, "mixture of experts (num_local_experts)"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"vocab_size": "many"}, "vocab_size must be a positive whole number, not 'many'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"hidden_size": 66}, "head_dim is not given"),
]


@pytest.mark.parametrize("change, words", REFUSED)
def test_what_is_not_a_dense_decoder_is_named_in_one_line(change, words):
    with pytest.raises(ValueError) as error:
        from_config({**config("qwen2", (64, 128, 2, 4, 2, 100)), **change}, "mine")
    assert words in str(error.value) and str(error.value).startswith("mine")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "7", '{"hidden_size": NaN}'])
def test_a_malformed_file_is_named_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        from_config(tmp_path)
    assert "\n" not in str(error.value) and tmp_path.name in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        from_config(tmp_path / "config.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OTHER_KEYS = [
    "model_type",
    "head_dim",
    "text_config",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "attention_bias",
    "tie_word_embeddings",
    "kv_lora_rank",
    "max_position_embeddings",
]
KEYS = st.sampled_from(SIZE_KEYS + OTHER_KEYS)


@given(st.dictionaries(KEYS, JSON, max_size=6), st.booleans())
@settings(max_examples=300, deadline=None)
def test_junk_gives_a_shape_or_one_line(junk, start_valid):
    base = config("qwen2", (64, 128, 2, 4, 2, 100)) if start_valid else {}
    try:
        model = from_config({**base, **junk})
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert model.parameters > 0 and model.kv_bytes_per_token() > 0 and model.kv_layer_slots >= model.num_layers


SIZES = st.tuples(
    st.integers(1, 64).map(lambda n: 128 * n),
    st.integers(1, 128).map(lambda n: 128 * n),
    st.integers(1, 80),
    st.sampled_from([(8, 8), (8, 1), (32, 8), (28, 4)]),
    st.integers(100, 200_000),
)


@given(SIZES, st.integers(2, 8))
@settings(deadline=None)
def test_kv_bytes_grow_with_layers_and_heads_and_weights_shrink_with_bits(sizes, factor):
    hidden, inter, layers, (heads, kv), vocab = sizes
    one = from_config(config("llama", (hidden, inter, layers, heads, kv, vocab), head_dim=128))
    deep = from_config(config("llama", (hidden, inter, layers * factor, heads, kv, vocab), head_dim=128))
    wide = from_config(config("llama", (hidden, inter, layers, heads * factor, kv * factor, vocab), head_dim=128))
    assert deep.kv_bytes_per_token() == wide.kv_bytes_per_token() == factor * one.kv_bytes_per_token()
    assert one.kv_bytes_per_token(tensor_parallel=kv) * kv == one.kv_bytes_per_token()
    assert one.kv_bytes_per_token(tensor_parallel=2 * kv) == one.kv_bytes_per_token(tensor_parallel=kv)
    assert one.weight_bytes() == 2 * one.parameters == one.weight_bytes("fp16")
    assert one.weight_bytes("awq") < one.weight_bytes("fp8") < one.weight_bytes()


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="choose one of fp32"):
        shape("Qwen2.5-7B").weight_bytes("int3")
    with pytest.raises(ValueError, match="choose one of auto"):
        shape("Qwen2.5-7B").kv_bytes_per_token("int8")
    with pytest.raises(ValueError, match="q_proj has 3584 input features, not a multiple of group size 1024"):
        shape("Qwen2.5-7B").weight_bytes(WeightScheme("wide", 4, 1024, 16, 4))


@given(name=st.sampled_from(models.known_models()[:-1]), scheme=st.sampled_from(["bf16", "fp16", "awq"]))
@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_shape_folder_reads_back_as_the_same_shape(tmp_path, name, scheme):
    folder = write_shape_folder(name, tmp_path / name, scheme)
    written = json.loads((folder / "config.json").read_text())
    assert from_config(folder, name) == shape(name)
    assert ("quantization_config" in written) == (scheme == "awq")
    assert written["architectures"] and not list(folder.glob("*.tmp"))


def test_a_shape_folder_has_a_tokenizer_and_no_weights(tmp_path):
    folder = write_shape_folder("Qwen2.5-7B", tmp_path)
    assert (folder / "tokenizer.json").exists() and not list(folder.glob("*.safetensors"))
    with pytest.raises(ValueError, match="bf16, fp16 or awq"):
        write_shape_folder("Qwen2.5-7B", tmp_path, "fp8")


def test_every_id_of_a_shape_has_a_text_and_common_text_keeps_its_tokens(tmp_path):
    from tokenizers import Tokenizer

    folder = write_shape_folder("Qwen2.5-7B", tmp_path / "shape")
    grown, course = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in (folder, COURSE_FOLDER))
    assert grown.get_vocab_size() == 152_064
    assert all(grown.id_to_token(number) for number in range(152_064))
    assert sorted(grown.get_vocab().values()) == list(range(152_064))
    text = "The porosity of flange AB-1234 is 3.75 %."
    assert course.decode(course.encode(text).ids) == grown.decode(grown.encode(text).ids) == text
