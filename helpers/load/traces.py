"""Traces in ShareGPT's format, which `vllm bench serve --dataset-name sharegpt` replays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np


def write_sharegpt(conversations: Iterable[Sequence[str]], path: str | Path) -> Path:
    """Writes conversations, each a list of turns that starts with the user's, as one JSON file."""
    entries = []
    for number, turns in enumerate(conversations):
        if isinstance(turns, str) or len(turns) < 2:
            raise ValueError(f"conversation {number} has no question and answer: {turns!r}")
        speakers = ("human", "gpt") * len(turns)
        talk = [{"from": speaker, "value": turn} for speaker, turn in zip(speakers, turns, strict=False)]
        entries.append({"id": f"conversation_{number}", "conversations": talk})
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(entries, ensure_ascii=False, indent=0), encoding="utf-8")
    os.replace(partial, path)
    return path


def read_sharegpt(path: str | Path) -> list[tuple[str, str]]:
    """The first two turns of every conversation that has two; ValueError if there is none."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        talks = [entry["conversations"] for entry in entries if len(entry.get("conversations", ())) >= 2]
        pairs = [(talk[0]["value"], talk[1]["value"]) for talk in talks]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a file in ShareGPT's format ({type(error).__name__}: {error})") from None
    if not pairs:
        raise ValueError(f"{path}: no conversation of two turns")
    return pairs


def trace_lengths(path: str | Path, tokenizer: str | Path) -> dict[str, dict[str, float]]:
    """Tokens of the questions ("prompt") and the answers ("output"): count, mean, min, p50, p90, p99, max of each."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    pairs = read_sharegpt(path)
    lengths = {}
    for name, texts in zip(("prompt", "output"), zip(*pairs, strict=True), strict=True):
        tokens = [len(encoding.ids) for encoding in encoder.encode_batch(texts)]
        points = np.percentile(tokens, (0, 50, 90, 99, 100)).tolist()
        lengths[name] = {"count": len(tokens), "mean": float(np.mean(tokens))}
        lengths[name] |= dict(zip(("min", "p50", "p90", "p99", "max"), points, strict=True))
    return lengths
