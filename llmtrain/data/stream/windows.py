"""Windows over the tokens of one split, a run's sequences: contiguous texts. rows.py has those of conversations.

Texts are packed end to end, each followed by the separator. Window i of a split is its tokens [i*T, i*T + T + 1):
inputs are the first T, labels the last T, so labels are already shifted by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmtrain.config.run import DataConfig
from llmtrain.data.shards import TokenStream

if TYPE_CHECKING:
    from llmtrain.data.origins import Origin, Origins
    from llmtrain.data.stream.columns import Taught

IGNORED = -100  # the label that no loss counts; torch's and Hugging Face's default


def ends_in(tokens: np.ndarray, separator_id: int, doubled: bool) -> np.ndarray:
    """bool [..., T] of T + 1 tokens: a document ends there. `doubled`: documents begin with the separator, too."""
    ends: np.ndarray = tokens[..., :-1] == separator_id
    return ends & (tokens[..., 1:] == separator_id) if doubled else ends


def labels_of(
    tokens: np.ndarray, separator_id: int, mask_document_starts: bool, doubled: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels), int64 [T] each, of a window of T + 1 tokens. `doubled`: see `ends_in`.

    With `mask_document_starts` the label after a separator is -100: no token predicts a document's first one.
    """
    inputs = tokens[:-1].astype(np.int64)
    labels = tokens[1:].astype(np.int64)
    if mask_document_starts:
        labels[ends_in(tokens, separator_id, doubled)] = IGNORED
    return inputs, labels


def positions_of(inputs: np.ndarray, separator_id: int, doubled: bool = False) -> np.ndarray:
    """int64 [b, T]: each token's position in its document, from 0 at the row's start and after every document's end."""
    index = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(ends_in(inputs, separator_id, doubled), index[:, 1:], 0)
    return index - np.maximum.accumulate(begins, axis=1)


def windows_in(tokens: int, sequence_length: int) -> int:
    """Number of windows in `tokens`: a window's last label is the first input of the next one."""
    return max(0, (tokens - 1) // sequence_length)


class Window(NamedTuple):
    """A sequence for the model, int64 [T] each."""

    inputs: np.ndarray
    labels: np.ndarray
    """Already shifted; -100 is not counted."""
    positions: np.ndarray | None
    """Each token's position in its document; None: the sequence is one text."""
    rows: np.ndarray | None = None
    """Rows of the split that are its first documents, int64 [2 pairs]: chosen and rejected answers in turn."""
    reference: np.ndarray | None = None
    """Their log-probabilities under the reference, fp32 [2 pairs], if the run has one."""
    desirable: np.ndarray | None = None
    """Labels of unpaired answers, bool [rows]: True if desired; `rows` and `reference` then are [rows] too."""
    mismatched: Window | None = None
    """For unpaired answers: the prompts, each with the answer to another one. Their rows come after the split's."""
    words: np.ndarray | None = None
    """Ids that the teacher finds likeliest instead of each counted label, int64 [T, k]; None: no teacher's column."""
    logs: np.ndarray | None = None
    """fp32 [T, k + 1]: log-probabilities of the words, and all other words' logarithmic mass; 0 if not counted."""


class Texts:
    """Windows over contiguous documents."""

    taught: Taught | None = None

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int, doubled: bool = False) -> None:
        self.stream, self._config, self._separator_id, self._doubled = stream, config, separator_id, doubled
        self.count = windows_in(stream.tokens, config.sequence_length)

    def read(self, index: int) -> Window:
        length = self._config.sequence_length
        tokens = self.stream.read(index * length, length + 1)
        inputs, labels = labels_of(tokens, self._separator_id, self._config.mask_document_starts, self._doubled)
        if not self._config.isolate_documents:
            return Window(inputs, labels, None)
        return Window(inputs, labels, positions_of(inputs[None], self._separator_id, self._doubled)[0])

    def fetch(self, indices: Iterable[int]) -> None:
        """Read these windows from a store concurrently. Raises DataError."""
        length = self._config.sequence_length
        self.stream.fetch((index * length, length + 1) for index in indices)

    def begin(self, index: int) -> int:
        return index * self._config.sequence_length

    def origins(self, index: int, known: Origins) -> Iterator[Origin]:
        """The documents in a window, the first and the last perhaps in parts."""
        length = self._config.sequence_length
        return known.within(index * length, (index + 1) * length)

    def windows_with(self, origin: Origin) -> range:
        """The windows with parts of a document; its end may be in none."""
        length = self._config.sequence_length
        return range(origin.begin // length, min(self.count, (origin.end - 1) // length + 1))

    @property
    def context(self) -> list[Any] | None:
        """Settings, apart from earlier tokens, that change a token's prediction."""
        config = self._config
        return [config.sequence_length, config.isolate_documents, config.mask_document_starts]

    @property
    def place_count(self) -> int:
        """Number of places in a teacher's column (columns.py)."""
        return self.count * self._config.sequence_length

    def places(self, index: int, window: Window) -> np.ndarray:
        """Places of this window's counted labels, int64 [labels]."""
        return index * self._config.sequence_length + np.flatnonzero(window.labels != IGNORED)
