"""The course model's files, tokenizer and training, against transformers, tokenizers and torch."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.coursemodel import batches, evaluate, path, prose, reports
from helpers.coursemodel.batches import WEIGHTS, Batches, Phase
from helpers.coursemodel.tokenizer import SPECIAL, VOCABULARY, render


@pytest.fixture(scope="module")
def auto():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path())


@pytest.fixture(scope="module")
def fast():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path() / "tokenizer.json"))


def chats(count: int = 30) -> list[list[dict]]:
    return [reports.conversation(reports.make(reports.TRADES[i % 2], i, "test", 400)) for i in range(count)]


def test_sizes_fit_every_kernel_and_format():
    from safetensors import safe_open

    config = json.loads((path() / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] % 256 == config["intermediate_size"] % 256 == 0
    assert config["hidden_size"] // config["num_attention_heads"] == 64
    assert config["num_key_value_heads"] * 64 % 128 == 0
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == VOCABULARY
    assert (path() / "model.safetensors").stat().st_size <= 20_000_000
    with safe_open(path() / "model.safetensors", "pt") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        assert {t.get_dtype() for t in tensors} == {"BF16"}
        assert sum(int(np.prod(t.get_shape())) for t in tensors) < 10_000_000


def test_the_tokenizer_is_qwen2s_with_merges_of_its_own(auto, fast):
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    saved = json.loads((path() / "tokenizer.json").read_text())
    assert saved["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == PRETOKENIZE_REGEX
    texts = [render(c) for c in chats()] + prose.documents()[:40] + ["naïve café 漢字 🙂 12345.678\r\n\t x  y "]
    for text in texts:
        ids = fast.encode(text).ids
        assert auto(text).input_ids == ids
        assert auto.decode(ids) == text
    assert [auto.decode([i]) for i in auto(" 1482.6").input_ids] == [" ", "1", "4", "8", "2", ".", "6"]
    assert len(auto) == VOCABULARY
    assert len({auto.convert_tokens_to_ids(word) for word in SPECIAL}) == 3


def test_the_chat_template_renders_what_training_rendered(auto):
    for chat in chats():
        assert auto.apply_chat_template(chat, tokenize=False) == render(chat)
        question = auto.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        assert render(chat).startswith(question + chat[1]["content"])


def test_generation_stops_at_the_end_of_the_turn(auto):
    stops = json.loads((path() / "generation_config.json").read_text())["eos_token_id"]
    assert auto.convert_tokens_to_ids("<|im_end|>") in stops


@pytest.mark.parametrize("length", [300, 1000, 3300])
def test_length_of_a_report_is_in_tokens(fast, length):
    for trade in reports.TRADES:
        sizes = [len(fast.encode(reports.make(trade, seed, "test", length).text).ids) for seed in range(20)]
        assert np.mean(sizes) == pytest.approx(length, rel=0.15)
        assert max(sizes) < 3950  # question and answer still fit into 4096


def test_weights_mark_exactly_the_answers(fast):
    rows = Batches(path())
    for chat in chats(10):
        ids = np.array(fast.encode(render(chat)).ids)
        told = fast.decode(list(ids[rows.weights(ids) == WEIGHTS["answer"]]), skip_special_tokens=False)
        assert told == "".join(m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant")
    text = np.array(fast.encode("Plain prose.").ids)
    assert set(rows.weights(text)) == {WEIGHTS["prose"]}


def test_batches_follow_from_seed_and_index():
    phase = Phase(rows=4, length=512, longest_report=200)
    (tokens, weights), (again, _) = (Batches(path(), 1).batch(3, phase) for _ in range(2))
    assert tokens.shape == weights.shape == (4, 513)
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != Batches(path(), 2).batch(3, phase)[0]).any()
    assert (tokens != Batches(path(), 1).batch(4, phase)[0]).any()
    assert (weights == 0).mean() < 0.15  # padding


def test_training_forward_is_that_of_transformers():
    import torch

    from helpers.coursemodel import train

    model = train.new_model("tiny")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
        tokens = torch.randint(0, VOCABULARY, (2, 65), generator=generator)
        logits = model(tokens[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        torch.testing.assert_close(train.losses(model, tokens), expected, rtol=1e-4, atol=1e-4)


def test_muon_is_torchs():
    import torch

    from helpers.coursemodel.train import WEIGHT_DECAY, Muon

    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 32), (32, 64), (64, 32))]
    theirs = copy.deepcopy(ours)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    batched = Muon(ours)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        batched.step(0.01)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # torch computes the iterations in bf16; an update is 0.01


def training(folder: Path) -> subprocess.Popen:
    options = "--steps 9 --shape tiny --workers 1 --log-every 1 --save-every 3"
    return subprocess.Popen(
        [sys.executable, "-m", "helpers.coursemodel.train", "--folder", str(folder), *options.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def logged_losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "report" in line]
    assert len(steps) == len(set(steps))
    return {line["step"]: line["report"] for line in lines if "report" in line}


def test_a_killed_training_goes_on_where_it_was(tmp_path):
    whole = training(tmp_path / "whole")
    killed = training(tmp_path / "killed")
    for line in killed.stdout:
        if json.loads(line)["step"] == 5:
            killed.send_signal(signal.SIGKILL)
            break
    killed.wait()
    resumed = training(tmp_path / "killed")
    assert resumed.communicate()[0].startswith("resumed at step 3\n")
    whole.communicate()
    expected, got = logged_losses(tmp_path / "whole"), logged_losses(tmp_path / "killed")
    assert list(expected) == list(got) == list(range(1, 10))
    assert got == pytest.approx(expected, abs=1e-3)
    assert expected[9] < expected[1] - 0.1


def test_the_loss_curve_in_the_package_is_whole():
    lines = [json.loads(line) for line in (path().parent / "loss.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert min(v for trade in lines[-1]["right"].values() for v in trade.values()) >= 0.95


def test_answers_ignores_an_unfinished_turn():
    special = {"start": 1, "assistant": 2, "stop": 3}
    ids = np.array([1, 9, 8, 7, 3, 8, 1, 2, 8, 5, 6, 3, 8, 1, 2, 8, 5])
    assert batches.answers(ids, special).nonzero()[0].tolist() == [9, 10, 11, 16]


def test_score_counts_exact_values_only():
    pairs = evaluate.unseen("inspection", 40)
    right = [question.response for _, question in pairs]
    assert evaluate.score(pairs, right)["score"] == 1
    swapped = evaluate.score(pairs, [right[-1], *right[:-1]])
    assert swapped["score"] < 0.1
    assert sum(asked for _, asked in swapped["fields"].values()) == 40
