"""The course model: a small Qwen2 trained to answer questions about reports of two trades."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder with config.json, model.safetensors and the tokenizer, as vLLM and transformers load it."""
    return Path(__file__).parent / "model"
