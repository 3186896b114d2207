"""Prompts for the drivers that bring none: random token ids, or the texts of a ShareGPT file."""

from __future__ import annotations

import random
from pathlib import Path

from helpers.load.plan import LoadPlan
from helpers.load.traces import read_sharegpt


def make_prompts(plan: LoadPlan, tokenizer: str | Path) -> list[tuple[str | list[int], int]]:
    """(prompt, tokens to generate) for each request of the plan.

    Random prompts are lists of independent token ids, so they have exactly `input_len` tokens and share no prefix.
    A ShareGPT file is shuffled and filtered as in `vllm bench serve`: at least 4 and at most 1024 tokens of prompt,
    at least 4 of answer, 2048 together; with the same seed both pick the same conversations.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    rng = random.Random(plan.seed)
    if plan.dataset == "random":
        special = {id for id, token in encoder.get_added_tokens_decoder().items() if token.special}
        ids = [id for id in range(encoder.get_vocab_size(with_added_tokens=False)) if id not in special]
        return [(rng.choices(ids, k=plan.input_len), plan.output_len) for _ in range(plan.num_requests)]

    conversations = read_sharegpt(plan.dataset)
    rng.shuffle(conversations)
    prompts = []
    for question, answer in conversations:
        prompt_len = len(encoder.encode(question).ids)
        output_len = plan.output_len or len(encoder.encode(answer).ids)
        long_enough = prompt_len >= 4 and (plan.output_len or output_len >= 4)
        if long_enough and prompt_len <= 1024 and prompt_len + output_len <= 2048:
            prompts.append((question, output_len))
        if len(prompts) == plan.num_requests:
            return prompts
    if not prompts:
        raise ValueError(f"{plan.dataset}: no conversation of 4 to 1024 tokens of prompt and at most 2048 in all")
    rng = random.Random(plan.seed)
    return prompts + [rng.choice(prompts) for _ in range(plan.num_requests - len(prompts))]
