"""Faults that DeepSpeed, transformers and training stacks have really had, to be seeded into a rank of a parity check.

The product knows nothing of them: each replaces a function while the rank trains.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from tests.helpers.families import FAMILIES, tied

Context = contextlib.AbstractContextManager[None]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in which form it can be."""

    seeded: Callable[[], Context]
    form: dict[str, Any]
    """Fields of helpers.training.Case."""
    words: str
    """What the hint has to say, or the refusal."""
    everywhere: bool = False
    """Seeded into the process of the reference as well: in a function that it might call."""
    refused: bool = False
    """The proofs before the first step find it: the run does not begin."""


FAULTS: dict[str, Fault] = {}
"""By the name of what seeds it."""

_LORA = {"r": 4, "alpha": 8.0}
_SAVED = {**_LORA, "modules_to_save": ["lm_head", "*norm"]}
_COLUMN: dict[str, Any] = {"stage": 2, "objective": {"name": "distill", "top_k": 7}}


def fault(
    words: str, *, everywhere: bool = False, refused: bool = False, name: str = "", **form: Any
) -> Callable[[Callable[[], Context]], Callable[[], Context]]:
    """The decorated function seeds a fault of FAULTS. `name`: in place of the function's."""

    def add(seeded: Callable[[], Context]) -> Callable[[], Context]:
        FAULTS[name or seeded.__name__] = Fault(
            seeded, {"model": FAMILIES["llama"], **form}, words, everywhere, refused
        )
        return seeded

    return add


@fault(
    "wrong weight in the mean", name="rewards_per_micro_batch", stage=2, accumulation=2, objective={"name": "reward"}
)
@fault("wrong weight in the mean", name="pairs_per_micro_batch", stage=2, accumulation=2, objective={"name": "dpo"})
@fault("wrong weight in the mean", stage=2, accumulation=2)
def mean_per_micro_batch() -> Context:
    """The loss is averaged per micro-batch, and the means are averaged: tokens of short ones count more."""
    from llmtrain.engine.deepspeed.engine import ZeroEngine

    def micro_step(self: Any, micro: Any, weight: Any, objective: Any) -> torch.Tensor:
        sums = self._sums(micro, objective)
        self.deepspeed.backward(sums[0] / objective.weight(micro))
        weight()
        return sums.detach()

    return patch.object(ZeroEngine, "micro_step", micro_step)


@fault("a layer that is skipped", pipeline=2, accumulation=2)
def skipped_layer() -> Context:
    """The third decoder layer, the first of the second stage, hands on what it got."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def skipping(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        computed = forward(self, hidden_states, *args, **kwargs)
        return hidden_states + 0 * computed if self.self_attn.layer_idx == 2 else computed

    return patch.object(LlamaDecoderLayer, "forward", skipping)


@fault("tied tensor", pipeline=2, accumulation=2, model=tied(FAMILIES["llama"]))
def lost_tie() -> Context:
    """The stages that hold the tied embedding do not add up its gradients."""
    from deepspeed.pipe import PipelineModule

    return patch.object(PipelineModule, "get_tied_weights_and_groups", lambda self: [])


@fault("loss of LlamaForCausalLM", refused=True, sequence=2)
def lost_offset() -> Context:
    """Each rank's share of a row begins at position 0."""
    from llmtrain.models.language import LanguageModel

    decoded = LanguageModel.decoded

    def from_0(self: Any, **given: torch.Tensor) -> torch.Tensor:
        given["position_ids"] = given["position_ids"] - given["position_ids"][:, :1]
        return decoded(self, **given)

    return patch.object(LanguageModel, "decoded", from_0)


@fault("norm is not summed", tensor=2)
def norm_of_one_shard() -> Context:
    """The gradient norm, and so the clipping, is that of each rank's own shards."""
    from llmtrain.engine.deepspeed import build

    def of_one(parameters: list[Any], mesh: Any) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    return patch.object(build, "_total_norm", of_one)


@fault("several ranks hold", tensor=2, model=FAMILIES["qwen3"], stage=1)
def unsummed_head_norms() -> Context:
    """A norm that acts on each head (Qwen3) keeps the gradient of one rank's heads."""
    from llmtrain.models.parallel import tensor

    return patch.object(tensor, "_sum_of", lambda grad, group: grad)


@fault("loss of LlamaForCausalLM", refused=True, stage=0)
def shifted_twice() -> Context:
    """Labels that are shifted already are shifted once more."""
    from llmtrain.models.head import Head

    nll_sum = Head.nll_sum

    def shifting(self: Any, hidden: torch.Tensor, labels: torch.Tensor, _counted: int | None) -> torch.Tensor:
        labels = labels.roll(-1, dims=1)
        labels[:, -1] = -100
        return nll_sum(self, hidden, labels)

    return patch.object(Head, "nll_sum", shifting)


@contextlib.contextmanager
def _instead(function: Any, faulty: Any) -> Iterator[None]:
    """Everybody who has imported `function` gets `faulty`, which finds the true one as `right` among its globals."""
    right = types.FunctionType(function.__code__, function.__globals__)
    with patch.dict(function.__globals__, {"right": right}):
        function.__code__ = faulty.__code__
        try:
            yield
        finally:
            function.__code__ = right.__code__


@fault("labels", everywhere=True, stage=0)
def late_labels() -> Context:
    """The label of a place is the token after the next one."""
    from llmtrain.data.sequences import labels_of

    def late(tokens: Any, separator_id: int, mask_document_starts: bool, doubled: bool = False) -> Any:
        more = (separator_id, mask_document_starts, doubled)
        inputs, _ = right(tokens, *more)  # type: ignore[name-defined]  # noqa: F821
        return inputs, right(tokens[[*range(1, len(tokens)), 0]], *more)[1]  # type: ignore[name-defined]  # noqa: F821

    return _instead(labels_of, late)


@fault("learning rate", everywhere=True, stage=1)
def late_schedule() -> Context:
    """Each step has the learning rate of the next one."""
    from llmtrain.optim.schedules import Schedule

    def late(self: Any, step: int, max_steps: int | None) -> float:
        return right(self, step + 1, max_steps)  # type: ignore[name-defined]  # noqa: F821

    return _instead(Schedule.factor, late)


@fault("wrong number of ranks", stage=1)
def wrong_rank_count() -> Context:
    """Gradients are divided by the data-parallel ranks twice."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    backward = DeepSpeedEngine.backward

    def dividing(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return backward(self, loss / self.dp_world_size, *args, **kwargs)

    return patch.object(DeepSpeedEngine, "backward", dividing)


@fault("bias correction", stage=2)
def late_bias_correction() -> Context:
    """AdamW's step counter begins at 1: a step on zero gradients has been taken to create its state."""
    from llmtrain.engine.api import Counters
    from llmtrain.training import setup

    build = setup.build_engine

    def built(*args: Any) -> Any:
        engine = build(*args)
        engine.state()  # creates the state
        engine.set_counters(Counters(optimizer_step=1, loss_scale={}))
        return engine

    return patch.object(setup, "build_engine", built)


@fault("weight decay on them", stage=3)
def decayed_norms() -> Context:
    """Weight decay on vectors, too."""
    from llmtrain.training import setup

    build = setup.build_engine

    def built(*args: Any) -> Any:
        from llmtrain.engine.deepspeed.state import base_optimizer

        engine = build(*args)
        for group in base_optimizer(engine.deepspeed).param_groups:
            group["weight_decay"] = 0.1
        return engine

    return patch.object(setup, "build_engine", built)


@fault("other betas (Lion's swapped?)", stage=2, optimizer="lion")
def swapped_betas() -> Context:
    """Lion interpolates by the rate of its momentum, and the other way round."""
    from llmtrain.optim.optimizers import Lion

    build = Lion.build

    def swapped(self: Lion, groups: list[dict[str, Any]]) -> Any:
        return build(self, [{**group, "betas": group["betas"][::-1]} for group in groups])

    return patch.object(Lion, "build", swapped)


@fault("other rows", stage=3)
def same_rows() -> Context:
    """Every data-parallel rank reads the rows of the first."""
    from llmtrain.training import setup

    loader = setup.TrainLoader

    def of_rank_0(*args: Any, **kwargs: Any) -> Any:
        return loader(*args, **{**kwargs, "rank": 0})

    return patch.object(setup, "TrainLoader", of_rank_0)


@fault("forward pass", stage=1, accumulation=3)
def lost_micro_batch() -> Context:
    """The last micro-batch's gradients do not reach the optimizer (DeepSpeed PR #7985)."""
    from llmtrain.training.step import Session

    step = Session.step

    def stepping(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.micro_batches[-1].labels[:] = -100
        return step(self, batch, *args, **kwargs)

    return patch.object(Session, "step", stepping)


@fault("data.isolate_documents", refused=True, isolate_documents=True)
def leaking_documents() -> Context:
    """Positions begin anew with each document, but attention sees the documents before."""
    from llmtrain.models import language

    inside = language.documents_in_rows
    return patch.object(language, "documents_in_rows", lambda positions: inside(None))


@fault("weighted otherwise", model=FAMILIES["mixtral"], stage=3)
def raw_router_weights() -> Context:
    """The chosen experts' weights are not normalised to a sum of 1."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    forward = MixtralTopKRouter.forward

    def routing(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, chosen = forward(self, hidden)
        return logits, torch.softmax(logits.float(), -1).gather(1, chosen).to(weights.dtype), chosen

    return patch.object(MixtralTopKRouter, "forward", routing)


@fault("do not compute what", refused=True, model=FAMILIES["mixtral"], expert=2, stage=1)
def dropped_expert() -> Context:
    """What the first expert of each rank gives does not come back to its tokens."""
    from deepspeed.moe.ep_experts import GroupedExperts

    forward = GroupedExperts.forward

    def dropping(self: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        given = forward(self, x, num_tokens_per_expert)
        kept = torch.arange(len(given)) >= int(num_tokens_per_expert[0])
        return given * kept.unsqueeze(1)

    return patch.object(GroupedExperts, "forward", dropping)


def changed_adapter(change: Callable[[list[Any]], None]) -> Context:
    """peft's layers are changed before the engine sees them."""
    from llmtrain.models import adapter

    put_around = adapter.put_around

    def changed(*args: Any, **options: Any) -> Any:
        change(made := put_around(*args, **options))
        return made

    return patch.object(adapter, "put_around", changed)


@fault("an adapter that is left out", stage=2, adapter=_LORA)
def alpha_without_r() -> Context:
    """The scale of an adapter is alpha in place of alpha / r."""

    def change(layers: list[Any]) -> None:
        for layer in layers:
            layer.scaling["default"] *= layer.r["default"]

    return changed_adapter(change)


@fault("an adapter that is left out", stage=2, adapter=_LORA)
def map_without_adapter() -> Context:
    """One map computes without its adapter, as where a server finds no module of its name."""

    def change(layers: list[Any]) -> None:
        layers[3]._disable_adapters = True

    return changed_adapter(change)


@fault("no gradient reaches", stage=2, adapter=_LORA)
def adapter_without_gradient() -> Context:
    """No gradient reaches an adapter's B."""

    def change(layers: list[Any]) -> None:
        for layer in layers:
            layer.lora_B["default"].weight.register_hook(torch.zeros_like)

    return changed_adapter(change)


@fault("left out of the backward pass", tensor=2, stage=1, adapter=_LORA)
def adapter_of_a_rank() -> Context:
    """Each tensor-parallel rank keeps the gradient that its own outputs give the adapter's A."""
    from llmtrain.models.parallel import tensor

    return patch.object(tensor, "_read", lambda value, group: value)


@fault("forward pass", stage=2, objective={"name": "dpo"})
def reference_that_trains() -> Context:
    """Log-probabilities are compared with those of the model itself."""
    from llmtrain.objectives.preferences import Answers

    return patch.object(Answers, "ratio", property(lambda self: self.log_prob - self.log_prob.detach()))


@fault("forward pass", stage=2, objective={"name": "dpo_norm"})
def prompts_counted() -> Context:
    """Tokens that do not count are counted in an answer's length."""
    return patch("llmtrain.engine.losses.answers.IGNORE", -1)  # type: ignore[return-value]


@fault("forward pass", stage=2, objective={"name": "dpo_norm"})
def late_answers() -> Context:
    """What says which answer a token belongs to is late by one."""
    from dataclasses import replace

    from llmtrain.data import batches

    right = batches.answer_batch_of

    def late(*given: Any) -> Any:
        return replace(made := right(*given), answers=made.answers.roll(1, dims=1))

    return patch.object(batches, "answer_batch_of", late)


@fault("forward pass", sequence=2, stage=2, objective={"name": "dpo_norm"})
def answers_in_parts() -> Context:
    """A rank that shares a row has the likelihoods of its own columns, in the place of each of the others'."""
    from llmtrain.models.head import Head

    def own_only(self: Any, columns: torch.Tensor) -> torch.Tensor:
        return columns if self.shared_rows is None else columns.repeat(1, self.shared_rows.degree)

    return patch.object(Head, "whole", own_only)


@fault("wrong number of ranks", sequence=2, stage=2, objective={"name": "dpo_norm"})
def answers_without_the_others() -> Context:
    """Of ranks that share a row, the gradient of an answer goes through this rank's own figure alone."""
    from llmtrain.models.parallel.sequence import Exchange

    right = Exchange.of_all

    def own_gradient(self: Any, own: torch.Tensor) -> torch.Tensor:
        every = right(self, own.detach()).clone()
        every[self.rank] = own
        return every

    return patch.object(Exchange, "of_all", own_gradient)


@fault("forward pass", stage=2, accumulation=2, objective={"name": "kto"})
def divergence_of_a_micro_batch() -> Context:
    """kto's z is that of the rank's first micro-batch."""
    from llmtrain.engine.losses.answers import MismatchLoss

    right = MismatchLoss.look
    return patch.object(MismatchLoss, "look", lambda self, micros, evaluate: right(self, micros[:1], evaluate))


@fault("forward pass", stage=2, objective={"name": "reward"})
def score_of_next_token() -> Context:
    """The score is read at the token after an answer: of the next row, or what pads."""
    from llmtrain.engine.losses import answers

    last_tokens = answers.last_tokens

    def late(batch: Any) -> torch.Tensor:
        return (last_tokens(batch) + 1).clamp(max=batch.labels.numel() - 1)

    return patch.object(answers, "last_tokens", late)


@fault("it is frozen", stage=3, adapter=_LORA, objective={"name": "reward"})
def frozen_score() -> Context:
    """The head of a reward model is frozen with the model that an adapter is beside."""
    from llmtrain.models.spec import ModelSpec

    names = property(lambda self: frozenset(name for name, _ in self.skeleton.named_parameters()))
    return patch.object(ModelSpec, "frozen", names)


@fault("forward pass", stage=3, adapter=_LORA, objective={"name": "dpo", "reference": "online"})
def reference_with_adapter() -> Context:
    """The adapter stays on while the reference is computed."""
    from llmtrain.models import adapter

    return patch.object(adapter, "without_adapter", contextlib.nullcontext)


@fault("a reference that trains", stage=2, adapter=_SAVED, objective={"name": "dpo", "reference": "online"})
def reference_with_trained_modules() -> Context:
    """Modules that train whole beside an adapter are in the reference as they are now."""
    from llmtrain.engine.deepspeed.state import State

    return patch.object(State, "reading_instead", lambda *_: contextlib.nullcontext())  # type: ignore[return-value]


@fault("another temperature", stage=2, objective={"name": "distill"})
def teacher_without_temperature() -> Context:
    """The student's logits alone are divided by the temperature."""
    from llmtrain.engine.losses.likeliest import DistillLoss

    right = DistillLoss.sums

    def sums(self: Any, head: Any, hidden: Any, micro: Any) -> Any:
        asked, temperature = self._teacher.logits, self._terms.temperature

        def hotter(*tokens: Any) -> Any:
            found = asked(*tokens)
            return lambda rows: temperature * found(rows)

        with patch.object(self._teacher, "logits", hotter):
            return right(self, head, hidden, micro)

    return patch.object(DistillLoss, "sums", sums)


@fault("forward pass", stage=2, objective={"name": "distill"})
def every_token_distilled() -> Context:
    """Tokens that do not count are distilled as well."""
    return patch("llmtrain.models.loss.IGNORE", -1)  # type: ignore[return-value]


@fault("direction of a distillation", stage=2, objective={"name": "distill"})
def other_direction() -> Context:
    """beta is taken for the student's share."""
    from dataclasses import replace

    from llmtrain.models import distillation

    right = distillation.distilled_sums
    return patch.object(
        distillation, "distilled_sums", lambda *a, terms, **k: right(*a, terms=replace(terms, beta=1 - terms.beta), **k)
    )


def _another_column(change: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]) -> Context:
    """A micro-batch's part of a teacher's column is another. `change`: (words [b, T, k], logs [b, T, k + 1]) -> what
    stands in their place."""
    from llmtrain.data import batches

    right = batches.MicroBatch

    def wrong(**fields: Any) -> Any:
        column = fields["by_token"]
        return right(**fields | {"by_token": column | change(column["words"], column["logs"])})

    return patch.object(batches, "MicroBatch", wrong)


@fault("forward pass", **_COLUMN)
def late_column() -> Context:
    """A place has the words of the place before it."""
    return _another_column(lambda words, logs: {"words": words.roll(1, dims=1), "logs": logs.roll(1, dims=1)})


@fault("forward pass", **_COLUMN)
def words_of_other_chances() -> Context:
    """The least likely word has the largest probability."""
    return _another_column(lambda words, _: {"words": words.flip(2)})


@fault("forward pass", **_COLUMN)
def others_without_mass() -> Context:
    """The mass of the words that are not in the column is taken for 0."""
    from torch.nn.functional import pad

    from llmtrain.models.distillation import NOTHING

    return _another_column(lambda _, logs: {"logs": pad(logs[..., :-1].log_softmax(2), (0, 1), value=NOTHING)})
