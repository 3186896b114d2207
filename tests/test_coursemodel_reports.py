"""The texts the course model learns from: disjoint splits, one right answer, extraction by rule."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.coursemodel import reports
from helpers.coursemodel.reports import FIELDS, TRADES, Question, extract, make

DIGEST = "e0ee116c"  # of the text that the weights in the package were trained on


def asked(field: str, answer: str = "", unit: str = "") -> Question:
    return Question(text="", field=field, answer=answer, unit=unit, response="")


@pytest.mark.parametrize("trade", TRADES)
def test_splits_share_no_subject_no_person_and_no_tuple_of_values(trade):
    def seen(split):
        names, people, tuples = set(), set(), set()
        for seed, look_alikes in product(range(700), (False, True)):
            report = make(trade, seed, split, length=300, look_alikes=look_alikes)
            # a company is its first word, a part its number
            names |= {s.split()[0] if trade == "finance" else s.split()[-1] for s in report.subjects}
            people |= {q.answer for q in report.questions if q.field in ("chief executive", "inspector")}
            tuples |= set(report.values)
        return names, people, tuples

    train, test = seen("train"), seen("test")
    assert all(len(kind) > 30 for kind in (*train, *test))
    assert [a & b for a, b in zip(train, test, strict=True)] == [set(), set(), set()]


def digest() -> str:
    text = "".join(
        message["content"]
        for trade, split, seed in product(TRADES, reports.SPLITS, range(50))
        for message in reports.conversation(make(trade, seed, split))
    )
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_text_is_that_of_the_trained_weights_in_any_process():
    assert digest() == DIGEST
    code = "import sys; sys.path.insert(0, 'tests'); import test_coursemodel_reports as t; print(t.digest())"
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."}
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == DIGEST


def facts_of_rows_and_lists(text: str) -> list[tuple[str, str, str, str]]:
    """(subject, place, field phrase, value with unit), read back from tables and lists."""
    facts, heading = [], ("", "")
    for line in text.splitlines():
        if row := re.fullmatch(r"\| (.+) \| (.+) \| (.+) \| (.+) \|", line):
            subject, place, *rest = row.groups()
            facts.append((subject, "" if place == "-" else place, *rest))
        elif line.startswith("## "):
            subject, _, place = line[3:].partition(", ")
            heading = (subject[:1].lower() + subject[1:] if subject.split()[-1][-4:].isdigit() else subject, place)
        elif item := re.fullmatch(r"- (.+?): (.+)", line):
            facts.append((*heading, *item.groups()))
    return facts


def place_in(question: str) -> str:
    places = [p for trade in TRADES for p in reports._DATA[trade]["places"] if re.search(rf"\b{p}\b", question)]
    return max(places, key=len, default="")


def test_answers_in_tables_and_lists_are_the_one_fact_that_matches_the_question():
    checked = 0
    for trade, seed in product(TRADES, range(300)):
        report = make(trade, seed, "test", length=600)
        facts = facts_of_rows_and_lists(report.text)
        for question in report.questions:
            phrases = next(f["phrases"] for f in reports._DATA[trade]["fields"] if f["name"] == question.field)
            subjects = [s for s in report.subjects if re.search(rf"\b{re.escape(s)}\b", question.text)]
            wanted = (subjects, place_in(question.text))
            matches = [v for s, p, f, v in facts if ([s], p) == wanted and f in phrases]
            if matches:
                assert matches == [f"{question.answer} {question.unit}".strip()]
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("trade", TRADES)
def test_the_expected_response_is_right_by_the_rule_and_other_values_of_the_report_are_not(trade):
    fields, distracted = set(), 0
    for seed in range(200):
        report = make(trade, seed, "test", length=500, questions=8)
        for question in report.questions:
            assert reports.correct(question, question.response)
            assert question.answer in report.text
            fields.add(question.field)
            others = {v for values in report.values for v in values} - {question.answer}
            for other in list(others)[:3]:
                assert not reports.correct(question, question.response.replace(question.answer, other))
            distracted += len(others) > 5
    assert fields == set(FIELDS[trade])
    assert distracted > 800


@pytest.mark.parametrize(
    ("question", "text", "value"),
    [
        (asked("revenue", unit="million euros"), "The revenue of Norvik in 2024 was 1,482.6 million euros.", "1482.6"),
        (asked("revenue", unit="million euros"), "It was 1482.6 million euros, or 3 percent more.", "1482.6"),
        (asked("revenue", unit="million euros"), "It was 1482.6 million dollars.", "1482.6"),
        (asked("dividend yield", unit="%"), "In 2024: 3.47%", "3.47"),
        (asked("price/earnings ratio"), "The P/E ratio in 2024 was 23.47.", "23.47"),
        (asked("porosity", unit="%"), "No such value.", None),
        (asked("inspection date"), "It was inspected on 3 May 2027, not 4 May.", "3 May 2027"),
        (asked("inspection date"), "It was inspected in 2027.", None),
        (asked("inspector"), "The inspector of bearing ring LB-1988 is Anna Berg.", "Anna Berg"),
        (asked("chief executive"), "The chief executive of Norvik Foods is Anna Berg.", "Anna Berg"),
        (asked("chief executive"), "nobody", None),
        (asked("crack length", unit="mm"), "", None),
    ],
)
def test_extraction(question, text, value):
    assert extract(question, text) == value


@given(st.integers(10, 999_999), st.integers(0, 3), st.sampled_from(["mm", "%", "million euros", ""]))
def test_extraction_returns_the_number_as_written(number, decimals, unit):
    written = f"{number / 10**decimals:.{decimals}f}"
    question = asked("crack length", unit=unit)
    assert extract(question, f"In 2024 the crack length of part AB-1234 was {written} {unit}.") == written


@given(st.text())
def test_extraction_takes_any_text(text):
    for field in ("revenue", "inspector", "inspection date"):
        extract(asked(field, unit="mm"), text)


@pytest.mark.parametrize(
    ("trade", "split", "word"), [("banking", "train", "finance"), ("finance", "dev", "train, test")]
)
def test_unknown_trade_or_split_is_named(trade, split, word):
    with pytest.raises(ValueError, match=word):
        make(trade, 0, split)


def test_look_alikes_differ_in_one_word_or_one_digit():
    pairs = 0
    for seed in range(50):
        first, *others = make("inspection", seed, "test", length=300, look_alikes=True).subjects
        pairs += any(sum(a != b for a, b in zip(first, other, strict=False)) == 1 for other in others)
    assert pairs > 25
