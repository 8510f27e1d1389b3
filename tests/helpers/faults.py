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

Context = contextlib.AbstractContextManager[None]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in which form it can be."""

    seeded: Callable[[], Context]
    form: dict[str, Any]
    """Fields of helpers.parity.Form."""
    words: str
    """What the hint has to say, or the refusal."""
    everywhere: bool = False
    """Seeded into the process of the reference as well: in a function that it might call."""
    refused: bool = False
    """The proofs before the first step find it: the run does not begin."""


@contextlib.contextmanager
def mean_per_micro_batch() -> Iterator[None]:
    """The loss is averaged per micro-batch, and the means are averaged: tokens of short ones count more."""
    from llmtrain.engine.deepspeed.engine import ZeroEngine

    def micro_step(self: Any, micro: Any, weight: Any, objective: Any) -> torch.Tensor:
        sums = self._sums(micro, objective)
        self.deepspeed.backward(sums[0] / objective.weight(micro))
        weight()
        return sums.detach()

    with patch.object(ZeroEngine, "micro_step", micro_step):
        yield


@contextlib.contextmanager
def skipped_layer() -> Iterator[None]:
    """The third decoder layer, the first of the second stage, hands on what it got."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def skipping(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        computed = forward(self, hidden_states, *args, **kwargs)
        return hidden_states + 0 * computed if self.self_attn.layer_idx == 2 else computed

    with patch.object(LlamaDecoderLayer, "forward", skipping):
        yield


@contextlib.contextmanager
def lost_tie() -> Iterator[None]:
    """The stages that hold the tied embedding do not add up its gradients."""
    from deepspeed.pipe import PipelineModule

    with patch.object(PipelineModule, "get_tied_weights_and_groups", lambda self: []):
        yield


@contextlib.contextmanager
def lost_offset() -> Iterator[None]:
    """Each rank's share of a row begins at position 0."""
    from llmtrain.models.language import LanguageModel

    decoded = LanguageModel.decoded

    def from_0(self: Any, **given: torch.Tensor) -> torch.Tensor:
        given["position_ids"] = given["position_ids"] - given["position_ids"][:, :1]
        return decoded(self, **given)

    with patch.object(LanguageModel, "decoded", from_0):
        yield


@contextlib.contextmanager
def norm_of_one_shard() -> Iterator[None]:
    """The gradient norm, and so the clipping, is that of each rank's own shards."""
    from llmtrain.engine.deepspeed import build

    def of_one(parameters: list[Any], mesh: Any) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    with patch.object(build, "_total_norm", of_one):
        yield


@contextlib.contextmanager
def unsummed_head_norms() -> Iterator[None]:
    """A norm that acts on each head (Qwen3) keeps the gradient of one rank's heads."""
    from llmtrain.models.parallel import tensor

    with patch.object(tensor, "_sum_of", lambda grad, group: grad):
        yield


@contextlib.contextmanager
def shifted_twice() -> Iterator[None]:
    """Labels that are shifted already are shifted once more."""
    from llmtrain.models.head import Head

    nll_sum = Head.nll_sum

    def shifting(self: Any, hidden: torch.Tensor, labels: torch.Tensor, _counted: int | None) -> torch.Tensor:
        labels = labels.roll(-1, dims=1)
        labels[:, -1] = -100
        return nll_sum(self, hidden, labels)

    with patch.object(Head, "nll_sum", shifting):
        yield


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


def late_labels() -> Context:
    """The label of a place is the token after the next one."""
    from llmtrain.data.stream.windows import labels_of

    def late(tokens: Any, separator_id: int, mask_document_starts: bool) -> Any:
        inputs, _ = right(tokens, separator_id, mask_document_starts)  # type: ignore[name-defined]  # noqa: F821
        return inputs, right(tokens[[*range(1, len(tokens)), 0]], separator_id, mask_document_starts)[1]  # type: ignore[name-defined]  # noqa: F821

    return _instead(labels_of, late)


def late_schedule() -> Context:
    """Each step has the learning rate of the next one."""
    from llmtrain.optim.schedules import Schedule

    def late(self: Any, step: int, max_steps: int | None) -> float:
        return right(self, step + 1, max_steps)  # type: ignore[name-defined]  # noqa: F821

    return _instead(Schedule.factor, late)


@contextlib.contextmanager
def wrong_rank_count() -> Iterator[None]:
    """Gradients are divided by the data-parallel ranks twice."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    backward = DeepSpeedEngine.backward

    def dividing(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return backward(self, loss / self.dp_world_size, *args, **kwargs)

    with patch.object(DeepSpeedEngine, "backward", dividing):
        yield


@contextlib.contextmanager
def late_bias_correction() -> Iterator[None]:
    """AdamW's step counter begins at 1: a step on zero gradients has been taken to create its state."""
    from llmtrain.training import setup

    build = setup.build_engine

    def built(*args: Any) -> Any:
        engine = build(*args)
        engine.state()  # creates the state
        engine.set_optimizer_step(1)
        return engine

    with patch.object(setup, "build_engine", built):
        yield


@contextlib.contextmanager
def decayed_norms() -> Iterator[None]:
    """Weight decay on vectors, too."""
    from llmtrain.training import setup

    build = setup.build_engine

    def built(*args: Any) -> Any:
        from llmtrain.engine.deepspeed.state import base_optimizer

        engine = build(*args)
        for group in base_optimizer(engine.deepspeed).param_groups:
            group["weight_decay"] = 0.1
        return engine

    with patch.object(setup, "build_engine", built):
        yield


@contextlib.contextmanager
def swapped_betas() -> Iterator[None]:
    """Lion interpolates by the rate of its momentum, and the other way round."""
    from llmtrain.optim.optimizers import Lion

    build = Lion.build

    def swapped(self: Lion, groups: list[dict[str, Any]]) -> Any:
        return build(self, [{**group, "betas": group["betas"][::-1]} for group in groups])

    with patch.object(Lion, "build", swapped):
        yield


@contextlib.contextmanager
def same_rows() -> Iterator[None]:
    """Every data-parallel rank reads the rows of the first."""
    from llmtrain.training import setup

    loader = setup.TrainLoader

    def of_rank_0(*args: Any, **kwargs: Any) -> Any:
        return loader(*args, **{**kwargs, "rank": 0})

    with patch.object(setup, "TrainLoader", of_rank_0):
        yield


@contextlib.contextmanager
def lost_micro_batch() -> Iterator[None]:
    """The last micro-batch's gradients do not reach the optimizer (DeepSpeed PR #7985)."""
    from llmtrain.training.step import Session

    step = Session.step

    def stepping(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.micro_batches[-1].labels[:] = -100
        return step(self, batch, *args, **kwargs)

    with patch.object(Session, "step", stepping):
        yield


@contextlib.contextmanager
def leaking_documents() -> Iterator[None]:
    """Positions begin anew with each document, but attention sees the documents before."""
    from llmtrain.models import language

    inside = language.documents_in_rows
    with patch.object(language, "documents_in_rows", lambda positions: inside(None)):
        yield


@contextlib.contextmanager
def raw_router_weights() -> Iterator[None]:
    """The chosen experts' weights are not normalised to a sum of 1."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    forward = MixtralTopKRouter.forward

    def routing(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, chosen = forward(self, hidden)
        return logits, torch.softmax(logits.float(), -1).gather(1, chosen).to(weights.dtype), chosen

    with patch.object(MixtralTopKRouter, "forward", routing):
        yield


@contextlib.contextmanager
def dropped_expert() -> Iterator[None]:
    """What the first expert of each rank gives does not come back to its tokens."""
    from deepspeed.moe.ep_experts import GroupedExperts

    forward = GroupedExperts.forward

    def dropping(self: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        given = forward(self, x, num_tokens_per_expert)
        kept = torch.arange(len(given)) >= int(num_tokens_per_expert[0])
        return given * kept.unsqueeze(1)

    with patch.object(GroupedExperts, "forward", dropping):
        yield


@contextlib.contextmanager
def changed_adapter(change: Callable[[list[Any]], None]) -> Iterator[None]:
    """peft's layers are changed before the engine sees them."""
    from llmtrain.models import adapter

    put_around = adapter.put_around

    def changed(*args: Any, **options: Any) -> Any:
        change(made := put_around(*args, **options))
        return made

    with patch.object(adapter, "put_around", changed):
        yield


def alpha_without_r() -> Context:
    """The scale of an adapter is alpha in place of alpha / r."""

    def change(layers: list[Any]) -> None:
        for layer in layers:
            layer.scaling["default"] *= layer.r["default"]

    return changed_adapter(change)


def map_without_adapter() -> Context:
    """One map computes without its adapter, as where a server finds no module of its name."""

    def change(layers: list[Any]) -> None:
        layers[3]._disable_adapters = True

    return changed_adapter(change)


def adapter_without_gradient() -> Context:
    """No gradient reaches an adapter's B."""

    def change(layers: list[Any]) -> None:
        for layer in layers:
            layer.lora_B["default"].weight.register_hook(torch.zeros_like)

    return changed_adapter(change)


def adapter_of_a_rank() -> Context:
    """Each tensor-parallel rank keeps the gradient that its own outputs give the adapter's A."""
    from llmtrain.models.parallel import tensor

    return patch.object(tensor, "_read", lambda value, group: value)


_LORA = '{"r": 4, "alpha": 8.0}'
_SAVED = '{"r": 4, "alpha": 8.0, "modules_to_save": ["lm_head", "*norm"]}'
_COLUMN = {"zero": 2, "objective": "distill", "top_k": 7}


@contextlib.contextmanager
def reference_that_trains() -> Iterator[None]:
    """Log-probabilities are compared with those of the model itself."""
    from llmtrain.objectives.preferences import Answers

    with patch.object(Answers, "ratio", property(lambda self: self.log_prob - self.log_prob.detach())):
        yield


def prompts_counted() -> Context:
    """Tokens that do not count are counted in an answer's length."""
    return patch("llmtrain.engine.losses.answers.IGNORE", -1)  # type: ignore[return-value]


@contextlib.contextmanager
def late_answers() -> Iterator[None]:
    """What says which answer a token belongs to is late by one."""
    from dataclasses import replace

    from llmtrain.data.stream import loader

    right = loader._answers
    with patch.object(loader, "_answers", lambda *a: replace(made := right(*a), answers=made.answers.roll(1, dims=1))):
        yield


@contextlib.contextmanager
def answers_in_parts() -> Iterator[None]:
    """A rank that shares a row has the likelihoods of its own columns, in the place of each of the others'."""
    from llmtrain.models.head import Head

    def own_only(self: Any, columns: torch.Tensor) -> torch.Tensor:
        return columns if self.shared_rows is None else columns.repeat(1, self.shared_rows.degree)

    with patch.object(Head, "whole", own_only):
        yield


@contextlib.contextmanager
def answers_without_the_others() -> Iterator[None]:
    """Of ranks that share a row, the gradient of an answer goes through this rank's own figure alone."""
    from llmtrain.models.parallel.sequence import Exchange

    right = Exchange.of_all

    def own_gradient(self: Any, own: torch.Tensor) -> torch.Tensor:
        every = right(self, own.detach()).clone()
        every[self.rank] = own
        return every

    with patch.object(Exchange, "of_all", own_gradient):
        yield


@contextlib.contextmanager
def divergence_of_a_micro_batch() -> Iterator[None]:
    """kto's z is that of the rank's first micro-batch."""
    from llmtrain.engine.losses.named import UnpairedLoss

    right = UnpairedLoss.look
    with patch.object(UnpairedLoss, "look", lambda self, micros, evaluate: right(self, micros[:1], evaluate)):
        yield


@contextlib.contextmanager
def score_of_next_token() -> Iterator[None]:
    """The score is read at the token after an answer: of the next row, or what pads."""
    from llmtrain.engine.losses import named

    last_tokens = named.last_tokens

    def late(batch: Any) -> torch.Tensor:
        return (last_tokens(batch) + 1).clamp(max=batch.labels.numel() - 1)

    with patch.object(named, "last_tokens", late):
        yield


@contextlib.contextmanager
def frozen_score() -> Iterator[None]:
    """The head of a reward model is frozen with the model that an adapter is beside."""
    from llmtrain.models.spec import ModelSpec

    names = property(lambda self: frozenset(name for name, _ in self.skeleton.named_parameters()))
    with patch.object(ModelSpec, "frozen", names):
        yield


@contextlib.contextmanager
def reference_with_adapter() -> Iterator[None]:
    """The adapter stays on while the reference is computed."""
    from llmtrain.models import adapter

    with patch.object(adapter, "without_adapter", contextlib.nullcontext):
        yield


def reference_with_trained_modules() -> Context:
    """Modules that train whole beside an adapter are in the reference as they are now."""
    from llmtrain.engine.deepspeed.state import State

    return patch.object(State, "reading_instead", lambda *_: contextlib.nullcontext())  # type: ignore[return-value]


@contextlib.contextmanager
def teacher_without_temperature() -> Iterator[None]:
    """The student's logits alone are divided by the temperature."""
    from llmtrain.engine.losses.named import DistillLoss

    right = DistillLoss.sums

    def sums(self: Any, head: Any, hidden: Any, micro: Any) -> Any:
        asked, temperature = self._teacher.logits, self._terms.temperature

        def hotter(*tokens: Any) -> Any:
            found = asked(*tokens)
            return lambda rows: temperature * found(rows)

        with patch.object(self._teacher, "logits", hotter):
            return right(self, head, hidden, micro)

    with patch.object(DistillLoss, "sums", sums):
        yield


def every_token_distilled() -> Context:
    """Tokens that do not count are distilled as well."""
    return patch("llmtrain.models.distillation.IGNORE", -1)  # type: ignore[return-value]


@contextlib.contextmanager
def other_direction() -> Iterator[None]:
    """beta is taken for the student's share."""
    from dataclasses import replace

    from llmtrain.models import distillation

    right = distillation.distilled_sums
    with patch.object(distillation, "distilled_sums",
                      lambda *a, terms, **k: right(*a, terms=replace(terms, beta=1 - terms.beta), **k)):  # fmt: skip
        yield


@contextlib.contextmanager
def _another_column(change: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]) -> Iterator[None]:
    """A micro-batch's part of a teacher's column is another. `change`: (words [b, T, k], logs [b, T, k + 1]) -> what
    stands in their place."""
    from llmtrain.data.stream import loader

    right = loader.TaughtBatch
    with patch.object(loader, "TaughtBatch", lambda **given: right(**given | change(given["words"], given["logs"]))):
        yield


def late_column() -> Context:
    """A place has the words of the place before it."""
    return _another_column(lambda words, logs: {"words": words.roll(1, dims=1), "logs": logs.roll(1, dims=1)})


def words_of_other_chances() -> Context:
    """The least likely word has the largest probability."""
    return _another_column(lambda words, _: {"words": words.flip(2)})


def others_without_mass() -> Context:
    """The mass of the words that are not in the column is taken for 0."""
    from torch.nn.functional import pad

    from llmtrain.models.distillation import NOTHING

    return _another_column(lambda _, logs: {"logs": pad(logs[..., :-1].log_softmax(2), (0, 1), value=NOTHING)})


FAULTS: dict[str, Fault] = {
    "late_column": Fault(late_column, _COLUMN, "forward pass"),
    "words_of_other_chances": Fault(words_of_other_chances, _COLUMN, "forward pass"),
    "others_without_mass": Fault(others_without_mass, _COLUMN, "forward pass"),
    "reference_with_adapter": Fault(
        reference_with_adapter,
        {"zero": 3, "adapter": _LORA, "objective": "dpo", "reference": "online"},
        "forward pass",
    ),
    "reference_with_trained_modules": Fault(
        reference_with_trained_modules,
        {"zero": 2, "adapter": _SAVED, "objective": "dpo", "reference": "online"},
        "a reference that trains",
    ),
    "score_of_next_token": Fault(score_of_next_token, {"zero": 2, "objective": "reward"}, "forward pass"),
    "rewards_per_micro_batch": Fault(
        mean_per_micro_batch, {"zero": 2, "accumulation": 2, "objective": "reward"}, "wrong weight in the mean"
    ),
    "frozen_score": Fault(frozen_score, {"zero": 3, "adapter": _LORA, "objective": "reward"}, "it is frozen"),
    "teacher_without_temperature": Fault(
        teacher_without_temperature, {"zero": 2, "objective": "distill"}, "another temperature"
    ),
    "every_token_distilled": Fault(every_token_distilled, {"zero": 2, "objective": "distill"}, "forward pass"),
    "other_direction": Fault(other_direction, {"zero": 2, "objective": "distill"}, "direction of a distillation"),
    "pairs_per_micro_batch": Fault(
        mean_per_micro_batch, {"zero": 2, "accumulation": 2, "objective": "dpo"}, "wrong weight in the mean"
    ),
    "reference_that_trains": Fault(reference_that_trains, {"zero": 2, "objective": "dpo"}, "forward pass"),
    "prompts_counted": Fault(prompts_counted, {"zero": 2, "objective": "dpo_norm"}, "forward pass"),
    "late_answers": Fault(late_answers, {"zero": 2, "objective": "dpo_norm"}, "forward pass"),
    "answers_in_parts": Fault(answers_in_parts, {"sequence": 2, "zero": 2, "objective": "dpo_norm"}, "forward pass"),
    "answers_without_the_others": Fault(
        answers_without_the_others, {"sequence": 2, "zero": 2, "objective": "dpo_norm"}, "wrong number of ranks"
    ),
    "divergence_of_a_micro_batch": Fault(
        divergence_of_a_micro_batch, {"zero": 2, "accumulation": 2, "objective": "kto"}, "forward pass"
    ),
    "alpha_without_r": Fault(alpha_without_r, {"zero": 2, "adapter": _LORA}, "an adapter that is left out"),
    "map_without_adapter": Fault(map_without_adapter, {"zero": 2, "adapter": _LORA}, "an adapter that is left out"),
    "adapter_without_gradient": Fault(adapter_without_gradient, {"zero": 2, "adapter": _LORA}, "no gradient reaches"),
    "adapter_of_a_rank": Fault(
        adapter_of_a_rank, {"tensor": 2, "zero": 1, "adapter": _LORA}, "left out of the backward pass"
    ),
    "mean_per_micro_batch": Fault(mean_per_micro_batch, {"zero": 2, "accumulation": 2}, "wrong weight in the mean"),
    "lost_micro_batch": Fault(lost_micro_batch, {"zero": 1, "accumulation": 3}, "forward pass"),
    "wrong_rank_count": Fault(wrong_rank_count, {"zero": 1}, "wrong number of ranks"),
    "late_bias_correction": Fault(late_bias_correction, {"zero": 2}, "bias correction"),
    "decayed_norms": Fault(decayed_norms, {"zero": 3}, "weight decay on them"),
    "swapped_betas": Fault(swapped_betas, {"zero": 2, "optimizer": "lion"}, "other betas (Lion's swapped?)"),
    "same_rows": Fault(same_rows, {"zero": 3}, "other rows"),
    "late_labels": Fault(late_labels, {"zero": 0}, "labels", everywhere=True),
    "late_schedule": Fault(late_schedule, {"zero": 1}, "learning rate", everywhere=True),
    "shifted_twice": Fault(shifted_twice, {"zero": 0}, "loss of LlamaForCausalLM", refused=True),
    "leaking_documents": Fault(leaking_documents, {"isolate_documents": True}, "data.isolate_documents", refused=True),
    "raw_router_weights": Fault(raw_router_weights, {"family": "mixtral", "zero": 3}, "weighted otherwise"),
    "dropped_expert": Fault(
        dropped_expert, {"family": "mixtral", "expert": 2, "zero": 1}, "do not compute what", refused=True
    ),
    "skipped_layer": Fault(skipped_layer, {"pipeline": 2, "accumulation": 2}, "a layer that is skipped"),
    "lost_tie": Fault(lost_tie, {"pipeline": 2, "accumulation": 2, "tied": True}, "tied tensor"),
    "lost_offset": Fault(lost_offset, {"sequence": 2}, "loss of LlamaForCausalLM", refused=True),
    "norm_of_one_shard": Fault(norm_of_one_shard, {"tensor": 2}, "norm is not summed"),
    "unsummed_head_norms": Fault(
        unsummed_head_norms, {"tensor": 2, "family": "qwen3", "zero": 1}, "several ranks hold"
    ),
}
