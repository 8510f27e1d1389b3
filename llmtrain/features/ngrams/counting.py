"""Losses of a unigram and a bigram model that count the run's training tokens."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import cache_folder, content_of, replace_file
from llmtrain.data.sequences import IGNORED, ends_in
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.token_stream import TokenStream
from llmtrain.tracking.tracker import Tracker

_MOST_TOKENS = 20_000_000
"""Counting n-grams of more training tokens than this would hold up the end of a run."""
_METHOD = 1
"""Raise it with a change of the losses: those in the cache folder are then counted again."""
_VALIDATION_TOKENS = 262_144
_MAX_TRAIN_TOKENS = 16 << 20  # about 2 s and 0.5 GiB; the counts of frequent pairs do not change beyond
_BLOCK_TOKENS = 1 << 20
_ADD_K = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)
_DISCOUNTS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
_CONCENTRATIONS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Training counts at the N validation positions, and for all words of the vocabulary."""

    unigram: np.ndarray
    """Occurrences of each token, [vocab_size]."""
    pair: np.ndarray
    """Occurrences of the position's token after the one before it, [N]."""
    context: np.ndarray
    """Occurrences of the token before it with any successor, [N]."""
    followers: np.ndarray
    """Number of different tokens that follow the one before it, [N]."""


def tell(data: TrainData, tracker: Tracker) -> None:
    """Log the losses, and write them as an event; nothing if the data takes long to count.

    The cache folder keeps the losses: a run over the same data counts nothing.
    """
    train_tokens = sum(stream.tokens for stream in data.streams("train"))
    if train_tokens > _MOST_TOKENS:
        return
    # Independent of train.eval_sequences: two runs on the same data report equal figures.
    sequences = min(data.validation_sequences, max(1, _VALIDATION_TOKENS // data.sequence_length))
    masked = "masked" if data.mask_document_starts else "unmasked"
    file = cache_folder() / "baselines" / f"{_METHOD}-{data.order}-{masked}-{sequences}.json"
    losses = _read(file)
    if losses is None:
        unigram, bigram = ngram_baselines(data, sequences=sequences)
        counted = sum(int((data.validation_sequence(index)[1] != IGNORED).sum()) for index in range(sequences))
        losses = {"unigram_loss": unigram, "bigram_loss": bigram, "validation_tokens": counted}
        with contextlib.suppress(OSError):  # then the next run counts again
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(losses).encode())
    tracker.event("baselines", train_tokens=train_tokens, **losses)
    log.info(
        f"for comparison: a unigram model {losses['unigram_loss']:.4f} nats/token, a bigram model "
        f"{losses['bigram_loss']:.4f} nats/token (counts of the same {units.count(train_tokens)} training tokens, "
        f"measured on the first {units.count(losses['validation_tokens'])} counted validation tokens)"
    )


def _read(file: Path) -> dict[str, Any] | None:
    """Return the kept losses; None: there are none, or the file is damaged."""
    try:
        losses = untrusted.loads(content_of(file))
        whole = isinstance(losses["validation_tokens"], int)
        finite = all(math.isfinite(losses[name]) for name in ("unigram_loss", "bigram_loss"))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return losses if whole and finite else None


def ngram_baselines(data: TrainData, *, sequences: int) -> tuple[float, float]:
    """(unigram, bigram) loss in nats per counted token of the first `sequences` validation sequences. The smoothing
    constants are chosen on the validation tokens, which favours the baselines.

    Positions are those counted by `validation_batches`. Unigram: add-k. Bigram: absolute discounting with a Dirichlet
    prior, both backing off to that unigram (the hierarchical Pitman-Yor model of Y. W. Teh, ACL 2006, with one table
    per type); a discount of 0 makes it plain Dirichlet smoothing. A mixture's training tokens are taken in its shares,
    at most 16 Mi in all. Raises DataError when there is no validation sequence.
    """
    total = min(sequences, data.validation_sequences)
    if total == 0:
        raise DataError(
            f"{data.name}: no validation sequence to measure on; prepare it with a larger --validation-fraction"
        )
    data.fetch_validation(range(total))
    pairs = [data.validation_sequence(index) for index in range(total)]
    before, after = (np.concatenate(some) for some in zip(*pairs, strict=True))
    before, after = before[after != IGNORED], after[after != IGNORED]
    counts = _count(data, before, after)
    losses = {}
    for k in _ADD_K:
        smoothed = (counts.unigram + k) / (counts.unigram.sum() + k * data.vocab_size)
        losses[k] = float(-np.log(smoothed[after]).mean())
    best = min(losses, key=losses.__getitem__)
    unigram = ((counts.unigram + best) / (counts.unigram.sum() + best * data.vocab_size))[after]
    bigram = min(
        _bigram_loss(counts, unigram, discount, concentration)
        for discount in _DISCOUNTS
        for concentration in _CONCENTRATIONS
    )
    return losses[best], bigram


def _bigram_loss(counts: _Counts, unigram: np.ndarray, discount: float, concentration: float) -> float:
    backed_off = (concentration + discount * counts.followers) * unigram
    seen = np.maximum(counts.pair - discount, 0)
    return float(-np.log((seen + backed_off) / (counts.context + concentration)).mean())


def _count(data: TrainData, before: np.ndarray, after: np.ndarray) -> _Counts:
    vocab_size, streams = data.vocab_size, data.streams("train")
    limit = min(_MAX_TRAIN_TOKENS, *(int(s.tokens / share) for s, share in zip(streams, data.shares, strict=True)))
    blocks: list[_Block] = []  # of every set in the mixture's shares
    for stream, share in zip(streams, data.shares, strict=True):
        blocks += _spread(stream, max(2, int(limit * share)))
    keys = np.concatenate([_train_pairs(data, *block) for block in blocks])
    unique, times = np.unique(keys, return_counts=True)
    contexts, tokens = unique // vocab_size, unique % vocab_size
    wanted = before * vocab_size + after
    places = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
    return _Counts(
        unigram=np.bincount(tokens, weights=times, minlength=vocab_size),
        pair=np.where(unique[places] == wanted, times[places], 0),
        context=np.bincount(contexts, weights=times, minlength=vocab_size)[before],
        followers=np.bincount(contexts, minlength=vocab_size)[before],
    )


def _train_pairs(data: TrainData, tokens: np.ndarray, counted: np.ndarray | None) -> np.ndarray:
    """Counted pairs of consecutive tokens as before * vocab_size + after."""
    before, after = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    if counted is not None:
        before, after = before[counted[1:]], after[counted[1:]]
    elif data.mask_document_starts:
        inside = ~ends_in(tokens, data.separator_id, data.doubled)
        before, after = before[inside], after[inside]
    return before * data.vocab_size + after


_Block = tuple[np.ndarray, np.ndarray | None]
"""Tokens, and which of them are counted if not all are."""


def _spread(stream: TokenStream, wanted: int) -> list[_Block]:
    """Return all tokens of a stream, or `wanted` in evenly spread blocks."""
    if wanted >= stream.tokens:
        return [(stream.read(0, stream.tokens), stream.counted(0, stream.tokens))]
    number = -(-wanted // _BLOCK_TOKENS)
    length = wanted // number
    starts = [(stream.tokens - length) * i // max(1, number - 1) for i in range(number)]
    return [(stream.read(start, length), stream.counted(start, length)) for start in starts]
