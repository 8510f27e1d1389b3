"""The end of a run, on rank 0: export, a sample, the figures, and the paths of the results."""

from __future__ import annotations

import json
import time
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError, DataError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.redact import redact_text
from llmtrain.base.threads import in_thread
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.inference import Sampling, generate
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.config.run import RunConfig, same_command
from llmtrain.data.shards import TokenStream
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.stream.windows import IGNORED, ends_in
from llmtrain.objectives.by_token import NextToken
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.tracker import Tracker

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
    found = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
    return _Counts(
        unigram=np.bincount(tokens, weights=times, minlength=vocab_size),
        pair=np.where(unique[found] == wanted, times[found], 0),
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


_UPLOAD_S = 1800.0
"""Limit for how long the end of a run waits for its export's upload."""
_BASELINE_TOKENS = 20_000_000
"""Counting n-grams of more training tokens than this would hold up the end of a run."""
_BASELINE_VALIDATION_TOKENS = 262_144


def finish(
    config: RunConfig,
    folder: RunDirectory,
    data: TrainData,
    tracker: Tracker,
    validation_loss: float | None,
    device: torch.device,
) -> str:
    """Print the result; write the Hugging Face folder and the sample if the run asks for them. `data`: of the last
    stage. `validation_loss`: None with train.eval off. Returns the last line for the user."""
    newest = complete_checkpoints(folder.checkpoints)[0]
    lines = [("run folder", str(folder.path)), ("checkpoint", str(newest))]
    if config.train.export:
        export_hf(newest, folder.export)
        tracker.event("export", path=str(folder.export))
        lines.append(("Hugging Face", str(folder.export)))
        if config.train.export_to is not None:
            _upload(config.train.export_to, newest, folder, tracker)
    lines.append(("plots", f"llmtrain report {folder.path}"))
    if validation_loss is None:
        log.info("no validation loss: train.eval is off")
    elif not isinstance(config.objective, NextToken):
        log.info(f"validation loss {validation_loss:.4f} {config.objective.unit}")
    else:
        log.info(f"validation loss {validation_loss:.4f} nats/token (perplexity {perplexity(validation_loss):.2f})")
        _print_baselines(data, tracker)
    if config.train.export and config.train.sample_prompt is not None:
        _sample(folder, config.train.sample_prompt, Sampling(max_tokens=64, seed=config.train.seed), tracker, device)
        lines.append(("more text", f'llmtrain generate {folder.path} --prompt "..."'))
    return "\n".join(f"{what:<13} {where}" for what, where in lines)


def _upload(url: str, checkpoint: Path, folder: RunDirectory, tracker: Tracker) -> None:
    """Upload the export; a failure is a warning, since the export is on this host's disk."""
    from llmtrain.checkpoint.hf.export_store import ExportStore  # most runs have none

    done = in_thread(lambda: ExportStore(url, checkpoint, "train.export_to").put(folder.export), "upload")
    until = time.monotonic() + _UPLOAD_S
    while not wait([done], 1.0).done and time.monotonic() < until:
        heart.beat()
    try:
        words = done.result(0)
    except (CheckpointError, FutureTimeout) as error:
        reason = str(error) or f"train.export_to {redact_text(url)}: not done after {units.duration(_UPLOAD_S)}."
        tracker.event("export_failed", error=reason)
        log.warn(f"{reason} Later: llmtrain checkpoint to-hf {folder.path} {redact_text(url)}")
        return
    tracker.event("uploaded", export=words)
    log.info(f"uploaded {words}")


def _sample(folder: RunDirectory, prompt: str, sampling: Sampling, tracker: Tracker, device: torch.device) -> None:
    """Generate a sample; a warning if the engine's shards leave no room for the exported model."""
    try:
        text = generate(folder.export, prompt, sampling, device={"": device})
    except RuntimeError as error:
        from llmtrain.base.rank.device_faults import OUT_OF_MEMORY, device_fault

        if device_fault(str(error)) is not OUT_OF_MEMORY:
            raise
        again = f'llmtrain generate {folder.path} --prompt "..."'
        log.warn(f"no sample: {device} has no room for the exported model next to the engine. Later: {again}")
        return
    tracker.event("sample", text=text)
    log.info(f"sample: {json.dumps(text, ensure_ascii=False)}")


def stopped(config: RunConfig, checkpoints: Path | None, step: int, reason: str | None) -> str:
    """The last line of a run that was asked to stop. `checkpoints`: None: the run had not begun."""
    if checkpoints is None:
        return f"stopped ({reason}) at step {step}, before this launch trained any; the same command begins again"
    where = step_folder(checkpoints, step)
    return f"stopped ({reason}) at step {step}, saved in {where}; {same_command(config)} continues"


def _print_baselines(data: TrainData, tracker: Tracker) -> None:
    train_tokens = sum(stream.tokens for stream in data.streams("train"))
    if train_tokens > _BASELINE_TOKENS:
        return
    length = data.sequence_length
    # Independent of train.eval_sequences: two runs on the same data report equal figures.
    sequences = min(data.validation_sequences, max(1, _BASELINE_VALIDATION_TOKENS // length))
    unigram, bigram = ngram_baselines(data, sequences=sequences)
    counted = sum(int((data.validation_sequence(index)[1] != IGNORED).sum()) for index in range(sequences))
    seen = {"train_tokens": train_tokens, "validation_tokens": counted}
    tracker.event("baselines", unigram_loss=unigram, bigram_loss=bigram, **seen)
    log.info(
        f"for comparison: a unigram model {unigram:.4f} nats/token, a bigram model {bigram:.4f} nats/token "
        f"(counts of the same {units.count(train_tokens)} training tokens, measured on the first "
        f"{units.count(counted)} counted validation tokens)"
    )
