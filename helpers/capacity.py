"""What fits on a card and how fast it can be at best: memory plan, floors for TPOT and TTFT, roofline.

Pure functions of a shape, a card and vLLM's options. A plan predicts what vLLM's start log will say; a floor is a time
that no server can beat on that card. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from helpers.hardware import DATA, GIB, GPU, gpu, known_gpus
from helpers.models import ModelShape, WeightScheme, from_config, known_models, shape, weight_scheme

# Bytes per logit that live at the peak of the sampler's warm-up with max_num_seqs rows (vllm/v1/sample/): the 16-bit
# logits (2) and their float32 copy (4), then either
#   probabilities (4) and exponential noise (4): top-k and top-p masked in place (vLLM pull request 33538, 2026-02), or
#   sorted values (4), their int64 indices (8), the index input (8) and the second key and index buffers (12) of torch's
#   segmented radix sort (aten/src/ATen/native/cuda/SortStable.cu): vLLM before that.
SAMPLER_BYTES = {"in place": 2 + 4 + 4 + 4, "sort": 2 + 4 + 4 + 8 + 8 + 12}

CPU_BLOCK_SIZE = 128  # vLLM's default on a CPU, in tokens (vllm/platforms/cpu.py); 16 on a GPU

# Memory outside PyTorch's allocator (cuBLAS, attention work space; with more ranks NCCL's buffers), as vLLM 0.11 logged
# it on H100. Measured, not derived: other versions and cards print 0.02 to 0.26 GiB on one rank.
NON_TORCH = {1: round(0.13 * GIB), 2: round(0.54 * GIB)}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank: budget = weights + non_torch + activation + cuda_graphs + kv."""

    shape: ModelShape
    budget: int
    weights: int
    non_torch: int
    activation: int
    cuda_graphs: int
    kv: int
    kv_bytes_per_token: int
    kv_slot_bytes: int
    block_size: int
    max_model_len: int

    @property
    def kv_blocks(self) -> int:
        """Blocks of the pool, as vLLM counts them (one of them is its null block and holds no request)."""
        return max(self.kv, 0) // (self.kv_slot_bytes * self.block_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the pool: what vLLM logs as "GPU KV cache size"."""
        return self.kv_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len tokens that the pool holds: what vLLM logs as "Maximum concurrency"."""
        return self.kv_blocks / math.ceil(self.max_model_len / self.block_size)

    @property
    def fits(self) -> bool:
        """Whether vLLM would start: the weights fit, and one request of max_model_len does."""
        return self.concurrency >= 1

    def explain(self) -> str:
        """One line: what fits, or what does not and what to change."""
        gib = {name: getattr(self, name) / GIB for name in ("budget", "weights", "activation", "kv")}
        if self.weights >= self.budget:
            return (
                f"{self.shape.name} does not fit: weights {gib['weights']:.2f} GiB, budget {gib['budget']:.2f} GiB: "
                "use fewer bits per weight (awq), more GPUs (tensor_parallel) or a smaller model"
            )
        if self.kv_blocks == 0:
            return (
                f"{self.shape.name} leaves no memory for the KV cache: weights {gib['weights']:.2f} and activation "
                f"{gib['activation']:.2f} of {gib['budget']:.2f} GiB: lower max_num_seqs or max_num_batched_tokens, "
                "raise gpu_memory_utilization, or use fewer bits per weight"
            )
        if not self.fits:
            return (
                f"{self.shape.name} cannot hold one request of max_model_len {self.max_model_len}: the KV cache has "
                f"{self.kv_tokens} tokens ({gib['kv']:.2f} GiB): set max_model_len to {self.kv_tokens} or less, use an "
                "fp8 KV cache, or raise gpu_memory_utilization"
            )
        return (
            f"{self.shape.name} fits: weights {gib['weights']:.2f} of {gib['budget']:.2f} GiB, KV cache "
            f"{gib['kv']:.2f} GiB = {self.kv_tokens} tokens, {self.concurrency:.2f} requests of {self.max_model_len}"
        )


def default_batch(card: GPU) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) that `vllm serve` 0.32 takes by default on this card.

    Source: vllm/engine/arg_utils.py, `get_batch_defaults`; large batches are not the default on A100.
    """
    if card.memory_bytes >= 160 * GIB:
        return 1024, 16384
    if card.memory_bytes >= 70 * GIB and not card.name.startswith("A100"):
        return 1024, 8192
    return 256, 2048


def activation_bytes(
    model: ModelShape,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tensor_parallel: int = 1,
    sampler: str = "in place",
) -> int:
    """Peak of vLLM's profile run: the larger of one forward pass and one sampler call, plus the hidden states.

    Forward, per token at 16 bits: the MLP's gate, up and product (divided over ranks) and four vectors of hidden size;
    that it is four was read off two start logs (1.09 and 2.02 GiB), the rest is counted from vLLM's source. The sampler
    holds SAMPLER_BYTES for each of max_num_seqs x vocabulary logits. Multimodal encoders and dequantized copies are not
    counted.
    """
    mlp = (3 if model.gated_mlp else 2) * model.intermediate_size
    forward = 2 * max_num_batched_tokens * (4 * model.hidden_size + mlp // tensor_parallel)
    sampling = SAMPLER_BYTES[sampler] * min(max_num_seqs, max_num_batched_tokens) * model.vocab_size
    return max(forward, sampling + 2 * max_num_batched_tokens * model.hidden_size)


def memory_plan(
    model: ModelShape | str,
    card: GPU | str | None = None,
    scheme: str | WeightScheme = "bf16",
    kv_dtype: str = "auto",
    *,
    gpu_memory_utilization: float = 0.92,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    tensor_parallel: int = 1,
    block_size: int = 16,
    kv_cache_memory_bytes: int | None = None,
    sampler: str = "in place",
    activation: float | None = None,
    non_torch: float | None = None,
    cuda_graphs: float = 0,
) -> MemoryPlan:
    """Where a card's memory goes when vLLM starts, per rank (vllm/v1/worker/gpu_worker.py, determine_available_memory).

    kv = utilization x total - weights - non_torch - activation - cuda_graphs, or `kv_cache_memory_bytes` where given
    (then no card is needed, as on the CPU lane). Give `activation`, `non_torch` and `cuda_graphs` in bytes where a log
    prints them; the first two are estimated otherwise, and graphs are taken as 0 (true for enforce_eager; vLLM 0.21 and
    later charge an estimate of their own, earlier ones left graphs outside the budget). The default utilization is that
    of vLLM 0.32; 0.6.4 had 0.9. ValueError for options that vLLM would refuse.
    """
    model = shape(model) if isinstance(model, str) else model
    card = gpu(card) if isinstance(card, str) else card
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization}, must be above 0 and at most 1")
    if tensor_parallel < 1 or model.num_heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel {tensor_parallel} does not divide the {model.num_heads} heads of {model.name}"
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1")
    if card is None and kv_cache_memory_bytes is None:
        raise ValueError("memory_plan needs a card, or kv_cache_memory_bytes")

    default_seqs, default_tokens = default_batch(card) if card else (256, 2048)
    weights = model.weight_bytes(scheme) // tensor_parallel
    if activation is None:
        activation = activation_bytes(
            model, max_num_seqs or default_seqs, max_num_batched_tokens or default_tokens, tensor_parallel, sampler
        )
    if non_torch is None:
        non_torch = NON_TORCH[min(tensor_parallel, 2)] if card else 0
    activation, non_torch, cuda_graphs = round(activation), round(non_torch), round(cuda_graphs)
    fixed = weights + non_torch + activation + cuda_graphs
    if kv_cache_memory_bytes is None:
        budget = int(card.memory_bytes * gpu_memory_utilization)
        kv = budget - fixed
    else:
        kv, budget = kv_cache_memory_bytes, kv_cache_memory_bytes + fixed
    per_token = model.kv_bytes_per_token(kv_dtype, tensor_parallel)
    return MemoryPlan(
        shape=model,
        budget=budget,
        weights=weights,
        non_torch=non_torch,
        activation=activation,
        cuda_graphs=cuda_graphs,
        kv=kv,
        kv_bytes_per_token=per_token,
        kv_slot_bytes=per_token // model.num_layers * model.kv_layer_slots,
        block_size=block_size,
        max_model_len=max_model_len or model.max_position_embeddings,
    )


def max_context(plan: MemoryPlan, concurrency: int) -> int:
    """Most tokens (prompt and output) that each of `concurrency` requests can hold without preemption; 0 if none.

    Whole blocks of the pool less the null block, shared evenly and cut to the plan's max_model_len.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, must be at least 1")
    return min(max(plan.kv_blocks - 1, 0) // concurrency * plan.block_size, plan.max_model_len)


def max_concurrency(plan: MemoryPlan, context: int) -> int:
    """Most requests of `context` tokens each that the pool holds without preemption; 0 if not one, or if it is longer
    than max_model_len."""
    if context < 1:
        raise ValueError(f"context is {context} tokens, must be at least 1")
    if context > plan.max_model_len:
        return 0
    return max(plan.kv_blocks - 1, 0) // math.ceil(context / plan.block_size)


def server_plan(model: ModelShape | str, card: GPU | str | None, options: dict, facts: dict) -> MemoryPlan:
    """The plan of a server from its start options (keywords of `serving.serve`) and the facts of its log.

    From the facts come the block size, and what vLLM measured or estimated before it sized the pool
    (activation, other memory, graphs), if logged.
    """
    measured = {"activation": "activation_gib", "non_torch": "non_torch_gib", "cuda_graphs": "graph_estimate_gib"}
    names = (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    return memory_plan(
        model,
        card,
        served_scheme(options),
        served_kv_dtype(options),
        tensor_parallel=options.get("tensor_parallel_size", 1),
        block_size=facts.get("block_size", 16 if card else CPU_BLOCK_SIZE),
        **{name: options[name] for name in names if name in options},
        **{name: facts[fact] * GIB for name, fact in measured.items() if fact in facts},
    )


def served_scheme(options: dict) -> str:
    """The weight scheme of a server from its start options: its quantization, else its dtype."""
    short = {"float32": "fp32", "float16": "fp16"}
    return options.get("quantization") or short.get(options.get("dtype"), "bf16")


def served_kv_dtype(options: dict) -> str:
    """The KV dtype of a server from its start options: kv_cache_dtype, else the dtype it computes in."""
    return options.get("kv_cache_dtype") or options.get("dtype") or "auto"


def compare(plan: MemoryPlan, facts: dict) -> list[dict]:
    """A plan beside the log of the server it is for: term, predicted, logged and relative error, in the log's units.

    `facts` is what `serverlog.facts` read (weights_gib, kv_memory_gib, kv_tokens, ...); terms it lacks are left out.
    """
    predicted = {
        "weights_gib": plan.weights / GIB,
        "activation_gib": plan.activation / GIB,
        "non_torch_gib": plan.non_torch / GIB,
        "kv_memory_gib": plan.kv / GIB,
        "kv_tokens": plan.kv_tokens,
        "max_concurrency": plan.concurrency,
    }
    return [
        {"term": term, "predicted": value, "logged": facts[term], "error": value / facts[term] - 1}
        for term, value in predicted.items()
        if facts.get(term)
    ]


def start_logs() -> list[dict]:
    """Start logs of vLLM 0.6 to 0.31 on other people's cards, collected in 2026-11 from public threads and files.

    Sizes are GiB per rank as logged. `config`, `scheme` and `options` (the batch sizes of that version where the log
    gives none) were added for the dense models; `weak` says what was inferred.
    """
    return [json.loads(line) for line in (DATA / "startup.jsonl").read_text(encoding="utf-8").splitlines()]


def plan_for_log(row: dict, given_activation: bool = False) -> MemoryPlan:
    """The plan for a row of `start_logs` with a config; activation and non-torch memory as logged, if asked."""
    card = gpu(row["card"])
    if "total_gpu_memory_gib" in row:
        card = replace(card, memory_bytes=round(row["total_gpu_memory_gib"] * GIB))
    known = {}
    if given_activation:
        known = {"activation": row["peak_activation_gib"] * GIB, "non_torch": row["non_torch_gib"] * GIB}
    return memory_plan(
        from_config(row["config"], row["model"]),
        card,
        row["scheme"],
        gpu_memory_utilization=row["gpu_memory_utilization"],
        max_model_len=row["max_model_len"],
        tensor_parallel=row["tensor_parallel_size"],
        block_size=row["block_size"],
        **row["options"],
        **known,
    )


def log_table() -> list[dict]:
    """How wrong the plan is: for each log with a dense config and a utilization, KV memory logged and predicted (GiB).

    `given` takes activation and non-torch memory from the log (None where it prints none), `predicted` estimates them;
    `error` and `given_error` are relative to what was logged.
    """
    rows = []
    for row in start_logs():
        if "config" not in row or "gpu_memory_utilization" not in row:
            continue
        logged = row["available_kv_gib_per_rank"]
        predicted = plan_for_log(row).kv / GIB
        given = plan_for_log(row, given_activation=True).kv / GIB if "peak_activation_gib" in row else None
        rows.append(
            {
                "id": row["id"],
                "logged": logged,
                "predicted": predicted,
                "error": predicted / logged - 1,
                "given": given,
                "given_error": None if given is None else given / logged - 1,
                "weak": row.get("weak", ""),
            }
        )
    return rows


def decode_bytes(
    model: ModelShape, batch: int, context: int, scheme: str | WeightScheme = "bf16", kv_dtype: str = "auto"
) -> int:
    """Bytes read by one decode step: every weight but the rows of the embedding that are not looked up, and the KV."""
    table = 0 if model.tie_word_embeddings else 2 * (model.embedding_parameters - batch * model.hidden_size)
    return model.weight_bytes(scheme) - max(table, 0) + batch * context * model.kv_bytes_per_token(kv_dtype)


def decode_flops(model: ModelShape, batch: int, context: int) -> int:
    """FLOPs of one decode step: two per weight of linears and head, and query-key and weight-value products."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * context
    return batch * (2 * (model.linear_parameters + model.embedding_parameters) + attention)


def attained(
    model: ModelShape,
    batch: int,
    context: int,
    step: float,
    scheme: str | WeightScheme = "bf16",
    kv_dtype: str = "auto",
) -> tuple[float, float]:
    """A decode step of `step` seconds as a point of the roofline: (FLOP per byte, FLOP/s)."""
    flops = decode_flops(model, batch, context)
    return flops / decode_bytes(model, batch, context, scheme, kv_dtype), flops / step


def tpot_floor(
    model: ModelShape | str,
    card: GPU | str,
    scheme: str | WeightScheme = "bf16",
    kv_dtype: str = "auto",
    *,
    batch: int = 1,
    context: int = 0,
    tensor_parallel: int = 1,
) -> float:
    """Seconds that one decode step takes at least: bytes over bandwidth, or FLOPs over peak where that is more."""
    model, card = _resolve(model, card)
    memory = decode_bytes(model, batch, context, scheme, kv_dtype) / card.bandwidth
    return max(memory, decode_flops(model, batch, context) / peak_flops(card, scheme)) / tensor_parallel


def ttft_floor(
    model: ModelShape | str,
    card: GPU | str,
    input_len: int,
    scheme: str | WeightScheme = "bf16",
    *,
    batch: int = 1,
    tensor_parallel: int = 1,
) -> float:
    """Seconds that the prefill of `batch` prompts takes at least: FLOPs over peak, or weights over bandwidth if more.

    FLOPs: two per linear weight and token, causal attention (half of the square), and the head for one token each.
    """
    model, card = _resolve(model, card)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * input_len**2
    flops = batch * (2 * model.linear_parameters * input_len + attention + 2 * model.embedding_parameters)
    memory = decode_bytes(model, batch, 0, scheme) / card.bandwidth
    return max(flops / peak_flops(card, scheme), memory) / tensor_parallel


def peak_flops(card: GPU, scheme: str | WeightScheme = "bf16") -> float:
    """Peak in FLOP/s of the matrix products of a scheme: FP8 units where card and weights have them, else 16-bit.

    4-bit weights are multiplied at 16 bits; INT8 peaks are not in the data and count as FP8's.
    """
    return card.fp8_flops if weight_scheme(scheme).bits == 8 and card.fp8_flops else card.flops


def roofline(bandwidth: float, flops: float, intensity: float) -> float:
    """Attainable FLOP/s at an arithmetic intensity in FLOP/byte (Williams, Waterman, Patterson, CACM 52(4), 2009)."""
    return min(flops, bandwidth * intensity)


def decode_points(
    model: ModelShape | str,
    card: GPU | str,
    batches: list[int],
    context: int,
    scheme: str | WeightScheme = "bf16",
    kv_dtype: str = "auto",
) -> list[dict]:
    """Decode on the roofline, predicted: batch, intensity (FLOP/byte), FLOP/s, step (s) and tokens/s at best."""
    model, card = _resolve(model, card)
    points = []
    for batch in batches:
        flops = decode_flops(model, batch, context)
        intensity = flops / decode_bytes(model, batch, context, scheme, kv_dtype)
        attainable = roofline(card.bandwidth, peak_flops(card, scheme), intensity)
        step = flops / attainable
        points.append(
            {
                "batch": batch,
                "intensity": intensity,
                "flops": attainable,
                "step": step,
                "tokens_per_second": batch / step,
            }
        )
    return points


def largest_model_table(
    cards: list[str] | None = None,
    schemes: tuple[str, ...] = ("bf16", "fp8", "awq"),
    *,
    context: int = 4096,
    max_num_seqs: int = 64,
    gpu_memory_utilization: float = 0.92,
) -> list[dict]:
    """The largest Qwen2.5 that starts on one card: a row per card and scheme, with the plan's KV tokens (predicted).

    A model counts as fitting if one request of `context` tokens fits beside it, 64 requests being admitted at once.
    On a card without FP8 units vLLM keeps FP8 weights as they are and multiplies at 16 bits.
    """
    family = sorted((shape(name) for name in known_models() if name.startswith("Qwen2.5")), key=lambda m: m.parameters)
    rows = []
    for card in cards or known_gpus():
        for scheme in schemes:
            plans = [
                memory_plan(
                    model,
                    card,
                    scheme,
                    max_model_len=context,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=2048,
                    gpu_memory_utilization=gpu_memory_utilization,
                )
                for model in family
            ]
            best = next((plan for plan in reversed(plans) if plan.fits), None)
            rows.append(
                {
                    "card": card,
                    "scheme": scheme if scheme != "bf16" or gpu(card).bf16_flops else "fp16",
                    "model": best and best.shape.name,
                    "weights_gib": best and best.weights / GIB,
                    "kv_tokens": best and best.kv_tokens,
                }
            )
    return rows


def _resolve(model: ModelShape | str, card: GPU | str) -> tuple[ModelShape, GPU]:
    return (shape(model) if isinstance(model, str) else model, gpu(card) if isinstance(card, str) else card)
