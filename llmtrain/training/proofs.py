"""Proves an objective before the first step: identities that hold for any data and model, and a plugin's functions.

The identities: the initial model and the reference, which is the same, give an answer the same log-probability; an
answer that is compared with itself has the margin 0 and a known loss; a student that is its own teacher has the
divergence 0. A run proves them with its own data, engine and loss function.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain.base.errors import DataError, ModelError, UserError
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.stages import Stage
from llmtrain.config.topology import Place
from llmtrain.data.batches import MicroBatch
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import NEW_COLUMN
from llmtrain.data.sequences import IGNORED, AnswerSequence, TokenSequence
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.api import Engine
from llmtrain.engine.losses.answers import PerAnswer, answers_in, answers_of, mismatched_of
from llmtrain.engine.losses.function import NEXT_TOKEN, Evaluate, LooksAhead, LossFunction
from llmtrain.engine.losses.likeliest import DistillLoss
from llmtrain.engine.losses.named import sample_terms
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.models import compiler
from llmtrain.models.adapter import without_adapter
from llmtrain.models.distillation import TeacherSays
from llmtrain.models.head import Head
from llmtrain.models.run.build_for_rank import divided
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.by_token import Distill
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import OverAnswers
from llmtrain.training.examine import stage_key

ROUNDING = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.01}
"""Nats per token by which two correct computations of one answer may differ, as with another form of parallelism or
place in the sequence. Measured with 8 layers, another kernel and another length: 1.5e-6, 8e-3 and 2e-3. The answer of
another row differs by at least 0.06, even under a model that has learnt nothing."""
_WORDS = 8
_ONE_FUNCTION = 1e-4
"""Tolerance between ranks, relative or in nats: hosts with different processors round fp32 differently."""


class FromReference(PerAnswer):
    """Mean distance of answers' log-probabilities from the reference, per counted token."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sum over this micro-batch's answers, [1]."""
        batch = answers_in(micro)
        assert batch.reference is not None
        log_prob, tokens = answers_of(head, hidden, batch)
        return head.once(((log_prob - batch.reference).abs() / tokens).sum().unsqueeze(0))


class FromItself(DistillLoss):
    """A distillation from the student's own likeliest tokens."""

    def _says(self, head: Head, hidden: Tensor, micro: MicroBatch) -> TeacherSays:
        return head.top_words(hidden.flatten(0, 1), _WORDS, self._terms.temperature).of


def alike(kind: RowKind, sequence: TokenSequence) -> AnswerSequence:
    """Return a sequence that repeats the given sequence's first answer, so that an objective compares it with itself.

    The answer's beginning is cut off if the copies do not fit.
    """
    assert isinstance(sequence, AnswerSequence) and sequence.positions is not None
    count, length = max(2, kind.together), len(sequence.inputs)
    begins = np.flatnonzero(sequence.positions == 0)
    end = int(begins[1]) if len(begins) > 1 else length
    size = min(end, length // count)
    inputs, labels = np.full_like(sequence.inputs, sequence.inputs[-1]), np.full_like(sequence.labels, IGNORED)
    positions = np.arange(length) - count * size
    for at in range(0, count * size, size):
        inputs[at : at + size], labels[at : at + size] = (
            sequence.inputs[end - size : end],
            sequence.labels[end - size : end],
        )
        positions[at : at + size] = np.arange(size)
    reference = None if sequence.reference is None else sequence.reference[[0] * count]
    facts, rows = kind.alike(sequence.facts, count), sequence.rows[[0] * count]
    tokens = replace(sequence, inputs=inputs, labels=labels, positions=positions)
    return replace(tokens, rows=rows, reference=reference, facts=facts)


@dataclass(frozen=True)
class Known:
    """The figures of a run that are known before its first step."""

    config: RunConfig
    precision: str
    evaluate: Evaluate
    loss: LossFunction
    """The loss function that the run minimises."""
    reference: Callable[[LossFunction], LossFunction]
    """Returns a loss function with the run's reference added."""
    first: Sequence[MicroBatch]
    """This rank's micro-batches of the first sequences of the data."""
    alike: Sequence[MicroBatch]
    """Micro-batches of sequences that `alike` made, equal on all ranks."""
    own_teacher: bool
    """The teacher has the initial weights."""

    def broken(self, module: nn.Module) -> Iterator[UserError]:
        """Yield an error for each identity that the initial weights violate. All ranks iterate together."""
        objective = self.config.objective
        if objective.reference is not None:
            yield from self._reference()
        if isinstance(objective, OverAnswers) and type(objective).equal is not OverAnswers.equal:
            yield from self._equals(objective)
        if isinstance(objective, Distill):
            yield from self._itself(objective)
        if self.config.adapter.r is not None and self.config.adapter.start is None:
            yield from self._adapter(module)

    @property
    def _few(self) -> float:
        return ROUNDING[self.precision]

    @property
    def _begin(self) -> str:
        return f"objective.name {self.config.objective.name}: before the first step"

    def _figures(self, loss: LossFunction, micros: Sequence[MicroBatch]) -> dict[str, float]:
        if isinstance(loss, LooksAhead):
            loss.look(list(micros), self.evaluate)
        figures, weight = self.evaluate(micros, loss)
        return figures if weight else dict.fromkeys(figures, 0.0)  # no token counts, so nothing differs

    def _reference(self) -> Iterator[UserError]:
        """The model must give each answer the reference's log-probability: dpo's first loss is ln 2, and kto's z 0."""
        others = mismatched_of(self.first)
        remedy = NEW_COLUMN if self.config.objective.reference == "column" else "train with a column instead of online"
        for whose, micros in (("an answer", self.first), ("a prompt with the answer to another", others)):
            apart = self._figures(self.reference(FromReference()), micros)["loss"] if micros else 0.0
            if _off(apart, 0.0, self._few):
                yield DataError(
                    f"{self._begin} the model and its reference have the same weights, but their log-probabilities of "
                    f"{whose} differ by {apart:.3g} nats a token (mean; at most {self._few:g} is rounding). Those of "
                    f"the reference belong to another row or another model; {remedy}"
                )

    def _equals(self, objective: OverAnswers) -> Iterator[UserError]:
        found = self._figures(self.loss, self.alike)
        known = objective.equal(found)
        margin = self._few * known.margin
        loss_off = _off(found["loss"], known.loss, self._few + margin * known.slope)
        what = f"{self._begin} an answer that is compared with itself has"
        if "pairs/margin" not in found:
            if loss_off:
                yield ModelError(
                    f"{what} the loss {found['loss']:.6g}; by the definition it is {known.loss:.6g}: please report it "
                    "with your JSON."
                )
        elif loss_off or _off(found["pairs/margin"], 0.0, margin):
            yield ModelError(
                f"{what} the margin {found['pairs/margin']:.4g} and the loss {found['loss']:.6g}; by the definition "
                f"they are 0 and {known.loss:.6g}. The answers of a sequence are separated wrongly: please report it "
                "with your JSON."
            )

    def _itself(self, objective: Distill) -> Iterator[UserError]:
        apart = self._figures(FromItself(objective, None), self.first)["distill/divergence"]
        if _off(apart, 0.0, self._few):
            yield ModelError(
                f"{self._begin} the divergence of the model from itself is {apart:.3g} nats a token and not 0: please "
                "report it with your JSON."
            )
        if self.own_teacher:
            taught = self._figures(self.loss, self.first)["distill/divergence"]
            if _off(taught, 0.0, self._few):
                remedy = NEW_COLUMN if objective.top_k else "look at objective.teacher"
                yield DataError(
                    f"{self._begin} the model and its teacher have the same weights, but their divergence is "
                    f"{taught:.3g} nats a token (at most {self._few:g} is rounding). The teacher's probabilities "
                    f"belong to other tokens; {remedy}"
                )

    def _adapter(self, module: nn.Module) -> Iterator[UserError]:
        scored = self.config.objective.scores
        plain, micros = (self.loss, self.alike) if scored else (NEXT_TOKEN, self.first)
        adapted = self._figures(plain, micros)["loss"]
        with without_adapter(module):
            base = self._figures(plain, micros)["loss"]
        if _off(adapted, base, self._few * max(1.0, abs(base))):
            yield ModelError(
                f"adapter.r {self.config.adapter.r}: a new adapter, whose matrices B are 0, must not change the loss, "
                f"but before the first step it is {adapted:.6g} with the adapter and {base:.6g} without: please report "
                "it with your JSON."
            )


def _off(value: float, known: float, tolerated: float) -> bool:
    return not abs(value - known) <= tolerated  # NaN is off, too


def prove_alike(objective: Objective, ranks: Ranks) -> None:
    """Prove that a plugin's objective depends on its argument alone: equal results on all ranks, and in two calls. All
    ranks call it together. Raises AgreedError."""
    with ranks.together(), torch.random.fork_rng(devices=[]):
        mine = []
        for _ in range(2):
            torch.default_generator.manual_seed(0)  # a step seeds torch's random numbers, too
            mine.append(sample_terms(copy.deepcopy(objective)))
    calls = [(rank, *call) for rank, found in enumerate(ranks.gather(mine)) for call in found]
    first_rank, method, first = calls[0]
    for rank, _, values in calls[1:]:
        for one, other in zip(first, values, strict=True):
            close = math.isclose(one, other, rel_tol=_ONE_FUNCTION, abs_tol=_ONE_FUNCTION)
            if not close and not (math.isnan(one) and math.isnan(other)):
                whose = "in two calls" if rank == first_rank else f"on the ranks {first_rank} and {rank}"
                raise AgreedError(
                    f"objective.name {objective.name}: {method} gives {one:.6g} and {other:.6g} for the same numbers, "
                    f"{whose}. A loss may depend on its argument alone: not on the rank, the time, or random numbers "
                    "that are not torch's. Correct the plugin.",
                    ModelError.exit_code,
                )


def prove_sharding(spec: ModelSpec, degree: int, ranks: Ranks) -> None:
    """Prove that all ranks have found the same parts of the model to share. All ranks call it. Raises AgreedError."""
    with ranks.together(), divided(spec, "tensor_parallel.autotp_size", degree):
        mine = spec.projections
    words = f"{len(mine.maps)} linear maps{'; ' * bool(mine.note)}{mine.note}"
    said = ranks.gather((hashlib.sha256(repr(mine).encode()).hexdigest(), words))
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is not None:
        raise AgreedError(
            f"tensor_parallel.autotp_size {degree}: the ranks have found different parts of the model to share. "
            f"Rank 0: {said[0][1]}. Rank {other}: {said[other][1]}. Start the command again; if it fails again, "
            "install the same versions of torch and transformers on all hosts.",
            ModelError.exit_code,
        )


@dataclass(frozen=True, kw_only=True)
class StartProof:
    """Proves, on a few sequences, the figures of a run's first step that are known without training."""

    engine: Engine
    run: Run
    place: Place
    ranks: Ranks
    objective: LossFunction
    with_reference: Callable[[LossFunction], LossFunction]
    """Returns a loss function with the run's reference added."""
    own_teacher: bool = False
    """The teacher has the initial weights."""

    def prove(self, stage: Stage, data: TrainData) -> None:
        """`stage`: the first stage with this data. Raises AgreedError."""
        config, batch, key = self.run.config, stage.batch, stage_key(stage)
        dealt = Dealt(self.place.data, batch.data_parallel, self.ranks.device.type == "cuda")
        few, one = batch.micro_batch, 1
        with self.ranks.together():  # a damaged shard is met by one rank
            first = list(batches_of(data.kind, data.sequence_at, few * batch.data_parallel, few, dealt))
            equal: list[MicroBatch] = []
            if isinstance(config.objective, OverAnswers):
                sequence = alike(data.kind, data.sequence_at(0))
                equal = list(batches_of(data.kind, lambda _: sequence, batch.data_parallel, one, dealt))
        objectives = (self.objective, self.with_reference)
        precision, evaluate = self.run.mix.products, self.engine.evaluate
        known = Known(config, precision, evaluate, *objectives, first, equal, self.own_teacher)
        with compiler.uncompiled():
            for error in known.broken(self.engine.module):  # all ranks have the same figures
                raise AgreedError(f"{key}: {error}" if key else str(error), error.exit_code)
