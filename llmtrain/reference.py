"""`llmtrain reference RUN.yaml`: the log-probabilities that a preference objective compares with, once for all epochs.

The model that training starts from goes over the run's data in the form in which it will train, so that the first
step's ratio is exactly 0; the numbers become a column of the prepared folders (data/reference.py).
"""

from __future__ import annotations

import itertools
import os
import warnings
from dataclasses import replace

import numpy as np

from llmtrain import completion, log, units
from llmtrain.check import examine
from llmtrain.config.load import load
from llmtrain.config.objective import WITHOUT_REFERENCE
from llmtrain.config.run import DataConfig, ObjectiveConfig, ResolvedRun
from llmtrain.data.loader import UnpairedBatch, batches_of
from llmtrain.data.manifest import SPLITS, Split
from llmtrain.data.packing import TrainData
from llmtrain.data.reference import numbers, weights_hash, write_reference
from llmtrain.data.shards import PreparedSet
from llmtrain.dist.connect import leave_all
from llmtrain.dist.control import AgreedError, from_all, together
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.join import join_process_group
from llmtrain.errors import ConfigError, ModelError
from llmtrain.models.parallel.mesh import mesh_of
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.online import LogProbs
from llmtrain.start import start_engine, write_weights

USAGE = """\
usage: llmtrain reference RUN.yaml [--SECTION.FIELD VALUE ...]

Write the log-probability of every answer of the run's preferences, under the model that the run starts from, into its
data folders. On several ranks a launcher starts it, as it starts `llmtrain train`."""
_AT_ONCE = 64
"""Micro-batches of one call of the engine: a pipeline takes them together."""


def main(argv: list[str]) -> int:
    """Returns 0. Raises UserError."""
    completion.offer_run()
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0].startswith("-"):
        raise ConfigError("llmtrain reference: the run's YAML comes first; write llmtrain reference RUN.yaml")
    resolved = load(["--config", argv[0], *argv[1:]], int(os.environ.get("WORLD_SIZE", "1")))
    if (name := resolved.run.objective.name) in WITHOUT_REFERENCE:
        raise ConfigError(f"objective.name {name}: compares with no reference; leave this command out")
    if resolved.run.objective.reference == "online":
        raise ConfigError("objective.reference online: is computed at each step; leave this command out")
    # What it trains for needs the column that is to be written here.
    resolved = replace(resolved, run=replace(resolved.run, objective=ObjectiveConfig()))
    resolved, spec = examine(resolved)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    run = resolved.run
    ranks = join_process_group(run.fault.timeout_s, start_timeout_s=run.fault.start_timeout_s)
    try:
        write_columns(resolved, spec, ranks)
    except BaseException as error:
        leave_all(error)
        raise
    leave_all(None)
    return 0


def write_columns(resolved: ResolvedRun, spec: ModelSpec, ranks: Ranks) -> None:
    """The column of each of the run's data folders. All ranks call it together. Raises UserError on all of them."""
    run, mesh = resolved.run, mesh_of(resolved.degrees)
    engine = start_engine(resolved, spec, ranks, mesh)
    weights = weights_hash(write_weights(engine, spec.initial_weights(run.train.seed, ranks.device), ranks))
    batch = resolved.batch
    dealt = (batch.micro_batch, mesh.place.data, batch.data_parallel, ranks.device.type == "cuda")
    for folder in [run.data.path] if run.data.path else list(run.data.mixture or ()):
        assert folder is not None
        columns = {
            split: column(engine, replace(run.data, path=folder, mixture=None), split, dealt, ranks) for split in SPLITS
        }
        with together(ranks):
            if ranks.rank == 0:
                write_reference(PreparedSet(folder), weights, resolved.precision, columns)
        rows = sum(map(len, columns.values()))
        log.info(f"{folder}: log-probabilities of {units.counted(rows, 'answer')} of {run.model.pretrained}")
    engine.close()


def column(
    engine: Engine, config: DataConfig, split: Split, dealt: tuple[int, int, int, bool], ranks: Ranks
) -> np.ndarray:
    """fp32 [numbers] of a split of one folder. `dealt`: micro-batch, this rank's place, data-parallel ranks, pinned."""
    with together(ranks):
        data = TrainData(config)
    train = split == "train"
    read = data.window_at if train else data.validation_window_at
    total = data.sequences_per_epoch if train else data.validation_sequences
    collect = LogProbs()
    batches = batches_of(read, total, *dealt)
    while some := list(itertools.islice(batches, _AT_ONCE)):
        engine.evaluate(some, collect)
        if others := [micro.mismatched for micro in some if isinstance(micro, UnpairedBatch)]:
            engine.evaluate(others, collect)
    mine = [np.concatenate([part.cpu().numpy() for part in parts]) for parts in zip(*collect.found, strict=True)]
    values = np.full(numbers(data.manifests[0], split), np.nan, dtype=np.float32)
    for found in filter(None, from_all(ranks, mine)):
        values[found[0]] = found[1]
    if wrong := int((~np.isfinite(values)).sum()):
        raise AgreedError(
            f"{config.path}: the log-probabilities of {units.counted(wrong, 'answer')} are not finite under the model; "
            "look at its weights, or compute in bf16 or fp32",
            ModelError.exit_code,
        )
    return values
