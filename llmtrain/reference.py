"""`llmtrain reference RUN.yaml`: what an objective compares with, computed once for all epochs.

A model goes over the run's data in the form of the run, and what it says becomes a column of the prepared folders. Of a
preference objective it is the model that training starts from, so that the first step's ratio is exactly 0
(data/reference.py); of a distillation the teacher (data/teacher.py).
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from llmtrain import completion, log, units
from llmtrain.base import with_base
from llmtrain.check import examine
from llmtrain.config.batch import Batch
from llmtrain.config.load import load
from llmtrain.config.objective import DISTILL, WITHOUT_REFERENCE
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, ObjectiveConfig, ResolvedRun, RunConfig
from llmtrain.data.loader import UnpairedBatch, batches_of
from llmtrain.data.manifest import SPLITS, Split
from llmtrain.data.packing import TrainData
from llmtrain.data.reference import numbers, weights_hash, write_reference
from llmtrain.data.shards import PreparedSet
from llmtrain.data.teacher import ColumnWriter, TeacherColumn
from llmtrain.dist.connect import leave_all
from llmtrain.dist.control import AgreedError, from_all, to_rank_0, together
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.join import join_process_group
from llmtrain.errors import ConfigError, ModelError
from llmtrain.models.parallel.mesh import mesh_of
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import check_teacher, teacher_model
from llmtrain.objectives.distill import Likeliest
from llmtrain.objectives.online import LogProbs
from llmtrain.start import start_engine, teacher_hash, write_weights
from llmtrain.topology import Place

USAGE = """\
usage: llmtrain reference RUN.yaml [--SECTION.FIELD VALUE ...]

Write what the run's objective compares with into its data folders: of preferences the log-probability of every answer
under the model that the run starts from, of objective.name distill with objective.top_k the teacher's likeliest words.
On several ranks a launcher starts it, as it starts `llmtrain train`."""
_AT_ONCE = 64
"""Micro-batches of one call of the engine: a pipeline takes them together."""
_BYTES_AT_ONCE = 32 << 20
"""Of a teacher's column, that a rank holds before it is written."""


def main(argv: list[str]) -> int:
    """Returns 0. Raises UserError."""
    completion.offer_run()
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    resolved = load(argv, int(os.environ.get("WORLD_SIZE", "1")))
    _refuse(resolved.run.objective)
    resolved = with_base(resolved)
    teacher = teacher_model(resolved.run.objective, resolved.run.model) if resolved.run.objective.top_k else None
    given = resolved
    if teacher is not None:
        student = ModelSpec.of(resolved.run.model, resolved.run.adapter)
        tokenizer_dir, shared = TrainData(resolved.run.data).tokenizer_dir, resolved.degrees.sequence
        check_teacher(teacher, student, tokenizer_dir, resolved.places, sequence=shared)
        resolved = of_teacher(resolved, teacher)
    # What it trains for needs the column that is to be written here.
    resolved = replace(resolved, run=replace(resolved.run, objective=ObjectiveConfig()))
    resolved, spec = examine(resolved)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    run = resolved.run
    ranks = join_process_group(run.fault.timeout_s, start_timeout_s=run.fault.start_timeout_s)
    try:
        if teacher is not None:
            write_teacher(resolved, spec, ranks, given.run)
        else:
            write_columns(resolved, spec, ranks)
    except BaseException as error:
        leave_all(error)
        raise
    leave_all(None)
    return 0


def _refuse(objective: ObjectiveConfig) -> None:
    if objective.name == DISTILL:
        if objective.top_k is None:
            raise ConfigError("objective.top_k null: the whole teacher is asked at each step; set it to write its "
                              "likeliest words, or leave this command out")  # fmt: skip
        if objective.teacher is None:
            raise ConfigError("objective.teacher null: names no model whose words are to be written; name one")
    elif objective.name in WITHOUT_REFERENCE:
        raise ConfigError(f"objective.name {objective.name}: compares with no reference; leave this command out")
    if objective.reference == "online":
        raise ConfigError("objective.reference online: is computed at each step; leave this command out")


def of_teacher(resolved: ResolvedRun, teacher: ModelConfig) -> ResolvedRun:
    """A run of the teacher. All that can be frozen is, so that neither masters nor moments take memory: of a layer its
    norms are left, since a pipeline's stage needs something that trains."""
    few = [name for name, each in ModelSpec.of(teacher).skeleton.named_parameters() if each.dim() == 1]
    model = replace(teacher, train_only=few)
    run = replace(resolved.run, model=model, adapter=AdapterConfig(), resume="none", resume_weights_only=False)
    return replace(resolved, run=run)


def write_teacher(resolved: ResolvedRun, spec: ModelSpec, ranks: Ranks, asked: RunConfig) -> None:
    """The teacher's column of each of the run's data folders. All ranks call it together. Raises UserError on all of
    them, and leaves no part of a column.

    `resolved`, `spec`: of the teacher. `asked`: the run that will learn from it.
    """
    mesh = mesh_of(resolved.degrees)
    engine = start_engine(resolved, spec, ranks, mesh)
    write_weights(engine, spec.initial_weights(0, ranks.device), ranks)
    weights = teacher_hash(asked, ranks)
    assert weights is not None
    for folder in [asked.data.path] if asked.data.path else list(asked.data.mixture or ()):
        assert folder is not None
        with together(ranks):
            data = TrainData(replace(asked.data, path=folder, mixture=None))
            [column] = data.teacher_columns(asked.objective, spec.facts.vocab_size, resolved.precision, weights)
            writer = None
            if ranks.rank == 0:
                places = units.counted(sum(column.places.values()), "token")
                log.info(f"{folder}: {places}, {column.bytes_a_place} bytes each")
                writer = ColumnWriter(PreparedSet(folder), column)
        left = _write_teacher(engine, data, column, writer, (resolved.batch, mesh.place, ranks))
        log.info(f"{folder}: the {column.top_k} likeliest words of {asked.objective.teacher} at each counted token; "
                 f"all others have {left:.2%} of the mass")  # fmt: skip
    engine.close()


def _write_teacher(
    engine: Engine,
    data: TrainData,
    column: TeacherColumn,
    writer: ColumnWriter | None,
    form: tuple[Batch, Place, Ranks],
) -> float:
    """Of one folder. Returns the mean mass of the words that are not written. `writer`: on rank 0."""
    batch, place, ranks = form
    dealt = (batch.micro_batch, place.data, batch.data_parallel, ranks.device.type == "cuda")
    at_once = max(1, _BYTES_AT_ONCE // (batch.micro_batch * data.sequence_length * column.bytes_a_place))
    left, tokens = 0.0, 0
    try:
        for split in SPLITS:
            train = split == "train"
            read = data.window_at if train else data.validation_window_at
            batches = batches_of(read, data.sequences_per_epoch if train else data.validation_sequences, *dealt)
            while some := list(itertools.islice(batches, at_once)):
                collect = Likeliest(column.top_k, column.temperature)
                figures, counted = engine.evaluate(some, collect)
                left, tokens = left + figures["loss"] * counted, tokens + counted
                mine = [(samples, words.numpy().astype(column.dtype), logs.numpy()) for samples, words, logs in
                        collect.found] if place.tensor == place.sequence == 0 else []  # fmt: skip
                every = to_rank_0(ranks, mine)
                with together(ranks):
                    if writer is not None:
                        _take(writer, data, split, itertools.chain.from_iterable(every))
        with together(ranks):
            if writer is not None:
                writer.finish()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return left / max(1, tokens)


def _take(
    writer: ColumnWriter, data: TrainData, split: Split, found: Iterable[tuple[list[int], np.ndarray, np.ndarray]]
) -> None:
    """Write micro-batches: their samples, words and logarithms."""
    for samples, words, logs in found:
        if not np.isfinite(logs).all():
            raise ModelError("objective.teacher: its probabilities are not finite; look at its weights, or compute in "
                             "bf16 or fp32")  # fmt: skip
        places = [np.empty(0, dtype=np.int64), *(data.places(split, sample) for sample in samples)]
        writer.write(split, np.concatenate(places), words, logs)


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
