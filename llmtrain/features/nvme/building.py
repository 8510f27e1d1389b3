"""The engine of a run with swap files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.base import disks, units
from llmtrain.base.errors import ConfigError
from llmtrain.base.trees import lookup
from llmtrain.checkpoint.snapshot import boot_id
from llmtrain.config.run import Run
from llmtrain.engine.deepspeed import patches
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.nvme import KEY, state, store
from llmtrain.models.language import LanguageModel


@contextlib.contextmanager
def building(model: LanguageModel, run: Run, ranks: Ranks, tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A context in which DeepSpeed builds the engine; gives the JSON for it. Raises ConfigError, AgreedError."""
    patches.check((*store.PRIVATE, *state.PRIVATE))
    folder, aio = Path(lookup(tree, KEY)), {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
    aio |= tree.get("aio") or {}
    _check_room(model, run, ranks, folder)
    settings = tree["zero_optimization"]["offload_optimizer"]
    swap = store.Store(folder, KEY, block=aio["block_size"], requests=aio["queue_depth"] * aio["intra_op_parallelism"])
    with tempfile.TemporaryDirectory() as names, store.in_place_of_op(swap):
        # DeepSpeed makes empty folders under its path, which gives the tensors their names and nothing else.
        settings = {**settings, "nvme_path": names, "buffer_count": run.mix.swaps}
        zero = {**tree["zero_optimization"], "offload_optimizer": settings}
        # Sizes that DeepSpeed makes multiples of 1 KiB x intra_op_parallelism are pages, as direct I/O needs them.
        yield {**tree, "zero_optimization": zero, "aio": {"intra_op_parallelism": store.PAGE // 1024}}


def check_folder(key: str, folder: str) -> None:
    """Raises ConfigError: the folder is missing, cannot be written, or is not on a disk of this host."""
    if reason := disks.why_no_disk(folder):
        rule = "the ranks of a host keep the optimizer's state in files there, on a disk of the host"
        remedy = "name a folder on a local disk that the run may write, with the same path on each host"
        where = f"{key} = {folder!r}: {reason} (on {os.uname().nodename})"
        raise ConfigError(f"{where}\n    rule:   {rule}\n    remedy: {remedy}")


def _check_room(model: LanguageModel, run: Run, ranks: Ranks, folder: Path) -> None:
    trained = sum(held.region.numel for held in model.local_parameters() if held.trains)
    shares = run.mix.degrees.data * run.mix.degrees.sequence
    mine = 4 * trained * (2 + run.config.optim.moments) // shares
    disk = (boot_id(), folder.stat().st_dev)
    needed = sum(size for place, size in ranks.gather((disk, mine)) if place == disk)
    with ranks.together():
        if needed > (free := shutil.disk_usage(folder).free):
            raise ConfigError(
                f"{KEY} = {str(folder)!r}: masters, moments and gradients of this host's ranks need "
                f"{units.size(needed)}, and {units.size(free)} are free. Make room, or use another disk or more hosts"
            )
