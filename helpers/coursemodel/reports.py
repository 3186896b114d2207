"""Reports of two trades with questions whose answers are in the report: the text that the course model learns.

A report states facts (subject, place, field) -> value, for example (Norvik Foods, 2024, revenue) -> 1482.6 million
euros, among facts that differ in one of the three. Everything follows from trade, split and seed. The splits share no
company, no part number, no person and no tuple of a subject's values: each name and each tuple belongs to a split by
its checksum.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TRADES = ("finance", "inspection")
SPLITS = ("train", "test")
CHARACTERS_PER_TOKEN = 2.9  # of this text in the course model's tokenizer; a test holds it to 15 %

_DATA = tomllib.loads(Path(__file__).with_name("trades.toml").read_text(encoding="utf-8"))
_FIELDS = {trade: {f["name"]: f for f in _DATA[trade]["fields"]} for trade in TRADES}
FIELDS = {trade: tuple(fields) for trade, fields in _FIELDS.items()}
_MONTHS = [
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
]
_PATTERNS = {
    "number": r"\d[\d,]*(?:\.\d+)?",
    "date": rf"\b\d{{1,2}} (?:{'|'.join(_MONTHS)}) \d{{4}}\b",
    "name": r"\b[A-Z][a-z]+ [A-Z][a-z]+\b",
}
_STYLES = ("statements", "statements", "sections", "sections", "list", "rows", "mixed")


@dataclass(frozen=True)
class Question:
    """`answer` is the exact value ("1482.6", a name or a date), `response` the whole sentence expected."""

    text: str
    field: str
    answer: str
    unit: str
    response: str


@dataclass(frozen=True)
class Report:
    trade: str
    text: str
    questions: list[Question]
    subjects: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]  # the values of each subject


class _Fact(NamedTuple):
    place: str  # "" for a fact of the whole subject
    field: str
    value: str
    unit: str


@dataclass
class _Subject:
    name: str
    currency: str
    facts: list[_Fact] = field(default_factory=list)


def make(
    trade: str,
    seed: int | str,
    split: str = "train",
    length: int | None = None,
    questions: int = 4,
    look_alikes: bool = False,
) -> Report:
    """A report of about `length` tokens of the course model, with up to `questions` questions.

    length None draws one from 80 to 3600. With look_alikes, subjects differ in one word or digit and values by a few
    percent: harder than what was trained.
    """
    if trade not in TRADES:
        raise ValueError(f"trade {trade!r} is unknown: take one of {', '.join(TRADES)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown: take one of {', '.join(SPLITS)}")
    return _Writer(trade, split, random.Random(f"{trade}/{split}/{seed}"), look_alikes).report(length, questions)


def chat(report: Report, question: Question) -> list[dict[str, str]]:
    """The messages that ask one question about a report."""
    return [{"role": "user", "content": f"{report.text}\n\n{question.text}"}]


def conversation(report: Report) -> list[dict[str, str]]:
    """Every question of a report with its response, as one chat of several turns."""
    messages = []
    for question in report.questions:
        messages += chat(report, question) if not messages else [{"role": "user", "content": question.text}]
        messages.append({"role": "assistant", "content": question.response})
    return messages


def extract(question: Question, text: str) -> str | None:
    """The value that an answer states for the question's field, or None.

    Numbers: the last one followed by the unit, else the last one; thousands separators are dropped. Dates: the last
    "14 March 2027". Names: the last two capitalised words in a row.
    """
    kind = next(f[question.field] for f in _FIELDS.values() if question.field in f).get("kind", "number")
    found = re.findall(_PATTERNS[kind], text)
    if kind == "number" and question.unit:
        found = re.findall(rf"({_PATTERNS[kind]})\s*{re.escape(question.unit)}", text) or found
    return found[-1].replace(",", "") if found else None


def correct(question: Question, text: str) -> bool:
    """Does the answer state exactly the right value?"""
    return extract(question, text) == question.answer


def split_of(text: str) -> str:
    """The split a name or a tuple of values belongs to: a tenth of all is kept for tests."""
    return "test" if zlib.crc32(text.encode()) % 10 == 0 else "train"


class _Writer:
    """Writes one report."""

    def __init__(self, trade: str, split: str, rng: random.Random, look_alikes: bool):
        self.trade, self.split, self.rng, self.look_alikes = trade, split, rng, look_alikes
        self.spread, self.base = (0.13, {}) if look_alikes else (1.0, None)
        self.data, self.fields = _DATA[trade], _DATA[trade]["fields"]
        self.subjects: list[_Subject] = []
        self.phrases = {f["name"]: rng.choice(f["phrases"]) for f in self.fields}

    def report(self, length: int | None, questions: int) -> Report:
        rng = self.rng
        if length is None:
            length = int(80 * 45 ** rng.random())
        blocks, size = [self._title()], 0
        while not self.subjects or size < length * CHARACTERS_PER_TOKEN - 100:
            blocks.append(self._block(min(length * CHARACTERS_PER_TOKEN - size, 2500)))
            size = sum(map(len, blocks))
        asked = [(s, f) for s in self.subjects for f in s.facts]
        return Report(
            trade=self.trade,
            text="\n\n".join(blocks),
            questions=[self._question(s, f) for s, f in rng.sample(asked, min(questions, len(asked)))],
            subjects=tuple(s.name for s in self.subjects),
            values=tuple(tuple(f.value for f in s.facts) for s in self.subjects),
        )

    def _title(self) -> str:
        return f"{self.rng.choice(self.data['titles'])}, {self._date()}"

    def _block(self, room: float) -> str:
        """A part of a report in one style: one to four new subjects, at one to three places, with the same fields."""
        rng = self.rng
        budget = max(1, int(room / 65))  # facts
        fields = rng.sample(self.fields, rng.randint(2, 6))
        subjects = [self._subject() for _ in range(min(rng.randint(1, 4), max(1, budget // 3)))]
        places = rng.sample(self.data["places"], rng.randint(1, 3))
        for subject in subjects:
            self._fill(subject, fields, places, max(2, budget // len(subjects)))
        style = rng.choice(_STYLES)
        return getattr(self, "_" + style)(subjects)

    def _subject(self) -> _Subject:
        taken = {s.name for s in self.subjects}
        name = self._look_alike(taken) if self.look_alikes and taken else None
        while name is None or name in taken:
            name = self._company() if self.trade == "finance" else self._part()
        self.subjects.append(_Subject(name, self.rng.choice(_DATA["finance"]["currencies"])))
        return self.subjects[-1]

    def _look_alike(self, taken: set[str]) -> str | None:
        """Another trade of the same company name, or a part number with one other digit; None if hard to find."""
        rng = self.rng
        for _ in range(100):
            name = rng.choice(self.subjects).name
            if self.trade == "finance":
                name = f"{name.split()[0]} {rng.choice(self.data['kinds'])}"
            else:
                digit = len(name) - rng.randint(1, 4)
                name = f"{name[:digit]}{rng.randint(0, 9)}{name[digit + 1 :]}"
                if split_of(name.split()[-1]) != self.split:
                    continue
            if name not in taken:
                return name
        return None

    def _company(self) -> str:
        d, rng = self.data, self.rng
        while True:
            stem = rng.choice(d["name_start"]) + rng.choice(d["name_middle"]) + rng.choice(d["name_end"])
            if split_of(stem) == self.split:
                return f"{stem} {rng.choice(d['kinds'])}"

    def _part(self) -> str:
        rng, letters = self.rng, self.data["part_letters"]
        while True:
            number = f"{rng.choice(letters)}{rng.choice(letters)}-{rng.randint(1000, 9999)}"
            if split_of(number) == self.split:
                return f"{rng.choice(self.data['kinds'])} {number}"

    def _fill(self, subject: _Subject, fields: list[dict], places: list[str], limit: int) -> None:
        """Facts of one subject; redrawn until the tuple of values belongs to the split."""
        keys = [(place, f) for f in fields for place in (places if "kind" not in f else [""])]
        keys = [keys[i] for i in sorted(self.rng.sample(range(len(keys)), min(limit, len(keys))))]
        for attempt in itertools.count():
            base = {} if self.base is None else self.base
            spread = min(1.0, self.spread * (1 + attempt / 50))
            subject.facts = [_Fact(place, f["name"], *self._value(f, subject, base, spread)) for place, f in keys]
            if split_of("|".join(f.value for f in subject.facts)) == self.split:
                return

    def _value(self, f: dict, subject: _Subject, base: dict[str, float], spread: float) -> tuple[str, str]:
        """A value and its unit; the values of one field at several places lie close together."""
        rng = self.rng
        if f.get("kind") == "name":
            return self._person(), ""
        if f.get("kind") == "date":
            return self._date(), ""
        low, high = f["range"]
        value = base.setdefault(f["name"], low * (high / low) ** rng.random()) * rng.uniform(0.8, 1.25) ** spread
        return f"{value:.{f['decimals']}f}", f.get("unit", "").format(currency=subject.currency)

    def _person(self) -> str:
        people = _DATA["people"]
        while True:
            name = f"{self.rng.choice(people['first'])} {self.rng.choice(people['last'])}"
            if split_of(name) == self.split:
                return name

    def _date(self) -> str:
        rng = self.rng
        return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randint(2015, 2030)}"

    def _words(self, subject: _Subject, fact: _Fact, second: str = "") -> dict[str, str]:
        where = self.data["place_phrase"].format(k=fact.place)
        return {
            "e" + second: subject.name,
            "k" + second: fact.place,
            "p" + second: where,
            "P" + second: where[:1].upper() + where[1:],
            "f": self.phrases[fact.field],
            "v" + second: f"{fact.value} {fact.unit}".rstrip(),
        }

    def _sentence(self, templates: str, words: dict[str, str]) -> str:
        text = self.rng.choice(self.data[templates]).format(**words)
        return text[:1].upper() + text[1:]

    def _filler(self) -> str:
        return self.rng.choice(self.data["filler"]).format(n=self.rng.randint(2, 400))

    def _statements(self, subjects: list[_Subject], combine: float = 0.0) -> str:
        """Sentences that each name subject, place and field, in any order; `combine`: the share told in pairs."""
        rng = self.rng
        facts = [(s, f) for s in subjects for f in s.facts]
        rng.shuffle(facts)
        sentences = []
        while facts:
            subject, fact = facts.pop()
            words = self._words(subject, fact)
            partner = self._partner(subject, fact, facts) if rng.random() < combine else None
            if not fact.place:
                sentences.append(self._sentence("plain", words))
            elif partner is None:
                sentences.append(self._sentence("statements", words))
            else:
                facts.remove(partner)
                words |= self._words(*partner, second="2")
                sentences.append(self._sentence("pairs" if partner[0] is subject else "others", words))
            if rng.random() < 0.2:
                sentences.append(self._filler())
        cut = [i for i in range(1, len(sentences)) if rng.random() < 0.2]
        return "\n\n".join(" ".join(sentences[a:b]) for a, b in zip([0, *cut], [*cut, len(sentences)], strict=True))

    def _mixed(self, subjects: list[_Subject]) -> str:
        return self._statements(subjects, combine=0.8)

    def _partner(self, subject: _Subject, fact: _Fact, facts: list) -> tuple[_Subject, _Fact] | None:
        """Another fact of the same field: of the same subject, or of another subject at the same place."""
        for owner, other in facts:
            if other.field == fact.field and other.place and (owner is subject or other.place == fact.place):
                return owner, other
        return None

    def _rows(self, subjects: list[_Subject]) -> str:
        """A table of one fact a row."""
        facts = [(s, f) for s in subjects for f in s.facts]
        self.rng.shuffle(facts)
        rows = []
        for subject, fact in facts:
            words = self._words(subject, fact)
            rows.append(f"| {words['e']} | {words['k'] or '-'} | {words['f']} | {words['v']} |")
        return "\n".join(rows)

    def _grouped(self, subjects: list[_Subject]) -> list[tuple[_Subject, str, list[_Fact]]]:
        """(subject, place, its facts there), in any order."""
        groups = [
            (s, place, [f for f in s.facts if f.place == place])
            for s in subjects
            for place in dict.fromkeys(f.place for f in s.facts)
        ]
        self.rng.shuffle(groups)
        return groups

    def _list(self, subjects: list[_Subject]) -> str:
        parts = []
        for subject, place, facts in self._grouped(subjects):
            words = [self._words(subject, fact) for fact in facts]
            parts.append("\n".join([self._heading(subject, place), *(f"- {w['f']}: {w['v']}" for w in words)]))
        return "\n\n".join(parts)

    def _sections(self, subjects: list[_Subject]) -> str:
        """A heading names subject and place, the sentences under it only the field."""
        rng, parts = self.rng, []
        for subject, place, facts in self._grouped(subjects):
            sentences, templates = [], "in_section" if place else "plain_in_section"
            rng.shuffle(facts)
            for fact in facts:
                sentences.append(self._sentence(templates, self._words(subject, fact)))
                if rng.random() < 0.15:
                    sentences.append(self._filler())
            parts.append(f"{self._heading(subject, place)}\n{' '.join(sentences)}")
        return "\n\n".join(parts)

    def _heading(self, subject: _Subject, place: str) -> str:
        return f"## {subject.name[:1].upper()}{subject.name[1:]}{', ' + place if place else ''}"

    def _question(self, subject: _Subject, fact: _Fact) -> Question:
        words = self._words(subject, fact)
        words["f"] = self.rng.choice(_FIELDS[self.trade][fact.field]["phrases"])
        plain = "" if fact.place else "plain_"
        response = self.data[plain + "response"].format(**{**words, "f": fact.field})
        return Question(self._sentence(plain + "questions", words), fact.field, fact.value, fact.unit, response)
