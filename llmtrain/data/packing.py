"""Prepared folders as training sequences: windows over the token streams, in a reproducible order.

Texts are packed end to end, each followed by the separator. Window i of a split is its tokens
[i*T, i*T + T + 1): inputs are the first T, labels the last T, so labels are already shifted by one.
A window of conversations holds whole rows, by best fit, each isolated from the others and from the padding at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from llmtrain.config.run import DataConfig
from llmtrain.data.bestfit import best_fit
from llmtrain.data.manifest import SPLITS, Manifest, Split
from llmtrain.data.mixture import Mixture
from llmtrain.data.order import permute
from llmtrain.data.reference import read_reference
from llmtrain.data.shards import PreparedSet, TokenStream
from llmtrain.data.unpaired import partners
from llmtrain.errors import DataError

IGNORED = -100  # the label that no loss counts; torch's and Hugging Face's default


def labels_of(tokens: np.ndarray, separator_id: int, mask_document_starts: bool) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels), int64 [T] each, of a window of T + 1 tokens.

    With `mask_document_starts` the label after a separator is -100: the first token of the next document, which
    nothing before it tells.
    """
    inputs = tokens[:-1].astype(np.int64)
    labels = tokens[1:].astype(np.int64)
    if mask_document_starts:
        labels[inputs == separator_id] = IGNORED
    return inputs, labels


def positions_of(inputs: np.ndarray, separator_id: int) -> np.ndarray:
    """int64 [b, T]: each token's position in its document, from 0 at the row's start and after every separator."""
    index = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == separator_id, index[:, 1:], 0)
    return index - np.maximum.accumulate(begins, axis=1)


def windows_in(tokens: int, sequence_length: int) -> int:
    """How many windows a stream of `tokens` has: the last label of a window is the first input of the next."""
    return max(0, (tokens - 1) // sequence_length)


class Window(NamedTuple):
    """A sequence for the model, int64 [T] each."""

    inputs: np.ndarray
    labels: np.ndarray
    """Already shifted; -100 is not counted."""
    positions: np.ndarray | None
    """Of each token in its document; None: the sequence is one text."""
    rows: np.ndarray | None = None
    """Of preferences, int64 [2 pairs]: which rows of the split are its first documents, chosen and rejected in turn."""
    reference: np.ndarray | None = None
    """Their log-probabilities under the reference, fp32 [2 pairs], where the run has one."""
    desirable: np.ndarray | None = None
    """Of unpaired answers, bool [rows]: whether each is desired; `rows` and `reference` are [rows], too."""
    mismatched: Window | None = None
    """Of unpaired answers: the same prompts, each with the answer to another one. Its rows come after the split's."""


class _Texts:
    """Windows over documents that lie end to end."""

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int) -> None:
        self.stream, self._config, self._separator_id = stream, config, separator_id
        self.count = windows_in(stream.tokens, config.sequence_length)

    def read(self, index: int) -> Window:
        length = self._config.sequence_length
        tokens = self.stream.read(index * length, length + 1)
        inputs, labels = labels_of(tokens, self._separator_id, self._config.mask_document_starts)
        if not self._config.isolate_documents:
            return Window(inputs, labels, None)
        return Window(inputs, labels, positions_of(inputs[None], self._separator_id)[0])


class _Conversations:
    """Windows of whole rows; the separator fills what no row does."""

    together = 1
    """Rows that share a window."""

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int) -> None:
        self.stream, self._length, self._separator_id = stream, config.sequence_length, separator_id
        self._lengths = stream.row_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths
        order, first = best_fit(self._sizes(), self._length)
        self._order = (order[:, None] * self.together + np.arange(self.together)).reshape(-1)
        self._first = first * self.together
        self.count = len(first) - 1

    def _sizes(self) -> np.ndarray:
        """Tokens that rows which go together ask for."""
        return self._lengths.reshape(-1, self.together).sum(1)

    def _rows(self, index: int) -> np.ndarray:
        return self._order[self._first[index] : self._first[index + 1]]

    def read(self, index: int) -> Window:
        return self._window(map(self._row, self._rows(index)))

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, whether each is counted)"""
        start, length = int(self._starts[row]), int(self._lengths[row])
        counted = self.stream.counted(start, length)
        assert counted is not None
        return self.stream.read(start, length), counted

    def _window(self, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> Window:
        inputs = np.full(self._length, self._separator_id, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        positions = np.arange(self._length)
        at = 0
        for ids, counted in rows:
            end = at + len(ids)
            inputs[at:end] = ids
            labels[at : end - 1] = np.where(counted[1:], inputs[at + 1 : end], IGNORED)
            positions[end:] -= end - at
            at = end
        return Window(inputs, labels, positions)


class _Preferences(_Conversations):
    """Windows of whole pairs: what compares two answers has both in one micro-batch, whatever the ranks share."""

    together = 2
    reference: np.ndarray | None = None
    """fp32 [rows]."""

    def read(self, index: int) -> Window:
        rows = self._rows(index)
        return (
            super().read(index)._replace(rows=rows, reference=None if self.reference is None else self.reference[rows])
        )


class _Unpaired(_Conversations):
    """Windows of answers judged alone; beside each, a window of the same prompts with answers to others."""

    reference: np.ndarray | None = None
    """fp32 [2 rows]."""

    def _sizes(self) -> np.ndarray:
        judged = self.stream.judged()
        self._begins, self._desirable = judged["begin"].astype(np.int64), judged["desirable"].astype(bool)
        found = partners(judged["prompt"])
        if found is None:
            raise DataError(
                f"{self.stream.folder}: more than half of its {len(judged)} records have the same prompt, and each "
                "has to meet the answer to another one; prepare more prompts"
            )
        self._partners = found
        sizes = self._begins + (self._lengths - self._begins)[found]
        if (longest := int(sizes.max(initial=0))) > self._length:
            raise DataError(
                f"{self.stream.folder}: a prompt with the answer to another one has {longest} tokens; raise "
                f"data.sequence_length to that, or prepare the data with less than --max-tokens {self._length}"
            )
        return np.maximum(sizes, self._lengths)

    def _mismatched(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's prompt with its partner's answer."""
        partner, begin = int(self._partners[row]), int(self._begins[row])
        (prompt, _), (answer, counted), at = self._row(row), self._row(partner), int(self._begins[partner])
        return np.concatenate([prompt[:begin], answer[at:]]), np.concatenate([np.zeros(begin, bool), counted[at:]])

    def read(self, index: int) -> Window:
        rows = self._rows(index)
        after = rows + len(self._lengths)
        known = self.reference
        mismatched = self._window(map(self._mismatched, rows))
        return (
            super()
            .read(index)
            ._replace(
                rows=rows,
                reference=None if known is None else known[rows],
                desirable=self._desirable[rows],
                mismatched=mismatched._replace(rows=after, reference=None if known is None else known[after]),
            )
        )


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One prepared set of the mixture."""

    prepared: PreparedSet
    train: _Texts | _Conversations
    validation: _Texts | _Conversations


class TrainData:
    """The sequences of a run: training sequence 0, 1, 2, ... without end, and the validation sequences.

    Training sequence k belongs to one set of the mixture; each set goes through its own epochs, every epoch in
    its own order. Both are pure functions of k and the seed, so a position is one integer and a seek costs nothing.
    """

    def __init__(self, config: DataConfig) -> None:
        """Raises DataError when a folder is not prepared, too small, or does not fit the others."""
        if (config.path is None) == (not config.mixture):
            raise DataError("data.path and data.mixture: give exactly one of the two")
        weights = config.mixture or {str(config.path): 1.0}
        for folder, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise DataError(
                    f"data.mixture {folder}: {weight}: a weight must be a positive number; or leave the set out"
                )
        if config.sequence_length < 1:
            raise DataError(f"data.sequence_length {config.sequence_length}: must be at least 1")
        self._config = config
        self._mixture = Mixture(list(weights.values()))
        self._members = [_open_member(Path(folder), config) for folder in weights]
        self._check_members()
        self.sequence_length = config.sequence_length
        self.mask_document_starts = config.mask_document_starts
        self.isolate_documents = config.isolate_documents
        self.shares = self._mixture.shares
        """Each set's exact share of the sequences."""
        self.manifests: tuple[Manifest, ...] = tuple(member.prepared.manifest for member in self._members)
        self.vocab_size: int = self.manifests[0].vocab_size
        self.separator_id: int = self.manifests[0].separator_id
        self.tokenizer_dir: Path = self._members[0].prepared.tokenizer_dir
        self._windows = [member.train.count for member in self._members]
        self._validation_windows = [member.validation.count for member in self._members]
        self.sequences_per_epoch: int = min(
            int(windows / share) for windows, share in zip(self._windows, self.shares, strict=True)
        )
        """Training sequences until the first set of the mixture has been read once."""
        self.validation_sequences: int = self._count_validation()
        """Validation sequences there are; a mixture's end when one of its sets does."""
        self.fingerprint: str = self._fingerprint()
        """Hash of the data, the sequence length, the seed and the mixture: what decides every training sequence."""

    def take_reference(self, precision: str) -> list[str]:
        """From now on windows of preferences have the reference's log-probabilities. Returns the hash of the weights
        that each set's are of. Raises DataError when a set has none, or they are not of its data."""
        hashes = []
        for member in self._members:
            made, columns = read_reference(member.prepared, precision)
            for windows, split in zip((member.train, member.validation), SPLITS, strict=True):
                assert isinstance(windows, _Preferences | _Unpaired)
                windows.reference = columns[split]
            hashes.append(made.weights)
        return hashes

    def _check_members(self) -> None:
        first = self._members[0].prepared
        for member in self._members:
            other = member.prepared
            if other.manifest.tokenizer_fingerprint != first.manifest.tokenizer_fingerprint:
                raise DataError(
                    f"data.mixture: {other.folder} and {first.folder} were prepared with different tokenizers; "
                    f"prepare one again with --tokenizer {first.tokenizer_dir}"
                )
            if member.train.count == 0:
                raise DataError(
                    f"{other.folder}: its {member.train.stream.tokens} training tokens do not fill one sequence of "
                    f"data.sequence_length {self._config.sequence_length}; lower that, or prepare more text"
                )

    def _count_validation(self) -> int:
        windows = self._validation_windows
        # Largest k whose share of every set is there, by bisection: the counts grow with k.
        low, high = 0, sum(windows)
        while low < high:
            middle = (low + high + 1) // 2
            if all(count <= have for count, have in zip(self._mixture.counts(middle), windows, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def _fingerprint(self) -> str:
        sets = [
            [manifest.data_fingerprint, str(share)] for manifest, share in zip(self.manifests, self.shares, strict=True)
        ]
        parts = [sets, self.sequence_length, self._config.seed]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels), int64 [T] each, of training sequence `index` >= 0."""
        return self.window_at(index)[:2]

    def window_at(self, index: int) -> Window:
        """Training sequence `index` >= 0."""
        member, own_index = self._mixture.locate(index)
        epoch, position = divmod(own_index, self._windows[member])
        window = permute(self._windows[member], self._config.seed, epoch, member, position)
        return self._read(self._members[member].train, window)

    def validation_sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels), int64 [T] each, of validation sequence `index` < validation_sequences."""
        return self.validation_window_at(index)[:2]

    def validation_window_at(self, index: int) -> Window:
        """Validation sequence `index` < validation_sequences.

        The order is fixed, whatever the run's seed, and shuffled: so the first few hundred stand for all of them
        and not for the first shard.
        """
        member, position = self._mixture.locate(index)
        window = permute(self._validation_windows[member], 0, 0, member, position)
        return self._read(self._members[member].validation, window)

    def streams(self, split: Split) -> list[TokenStream]:
        """The token stream of each set of the mixture."""
        return [(member.train if split == "train" else member.validation).stream for member in self._members]

    def _read(self, windows: _Texts | _Conversations, index: int) -> Window:
        window = windows.read(index)
        if (largest := int(max(window.inputs.max(), window.labels.max()))) >= self.vocab_size:
            # A wrong id would read past the embedding: on a GPU an assertion that kills the process without a name.
            raise DataError(
                f"{self.tokenizer_dir.parent}: holds the id {largest}, outside the vocabulary [0, {self.vocab_size}): "
                "a shard is damaged; copy the folder again, or delete it and prepare it again"
            )
        return window


def _kind(chat: dict[str, Any]) -> type[_Conversations]:
    return _Preferences if chat.get("pairs") else _Unpaired if chat.get("unpaired") else _Conversations


def _open_member(folder: Path, config: DataConfig) -> _Member:
    prepared = PreparedSet(folder)
    chat = prepared.manifest.chat
    kind = _Texts if chat is None else _kind(chat)
    if chat is not None and chat.get("prompts"):
        raise DataError(
            f"{folder} holds prompts, of which nothing is counted, so there is nothing to learn; they are for what "
            "generates answers. Prepare conversations, with --format chat"
        )
    if chat is not None and not config.isolate_documents:
        raise DataError(
            f"data.isolate_documents is false, and {folder} holds conversations: those that share a sequence would "
            "read each other; set data.isolate_documents to true"
        )
    if chat is not None and chat["longest"] > config.sequence_length:
        what = "pair" if chat.get("pairs") else "row"
        raise DataError(
            f"data.sequence_length {config.sequence_length}: the longest {what} of {folder} has {chat['longest']} "
            f"tokens, and none is cut here; raise it, or prepare the data with --max-tokens {config.sequence_length}"
        )
    separator_id = prepared.manifest.separator_id
    train, validation = (kind(prepared.split(split), config, separator_id) for split in SPLITS)
    return _Member(prepared=prepared, train=train, validation=validation)
