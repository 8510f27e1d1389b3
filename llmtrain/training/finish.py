"""The end of a run, on rank 0: export, a sample, the figures, and the paths of the results."""

from __future__ import annotations

import json
import time
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from pathlib import Path

import torch

from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.redact import redact_text
from llmtrain.base.threads import in_thread
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.inference import Sampling, generate
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.config.run import RunConfig, same_command
from llmtrain.data.stream.train_data import TrainData
from llmtrain.features import asked
from llmtrain.objectives.by_token import NextToken
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.tracker import Tracker

_UPLOAD_S = 1800.0
"""Limit for how long the end of a run waits for its export's upload."""


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
    for feature in asked(config):
        feature.at_end(data, tracker)
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
