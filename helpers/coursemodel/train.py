"""Train the course model from nothing.

    python -m helpers.coursemodel.train --folder run --minutes 6     one H200
    python -m helpers.coursemodel.train --folder run --steps 20 --shape tiny     a smoke run on a CPU
    python -m helpers.coursemodel.train --folder run --init-only     random weights, to try servers with

The folder receives config, tokenizer, model.safetensors (bf16), checkpoint.pt and loss.jsonl. The same command run
again goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.coursemodel import path, reports
from helpers.coursemodel.batches import WEIGHTS, Batches, Phase, answers
from helpers.coursemodel.tokenizer import VOCABULARY, render

SHAPES = {
    "course": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "num_attention_heads": 4},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2},
}
PHASES = {  # (share of the training after which it ends, shape of a batch)
    "course": [(0.12, Phase(64, 1024, 200)), (0.5, Phase(64, 1024, 900)), (1.0, Phase(16, 4096, 3600))],
    "tiny": [(0.5, Phase(8, 256, 60)), (1.0, Phase(4, 512, 200))],
}
LEARNING_RATE, WARM_UP_STEPS, DECAY_FROM = 3e-3, 100, 0.4
WEIGHT_DECAY = 0.1
EPSILON = 1e-6  # of RMSNorm
ROPE_THETA = 10_000.0


def new_model(shape: str = "course", seed: int = 0):
    """A Qwen2ForCausalLM with random weights: residual branches start at zero, other matrices at fan-in ** -0.5."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokens = Batches(path()).tokenizer
    torch.manual_seed(seed)
    config = Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.token_to_id("<|im_end|>"),
        pad_token_id=tokens.token_to_id("<|endoftext|>"),
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [config.eos_token_id, config.pad_token_id]
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON) * weight).to(x.dtype)


def block(x: Tensor, cosine: Tensor, sine: Tensor, weights: tuple[Tensor, ...], heads: int) -> Tensor:
    """One Qwen2 layer as a pure function, x [rows, length, hidden]: compiled once, it serves every layer."""
    q, q_bias, k, k_bias, v, v_bias, o, gate, up, down, norm1, norm2 = weights
    rows, length, hidden = x.shape

    def split(y: Tensor) -> Tensor:
        return y.view(rows, length, -1, hidden // heads).transpose(1, 2)

    def rotate(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return (y * cosine + torch.cat((-second, first), dim=-1) * sine).to(y.dtype)

    y = rms_norm(x, norm1)
    queries, keys, values = (split(F.linear(y, w, b)) for w, b in ((q, q_bias), (k, k_bias), (v, v_bias)))
    y = F.scaled_dot_product_attention(rotate(queries), rotate(keys), values, is_causal=True, enable_gqa=True)
    x = x + F.linear(y.transpose(1, 2).reshape(rows, length, hidden), o)
    y = rms_norm(x, norm2)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def token_losses(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target [rows * length] from the last layer's output, through the norm and the tied head."""
    logits = F.linear(rms_norm(x, norm), head).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets, reduction="none")


def rotary(length: int, dim: int, device) -> tuple[Tensor, Tensor]:
    frequencies = ROPE_THETA ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(length, device=device)[:, None] * frequencies.repeat(2)
    return angles.cos(), angles.sin()


def losses(model, tokens: Tensor, block=block, token_losses=token_losses) -> Tensor:
    """Loss of every next token, [rows, length], for tokens [rows, length + 1]."""
    core, heads = model.model, model.config.num_attention_heads
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    cosine, sine = rotary(inputs.shape[1], model.config.hidden_size // heads, tokens.device)
    x = core.embed_tokens(inputs)
    if torch.is_autocast_enabled(tokens.device.type):
        x = x.to(torch.get_autocast_dtype(tokens.device.type))
    for layer in core.layers:
        a, m = layer.self_attn, layer.mlp
        projections = [t for p in (a.q_proj, a.k_proj, a.v_proj) for t in (p.weight, p.bias)]
        mlp = [m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight]
        norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        x = block(x, cosine, sine, (*projections, a.o_proj.weight, *mlp, *norms), heads)
    return token_losses(x, core.norm.weight, core.embed_tokens.weight, targets.flatten()).view_as(targets)


class Muon:
    """Muon for matrices, one batched step for all matrices of a shape.

    Momentum 0.95 (Nesterov), five Newton-Schulz iterations (Jordan 2024), an update scaled by 0.2 sqrt(max(rows,
    columns)) so that AdamW's learning rate fits (Liu et al. 2025, "Muon is scalable"), decoupled weight decay.
    """

    def __init__(self, parameters: list[Tensor]):
        self.groups: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(parameter.shape, []).append(parameter)
        self.momenta = [torch.zeros(len(g), *shape, device=g[0].device) for shape, g in self.groups.items()]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self.groups.values(), self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            torch._foreach_mul_(group, 1 - rate * WEIGHT_DECAY)
            scale = 0.2 * math.sqrt(max(momentum.shape[1:]))
            torch._foreach_add_(group, list(update.to(momentum.dtype).unbind()), alpha=-rate * scale)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, of each matrix in x [n, rows, columns]; computed in bf16."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Validation:
    """Share of unseen questions whose every answer token is the most likely one: what greedy decoding would give."""

    def __init__(self, batches: Batches, lengths: tuple[int, ...], count: int):
        self.sets = {}
        for trade, length in itertools.product(reports.TRADES, lengths):
            made = [reports.make(trade, f"validation/{i}", "test", length, 4) for i in range(count)]
            texts = [render(reports.conversation(report)) for report in made]
            ids = [np.array(encoded.ids) for encoded in batches.tokenizer.encode_batch(texts)]
            tokens = np.zeros((count, max(map(len, ids))), np.int64)
            spans = []
            for row, document in enumerate(ids):
                tokens[row, : len(document)] = document
                edges = np.flatnonzero(np.diff(answers(document, batches.ids).astype(int))) + 1
                spans += [(row, a, b) for a, b in edges.reshape(-1, 2)]
            self.sets[trade, length] = torch.from_numpy(tokens), spans

    @torch.no_grad()
    def __call__(self, model) -> dict[str, dict[int, float]]:
        result: dict[str, dict[int, float]] = {trade: {} for trade in reports.TRADES}
        for (trade, length), (tokens, spans) in self.sets.items():
            right = []
            for part in tokens.to(model.device).split(8):
                guesses = model(part[:, :-1]).logits.argmax(-1)
                right.append((guesses == part[:, 1:]).cpu())
            right = torch.cat(right)
            result[trade][length] = round(sum(bool(right[r, a - 1 : b - 1].all()) for r, a, b in spans) / len(spans), 4)
        return result


class Stream(torch.utils.data.Dataset):
    """Batches by index, for the workers of a DataLoader. With a budget in minutes the progress is a shared number."""

    def __init__(self, batches: Batches, phases: list, steps: int | None):
        self.batches, self.phases, self.steps = batches, phases, steps
        self.progress = torch.zeros(1).share_memory_()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        progress = index / self.steps if self.steps else float(self.progress)
        return self.batches.batch(index, next(phase for end, phase in self.phases if progress < end or end == 1.0))


def learning_rate(step: int, progress: float) -> float:
    """Warm-up, constant, then linear to a hundredth."""
    decay = max(0.01, min(1.0, (1 - progress) / (1 - DECAY_FROM)))
    return LEARNING_RATE * decay * min(1.0, (step + 1) / WARM_UP_STEPS)


def export(model, folder: Path) -> None:
    """Write config, weights in bf16 and tokenizer, each file whole or not at all."""
    new = folder / "new"
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(new)
    for file in path().glob("*token*"):
        shutil.copy(file, new)
    shutil.copy(path() / "chat_template.jinja", new)
    for file in new.iterdir():
        os.replace(file, folder / file.name)
        (folder / file.name).chmod(0o644)
    new.rmdir()


def logged(file: Path, step: int) -> list[str]:
    """The whole lines of a log up to a step: what a run that resumes there keeps of it."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train until the budget is spent; returns the last logged losses."""
    begun = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forked
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches, phases = Batches(path(), options.seed), PHASES[options.shape]
    stream = Stream(batches, phases, options.steps)
    model = new_model(options.shape, options.seed).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")

    step, spent, tokens_seen = 0, 0.0, 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        muon.momenta = state["muon"]
        step, spent, tokens_seen = state["step"], state["spent"], state["tokens"]
        print(f"resumed at step {step}", flush=True)

    def save() -> None:
        state = {"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.momenta}
        state |= {"step": step, "spent": spent + time.monotonic() - begun, "tokens": tokens_seen}
        torch.save(state, folder / "checkpoint.new")
        os.replace(folder / "checkpoint.new", checkpoint)
        export(model, folder)

    forward = {}
    if device.type == "cuda":
        torch._dynamo.config.suppress_errors = True
        torch.set_float32_matmul_precision("high")
        forward = {f.__name__: torch.compile(f, dynamic=False) for f in (block, token_losses)}
    validation = Validation(batches, *options.validation)
    workers = options.workers if options.workers is not None else max(1, (os.cpu_count() or 2) - 1)
    loader = torch.utils.data.DataLoader(
        stream,
        batch_size=None,
        sampler=range(step, options.steps) if options.steps else itertools.count(step),
        num_workers=workers,
        prefetch_factor=3 if workers else None,
        pin_memory=device.type == "cuda",
    )
    last: dict[str, float] = {}
    sums = {kind: torch.zeros(2, device=device) for kind in WEIGHTS}  # loss, tokens
    kept = logged(folder / "loss.jsonl", step)
    with (folder / "loss.jsonl").open("w") as log:
        log.writelines(kept)

        def write(**entry) -> None:
            print(line := json.dumps(entry), flush=True)
            log.write(line + "\n")
            log.flush()

        for tokens, weights in loader:
            tokens, weights = tokens.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)[:, 1:]
            seconds = spent + time.monotonic() - begun
            progress = step / options.steps if options.steps else seconds / (60 * options.minutes)
            if progress >= 1:
                break
            stream.progress[0] = progress
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                each = losses(model, tokens, **forward)
            ((each * weights).sum() / weights.sum()).backward()
            for kind, weight in WEIGHTS.items():
                mask = weights == weight
                sums[kind] += torch.stack(((each.detach() * mask).sum(), mask.sum()))
            rate = learning_rate(step, progress)
            nn.utils.clip_grad_norm_(rest, 1.0)
            for group in adam.param_groups:
                group["lr"] = rate
            adam.step()
            muon.step(rate)
            model.zero_grad(set_to_none=True)
            step += 1
            tokens_seen += weights.numel()
            if step % options.log_every == 0 or step == options.steps:
                last = {kind: round((loss / count.clamp(min=1)).item(), 4) for kind, (loss, count) in sums.items()}
                for total in sums.values():
                    total.zero_()
                write(step=step, seconds=round(seconds, 1), tokens=tokens_seen, **last, rate=round(rate, 6))
            if step % options.save_every == 0:
                write(step=step, right=validation(model))
                save()
        save()
        write(step=step, right=validation(model.to(torch.bfloat16)))
    return last


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the course model.")
    parser.add_argument("--folder", type=Path, required=True, help="where results and checkpoints go")
    parser.add_argument("--minutes", type=float, help="budget of wall-clock time, everything included")
    parser.add_argument("--steps", type=int, help="budget of steps; exactly repeatable")
    parser.add_argument("--shape", choices=SHAPES, default="course")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes that write text (default: all cores but one)")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=400, help="steps between checkpoints and validations")
    parser.add_argument("--init-only", action="store_true", help="write random weights and stop")
    options = parser.parse_args(arguments)
    options.validation = ((100, 400, 1500, 3200), 16) if options.shape == "course" else ((60, 200), 4)
    if options.init_only:
        options.folder.mkdir(parents=True, exist_ok=True)
        export(new_model(options.shape, options.seed), options.folder)
    elif (options.minutes is None) == (options.steps is None):
        parser.error("give a budget: either --minutes or --steps")
    else:
        train(options)


if __name__ == "__main__":
    main()
