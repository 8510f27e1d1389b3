"""The start of a run: what it is, written down beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from llmtrain.base import log, units
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.config.batch import Batch
from llmtrain.config.deepspeed import FP32_BY_AUTO
from llmtrain.config.dump import dump
from llmtrain.config.run import RunConfig
from llmtrain.config.topology import Mix
from llmtrain.engine.dist.device import device_name
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.models.spec import ModelFacts
from llmtrain.tracking.environment import describe_environment, unverified, versions, write_environment


def write_run_files(
    folder: RunDirectory, run: RunConfig, exact: dict[str, Any], ranks: Ranks, sizes: ModelFacts
) -> dict[str, Any]:
    """config.yaml, deepspeed.json (the `exact` dict) and environment.json. Returns that (rank 0; else empty)."""
    if ranks.rank != 0:
        return {}
    (folder.path / "config.yaml").write_text(dump(run))
    (folder.path / "deepspeed.json").write_text(json.dumps(exact, indent=2) + "\n")
    environment = describe_environment(ranks=[asdict(seat) for seat in ranks.seats])
    environment["parameters"] = sizes.parameters
    write_environment(folder.path, environment)
    return environment


def announce(
    batch: Batch, mix: Mix, folder: RunDirectory, sizes: ModelFacts, device: torch.device, lines: list[str]
) -> None:
    """Print on rank 0 what is about to run, and `lines`."""
    frozen = f" ({units.count(sizes.trained)} trained)" if sizes.trained < sizes.parameters else ""
    by_auto = ' (by the JSON\'s "auto")' if any(FP32_BY_AUTO in line for line in lines) else ""
    log.info(
        f"{units.count(sizes.parameters)} parameters{frozen}, {mix.precision}{by_auto}, ZeRO {mix.zero_stage}, "
        f"{units.counted(mix.degrees.world_size, 'rank')} on {device_name(device)}; "
        f"{units.count(batch.tokens)} tokens a step ({batch.global_batch} sequences of {batch.sequence_length}: "
        f"micro-batch {batch.micro_batch} x accumulation {batch.accumulation} x {batch.data_parallel} data-parallel "
        f"ranks); run folder {folder.path}"
    )
    for line in (*filter(None, [unverified(versions())]), *lines):
        log.info(line)
