"""Write a checkpoint: every rank its own slices, the manifest last, then one rename."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from llmtrain import units
from llmtrain.checkpoint.durable import sync
from llmtrain.checkpoint.format import (
    MANIFEST,
    TRAINER,
    FileEntry,
    Manifest,
    Piece,
    complete_checkpoints,
    hash_file,
    remove_checkpoint,
    step_folder,
)
from llmtrain.config.run import ResolvedRun
from llmtrain.engine.build import Ranks
from llmtrain.engine.fragments import fragments, owned, whole_shapes
from llmtrain.errors import CheckpointError
from llmtrain.models.checksum import checksum

_HEADROOM = 64 << 20  # headers, the manifest, what else the run writes meanwhile


def save_checkpoint(
    engine: Any, checkpoints: Path, step: int, trainer: dict[str, Any], resolved: ResolvedRun, ranks: Ranks
) -> Path:
    """Write checkpoints/step-N and return it. All ranks call it together.

    Raises:
        CheckpointError: on every rank alike, with nothing left behind (no space, an I/O error on any rank).
    """
    final = step_folder(checkpoints, step)
    partial = final.with_name(final.name + ".tmp")
    pieces = [(f, *owned(f)) for f in fragments(engine) if f.own.stop > f.own.start]
    need = sum(values.numel() * values.element_size() for _, _, values in pieces)
    _agree(ranks, _prepare(partial, ranks, need), partial)

    name = f"rank-{ranks.rank:05d}.safetensors"
    entry, error = None, None
    try:
        tensors = {f"{f.kind}/{f.name}": values.contiguous() for f, _, values in pieces}
        save_file(tensors, partial / name)
        sync(partial / name)
        contents = [
            Piece(f.kind, f.name, start, values.numel(), checksum(values, start)) for f, start, values in pieces
        ]
        size = (partial / name).stat().st_size
        entry = FileEntry(bytes=size, xxh3=hash_file(partial / name), pieces=contents)
    except (OSError, SafetensorError) as problem:
        error = f"rank {ranks.rank} could not write {partial / name}: {problem}"
    _agree(ranks, error, partial)

    entries: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(entries, (name, entry), group=ranks.control)
    error = None
    if ranks.rank == 0:
        manifest = Manifest(
            step=step,
            tensors={name: list(shape) for name, shape in whole_shapes(engine).items()},
            files=dict(entries),
            layout={
                "world_size": ranks.world_size,
                "zero_stage": resolved.zero_stage,
                "precision": resolved.precision,
            },
        )
        try:
            _commit(partial, final, manifest, trainer)
        except OSError as problem:
            error = f"rank 0 could not complete {final}: {problem}"
    _agree(ranks, error, partial)
    return final


def _prepare(partial: Path, ranks: Ranks, need: int) -> str | None:
    total = torch.tensor([need], dtype=torch.int64)
    dist.all_reduce(total, group=ranks.control)
    if ranks.rank != 0:
        return None
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
    except OSError as problem:
        return f"cannot make {partial}: {problem}"
    if free < int(total) + _HEADROOM:
        return (
            f"no space for a checkpoint in {partial.parent}: it needs {units.size(int(total) + _HEADROOM)}, "
            f"{units.size(free)} are free. Free some space or lower checkpoint.keep."
        )
    return None


def _agree(ranks: Ranks, error: str | None, partial: Path) -> None:
    """If any rank failed, all ranks fail with its message and nothing stays behind. Also the barrier between phases."""
    errors: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(errors, error, group=ranks.control)
    first = next((e for e in errors if e), None)
    if first is None:
        return
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    raise CheckpointError(first)


def _commit(partial: Path, final: Path, manifest: Manifest, trainer: dict[str, Any]) -> None:
    files = dict(manifest.files)
    trainer_path = partial / TRAINER
    _write_durably(trainer_path, json.dumps(trainer, indent=1))
    files[TRAINER] = FileEntry(bytes=trainer_path.stat().st_size, xxh3=hash_file(trainer_path))
    complete = Manifest(
        step=manifest.step,
        tensors=manifest.tensors,
        files=files,
        layout=manifest.layout,
    )
    _write_durably(partial / MANIFEST, complete.to_json())
    sync(partial)
    if final.exists():  # saved before at this step, by this run or by one that was resumed from further back
        remove_checkpoint(final.rename(final.with_name(final.name + ".old.tmp")))
    partial.rename(final)
    sync(final.parent)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def keep_newest(checkpoints: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints; returns what was deleted. The newest always stays."""
    doomed = complete_checkpoints(checkpoints)[max(1, keep) :]
    for folder in doomed:
        remove_checkpoint(folder)
    return doomed
