"""Traces in ShareGPT's format and the prompts that come of them, with a tokenizer whose tokens are bytes."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_tools import write_tiny_model
from tokenizers import Tokenizer

from helpers.load import LoadPlan
from helpers.load.prompts import make_prompts
from helpers.load.traces import read_sharegpt, trace_lengths, write_sharegpt


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("bytes"))
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder.add_special_tokens(["<|endoftext|>"])
    encoder.save(str(folder / "tokenizer.json"))
    return folder


def plan_of(path, num_requests, **options):
    return LoadPlan("closed", num_requests, concurrency=1, dataset=path, **options)


def test_the_format_is_that_of_sharegpt(tmp_path):
    path = write_sharegpt([("question", "answer"), ["q", "a", "q2"]], tmp_path / "trace.json")
    entries = json.loads(path.read_text())
    assert entries[0]["conversations"] == [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
    assert [turn["from"] for turn in entries[1]["conversations"]] == ["human", "gpt", "human"]
    assert len({entry["id"] for entry in entries}) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talks=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_what_was_written_is_read(tmp_path, talks):
    talks = [tuple(turn.encode("utf-8", "replace").decode() for turn in talk) for talk in talks]
    assert read_sharegpt(write_sharegpt(talks, tmp_path / "trace.json")) == talks


@pytest.mark.parametrize("talks", [[("only a question",)], ["a text"], [("q", "a"), ()]])
def test_a_conversation_needs_question_and_answer(tmp_path, talks):
    with pytest.raises(ValueError, match="has no question and answer"):
        write_sharegpt(talks, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a file in ShareGPT's format"),
        ("[1]", "not a file in ShareGPT's format"),
        ('[{"conversations": [{}, {}]}]', "not a file in ShareGPT's format"),
        ('[{"conversations": [{"value": "q"}]}]', "no conversation of two turns"),
        ("[]", "no conversation of two turns"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, text, problem):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=rf"trace\.json: {problem}") as error:
        read_sharegpt(tmp_path / "trace.json")
    assert "\n" not in str(error.value)


def test_lengths_by_hand(tmp_path, tokenizer):
    path = write_sharegpt([("a" * n, "b" * (2 * n)) for n in range(1, 102)], tmp_path / "trace.json")
    lengths = trace_lengths(path, tokenizer)
    assert lengths["prompt"] == {"count": 101, "mean": 51, "min": 1, "p50": 51, "p90": 91, "p99": 100, "max": 101}
    assert lengths["output"] == {"count": 101, "mean": 102, "min": 2, "p50": 102, "p90": 182, "p99": 200, "max": 202}


def test_random_prompts_have_their_length_and_share_no_prefix(tokenizer):
    plan = LoadPlan("closed", 20, concurrency=1, input_len=30, output_len=7, seed=5)
    prompts = make_prompts(plan, tokenizer)
    assert {(len(prompt), output_len) for prompt, output_len in prompts} == {(30, 7)}
    assert len({tuple(prompt[:8]) for prompt, _ in prompts}) == 20
    assert max(token for prompt, _ in prompts for token in prompt) < 256  # the last id is the end of text
    assert make_prompts(plan, tokenizer) == prompts


def test_too_short_and_too_long_conversations_are_left_out(tmp_path, tokenizer):
    talks = [("q" * 3, "a" * 9), ("q" * 4, "a" * 3), ("q" * 1025, "a" * 9), ("q" * 1024, "a" * 1025)]
    kept = [("q" * 4, "a" * 4), ("q" * 1024, "a" * 1024)]
    path = write_sharegpt(talks + kept, tmp_path / "trace.json")
    assert sorted(make_prompts(plan_of(path, 2), tokenizer)) == [("q" * 4, 4), ("q" * 1024, 1024)]
    assert ("q" * 4, 2) in make_prompts(plan_of(path, 4, output_len=2), tokenizer)
    assert {prompt for prompt, _ in make_prompts(plan_of(path, 50), tokenizer)} == {prompt for prompt, _ in kept}
    write_sharegpt(talks, path)
    with pytest.raises(ValueError, match="no conversation of 4 to 1024 tokens"):
        make_prompts(plan_of(path, 2), tokenizer)


def test_the_seed_chooses_the_conversations(tmp_path, tokenizer):
    path = write_sharegpt([(f"question {i}", "an answer") for i in range(100)], tmp_path / "trace.json")
    first, second = (make_prompts(plan_of(path, 10, seed=seed), tokenizer) for seed in (0, 1))
    assert first != second
    assert make_prompts(plan_of(path, 10, seed=0), tokenizer) == first
