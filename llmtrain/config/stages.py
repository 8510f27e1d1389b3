"""The data of a run and its stages, as functions of a step's number.

Order, tokens, epochs, the run's length, evaluation and learning rate are computed from `Stages`, and nothing else says
when a stage begins. No file is read here.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, replace
from fractions import Fraction
from typing import Any

from llmtrain.base.choice import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SEED, Bound, HostPath, bounded, mapped
from llmtrain.optim.schedules import Schedule

_SEQUENCES = Bound(at_least=0, at_most=10**15)
STAGED = ("path", "mixture", "sequence_length", "exclude")
"""Fields of the section `data` that a stage changes."""


@dataclass(frozen=True, kw_only=True)
class StageBatch:
    """One or two numbers of a stage's batch; the others follow from the previous stage."""

    global_batch: int | None = bounded(None, AT_LEAST_1, "count sequences over all ranks")
    """Sequences per optimizer step over all ranks."""
    micro_batch: int | None = bounded(None, AT_LEAST_1, "count sequences of one forward pass of one rank")
    """Sequences per forward pass of one rank."""
    accumulation: int | None = bounded(None, AT_LEAST_1, "1 means no accumulation")
    """Micro-batches per optimizer step."""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Changes from a step on. Other values continue from the previous stage."""

    from_step: int = bounded(MISSING, NOT_NEGATIVE, "count optimizer steps")
    """Optimizer steps done before the stage."""
    path: HostPath | None = None
    """Another prepared folder."""
    mixture: dict[HostPath, float] | None = mapped("FOLDER: WEIGHT", POSITIVE, "remove the folder", None)
    """Other prepared folders with their weights."""
    sequence_length: int | None = bounded(None, Bound(at_least=2), "leave it out for the length of the stage before")
    """Tokens per sequence."""
    train: StageBatch = field(default_factory=StageBatch)
    schedule: Schedule | None = None
    """Schedule from the stage's first step on."""
    rope: dict[str, Any] | None = None
    """Changed fields of the model's rope_parameters, such as {rope_theta: 1.0e+6}."""
    exclude: tuple[int, ...] | None = bounded(None, _SEQUENCES, "sequences are numbered from 0")
    """As data.exclude, for the stage's own data: its sequences have other numbers."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data to train on: folders made by `llmtrain prepare`. Exactly one of `path` and `mixture` is given."""

    path: HostPath | None = None
    """One prepared folder: a path, or a URL in an object store (s3://, gs://, az://, hf:// or another scheme of
    fsspec)."""
    mixture: dict[HostPath, float] | None = mapped("FOLDER: WEIGHT", POSITIVE, "remove the folder", None)
    """Several prepared folders with their weights (shares of the sequences; they need not sum to 1)."""
    sequence_length: int = bounded(1024, Bound(at_least=2), "1024 is the default")
    """Tokens per sequence that the model sees."""
    seed: int = bounded(0, SEED, "write 0")
    """Seed of the order of the sequences."""
    mask_document_starts: bool = True
    """Leave the prediction of a document's first token out of the loss: no earlier token determines it."""
    cache: str | None = None
    """Folder of each host for fetched parts of prepared folders with a URL, shared by its runs; null = data in
    LLMTRAIN_CACHE, by default ~/.cache/llmtrain."""
    cache_gib: float = bounded(100.0, POSITIVE, "100 is the default")
    """Upper limit of the cache in GiB. Data beyond it is read from the store at each step; sets that no run uses are
    deleted to make room."""
    isolate_documents: bool = False
    """Attention stays within a document, and positions start at 0 in each; false: a sequence is one text."""
    pack: bool = True
    """Rows of conversations share sequences, by best fit; false: each row, or all answers of a record, has a sequence
    of its own, padded to sequence_length. It costs more, and a batch counts records."""
    exclude: tuple[int, ...] | None = bounded(None, _SEQUENCES, "sequences are numbered from 0")
    """Sequences, by their numbers in `llmtrain data where`, that keep their places in the order and count no token, in
    no epoch. null = none."""
    skip_steps: tuple[int, ...] | None = bounded(None, AT_LEAST_1, "steps are numbered from 1")
    """Optimizer steps that count no token and make no update; their sequences count in later epochs. null = none."""
    stages: list[StageConfig] = field(default_factory=list)
    """Changes during the run: a list of {from_step: N, path or mixture, sequence_length, train: {global_batch,
    micro_batch, accumulation}, schedule: {...}, rope: {...}} with from_step and the changed values. Without path and
    mixture a stage continues with the previous data. A stage from step 0 changes this section itself."""

    @property
    def folders(self) -> dict[str, float]:
        """The prepared folders of the first stage with their weights."""
        return {self.path: 1.0} if self.path is not None else dict(self.mixture or {})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch sizes, with global_batch = micro_batch x accumulation x data-parallel ranks, and the sequence length."""

    global_batch: int
    """Sequences per optimizer step over all ranks."""
    micro_batch: int
    """Sequences per forward pass of one rank."""
    accumulation: int
    """Micro-batches per optimizer step."""
    data_parallel: int
    """Groups of ranks that see different data."""
    sequence_length: int
    """Tokens of a sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step over all ranks."""
        return self.global_batch * self.sequence_length

    def equation(self) -> str:
        return (
            f"global_batch {self.global_batch} = micro_batch {self.micro_batch}"
            f" x accumulation {self.accumulation} x data-parallel {self.data_parallel}"
        )


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with the same data, batch and schedule."""

    first_step: int
    """Number of the first step; the run begins with step 0."""
    data: DataConfig
    """The stage's data, as a configuration without stages."""
    batch: Batch
    schedule: Schedule
    schedule_from: int
    """Step from which the schedule's steps count."""
    rope: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's rope_parameters that stages up to this one have changed."""


@dataclass(frozen=True)
class Stages:
    """The stages of a run, in their order; the first begins at step 0. A step's number is the number of steps done
    before it."""

    stages: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    def number(self, step: int) -> int:
        return bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1

    def at(self, step: int) -> Stage:
        return self.stages[self.number(step)]

    def sequences(self, step: int, of: Sequence[int]) -> int:
        """Return how many sequences the stages with numbers `of` train before a step."""
        return sum(self._steps(number, step) * self.stages[number].batch.global_batch for number in of)

    def tokens(self, step: int) -> int:
        """Return how many tokens are trained before a step."""
        return sum(self._steps(number, step) * stage.batch.tokens for number, stage in enumerate(self.stages))

    def step_of_tokens(self, tokens: int) -> int:
        """Return the number of steps that train this many tokens, rounded up."""
        return self._until(tokens, [stage.batch.tokens for stage in self.stages])

    def step_of_epochs(self, epochs: float, epoch: int, of: Sequence[int]) -> int:
        """Return the number of steps, rounded up, in which the stages with numbers `of` read `epochs` of their data.

        `of` ends with the last stage. `epoch`: sequences in an epoch."""
        each = [stage.batch.global_batch if number in of else 0 for number, stage in enumerate(self.stages)]
        return self._until(math.ceil(Fraction(str(epochs)) * epoch), each)

    def length(
        self, max_steps: int | None, max_tokens: int | None, epochs: float | None, epoch: int | None
    ) -> int | None:
        """Return the optimizer steps of the run: the smallest of its limits, rounded up; None: it has no limit.

        `epochs` counts epochs of the last stage's data, and `epoch` is the number of sequences in one."""
        limits = [] if max_steps is None else [max_steps]
        if max_tokens is not None:
            limits.append(self.step_of_tokens(max_tokens))
        if epochs is not None:
            assert epoch is not None, "pass `epoch`, the sequences of an epoch, for a run with train.epochs"
            limits.append(self.step_of_epochs(epochs, epoch, self.sharing(len(self) - 1)))
        return min(limits, default=None)

    def sharing(self, number: int) -> list[int]:
        """Return the numbers of the stages with the same data as stage `number`, however their paths are written."""
        own = _identity(self.stages[number].data)
        return [other for other, stage in enumerate(self.stages) if _identity(stage.data) == own]

    def schedule_end(self, step: int, max_steps: int | None) -> int | None:
        """Return the step at which the schedule of `step` ends: where the next schedule begins, or the run ends."""
        starts = [stage.first_step for stage in self.stages if stage.schedule_from > self.at(step).schedule_from]
        return min([*starts, *([] if max_steps is None else [max_steps])], default=None)

    def factor(self, step: int, max_steps: int | None) -> float:
        """Return the factor on the peak learning rate at a step."""
        stage, end = self.at(step), self.schedule_end(step, max_steps)
        first = stage.schedule_from
        return stage.schedule.factor(step - first, None if end is None else end - first)

    def filled(self, max_steps: int | None) -> Stages:
        """Return the stages with the schedules' missing lengths filled in, such as decay_steps of wsd."""
        made = []
        for stage in self.stages:
            end = self.schedule_end(stage.first_step, max_steps)
            length = None if end is None else end - stage.schedule_from
            made.append(replace(stage, schedule=stage.schedule.filled(length)))
        return Stages(tuple(made))

    def _steps(self, number: int, step: int) -> int:
        first = self.stages[number].first_step
        last = self.stages[number + 1].first_step if number + 1 < len(self.stages) else step
        return max(0, min(step, last) - first)

    def _until(self, goal: int, each: Sequence[int]) -> int:
        """Return the number of steps until a sum over steps reaches `goal`. `each`: what a step of each stage adds."""
        for number, stage in enumerate(self.stages):
            ends = self.stages[number + 1].first_step if number + 1 < len(self.stages) else math.inf
            steps = -(-goal // each[number]) if each[number] else (math.inf if goal > 0 else 0)
            if stage.first_step + steps <= ends:
                return int(stage.first_step + max(0, steps))
            goal -= int(ends - stage.first_step) * each[number]
        raise AssertionError("the last stage has no end")


def _identity(data: DataConfig) -> tuple[object, ...]:
    """Return a value that is equal for the same data: folder `a`, `./a`, or a mixture of `a` alone."""
    weights = [Fraction(str(weight)) if math.isfinite(weight) else Fraction(0) for weight in data.folders.values()]
    total = sum(weights, Fraction(0)) or 1
    shares = [(os.path.normpath(folder), weight / total) for folder, weight in zip(data.folders, weights, strict=True)]
    return tuple(shares), replace(data, path=None, mixture=None, stages=[], exclude=None)


def data_of(config: DataConfig) -> list[DataConfig]:
    found = [replace(config, stages=[])]
    for stage in config.stages:
        data = found[-1]
        if stage.path is not None or stage.mixture is not None:
            data = replace(data, path=stage.path, mixture=stage.mixture)
        if stage.sequence_length is not None:
            data = replace(data, sequence_length=stage.sequence_length)
        found.append(data)
    # Stages with the same data share its order, so each of them leaves out the same sequences.
    names, every = [repr(_identity(data)) for data in found], dict[str, tuple[int, ...]]()
    for name, some in zip(names, [config.exclude, *(stage.exclude for stage in config.stages)], strict=True):
        every[name] = every.get(name, ()) + tuple(some or ())
    return [replace(data, exclude=every[name] or None) for name, data in zip(names, found, strict=True)]


def stages_of(config: DataConfig, schedule: Schedule, batches: Sequence[Batch]) -> Stages:
    """Return the stages of a run. `schedule`: the one of the first stage. `batches`: one for each stage."""
    found: list[Stage] = []
    firsts = [0, *(stage.from_step for stage in config.stages)]
    given = [schedule, *(stage.schedule for stage in config.stages)]
    ropes = [None, *(stage.rope for stage in config.stages)]
    for first, data, batch, own, rope in zip(firsts, data_of(config), batches, given, ropes, strict=True):
        of_before = (found[-1].schedule, found[-1].schedule_from) if found else (schedule, 0)
        shape, since = of_before if own is None else (own, first)
        rope = {**(found[-1].rope if found else {}), **(rope or {})}
        found.append(Stage(first, data, batch, schedule=shape, schedule_from=since, rope=rope))
    return Stages(tuple(found))
