"""Score a model on unseen questions: is the value in its answer exactly right?

python -m helpers.coursemodel.evaluate --url http://127.0.0.1:8000/v1 --model NAME     any OpenAI-compatible server
python -m helpers.coursemodel.evaluate --folder FOLDER                                 offline, with transformers
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.coursemodel import path, reports
from helpers.coursemodel.reports import Question, Report

LENGTHS = (100, 250, 500, 1000, 3300)  # of the test reports, in tokens
QUESTIONS_PER_REPORT = 4
MAX_TOKENS = 48


def unseen(
    trade: str, count: int = 200, lengths: tuple[int, ...] = LENGTHS, look_alikes: bool = False
) -> list[tuple[Report, Question]]:
    """`count` questions about test reports of these lengths in turn; questions about one report stand apart."""
    made: list[Report] = []
    while sum(len(r.questions) for r in made) < count:
        length = lengths[len(made) % len(lengths)]
        made.append(reports.make(trade, f"evaluation/{len(made)}", "test", length, QUESTIONS_PER_REPORT, look_alikes))
    pairs = [(r, r.questions[i]) for i in range(QUESTIONS_PER_REPORT) for r in made if i < len(r.questions)]
    return pairs[:count]


def ask_server(base_url: str, model: str, pairs: list[tuple[Report, Question]], concurrency: int = 32) -> list[str]:
    """Greedy answers of an OpenAI-compatible server; base_url ends in /v1. Raises URLError when a request fails."""

    def ask(pair: tuple[Report, Question]) -> str:
        body = {"model": model, "messages": reports.chat(*pair), "temperature": 0, "max_tokens": MAX_TOKENS}
        request = urllib.request.Request(
            f"{base_url.rstrip('/')}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, pairs))


def ask_offline(folder: Path, pairs: list[tuple[Report, Question]], batch: int = 16) -> list[str]:
    """Greedy answers of a Hugging Face model folder, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    prompts = [
        tokenizer.apply_chat_template(reports.chat(*p), tokenize=False, add_generation_prompt=True) for p in pairs
    ]
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True).to(device)
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)[
            :, inputs["input_ids"].shape[1] :
        ]
        for i, text in zip(chosen, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            texts[i] = text
    return texts


def score(pairs: list[tuple[Report, Question]], texts: list[str]) -> dict:
    """Share of exact values, whole and per field: {"score": 0.97, "asked": 200, "fields": {name: [right, asked]}}."""
    fields: dict[str, list[int]] = {}
    for (_, question), text in zip(pairs, texts, strict=True):
        counts = fields.setdefault(question.field, [0, 0])
        counts[0] += reports.correct(question, text)
        counts[1] += 1
    return {"score": sum(r for r, _ in fields.values()) / len(pairs), "asked": len(pairs), "fields": fields}


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    parser = argparse.ArgumentParser(description="Ask unseen questions of both trades and score the exact values.")
    parser.add_argument("--url", help="base address of an OpenAI-compatible server, ending in /v1")
    parser.add_argument("--model", help="the server's name of the model")
    parser.add_argument("--folder", type=Path, default=path(), help="a model folder, when no --url is given")
    parser.add_argument("--count", type=int, default=200, help="questions of each trade")
    parser.add_argument("--look-alikes", action="store_true", help="reports whose subjects and values hardly differ")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    options = parser.parse_args(arguments)
    scores = {}
    for trade in reports.TRADES:
        pairs = unseen(trade, options.count, look_alikes=options.look_alikes)
        texts = ask_server(options.url, options.model, pairs) if options.url else ask_offline(options.folder, pairs)
        scores[trade] = score(pairs, texts)
        print(json.dumps({"trade": trade, **scores[trade]}), flush=True)
        for (report, question), text in zip(pairs, texts, strict=True):
            if options.wrong and not reports.correct(question, text):
                print(f"  {len(report.text)} characters | {question.text} | {question.response} | {text}")
    return scores


if __name__ == "__main__":
    main()
