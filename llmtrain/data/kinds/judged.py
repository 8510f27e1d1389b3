"""Unpaired answers: each answer was judged on its own, as desired or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.config.run import DataConfig
from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.kinds.packing import AnswerReader
from llmtrain.data.manifest import Manifest
from llmtrain.data.row import RefusedError, Row
from llmtrain.data.sequences import AnswerSequence
from llmtrain.data.token_stream import TokenStream


@dataclass(frozen=True, kw_only=True)
class Judged(RowKind, format="unpaired"):
    """A conversation with a `label`, true or false, of the text after the prompt (or of the last answer)."""

    title = "answers that were judged alone"
    columns = (("prompt", "completion", "label"),)
    mark = "unpaired"
    answers = ("it",)
    mismatched = True
    complete = "all tokens of a judged answer count"
    entry = np.dtype([("prompt", "<u8"), ("begin", "<u4"), ("desirable", "u1")])
    """Hash of the prompt, number of the answer's first token in the row, label."""

    def parse(self, record: dict[str, Any]) -> list[tuple[list[Any], int]]:
        from llmtrain.data.chat.conversation import messages_of

        if not isinstance(label := record.get("label"), bool):
            kind = "null" if label is None else type(label).__name__
            raise RefusedError(f"label is {kind}, not true (desired) or false")
        messages, prompt = messages_of(record, self.field)
        answers = [place for place, each in enumerate(messages) if isinstance(each, dict) and _answers(each)]
        return [(messages, prompt or (answers or [0])[-1])]

    def entry_of(self, record: dict[str, Any], row: Row) -> tuple[Any, ...]:
        begin = int(row.counted.argmax())
        return xxhash.xxh3_64_intdigest(row.ids[:begin].tobytes()), begin, record["label"]

    def reader(self, stream: TokenStream, config: DataConfig, manifest: Manifest) -> JudgedReader:
        return JudgedReader(stream, config, manifest.separator_id)

    def alike(self, facts: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
        return {"desirable": np.arange(count) % 2 == 0}

    def invented(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"desirable": (rows + rows // 4) % 2 == 1}

    def about(self, stream: TokenStream, index: int) -> str:
        return " (desired)" if stream.entries(self.entry)["desirable"][index] else " (not desired)"


def _answers(message: dict[str, Any]) -> bool:
    return message.get("role") == "assistant" and message.get("weight", 1) != 0


def partners(prompts: np.ndarray) -> np.ndarray | None:
    """Return for each row another row with a different prompt, int64 [rows]; every row is used once.

    `prompts`: hashes of the prompts [rows]. None: more than half of the rows have the same prompt.
    """
    order = np.argsort(prompts, kind="stable")
    _, counts = np.unique(prompts, return_counts=True)
    most = int(counts.max(initial=0))
    if 2 * most > len(prompts):
        return None
    partner = np.empty(len(prompts), dtype=np.int64)
    partner[order] = np.roll(order, -most)  # rows of a prompt are neighbours in `order`, and no prompt has more of them
    return partner


class JudgedReader(AnswerReader):
    """Sequences of answers judged alone, each with a sequence of the same prompts with answers to others."""

    def _sizes(self, together: int) -> np.ndarray:
        entries = self.stream.entries(Judged.entry)
        self._begins, self._desirable = entries["begin"].astype(np.int64), entries["desirable"].astype(bool)
        partner = partners(entries["prompt"])
        if partner is None:
            raise DataError(
                f"{self.stream.name}: more than half of its {len(entries)} records have the same prompt, and each "
                "has to meet the answer to another one; prepare more prompts"
            )
        self._partners = partner
        sizes = self._begins + (self._lengths - self._begins)[partner]
        if (longest := int(sizes.max(initial=0))) > self._length:
            raise DataError(
                f"{self.stream.name}: a prompt with the answer to another one has {longest} tokens; raise "
                f"data.sequence_length to that, or prepare the data with less than --max-tokens {self._length}"
            )
        return np.maximum(sizes, self._lengths)

    def _mismatched(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and counted bits of the row's prompt with its partner's answer."""
        partner, begin = int(self._partners[row]), int(self._begins[row])
        (prompt, _), (answer, counted), at = self._row(row), self._row(partner), int(self._begins[partner])
        return np.concatenate([prompt[:begin], answer[at:]]), np.concatenate([np.zeros(begin, bool), counted[at:]])

    def _read_for(self, row: int) -> list[int]:
        return [row, int(self._partners[row])]

    def read(self, index: int) -> AnswerSequence:
        rows = self._rows(index)
        mismatched = self._answers(rows + len(self._lengths), map(self._mismatched, rows))
        facts = {"desirable": self._desirable[rows]}
        return self._answers(rows, map(self._row, rows), facts=facts, mismatched=mismatched)
