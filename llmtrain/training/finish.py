"""The end of a run, on rank 0: export, a sample, the figures, and where everything lies."""

from __future__ import annotations

from pathlib import Path

import torch

from llmtrain.base import log, units
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.inference import Sampling, generate
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cluster.watch.explain.device_faults import OUT_OF_MEMORY, device_fault
from llmtrain.config.objective import BY_TOKEN, NEXT_TOKEN, UNPAIRED
from llmtrain.config.run import RunConfig
from llmtrain.data.stream.baseline import ngram_baselines
from llmtrain.data.stream.loader import TrainData
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.tracker import Tracker

_BASELINE_TOKENS = 20_000_000
"""Counting n-grams of more training tokens than this would hold up the end of a run."""
_BASELINE_VALIDATION_TOKENS = 262_144


def finish(
    run: RunConfig,
    folder: RunDirectory,
    data: TrainData,
    tracker: Tracker,
    validation_loss: float | None,
    device: torch.device,
) -> str:
    """Print the run's result; write the Hugging Face folder and the sample if the run asks for them.

    `validation_loss` is None with train.eval off: then there is nothing to compare unigrams and bigrams with, either.
    `device`: this rank's, for the sample; the others still hold their shards of the model. Returns where everything
    lies: lines to print when all else is done.
    """
    newest = complete_checkpoints(folder.checkpoints)[0]
    lines = [("run folder", str(folder.path)), ("checkpoint", str(newest))]
    if run.train.export:
        export_hf(newest, folder.export)
        tracker.event("export", path=str(folder.export))
        lines.append(("Hugging Face", str(folder.export)))
    lines.append(("plots", f"llmtrain report {folder.path}"))
    if validation_loss is None:
        log.info("no validation loss: train.eval is off")
    elif run.objective.name != NEXT_TOKEN:
        name = run.objective.name
        per = "nats/token" if name in BY_TOKEN else "per answer" if name in UNPAIRED else "nats/pair"
        log.info(f"validation loss {validation_loss:.4f} {per}")
    else:
        log.info(f"validation loss {validation_loss:.4f} nats/token (perplexity {perplexity(validation_loss):.2f})")
        _print_baselines(run.data.sequence_length, data, tracker)
    if run.train.export and run.train.sample_prompt is not None:
        _sample(folder, run.train.sample_prompt, Sampling(max_tokens=64, seed=run.train.seed), tracker, device)
        lines.append(("more text", f'llmtrain generate {folder.path} --prompt "..."'))
    return "\n".join(f"{what:<13} {where}" for what, where in lines)


def _sample(folder: RunDirectory, prompt: str, sampling: Sampling, tracker: Tracker, device: torch.device) -> None:
    """Beside the engine, which still holds its shards: where they leave no room, the run has ended well without."""
    try:
        text = generate(folder.export, prompt, sampling, device={"": device})
    except RuntimeError as error:
        if device_fault(str(error)) is not OUT_OF_MEMORY:
            raise
        again = f'llmtrain generate {folder.path} --prompt "..."'
        log.warn(f"no sample: {device} has no room for the exported model beside the engine. Later: {again}")
        return
    tracker.event("sample", text=text)
    log.info(f"sample: {text}")


def stopped(checkpoints: Path | None, step: int, reason: str | None) -> str:
    """The last line of a run that was asked to stop: what was saved, and where. None: it had not begun."""
    if checkpoints is None:
        return f"stopped ({reason}) while it waited for the other sites, at step {step}; the same command begins again"
    where = step_folder(checkpoints, step)
    return f"stopped ({reason}) at step {step}, saved in {where}; the same command continues"


def _print_baselines(length: int, data: TrainData, tracker: Tracker) -> None:
    """Unigram and bigram losses of the same training tokens, where that takes a moment only; on rows of `length`."""
    train_tokens = sum(stream.tokens for stream in data.streams("train"))
    if train_tokens > _BASELINE_TOKENS:
        return
    # So many whatever train.eval_sequences is: the figures of two runs on the same data are to be the same.
    sequences = min(data.validation_sequences, max(1, _BASELINE_VALIDATION_TOKENS // length))
    unigram, bigram = ngram_baselines(data, sequences=sequences)
    counted = {"train_tokens": train_tokens, "validation_tokens": sequences * length}
    tracker.event("baselines", unigram_loss=unigram, bigram_loss=bigram, **counted)
    log.info(
        f"for comparison: a unigram model {unigram:.4f} nats/token, a bigram model {bigram:.4f} nats/token "
        f"(counts of the same {units.count(train_tokens)} training tokens, measured on the first "
        f"{units.count(sequences * length)} validation tokens)"
    )
