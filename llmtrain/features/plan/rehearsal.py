"""Rehearse a run: its own code does two steps, a save and an evaluation on tensors without memory, in processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import Tensor

from llmtrain.base.child import ending_with_parent
from llmtrain.base.errors import ModelError, UserError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.snapshot import RankFile, written
from llmtrain.config.run import ModelConfig, Run
from llmtrain.config.stages import Stages
from llmtrain.config.topology import Degrees
from llmtrain.data.stream.train_data import RunData
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.losses.function import LooksAhead
from llmtrain.engine.process_memory import collected_by_hand
from llmtrain.engine.ranks.ranks import ConnectedRanks, Ranks
from llmtrain.features import parts_of
from llmtrain.features.plan.device import on_gpu as choices_on_gpu
from llmtrain.features.plan.held import held
from llmtrain.features.plan.ledger import Ledger
from llmtrain.features.plan.rehearsed_ranks import (
    RehearsedRanks,
    beyond_pinned,
    make_room_for_messages,
    rehearsed_ranks,
)
from llmtrain.features.plan.torch_private import needs_values, without_memory
from llmtrain.features.plan.work import Counts, Work
from llmtrain.models.language import LanguageModel
from llmtrain.models.loss import TRIED
from llmtrain.models.run.build_for_rank import divided
from llmtrain.models.run.check import check_model
from llmtrain.models.skeleton import DTYPES
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import Teacher, empty_teacher
from llmtrain.objectives.preferences import OverAnswers
from llmtrain.parity.tokens import Answers, Tokens
from llmtrain.storage.region import Region
from llmtrain.training.examine import Examined
from llmtrain.training.setup import Setup

_EVALUATED = 2
"""Micro-batches of an evaluation."""
COPIES = "copy for a save"
_MOST_STAGES = 8
_POINTS = 400
_AT_ONCE = 2
"""Ranks that are rehearsed at a time."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Memory of a rank in the rehearsed steps, in bytes."""

    rank: int
    peak: int
    """Most bytes alive on the device; for a run on CPUs the device is the host."""
    at: str
    """Part of the run with the peak."""
    phases: dict[str, dict[str, int]]
    """Part of the run -> bytes at its peak by label."""
    ahead: int
    """Bytes of parameters that ZeRO 3 gathers ahead on a GPU."""
    kept: int
    """Bytes alive between two steps."""
    highest: dict[str, int]
    """Most bytes of each label in the last step; the labels may have theirs at different times."""
    host: int
    """Peak of the tensors in host memory, whose labels in `parts` end with HOST; on a GPU with `beyond_pinned`."""
    saved: int
    """Bytes of this rank's file of a checkpoint."""
    curve: list[tuple[str, int]]
    """(part of the step, bytes alive) in the last step, at most some hundred points."""
    step: Counts
    """Work of a step of the run."""
    cpu_s: float
    disk: int = 0
    """Peak of the tensors that the run keeps on a disk."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak by label, such as `gradients`."""
        return self.phases[self.at]


class _FullRows(Tokens):
    """Synthetic sequences in which every token counts, the most that a run can have."""

    def row(self, index: int) -> tuple[np.ndarray, int]:
        draw = np.random.default_rng(index)
        return draw.integers(0, self.vocab_size - 1, self.sequence_length + 1), self.sequence_length


class _FullAnswers(Answers):
    """Synthetic sequences filled by the answers of a record, at least two; all tokens but the first of each count."""

    def rows(self, index: int, *, mismatched: bool = False) -> list[tuple[np.ndarray, int, float]]:
        count = max(2, self.kind.together)
        draw, length = np.random.default_rng((index, mismatched)), self.sequence_length // count
        return [(draw.integers(0, self.separator_id, length), 1, -8.0 * length) for _ in range(count)]


def prepared(run: Run, *, on_gpu: bool) -> Examined:
    """Return the run's largest stage with full sequences. Raises UserError: the model cannot be built in this form."""
    sizes = [(s.batch.micro_batch * s.batch.sequence_length, s.batch.sequence_length) for s in run.stages]
    largest = run.stages[sizes.index(max(sizes))]
    config = choices_on_gpu(run.config) if on_gpu else run.config
    config = replace(config, model=replace(config.model, compile_layers=False))  # eager layers keep more
    data = replace(largest.data, isolate_documents=config.data.isolate_documents)
    config = replace(config, data=data)
    zero = run.deepspeed.get("zero_optimization") or {}
    on_disk = {
        name: {**section, "device": "cpu"}
        for name, section in zero.items()
        if isinstance(section, dict) and section.get("device") == "nvme"
    }
    if on_disk:  # nothing is written: the tensors that a disk would have are counted
        run = replace(run, deepspeed={**run.deepspeed, "zero_optimization": {**zero, **on_disk}})
    run = replace(run, config=config, stages=Stages((replace(largest, first_step=0, schedule_from=0, data=data),)))
    spec, _ = check_model(run)
    if run.mix.degrees.tensor > 1:  # once, and outside of the ranks' processes: the proof has threads
        with divided(spec, "tensor_parallel.autotp_size", run.mix.degrees.tensor):
            _ = spec.projections
    vocabulary = spec.facts.vocab_size
    compares = isinstance(config.objective, OverAnswers)
    rows = _FullAnswers(config, vocabulary) if compares else _FullRows(data, vocabulary, config.objective.top_k)
    return run, spec, RunData(stages=(rows,))


def _ahead(run: Run, spec: ModelSpec) -> int:
    """Return the bytes of parameters that ZeRO 3 gathers before they are used, on a device with a queue."""
    if run.mix.zero_stage != 3:
        return 0
    usual = int(DeepSpeedZeroConfig.model_fields["prefetch_bucket_size"].default)
    elements = (run.deepspeed.get("zero_optimization") or {}).get("stage3_prefetch_bucket_size", usual)
    return min(int(elements), spec.facts.parameters) * (4 if run.mix.precision == "fp32" else 2)


def rehearse(
    examined: Examined, ranks: Sequence[int], slots: int, *, imbalance: float = 1.0, on_gpu: bool = False
) -> Iterator[Rehearsed]:
    """Rehearse these ranks. Yields each when it is done. Raises UserError of a rank; see `rehearse_each`."""
    for _, answer in rehearse_each([(examined, rank) for rank in ranks], slots, imbalance=imbalance, on_gpu=on_gpu):
        if isinstance(answer, UserError):
            raise answer
        yield answer


def rehearse_each(
    jobs: Sequence[tuple[Examined, int]], slots: int, *, imbalance: float = 1.0, on_gpu: bool = False
) -> Iterator[tuple[int, Rehearsed | UserError]]:
    """Rehearse ranks of runs in processes of their own. `slots`: ranks of a host. `imbalance`: see `rehearsed_ranks`.
    Yields the place in `jobs` with the answer when it is done.

    Raises RuntimeError: what a rank raises, as text, if it is no UserError.
    """
    fork, waiting = multiprocessing.get_context("fork"), list(enumerate(jobs))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, (examined, rank) = waiting.pop(0)
                receiving, sending = fork.Pipe(duplex=False)
                args = (sending, examined, rank, slots, imbalance, on_gpu)
                child = fork.Process(target=_in_child, args=args, daemon=True)
                child.start()
                sending.close()
                running[receiving] = number, child
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                number, child = running.pop(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    child.join()
                    answer = f"its process ended with exit code {child.exitcode}"
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                yield number, answer
    finally:
        for _, child in running.values():
            child.kill()


def _in_child(pipe: Connection, examined: Examined, rank: int, slots: int, imbalance: float, on_gpu: bool) -> None:
    run, spec, _ = examined
    ending_with_parent()()
    began_s = time.process_time()
    warnings.simplefilter("ignore")  # about tensors without memory
    torch.set_num_threads(1)  # nothing is computed, and a forked process must not wait for its parent's threads
    if on_gpu:
        TRIED["cpu", DTYPES[run.mix.products]] = True
    world_size = run.mix.degrees.world_size
    with rehearsed_ranks(rank, world_size, slots, imbalance) as ranks, without_memory():
        try:
            ledger, step, saved = walk(examined, ranks, on_gpu=on_gpu)
        except Exception as error:
            if needs_values(error):
                example = "such as a loop over experts whose widths are no multiples of 16 bytes"
                text = f"{error} decides shapes by values, {example}. Measure it in a short run"
                error = ModelError(f"the model cannot be planned: {text}")
            pipe.send(UserError(str(error)) if isinstance(error, UserError) else traceback.format_exc())
            raise SystemExit(1) from None
    pipe.send(
        Rehearsed(
            rank=rank,
            peak=ledger.most,
            at=ledger.at,
            phases={phase: dict(+Counter(bytes_)) for phase, (_, bytes_) in ledger.peaks.items()},
            ahead=_ahead(run, spec) if on_gpu else 0,
            kept=ledger.kept,
            highest=dict(+ledger.highest),
            host=ledger.host,
            disk=ledger.disk,
            saved=saved,
            curve=_thin(ledger.curve),
            step=step,
            cpu_s=time.process_time() - began_s,
        )
    )


def _thin(curve: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the highest point of each of about a hundred pieces of the curve."""
    wide = -(-len(curve) // _POINTS)
    return [max(curve[first : first + wide], key=itemgetter(1)) for first in range(0, len(curve), wide)]


def walk(
    examined: Examined, ranks: Ranks, fill: Callable[[Setup], None] = lambda _: None, *, on_gpu: bool = False
) -> tuple[Ledger, Counts, int]:
    """Set up a run, train two steps, save and evaluate.

    Returns the ledger, a step's work, and the bytes of this rank's file of a checkpoint. `fill` gives the parameters
    their values, if they have memory.
    """
    run, spec, data = examined
    agreements = ranks.group_name if isinstance(ranks, ConnectedRanks) else None
    work, pipeline = Work(agreements), run.mix.degrees.pipeline
    ledger = Ledger(run.mix, work, one_memory=not on_gpu)
    with ledger:
        kind = RehearsedSetup if isinstance(ranks, RehearsedRanks) else Setup
        setup = kind(run, spec, data, ranks, _WithoutValues(spec.shapes))
    fill(setup)
    walked = 0
    with ledger:
        watching = list(ledger.watch(setup.engine.module))
        ledger.mark(held(setup.engine, run.mix))
        buffers = [torch.empty(_largest_sub_group(setup.engine)) for _ in range(run.mix.swaps)]
        ledger.mark(("swap buffers", True, buffer) for buffer in buffers)
        session = setup.session()
        parts = parts_of(setup)
        # A source on a disk keeps the frozen parameters; the first save and all later ones take the same memory.
        elsewhere = setup.spec.frozen if setup.spec.model.folder is not None else ()
        pieces = written((*setup.engine.state(), *(tensor for part in parts for tensor in part.state())), elsewhere)
        copied = pieces if setup.run.config.checkpoint.mode == "async" and not run.mix.swaps else []
    # Outside of the ledger, which would take them for tensors of the device until they are marked.
    copies = [torch.empty(piece.own_region.numel, dtype=piece.dtype) for piece in copied]
    with ledger, collected_by_hand():
        ledger.mark((COPIES, True, copy) for copy in copies)
        with contextlib.closing(setup.loader()) as loader:
            # More micro-batches hold no more: each stage has at most one in flight for each stage after it. The first
            # step makes what the last one finds; of a pipeline, both lengths tell what a micro-batch costs.
            for most in (pipeline, 2 * pipeline):
                ledger.begin_step()
                heart.phase("data")
                batch = next(loader)
                micro_batches, before = len(batch.micro_batches), walked
                batch = replace(batch, micro_batches=batch.micro_batches[:most])
                walked = len(batch.micro_batches)
                session.step(batch)
                ledger.mark(held(setup.engine, run.mix))
        step = ledger.work.of_step(micro_batches, walked, before if pipeline > 1 else walked)
        heart.phase("save")
        for piece, copy in zip_longest(pieces, copies):
            with piece.open() as values:
                if copy is not None:
                    copy.copy_(values[piece.own])
        if setup.run.config.train.eval:
            heart.phase("evaluate")
            micros = batch.micro_batches[:_EVALUATED]
            # The parameters themselves take no more than the values of a part.
            for in_place in [swap for part in parts for swap in part.variants().values()] or [contextlib.nullcontext]:
                with in_place():
                    if isinstance(setup.objective, LooksAhead):
                        setup.objective.look(micros, setup.engine.evaluate)
                    setup.engine.evaluate(micros, setup.objective)
    ledger.host += beyond_pinned() if on_gpu else 0
    for handle in watching:
        handle.remove()
    setup.engine.close()
    return ledger, step, RankFile(pieces).bytes


def _largest_sub_group(engine: Engine) -> int:
    """Return the elements of the largest sub-group on this rank."""
    assert isinstance(engine, ZeroEngine)
    return max(flat.numel() for flat in engine.deepspeed.optimizer.fp32_partitioned_groups_flat)


class RehearsedSetup(Setup):
    """The setup of a run on another machine, which reads no weights."""

    def _check_device(self) -> None:
        """Do nothing: this machine does not have the device of the run."""

    def _load_teacher(self, model: ModelConfig, precision: str, language: Callable[..., LanguageModel]) -> Teacher:
        return empty_teacher(ModelSpec.of(model), precision, self.ranks.device, language)

    def _hash_of_teacher(self, columns: list[str]) -> None:
        """Return None: no file is read."""

    def _hash_of_reference(self, source: ParameterSource) -> None:
        """Do nothing: the hashes of the data stay as they are."""

    def _start_engine(self) -> Engine:
        engine = super()._start_engine()
        make_room_for_messages(engine)
        return engine


class _WithoutValues:
    """A source without values for the weights of an online reference."""

    origin = "plan"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def order(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start)

    def read_region(self, name: str, region: Region) -> Tensor:
        return torch.zeros(region.numel)


def kinds(degrees: Degrees) -> dict[int, int]:
    """Return one rank of each kind -> for how many pipeline stages the rank stands.

    Ranks of a stage hold the same. In a long pipeline the first stages hold most micro-batches; in the middle, each
    stage holds one micro-batch less than the stage before it.
    """
    first = degrees.place(0)
    stages = dict.fromkeys(range(degrees.pipeline), 1)
    if degrees.pipeline > _MOST_STAGES:
        stages = {0: 1, 1: degrees.pipeline - 2, degrees.pipeline - 1: 1}
    return {degrees.rank(replace(first, pipeline=stage)): standing for stage, standing in stages.items()}
