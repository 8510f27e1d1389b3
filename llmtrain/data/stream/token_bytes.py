"""Bytes of text per token of a tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.data.stream.windows import IGNORED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from llmtrain.data.stream.train_data import TrainData

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(tokenizer_dir: Path, vocab_size: int) -> np.ndarray:
    """Bytes by token id, int64 [vocab_size]: their sum over a text's tokens is the text's length in UTF-8.

    Special tokens have no text: 0. Part of a character counts as its bytes. If a decoder joins tokens with spaces, a
    token includes the space before it. Raises DataError: no tokenizer can be read.
    """
    from tokenizers import Tokenizer

    path = tokenizer_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: the tokenizers library cannot read it ({error}); copy the folder again") from error
    lengths = np.zeros(vocab_size, dtype=np.int64)
    length_of = _length_of(tokenizer)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if number < vocab_size:
            lengths[number] = length_of(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        if number < vocab_size:
            lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _length_of(tokenizer: Tokenizer) -> Any:
    """Return a function that counts the bytes of a token in the vocabulary's spelling."""
    kinds, decoder = _kinds(tokenizer), tokenizer.decoder
    if "ByteLevel" in kinds:
        return len  # a character for each byte
    if decoder is None:
        return lambda token: len(token.encode())

    def length(token: str) -> int:
        if "ByteFallback" in kinds and _BYTE.fullmatch(token):
            return 1
        # Decode it after itself: decoders drop a space at a text's beginning.
        return len(decoder.decode([token, token]).encode()) - len(decoder.decode([token]).encode())

    return length


def _kinds(tokenizer: Tokenizer) -> set[str]:
    """Types of the tokenizer's decoder and of its steps."""
    if tokenizer.decoder is None:
        return set()
    settings = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in [settings, *settings.get("decoders", [])]}


def counted_bytes(data: TrainData, sequences: int, lengths: np.ndarray) -> int:
    """Bytes of the counted labels of the first `sequences` validation sequences."""
    total, indices = 0, range(min(sequences, data.validation_sequences))
    data.fetch_validation(indices)
    for index in indices:
        _, labels = data.validation_sequence(index)
        total += int(lengths[labels[labels != IGNORED]].sum())
    return total
