"""Outputs of the reference or teacher model, computed once for all epochs by `llmtrain reference RUN.yaml`.

A model runs on the data with the run's parallelism, and its outputs become a column of the prepared folders. For a
preference objective this is the initial model, so that the first step's log-ratio is exactly 0; for distillation the
teacher. The columns' files: data/stream/columns.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmtrain.base import log, units
from llmtrain.base.errors import ModelError, UserError, number_in
from llmtrain.base.files import scratch_folder
from llmtrain.config.load import load
from llmtrain.config.pinned import with_base
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, Run, RunConfig
from llmtrain.config.stages import Stages
from llmtrain.data.batches import MicroBatch
from llmtrain.data.manifest import SPLITS, Split, read_manifest
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.reference_and_teacher import ColumnWriter, TeacherColumn, numbers, write_reference
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.deepspeed.build import join_process_group
from llmtrain.engine.losses.answers import LogProbs, mismatched_of
from llmtrain.engine.losses.likeliest import Likeliest
from llmtrain.engine.ranks.local_ranks import RankError, ending_on_sigterm, failure_reported
from llmtrain.engine.ranks.local_ranks import Ranks as LocalRanks
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.engine.ranks.rendezvous import leave_all
from llmtrain.features import decided
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import check_teacher, teacher_model
from llmtrain.objectives.by_token import Distill, NextToken
from llmtrain.training.examine import Examined, examine
from llmtrain.training.setup import Setup, teacher_hash

_AT_ONCE = 64
"""Micro-batches in one call of the engine, which a pipeline computes together."""
_BYTES_AT_ONCE = 32 << 20
"""Bytes of a teacher's column that a rank holds in memory before it writes them."""
_WORDS = "words.json"


def write(run: Run) -> None:
    """Write the reference's or teacher's column into the run's data folders. `run`: resolved for these ranks. Raises
    UserError."""
    run = with_base(run)
    teacher = teacher_model(run.config.objective, run.config.model) if run.config.objective.top_k else None
    given = run
    if teacher is not None:
        student = ModelSpec.of(run.config.model, run.config.adapter)
        tokenizer_dir, shared = TrainData(run.config.data).tokenizer_dir, run.mix.degrees.sequence
        check_teacher(teacher, student, tokenizer_dir, run.places, sequence=shared)
        run = of_teacher(run, teacher)
    # The run's own objective would need the column that is still to be written.
    run = replace(run, config=replace(run.config, objective=NextToken()))
    examined = run, *_ = examine(run)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    config = run.config
    ranks = join_process_group(config.fault.timeout_s, start_timeout_s=config.fault.start_timeout_s)
    try:
        if ranks.rank == 0:
            asked = config.model.pretrained if teacher is None else given.config.objective.teacher
            log.info(f"{asked} computes the column, on {units.counted(ranks.world_size, 'rank')}")
        if teacher is not None:
            write_teacher(examined, ranks, given.config)
        else:
            write_columns(examined, ranks)
    except BaseException as error:
        leave_all(error)
        raise
    leave_all(None)


def write_on_ranks_here(words: list[str], cpu: bool, count: int) -> None:
    """Run `write` on `count` new ranks on this host. `words`: the run's command line. Raises UserError."""
    with scratch_folder("reference") as made, ending_on_sigterm():
        (made / _WORDS).write_text(json.dumps(words))
        with LocalRanks(made, count, cpu=cpu, module=__name__, shows=True) as started:
            try:
                started.wait()
            except RankError as error:
                raise UserError(f"no column was written: {error}") from error


def of_teacher(run: Run, teacher: ModelConfig) -> Run:
    """Return a run of the teacher in which only the norms train: each pipeline stage needs a trained parameter, and
    those of norms need almost no memory for masters and moments."""
    few = [name for name, each in ModelSpec.of(teacher).skeleton.named_parameters() if each.dim() == 1]
    model = replace(teacher, train_only=few)
    config = replace(run.config, model=model, adapter=AdapterConfig(), resume="none", resume_weights_only=False)
    stages = Stages(tuple(replace(stage, rope={}) for stage in run.stages))  # its rotary positions stay
    return replace(run, config=config, stages=stages)


def _folders(run: Run) -> list[tuple[DataConfig, int]]:
    """Return (data, micro-batch) for each prepared folder of the stages and the evaluation. A folder of texts comes
    once for each sequence length, since each has its own column."""
    read = [(stage, folder) for stage in run.stages for folder in stage.data.folders]
    read += [(run.stages[0], folder) for folder in run.config.eval.sets.values()]
    found: dict[tuple[str, int | None], tuple[DataConfig, int]] = {}
    for stage, folder in read:
        length = stage.data.sequence_length if read_manifest(Path(folder)).chat is None else None
        own = replace(stage.data, path=folder, mixture=None)
        found.setdefault((folder, length), (own, stage.batch.micro_batch))
    return list(found.values())


def write_teacher(examined: Examined, ranks: Ranks, asked: RunConfig) -> None:
    """Write the teacher's column of each data folder. All ranks call it together. Raises UserError on all ranks, and
    then leaves no unfinished column. `examined`: a run of the teacher. `asked`: the run of the student."""
    run, spec, opened = examined
    setup = Setup(decided(run, ranks, trains=False), spec, opened, ranks)
    run, engine, vocabulary = setup.run, setup.engine, setup.spec.facts.vocab_size
    setup.write()
    weights, objective = teacher_hash(asked, ranks), asked.objective
    assert weights is not None and isinstance(objective, Distill)
    model = setup.spec.config.to_dict()
    for config, micro_batch in _folders(run):
        folder = str(config.path)
        with ranks.together():
            data = TrainData(config, trains=False)
            [column] = data.teacher_columns(objective, vocabulary, run.mix.arithmetic, weights, model)
            writer = None
            if ranks.rank == 0:
                places = units.counted(sum(column.places.values()), "token")
                log.info(f"{folder}: {places}, {column.bytes_a_place} bytes each")
                writer = ColumnWriter(PreparedSet(folder), column)
        left = _write_teacher(setup, data, column, writer, micro_batch)
        log.info(
            f"{folder}: the {column.top_k} likeliest tokens of {asked.objective.teacher} at each counted token; "
            f"all other tokens together have {left:.2%} of the probability"
        )
    engine.close()


def _write_teacher(
    setup: Setup, data: TrainData, column: TeacherColumn, writer: ColumnWriter | None, micro_batch: int
) -> float:
    """Write one folder's column. `writer`: only on rank 0. Returns the mean probability of other tokens."""
    ranks, place = setup.ranks, setup.mesh.place
    at_once = max(1, _BYTES_AT_ONCE // (micro_batch * data.sequence_length * column.bytes_a_place))
    left, tokens = 0.0, 0
    try:
        for split in SPLITS:
            for some in _read(setup, data, split, micro_batch, at_once):
                collect = Likeliest(column.top_k, column.temperature)
                figures, counted = setup.engine.evaluate(some, collect)
                left, tokens = left + (figures["loss"] * counted if counted else 0.0), tokens + counted
                outputs = collect.found if place.tensor == place.sequence == 0 else []
                mine = [(rows, words.numpy().astype(column.dtype), logs.numpy()) for rows, words, logs in outputs]
                every = ranks.gather_to_first(mine)
                with ranks.together():
                    if writer is not None:
                        _take(writer, data, split, itertools.chain.from_iterable(every))
        with ranks.together():
            if writer is not None:
                writer.finish()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return left / (tokens or math.nan)


def _read(setup: Setup, data: TrainData, split: Split, micro_batch: int, at_once: int) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches in lists of at most `at_once`; rank 0 shows the progress."""
    ranks, data_parallel, train = setup.ranks, setup.mesh.degrees.data, split == "train"
    read = data.sequence_at if train else data.validation_sequence_at
    rows = data.sequences_per_epoch if train else data.validation_sequences
    dealt = Dealt(setup.mesh.place.data, data_parallel, ranks.device.type == "cuda")
    batches = batches_of(data.kind, read, rows, micro_batch, dealt)
    done = 0
    with log.Progress(f"{split}:", rows, unit="row") if ranks.rank == 0 else contextlib.nullcontext() as progress:
        while some := list(itertools.islice(batches, at_once)):
            yield some
            done = min(rows, done + len(some) * micro_batch * data_parallel)
            if progress is not None:
                progress.show(done)


def _take(
    writer: ColumnWriter, data: TrainData, split: Split, found: Iterable[tuple[list[int], np.ndarray, np.ndarray]]
) -> None:
    for samples, words, logs in found:
        if not np.isfinite(logs).all():
            raise ModelError(
                "objective.teacher: its probabilities are not finite; check its weights, or compute in bf16 or fp32"
            )
        places = [np.empty(0, dtype=np.int64), *(data.places(split, sample) for sample in samples)]
        writer.write(split, np.concatenate(places), words, logs)


def write_columns(examined: Examined, ranks: Ranks) -> None:
    """Write the reference's column of each data folder. All ranks call it together. Raises UserError on all of them."""
    run, spec, opened = examined
    setup = Setup(decided(run, ranks, trains=False), spec, opened, ranks)
    config, run = setup.run.config, setup.run
    setup.start()
    assert setup.initial_weights is not None
    for data, micro_batch in _folders(run):
        folder = str(data.path)
        columns = {split: _column(setup, data, split, micro_batch) for split in SPLITS}
        with ranks.together():
            if ranks.rank == 0:
                model = setup.spec.config.to_dict()
                write_reference(PreparedSet(folder), setup.initial_weights, run.mix.arithmetic, columns, model)
        rows = sum(map(len, columns.values()))
        log.info(f"{folder}: log-probabilities of {units.counted(rows, 'answer')} of {config.model.pretrained}")
    setup.engine.close()


def _column(setup: Setup, config: DataConfig, split: Split, micro_batch: int) -> np.ndarray:
    """Return the reference's log-probabilities for a split of one folder, fp32 [numbers of the column]."""
    engine, ranks = setup.engine, setup.ranks
    with ranks.together():
        data = TrainData(config, trains=False)
    collect = LogProbs()
    for some in _read(setup, data, split, micro_batch, _AT_ONCE):
        engine.evaluate(some, collect)
        if others := mismatched_of(some):
            engine.evaluate(others, collect)
    values = collect.of_all(ranks, numbers(PreparedSet(str(config.path)), split))
    if wrong := int((~np.isfinite(values)).sum()):
        raise AgreedError(
            f"{config.path}: the log-probabilities of {units.counted(wrong, 'answer')} are not finite under the model; "
            "check its weights, or compute in bf16 or fp32",
            ModelError.exit_code,
        )
    return values


def main(argv: list[str]) -> int:
    """Run a rank of `write_on_ranks_here`. `argv`: the folder with the run's command line."""
    folder = Path(argv[0])
    with failure_reported(folder):
        world_size = number_in("WORLD_SIZE")
        write(load(json.loads((folder / _WORDS).read_text()), world_size, "the ranks started here"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
