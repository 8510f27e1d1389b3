"""The start of a run: what it is, written down beside it."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from typing import Any

import torch

from llmtrain import log, units
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.config.load import dump
from llmtrain.config.run import ResolvedRun
from llmtrain.dist.device import device_name
from llmtrain.dist.ranks import Ranks
from llmtrain.models.build import ModelFacts
from llmtrain.tracking.environment import describe_environment, unverified, versions, write_environment


def write_run_files(folder: RunDirectory, resolved: ResolvedRun, ranks: Ranks, sizes: ModelFacts) -> dict[str, Any]:
    """config.yaml, deepspeed.json and environment.json, as used. Returns the environment (rank 0; else empty)."""
    if ranks.rank != 0:
        return {}
    (folder.path / "config.yaml").write_text(dump(resolved.run))
    (folder.path / "deepspeed.json").write_text(json.dumps(resolved.deepspeed, indent=2) + "\n")
    environment = describe_environment(ranks=[asdict(seat) for seat in ranks.seats])
    environment["parameters"] = sizes.parameters
    write_environment(folder.path, environment)
    return environment


def announce(
    resolved: ResolvedRun, folder: RunDirectory, sizes: ModelFacts, device: torch.device, lines: list[str]
) -> None:
    """Print on rank 0 what is about to run, what was adapted, and what `lines` say of a resume."""
    train, length = resolved.run.train, resolved.run.data.sequence_length
    log.info(
        f"{units.count(sizes.parameters)} parameters, {resolved.precision}, ZeRO {resolved.zero_stage}, "
        f"{resolved.world_size} rank{'' if resolved.world_size == 1 else 's'} on {device_name(device)}; "
        f"{units.count((train.global_batch or 0) * length)} tokens a step ({train.global_batch} sequences of {length}: "
        f"micro-batch {train.micro_batch} x accumulation {train.accumulation} x {resolved.data_parallel} data-parallel "
        f"ranks); run folder {folder.path}"
    )
    for line in (*filter(None, [unverified(versions())]), *resolved.notes, *lines):
        log.info(line)


def max_memory_gib(device: torch.device) -> float:
    """Peak of this process: allocated device memory, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / units.GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / units.GIB
