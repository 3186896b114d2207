"""Make the course model's tokenizer: byte-level BPE behind Qwen2's pre-tokenizer, with a ChatML template.

    python -m helpers.coursemodel.tokenizer FOLDER

The pre-tokenizer is Qwen2's, because transformers puts it in place for every Qwen2 model, and llama.cpp knows it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.coursemodel import prose, reports

VOCABULARY = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def render(messages: list[dict[str, str]]) -> str:
    """What the chat template makes of finished messages (training does not need Jinja)."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def corpus() -> Iterator[str]:
    """Training reports of both trades, and prose: about a third and two thirds of the characters."""
    yield from prose.documents()
    for seed in range(800):
        for trade in reports.TRADES:
            chat = reports.conversation(reports.make(trade, seed, "train", 400))
            yield "\n".join(f"{m['role']}\n{m['content']}" for m in chat)


def train(folder: Path) -> None:
    """Learn the merges from `corpus` and write the tokenizer's files into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    learner.normalizer, learner.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    learner.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=None,
        additional_special_tokens=list(SPECIAL),
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
