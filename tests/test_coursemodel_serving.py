"""The course model behind vLLM: 200 unseen questions of each trade, reports up to 3,300 tokens."""

from __future__ import annotations

import pytest

from helpers.coursemodel import evaluate, path, reports
from helpers.hardware import tier
from helpers.serving import serve

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server():
    options = tier("cpu").serve | {"max_num_seqs": 32, "kv_cache_memory_bytes": 2**30}
    with serve(path(), **options, progress=False) as server:
        yield server


@pytest.mark.parametrize("trade", reports.TRADES)
def test_at_least_95_percent_of_unseen_questions_are_answered_with_the_exact_value(server, trade):
    pairs = evaluate.unseen(trade)
    assert len(pairs) == len({(report.text, question.text, question.field) for report, question in pairs}) == 200
    result = evaluate.score(pairs, evaluate.ask_server(f"{server.base_url}/v1", server.model_name, pairs))
    assert result["score"] >= 0.95, result
