"""Shapes of dense decoder models: parameters, bytes of weights, bytes of KV cache per token.

Everything here is arithmetic on a Hugging Face `config.json`; nothing is loaded or downloaded.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COURSE_FOLDER = Path(__file__).parent / "coursemodel" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Bytes of one stored key or value element, by vLLM's --kv-cache-dtype.
KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

# What the architecture decides and config.json does not say.
_QKV_BIAS = {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"}
_QK_NORM = {"qwen3", "gemma3", "gemma3_text"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text"}
_PLAIN_MLP = {"starcoder2", "nemotron", "gpt_neox", "phi"}
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "moe_intermediate_size": "mixture of experts",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_num_value_heads": "linear attention",
}


@dataclass(frozen=True)
class WeightScheme:
    """How the linear layers are stored; embeddings, head, norms and biases have `other_bits`.

    `group_size` is the number of input features that share a scale (None: one scale per output channel);
    `zero_bits` is the width of a group's zero point. `untied_head` adds a 16-bit head to a model that has none of
    its own, as some quantized checkpoints do.
    """

    name: str
    bits: int
    group_size: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    untied_head: bool = False
    other_bits: int = 16

    @property
    def bits_per_weight(self) -> float:
        """Bits per linear weight, scales and zeros of its group included (AWQ, group 128: 4.156)."""
        return self.bits + (self.scale_bits + self.zero_bits) / self.group_size if self.group_size else self.bits


def awq(group_size: int = 128, untied_head: bool = False) -> WeightScheme:
    """W4A16 as AutoAWQ stores it: 4-bit weights, one 16-bit scale and one 4-bit zero point per group."""
    return WeightScheme(f"awq-g{group_size}", 4, group_size, 16, 4, untied_head)


SCHEMES = {
    "fp32": WeightScheme("fp32", 32, other_bits=32),
    "bf16": WeightScheme("bf16", 16),
    "fp16": WeightScheme("fp16", 16),
    "fp8": WeightScheme("fp8", 8, scale_bits=32),
    "int8": WeightScheme("int8", 8, scale_bits=32),
    "awq": awq(),
}


def weight_scheme(scheme: str | WeightScheme) -> WeightScheme:
    """The scheme of that name (fp32, bf16, fp16, fp8, int8, awq); a WeightScheme passes through."""
    if isinstance(scheme, WeightScheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"weight scheme {scheme!r} is unknown: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", tensor_parallel: int = 1):
    """Bytes of KV cache for one token on one rank: 2 x layers x KV heads x head size x bytes.

    KV heads are divided over the ranks, and copied where there are fewer heads than ranks.
    """
    if dtype == "auto":
        dtype = "bfloat16"
    if dtype not in KV_DTYPE_BYTES:
        raise ValueError(f"KV dtype {dtype!r} is unknown: choose one of auto, {', '.join(KV_DTYPE_BYTES)}")
    return 2 * layers * -(-kv_heads // tensor_parallel) * head_dim * KV_DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one dense decoder, as its config.json gives them."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    gated_mlp: bool
    qk_norm: bool
    norms_per_layer: int
    sliding_window: int | None
    sliding_layers: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: name -> (input features, output features)."""
        hidden, inter = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layers = {"q_proj": (hidden, query), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (query, hidden)}
        if self.gated_mlp:
            layers["gate_proj"] = (hidden, inter)
        return layers | {"up_proj": (hidden, inter), "down_proj": (inter, hidden)}

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers, without biases: what a quantizer touches."""
        return self.num_layers * sum(rows * columns for rows, columns in self.linears.values())

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding; the head is a second such matrix unless it is tied."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters: linears, biases, norms, embedding and head."""
        outputs = {name: columns for name, (_, columns) in self.linears.items()}
        biases = 0
        if self.attention_bias:
            biases += outputs["q_proj"] + outputs["k_proj"] + outputs["v_proj"]
        if self.output_bias:
            biases += outputs["o_proj"]
        if self.mlp_bias:
            biases += outputs.get("gate_proj", 0) + outputs["up_proj"] + outputs["down_proj"]
        norms = self.norms_per_layer * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return self.linear_parameters + self.num_layers * (biases + norms) + self.hidden_size + embeddings

    def weight_bytes(self, scheme: str | WeightScheme = "bf16") -> int:
        """Bytes of the stored weights under a weight scheme. ValueError if a group does not divide a layer's input."""
        scheme = weight_scheme(scheme)
        bits = scheme.other_bits * (self.parameters - self.linear_parameters)
        if scheme.untied_head and self.tie_word_embeddings:
            bits += scheme.other_bits * self.embedding_parameters
        for name, (rows, columns) in self.linears.items():
            group = scheme.group_size or rows
            if rows % group:
                raise ValueError(
                    f"{self.name}: {name} has {rows} input features, not a multiple of group size {group}: "
                    "choose a smaller group"
                )
            scales = rows // group * columns * (scheme.scale_bits + scheme.zero_bits)
            bits += self.num_layers * (rows * columns * scheme.bits + scales)
        return bits // 8

    def kv_bytes_per_token(self, dtype: str = "bfloat16", tensor_parallel: int = 1) -> int:
        """Bytes of KV cache for one token of full context on one rank (sliding windows not subtracted)."""
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, dtype, tensor_parallel)

    @property
    def kv_layer_slots(self) -> int:
        """Layers that vLLM's pool charges each token for: more than `num_layers` where groups are padded.

        Sliding and full layers form groups of equal size, the last of each kind padded, so Gemma-3's 52 + 10 layers
        are charged as 70 (vllm/v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`).
        """
        kinds = [n for n in (self.sliding_layers, self.num_layers - self.sliding_layers) if n]
        group = max(kinds) if max(kinds) < 1.25 * min(kinds) else min(kinds)
        return sum(-(-n // group) * group for n in kinds)


def shape(name_or_path: str | os.PathLike) -> ModelShape:
    """The shape of a known model ("Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "course"), a folder or a config.json."""
    config, name = _config(name_or_path)
    return from_config(config, name)


def known_models() -> list[str]:
    """Names that `shape` knows without a file, smallest Qwen2.5 first; and "course"."""
    return [*_known(), "course"]


def from_config(config: dict | str | os.PathLike, name: str | None = None) -> ModelShape:
    """The shape of a dense decoder from a Hugging Face config (a dict, a config.json or its folder).

    ValueError, in one line that names the key or the architecture, if it is not one or a size is missing or wrong.
    """
    if not isinstance(config, dict):
        config, found = _read_config(Path(config))
        name = name or found
    name = name or "model"
    outer = config
    if isinstance(config.get("text_config"), dict):
        config = {"tie_word_embeddings": outer.get("tie_word_embeddings"), **config["text_config"]}
        config = {key: value for key, value in config.items() if value is not None}
    model_type = str(config.get("model_type") or outer.get("model_type") or "unknown")
    where = f"{name} (model_type {model_type[:40]!r})"

    for key, what in _UNSUPPORTED.items():
        if config.get(key) not in (None, 0):
            raise ValueError(f"{where}: {what} ({key}) is not supported, only dense decoders are")
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{where}: encoder-decoder models (is_encoder_decoder) are not supported, only dense decoders")

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{where}: config.json has no {key!r}, so this is not a dense decoder that can be read")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**40:
            raise ValueError(f"{where}: {key} must be a positive whole number, not {str(value)[:40]!r}")
        return value

    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{where}: hidden_size {hidden} is not a multiple of {heads} heads and head_dim is not given")
    sliding = _sliding_layers(config, model_type, layers, where, size)
    llama_bias = bool(config.get("attention_bias") or config.get("use_bias"))
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size("head_dim", hidden // heads),
        vocab_size=size("vocab_size"),
        max_position_embeddings=size("max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", model_type in _TIED)),
        attention_bias=model_type in _QKV_BIAS or llama_bias,
        output_bias=llama_bias,
        mlp_bias=bool(config.get("mlp_bias") or config.get("use_bias")),
        gated_mlp=model_type not in _PLAIN_MLP,
        qk_norm=model_type in _QK_NORM,
        norms_per_layer=4 if model_type in _FOUR_NORMS else 2,
        sliding_window=config["sliding_window"] if sliding else None,
        sliding_layers=sliding,
    )


def write_shape_folder(name_or_path: str | os.PathLike, folder: str | os.PathLike, scheme: str = "bf16") -> Path:
    """Write a folder that vLLM serves with `--load-format dummy`: true shape and speed, no weights, no quality.

    It holds the model's config.json (for "awq" with AutoAWQ's quantization_config) and the course model's tokenizer,
    grown to the model's vocabulary, so that every id has a text and random prompts are as varied. Returns the folder.
    """
    config, name = _config(name_or_path)
    from_config(config, name)
    if scheme not in ("bf16", "fp16", "awq"):
        raise ValueError(f"a shape folder is written for bf16, fp16 or awq, not {scheme!r}")
    config = config | {"torch_dtype": "bfloat16" if scheme == "bf16" else "float16"}
    if scheme == "awq":
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        if (COURSE_FOLDER / file).exists():
            shutil.copyfile(COURSE_FOLDER / file, folder / file)
    tokenizer = json.loads((COURSE_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(_grown(tokenizer, config["vocab_size"])), encoding="utf-8")
    temporary = folder / f".config.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "config.json")
    return folder


def _grown(tokenizer: dict, size: int) -> dict:
    """A BPE tokenizer with more tokens, each the merge of two words of its vocabulary, up to `size` ids."""
    words, merges = dict(tokenizer["model"]["vocab"]), list(tokenizer["model"]["merges"])
    special = tokenizer["added_tokens"]
    starts = [word for word in words if re.fullmatch("Ġ[a-z]+", word)]
    ends = [word for word in words if re.fullmatch("[a-z]+", word)]
    for start, end in itertools.product(starts, ends):
        if len(words) + len(special) >= size:
            break
        if start + end not in words:
            words[start + end] = len(words)
            merges.append([start, end])
    special = [token | {"id": len(words) + number} for number, token in enumerate(special)]
    model = {**tokenizer["model"], "vocab": words, "merges": merges}
    return {**tokenizer, "model": model, "added_tokens": special}


def _sliding_layers(config: dict, model_type: str, layers: int, where: str, size) -> int:
    """Number of layers that attend to a sliding window; 0 where every layer attends to the full context."""
    types = config.get("layer_types")
    if isinstance(types, list):
        strange = {str(kind)[:40] for kind in types} - {"full_attention", "sliding_attention"}
        if strange:
            raise ValueError(f"{where}: layer_types holds {min(strange)!r}: only full and sliding attention are known")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    size("sliding_window")
    if isinstance(types, list):
        return min(types.count("sliding_attention"), layers)
    if model_type in ("gemma3", "gemma3_text"):
        return layers - layers // size("sliding_window_pattern", 6)
    if model_type == "gemma2":
        return (layers + 1) // 2
    if config.get("use_sliding_window"):
        return max(layers - size("max_window_layers", layers), 0)
    return layers


@cache
def _known() -> dict[str, dict]:
    with open(Path(__file__).parent / "data" / "models.toml", "rb") as file:
        return tomllib.load(file)


def _config(name_or_path: str | os.PathLike) -> tuple[dict, str]:
    """(config, name) of a known name or of a path."""
    text = os.fspath(name_or_path)
    if text == "course" or Path(text).resolve() == COURSE_FOLDER.resolve():
        return _read_config(COURSE_FOLDER)[0], "course"
    if os.path.exists(text):
        return _read_config(Path(text))
    base = text.rsplit("/", 1)[-1]
    for name, config in _known().items():
        if re.match(rf"{re.escape(name)}(-|$)", base, re.IGNORECASE):
            return dict(config), name
    raise ValueError(f"model {text!r} is neither a folder with config.json nor one of {', '.join(known_models())}")


def _read_config(path: Path) -> tuple[dict, str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}): give a config.json or its folder") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file}: is not JSON: give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds no JSON object: give a Hugging Face config.json")
    return config, file.resolve().parent.name
