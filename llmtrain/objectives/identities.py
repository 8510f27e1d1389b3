"""Identities that hold before the first step, whatever the data and the model: numbers known without training.

A reference is the model that training starts from, so each answer's log-probability is the reference's own; an answer
that is preferred to itself has the margin 0 and a loss that is a number; a student that is its own teacher has the
divergence 0. `start.prove_start` asks a run for them, through its own data, engine and objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from llmtrain.base.errors import DataError, ModelError, UserError
from llmtrain.config.objective import DISTILL, SCORED, UNPAIRED, WITHOUT_REFERENCE, options, wants_column
from llmtrain.config.run import ObjectiveConfig, RunConfig
from llmtrain.data.stream.columns import REMEDY
from llmtrain.data.stream.loader import MicroBatch, UnpairedBatch
from llmtrain.data.stream.windows import IGNORED, Window
from llmtrain.models.adapter import without_adapter
from llmtrain.models.distillation import TeacherSays
from llmtrain.models.head import Head
from llmtrain.objectives.answers import answers_in
from llmtrain.objectives.distill import Distill
from llmtrain.objectives.next_token import NEXT_TOKEN
from llmtrain.objectives.objective import Evaluate, LooksAhead, Objective
from llmtrain.objectives.preference import LOSSES, answers_of

ROUNDING = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.01}
"""Nats per token by which two right computations of one answer may differ: another form of parallelism, another place
in the sequence. Measured (8 layers, another kernel and another length) 1.5e-6, 8e-3 and 2e-3; of another row's answer
at least 0.06, of a model that has learnt nothing."""
_WORDS = 8


class Apart:
    """Distance of each answer's log-probability from the reference's, per counted token: the mean over the answers."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        """Answers."""
        return len(answers_in(micro).rows)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]."""
        batch = answers_in(micro)
        assert batch.reference is not None
        log_prob, tokens = answers_of(head, hidden, batch)
        return head.once(((log_prob - batch.reference).abs() / tokens).sum().unsqueeze(0))


class FromItself(Distill):
    """A distillation whose teacher is the student itself, as its likeliest words."""

    def _says(self, head: Head, hidden: Tensor, micro: MicroBatch) -> TeacherSays:
        return head.top_words(hidden.flatten(0, 1), _WORDS, self._terms.temperature).of


def twice(window: Window) -> Window:
    """A sequence with the window's first answer two times, cut at its beginning where both would not fit: preferred to
    itself, or judged both ways."""
    assert window.positions is not None and window.rows is not None
    length = len(window.inputs)
    begins = np.flatnonzero(window.positions == 0)
    end = int(begins[1]) if len(begins) > 1 else length
    kept = min(end, length // 2)
    inputs, labels = np.full_like(window.inputs, window.inputs[-1]), np.full_like(window.labels, IGNORED)
    positions = np.arange(length) - 2 * kept
    for at in (0, kept):
        inputs[at : at + kept], labels[at : at + kept] = (
            window.inputs[end - kept : end],
            window.labels[end - kept : end],
        )
        positions[at : at + kept] = np.arange(kept)
    known = None if window.reference is None else window.reference[[0, 0]]
    judged = None if window.desirable is None else np.array([True, False])
    return window._replace(
        inputs=inputs, labels=labels, positions=positions, rows=window.rows[[0, 0]], reference=known, desirable=judged
    )


@dataclass(frozen=True)
class Equal:
    """Value and tolerances of a loss over pairs where an answer is preferred to itself."""

    loss: float
    margin: float
    """Largest distance of the margin from 0 per nat per token of rounding."""
    slope: float
    """Largest change of the loss per unit of the margin."""


def of_equals(config: ObjectiveConfig, figures: dict[str, float]) -> Equal:
    """Return the `Equal` of an objective over pairs, from its definition.

    `figures`: those of the pair; some losses contain its mean log-probability beside the margin.
    """
    o, ln2 = options(config), math.log(2)
    if config.name == "reward":
        reward = figures["pairs/chosen_reward"]
        return Equal(
            ln2 + o["centering"] * (2 * reward) ** 2, max(1.0, abs(reward)), 1 + 8 * o["centering"] * abs(reward)
        )
    tokens = figures["pairs/chosen_tokens"]
    mean = figures["pairs/chosen_log_prob"] / tokens
    beta = o["beta"]
    return {
        "dpo": lambda: Equal(ln2, beta * tokens, 1),
        "robust": lambda: Equal(ln2, beta * tokens, 1 / (1 - 2 * o["smoothing"])),
        "ipo": lambda: Equal(1 / (4 * beta**2), 1, 1 / beta),
        "dpo_norm": lambda: Equal(ln2, beta, 1),
        "rpo": lambda: Equal(ln2 - o["alpha"] * mean, beta * tokens, 1),
        "simpo": lambda: Equal(math.log1p(math.exp(o["gamma"])), beta, 1),
        "orpo": lambda: Equal(-mean + beta * ln2, 1 / -math.expm1(mean), beta),
    }[config.name]()


@dataclass(frozen=True)
class Known:
    """The numbers of one run that are known before its first step."""

    run: RunConfig
    precision: str
    evaluate: Evaluate
    objective: Objective
    """The objective that the run minimises."""
    reference: Callable[[Objective], Objective]
    """Gives an objective the run's reference."""
    first: Sequence[MicroBatch]
    """This rank's micro-batches of the first sequences of the data."""
    alike: Sequence[MicroBatch]
    """Micro-batches that are equal on all ranks, made by `twice`."""
    own_teacher: bool

    def broken(self, module: nn.Module) -> Iterator[UserError]:
        """Yield an error for each identity that the initial weights violate. All ranks iterate together."""
        name = self.run.objective.name
        if name not in WITHOUT_REFERENCE:
            yield from self._reference()
        if name in (*LOSSES, *SCORED):
            yield from self._equals()
        if name in UNPAIRED:
            yield from self._judged()
        if name == DISTILL:
            yield from self._itself()
        if self.run.adapter.r is not None and self.run.adapter.start is None:
            yield from self._adapter(module)

    @property
    def _few(self) -> float:
        return ROUNDING[self.precision]

    @property
    def _begin(self) -> str:
        return f"objective.name {self.run.objective.name}: before the first step"

    def _figures(self, objective: Objective, micros: Sequence[MicroBatch]) -> dict[str, float]:
        if isinstance(objective, LooksAhead):
            objective.look(list(micros), self.evaluate)
        return self.evaluate(micros, objective)[0]

    def _reference(self) -> Iterator[UserError]:
        """The first loss of dpo is ln 2 and its margin 0, kto's z is 0: each log-probability is the reference's."""
        others = [each.mismatched for each in self.first if isinstance(each, UnpairedBatch)]
        remedy = REMEDY if wants_column(self.run.objective) else "train with a column in place of online"
        for whose, micros in (("an answer", self.first), ("a prompt with the answer to another", others)):
            apart = self._figures(self.reference(Apart()), micros)["loss"] if micros else 0.0
            if _off(apart, 0.0, self._few):
                yield DataError(
                    f"{self._begin} the model is its own reference, and the log-probability of {whose} differs from "
                    f"the reference's by {apart:.3g} nats a token (mean; tolerated {self._few:g}): what it is compared "
                    f"with is another row's, or another model's, so that no first margin would be 0; {remedy}"
                )

    def _equals(self) -> Iterator[UserError]:
        found = self._figures(self.objective, self.alike)
        known = of_equals(self.run.objective, found)
        margin = self._few * known.margin
        loss = self._few + margin * known.slope
        if _off(found["pairs/margin"], 0.0, margin) or _off(found["loss"], known.loss, loss):
            yield ModelError(
                f"{self._begin} an answer that is preferred to itself has the margin {found['pairs/margin']:.4g} and "
                f"the loss {found['loss']:.6g}; by the definition they are 0 and {known.loss:.6g}. The answers of a "
                "sequence are told apart wrongly: please report it with your JSON."
            )

    def _judged(self) -> Iterator[UserError]:
        found, o = self._figures(self.objective, self.alike), options(self.run.objective)
        known = (o["desirable_weight"] + o["undesirable_weight"]) / 4  # 1 - sigmoid(0) of each, the mean of two
        if _off(found["loss"], known, self._few + self._few * o["beta"] * found["unpaired/tokens"] * known):
            yield ModelError(
                f"{self._begin} an answer that is judged both ways has the loss {found['loss']:.6g}; by the definition "
                f"it is {known:.6g}: please report it with your JSON."
            )

    def _itself(self) -> Iterator[UserError]:
        apart = self._figures(FromItself(self.run.objective, None), self.first)["distill/divergence"]
        if _off(apart, 0.0, self._few):
            yield ModelError(
                f"{self._begin} the divergence of the model from itself is {apart:.3g} nats a token and not 0: please "
                "report it with your JSON."
            )
        if self.own_teacher:
            taught = self._figures(self.objective, self.first)["distill/divergence"]
            if _off(taught, 0.0, self._few):
                remedy = REMEDY if self.run.objective.top_k else "look at objective.teacher"
                yield DataError(
                    f"{self._begin} the teacher has the weights that training starts from, and the divergence from it "
                    f"is {taught:.3g} nats a token (tolerated {self._few:g}): its words are of other tokens; {remedy}"
                )

    def _adapter(self, module: nn.Module) -> Iterator[UserError]:
        scored = self.run.objective.name in SCORED
        plain, micros = (self.objective, self.alike) if scored else (NEXT_TOKEN, self.first)
        adapted = self._figures(plain, micros)["loss"]
        with without_adapter(module):
            base = self._figures(plain, micros)["loss"]
        if _off(adapted, base, self._few * max(1.0, abs(base))):
            yield ModelError(
                f"adapter.r {self.run.adapter.r}: a new adapter changes nothing, for its B is 0, and before the first "
                f"step the loss is {adapted:.6g} with it and {base:.6g} without: please report it with your JSON."
            )


def _off(value: float, known: float, tolerated: float) -> bool:
    return not abs(value - known) <= tolerated  # what is not finite is off
