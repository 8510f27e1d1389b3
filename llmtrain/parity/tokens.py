"""Synthetic data: documents of unequal length, rows with unequal numbers of counted tokens, and answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmtrain.config.run import DataConfig, RunConfig
from llmtrain.data.kinds import RowKind
from llmtrain.data.sequences import IGNORED, AnswerSequence, TokenSequence, labels_of, positions_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.objectives.preferences import OverAnswers

SEED = 20_261_121
_COPY_FROM = 5  # distance in tokens between repetitions, which attention can learn


class Tokens(TrainData):
    """Sequences for the loader, made without a folder; sequence k depends only on k. Tokens follow from the previous
    one, repeat an earlier one or are random, so that embedding, layers and attention all learn in a few steps."""

    def __init__(self, config: DataConfig, vocab_size: int, top_k: int | None = None) -> None:
        """`top_k`: give each label a random teacher's probabilities for `top_k` tokens; None: no teacher."""
        assert vocab_size >= 8 and (top_k is None or top_k < vocab_size), (vocab_size, top_k)
        self.kind = RowKind.of("text")
        self.sequence_length = config.sequence_length
        self.mask_document_starts = config.mask_document_starts
        self.isolate_documents = config.isolate_documents
        self.vocab_size = vocab_size
        self.separator_id = vocab_size - 1
        self.top_k = top_k

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, labels), int64 [T] each, cut as in a run, with a limit on the number of counted labels."""
        tokens, counted = self.row(index)
        inputs, labels = labels_of(tokens, self.separator_id, self.mask_document_starts)
        labels[counted:] = IGNORED
        return inputs, labels

    def sequence_at(self, index: int) -> TokenSequence:
        inputs, labels = self.sequence(index)
        isolated = self.isolate_documents
        positions = positions_of(inputs[None], self.separator_id)[0] if isolated else None
        taught = {} if self.top_k is None else dict(zip(("words", "logs"), self.column(index), strict=True))
        return TokenSequence(inputs=inputs, labels=labels, positions=positions, by_token=taught)

    def column(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a teacher's column: (token ids, int64 [T, k], all different at one place; log-probabilities of these
        and of the rest, fp32 [T, k + 1])."""
        assert self.top_k is not None
        draw = np.random.default_rng((SEED, index, self.top_k))
        words = draw.random((self.sequence_length, self.vocab_size)).argsort(axis=1)[:, : self.top_k]
        chances = np.exp(2 * draw.standard_normal((self.sequence_length, self.top_k + 1)))
        return words, np.log(chances / chances.sum(axis=1, keepdims=True)).astype(np.float32)

    def row(self, index: int) -> tuple[np.ndarray, int]:
        """Return (tokens, int64 [T + 1]; upper limit on counted labels)."""
        draw = np.random.default_rng((SEED, index))
        ordinary, length = self.vocab_size - 1, self.sequence_length
        tokens = draw.integers(0, ordinary, length + 1)
        choice = draw.random(length + 1)
        for place in range(1, length + 1):
            if choice[place] < 0.5:
                tokens[place] = (tokens[place - 1] * 7 + 3) % ordinary
            elif choice[place] < 0.75 and place >= _COPY_FROM:
                tokens[place] = tokens[place - _COPY_FROM]
        tokens[np.flatnonzero(draw.random(length + 1) < 3 / length)] = self.separator_id
        return tokens, length // 4 + int(draw.integers(0, length))


class Answers(TrainData):
    """Sequences with one or two records of answers, or two or four if answers are judged alone; sequence k depends only
    on k. The reference's log-probabilities are below an untrained model's, so that the divergence is not 0."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:  # the base class opens folders
        assert vocab_size >= 8, vocab_size
        self.kind = RowKind.of(config.objective.data)
        self.sequence_length, self.vocab_size = config.data.sequence_length, vocab_size
        self.mask_document_starts, self.isolate_documents = False, True
        self.separator_id = vocab_size - 1
        self._most = 2 * max(2, self.kind.together)

    def rows(self, index: int, *, mismatched: bool = False) -> list[tuple[np.ndarray, int, float]]:
        """Return (ids, start of the answer, reference's log-probability) of each row."""
        draw = np.random.default_rng((SEED, index, mismatched))
        made = []
        for _ in range(self._most if index % 3 else self._most // 2):
            length = int(draw.integers(4, self.sequence_length // self._most + 1))
            ids = draw.integers(0, self.separator_id, length)
            ids[2:] = np.where(draw.random(length - 2) < 0.5, (ids[1:-1] * 7 + 3) % self.separator_id, ids[2:])
            begin = int(draw.integers(1, length - 1))
            made.append((ids, begin, -float(length - begin) * 8 + float(draw.normal())))
        return made

    def facts(self, index: int) -> dict[str, np.ndarray]:
        """Return what the format of the data records about each row."""
        return self.kind.invented(self._numbers(index, len(self.rows(index))))

    def _numbers(self, index: int, count: int) -> np.ndarray:
        return np.arange(count) + self._most * index

    def sequence_at(self, index: int) -> AnswerSequence:
        mismatched = self._sequence(index, mismatched=True) if self.kind.mismatched else None
        return replace(self._sequence(index), facts=self.facts(index), mismatched=mismatched)

    def _sequence(self, index: int, *, mismatched: bool = False) -> AnswerSequence:
        inputs = np.full(self.sequence_length, self.separator_id, dtype=np.int64)
        labels, positions = np.full_like(inputs, IGNORED), np.arange(self.sequence_length)
        at, rows = 0, self.rows(index, mismatched=mismatched)
        for ids, begin, _ in rows:
            end = at + len(ids)
            inputs[at:end], labels[at + begin - 1 : end - 1] = ids, ids[begin:]
            positions[end:] -= end - at
            at = end
        reference = np.array([row[2] for row in rows], dtype=np.float32)
        return AnswerSequence(
            inputs=inputs, labels=labels, positions=positions, rows=self._numbers(index, len(rows)), reference=reference
        )


def synthetic(config: RunConfig, vocab_size: int) -> Tokens | Answers:
    """Return data for the run's objective."""
    if isinstance(config.objective, OverAnswers):
        return Answers(config, vocab_size)
    return Tokens(config.data, vocab_size, config.objective.top_k)
