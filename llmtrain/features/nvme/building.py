"""The engine of a run with swap files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.base import disks, units
from llmtrain.base.trees import lookup
from llmtrain.checkpoint.snapshot import boot_id
from llmtrain.config.problems import stop
from llmtrain.config.run import Run
from llmtrain.engine.deepspeed import patches
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.nvme import KEY, WEIGHTS_KEY, state, store, weights
from llmtrain.models.spec import ModelSpec

_CONTENTS = {KEY: "masters, moments and gradients", WEIGHTS_KEY: "weights (in the first moment twice)"}


@contextlib.contextmanager
def building(run: Run, spec: ModelSpec, ranks: Ranks) -> Iterator[Run]:
    """A context in which DeepSpeed builds model and engine with state on a disk; yields the run with the JSON for that.

    Raises ConfigError, AgreedError.
    """
    patches.check((*store.PRIVATE, *state.PRIVATE, *weights.PRIVATE))
    _check_room(run, spec, ranks)
    zero, aio = dict(run.deepspeed["zero_optimization"]), run.deepspeed.get("aio")
    with contextlib.ExitStack() as stack:
        if run.mix.weights_on_disk:
            stack.enter_context(weights.in_files(Path(lookup(run.deepspeed, WEIGHTS_KEY)), WEIGHTS_KEY))
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if run.mix.swaps:
            # DeepSpeed makes empty folders under its path, which gives the tensors their names and nothing else.
            names = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(store.in_place_of_op(_store(Path(lookup(run.deepspeed, KEY)), aio or {})))
            changed = {"nvme_path": names, "buffer_count": run.mix.swaps}
            zero["offload_optimizer"] = {**zero["offload_optimizer"], **changed}
            # Sizes that DeepSpeed makes multiples of 1 KiB x intra_op_parallelism are pages, as direct I/O needs them.
            aio = {"intra_op_parallelism": store.PAGE // 1024}
        tree = {**run.deepspeed, "zero_optimization": zero}
        yield replace(run, deepspeed=tree if aio is None else {**tree, "aio": aio})


def _store(folder: Path, asked: dict[str, Any]) -> store.Store:
    aio = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1} | asked
    requests = aio["queue_depth"] * aio["intra_op_parallelism"]
    return store.Store(folder, KEY, block=aio["block_size"], requests=requests)


def check_folder(key: str, folder: str) -> None:
    """Raises ConfigError: the folder is missing, cannot be written, or is not on a disk of this host."""
    if reason := disks.why_no_disk(folder):
        rule = "the ranks of a host keep the optimizer's state or weights in files there, on a disk of the host"
        remedy = "name a folder on a local disk that the run may write, with the same path on each host"
        raise stop(key, folder, f"{reason} (on {os.uname().nodename}); {rule}", remedy)


def _check_room(run: Run, spec: ModelSpec, ranks: Ranks) -> None:
    trained, shares, needs = spec.facts.trained, run.mix.degrees.world_size, {}
    if run.mix.swaps:
        needs[KEY] = 4 * trained * (2 + run.config.optim.moments) // shares
    if run.mix.weights_on_disk:  # a share of each parameter, and then one of all that are trained
        size = 4 if run.mix.precision == "fp32" else 2
        frozen = (spec.facts.parameters - trained) * (1 if spec.adapter.quantize else size)
        needs[WEIGHTS_KEY] = (2 * size * trained + frozen) // shares
    disks_of = {key: (boot_id(), os.stat(lookup(run.deepspeed, key)).st_dev) for key in needs}
    each = ranks.gather([(disk, needs[key]) for key, disk in disks_of.items()])
    with ranks.together():
        for key, disk in disks_of.items():
            needed = sum(size for of_rank in each for place, size in of_rank if place == disk)
            folder = lookup(run.deepspeed, key)
            if needed > (free := shutil.disk_usage(folder).free):
                what = " and ".join(_CONTENTS[key] for key, place in disks_of.items() if place == disk)
                room = f"need {units.size(needed)}, and {units.size(free)} are free"
                remedy = "make room, or use another disk or more hosts"
                raise stop(key, folder, f"{what} of this host's ranks {room}", remedy)
