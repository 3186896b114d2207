"""Rows of tokens for training: whole documents one after another, with a weight for every token.

A document is a chat about one report with several questions, or a piece of prose; each ends with <|endoftext|>. Batch i
follows from (seed, i) and the phase alone, so a resumed training sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from helpers.coursemodel import prose, reports
from helpers.coursemodel.tokenizer import END_OF_TEXT, TURN_END, TURN_START, render

WEIGHTS = {"answer": 1.0, "prose": 0.5, "report": 0.25}  # of a token in the loss; questions count as reports
PROSE_SHARE = 0.05  # of the documents' tokens


@dataclass(frozen=True)
class Phase:
    """Shape of a batch and the longest report in it, in tokens."""

    rows: int
    length: int
    longest_report: int


class Batches:
    """batch(index, phase) -> tokens int32 [rows, length + 1] and their weights float32 of the same shape."""

    def __init__(self, tokenizer_folder: Path, seed: int = 0):
        self.folder, self.seed = tokenizer_folder, seed

    @cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def prose(self) -> list[str]:
        return prose.documents()

    @cached_property
    def ids(self) -> dict[str, int]:
        words = {"end": END_OF_TEXT, "start": TURN_START, "stop": TURN_END, "assistant": "assistant"}
        return {name: self.tokenizer.token_to_id(word) for name, word in words.items()}

    def batch(self, index: int, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        rng = random.Random(f"{self.seed}/{index}")
        texts, rows = [], []
        for row in range(phase.rows):
            room = phase.length + 1
            while room > 0:
                text = self._document(rng, f"{self.seed}/{index}/{len(texts)}", phase.longest_report, room)
                texts.append(text)
                rows.append(row)
                room -= int(len(text) / 3.1)
        encoded = self.tokenizer.encode_batch_fast(texts)
        shape = (phase.rows, phase.length + 1)
        tokens = np.full(shape, self.ids["end"], np.int32)
        weights = np.zeros(shape, np.float32)
        filled = [0] * phase.rows
        for row, document in zip(rows, encoded, strict=True):
            ids = np.array([*document.ids, self.ids["end"]], np.int32)[: shape[1] - filled[row]]
            end = filled[row] + len(ids)
            tokens[row, filled[row] : end] = ids
            weights[row, filled[row] : end] = self.weights(ids)
            filled[row] = end
        return tokens, weights

    def _document(self, rng: random.Random, seed: str, longest: int, room: int) -> str:
        if rng.random() < PROSE_SHARE:
            text = rng.choice(self.prose)
            start = rng.randrange(max(1, len(text) - 1500))
            return text[start : start + rng.randint(300, 3 * max(200, room))]
        length = int(60 * (max(61, min(longest, room - 100)) / 60) ** rng.random())
        questions = rng.randint(2, max(2, min(6 + length // 40, (room - length) // 45)))
        return render(reports.conversation(reports.make(rng.choice(reports.TRADES), seed, "train", length, questions)))

    def weights(self, ids: np.ndarray) -> np.ndarray:
        """The weight of each token of one document, by WEIGHTS."""
        if self.ids["start"] not in ids:
            return np.full(len(ids), WEIGHTS["prose"], np.float32)
        return np.where(answers(ids, self.ids), WEIGHTS["answer"], WEIGHTS["report"]).astype(np.float32)


def answers(ids: np.ndarray, special: dict[str, int]) -> np.ndarray:
    """Which tokens of one chat belong to an answer: after "<|im_start|>assistant\\n" up to "<|im_end|>" (bool [n])."""
    mask = np.zeros(len(ids), bool)
    starts = np.flatnonzero((ids[:-1] == special["start"]) & (ids[1:] == special["assistant"])) + 3
    stops = np.flatnonzero(ids == special["stop"])
    for start in starts:
        later = stops[stops >= start]
        mask[start : (later[0] + 1 if len(later) else len(ids))] = True
    return mask
