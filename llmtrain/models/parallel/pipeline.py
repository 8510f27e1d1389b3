"""A transformers causal language model cut into pipeline stages: DeepSpeed's PipelineModule, with this rank's stage."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from llmtrain.config.run import ResolvedRun
from llmtrain.models.adapter import put_around
from llmtrain.models.build import DTYPES
from llmtrain.models.frozen import named_tensors
from llmtrain.models.head import Head, Loss
from llmtrain.models.parallel.balance import Weights, balanced, explain, given, uniform
from llmtrain.models.parallel.deepspeed_private import overrides, set_bounds
from llmtrain.models.parallel.layers import set_up_layers
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parallel.stage import Part, Stage, build_stage
from llmtrain.models.parallel.stage_times import Measure, fastest_pass, seconds_of
from llmtrain.models.parallel.tensor import shard_model, share_adapter
from llmtrain.models.parameters import LocalParameter, local_parameter
from llmtrain.models.score import SCORE
from llmtrain.models.score_source import language_model
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.anatomy import Anatomy, anatomy_of
from llmtrain.models.structure.projections import projections

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class _Tie(TiedLayerSpec):
    """Tells DeepSpeed that a module of two stages has one weight; in the chain of layers it does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__("embedding", nn.Module, forward_fn=lambda _, passing: passing)
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


class PipelineLanguageModel(PipelineModule):
    """This rank's stage for DeepSpeed's pipeline engine. The last stage gives the loss of a micro-batch."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        parameters: list[LocalParameter],
        shapes: dict[str, tuple[int, ...]],
        tied: tuple[nn.Module, nn.Module] | None,
        chunk: int,
        layers: Sequence[int],
    ) -> None:
        degrees, place = mesh.degrees, mesh.place
        stages = degrees.pipeline
        specs: list[Any] = [LayerSpec(nn.Identity)] * stages  # DeepSpeed builds those of this rank's stage only
        specs[place.pipeline] = stage
        bounds = list(range(stages + 1))
        if tied is not None:
            specs = [_Tie(tied[0]), *specs, _Tie(tied[1])]
            bounds = [0, *range(2, stages + 1), stages + 2]
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=degrees.tensor, num_dp=degrees.data)
        # It prints its topology and its seeds, and broadcasts tied weights with gradients on.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(specs, topology=topology, partition_method=bounds)
        self.stage = stage
        for name, parameter in [] if tied is None else tied[1].named_parameters():
            if name != "weight":  # DeepSpeed takes a tied head's bias for a copy, too, and leaves it out of the norm
                parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
        if place.pipeline == stages - 1:
            # Not as DeepSpeed's loss_fn, which runs outside of the engine's forward pass and its hooks: BF16_Optimizer,
            # which DeepSpeed takes by itself, lost the head's gradients so.
            stage.conclude = self._loss
            self.head = Head(stage.hf, chunk)
        self.layers_per_stage = tuple(layers)
        self.notes: list[str] = []
        """For the user, at the start of a run."""
        self._parameters_here = parameters
        self._shapes = shapes
        self.factor: Callable[[], float] = lambda: 1.0
        """On the summed loss of a micro-batch, in training."""
        self.losses: deque[Loss] = deque()
        """Of the micro-batches whose forward pass has not begun; on the last stage."""
        self.sums: list[Tensor] = []
        """What they gave since the list was emptied; on the last stage."""

    @overrides(PipelineModule)
    def _partition_layers(self, method: list[int] = ()) -> None:  # type: ignore[assignment]
        """DeepSpeed's hook: the bounds are given."""
        self.parts = method
        set_bounds(self, method[self.stage_id], method[self.stage_id + 1])

    @property
    def hf(self) -> PreTrainedModel:
        """The transformers model as far as it is here."""
        return self.stage.hf

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers configuration."""
        return self.stage.hf.config

    def local_parameters(self) -> list[LocalParameter]:
        """What this rank holds of each Hugging Face tensor."""
        return self._parameters_here

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the whole model, by Hugging Face name."""
        return self._shapes

    def _loss(self, hidden: Tensor) -> Tensor:
        """The weighted loss of a micro-batch; its sums go into `sums`."""
        loss = self.losses.popleft()
        sums = loss(self.head, hidden) if self.stage.wants_logits else self.head.compute(loss, hidden)
        self.sums.append(sums.detach())
        return sums[0] * self.factor() if self.training else sums[0]


def build_pipeline(resolved: ResolvedRun, spec: ModelSpec, device: torch.device, mesh: Mesh) -> PipelineLanguageModel:
    """This rank's stage with uninitialised parameters; those of other stages never get memory.

    Raises:
        ModelError: transformers cannot build the model, or it cannot be cut into these stages.
    """
    model, degrees = resolved.run.model, resolved.degrees
    hf = spec.own_skeleton()
    like = language_model(hf) if spec.scores else hf  # its logits prove the parts of the decoder
    words = anatomy_of(like)
    plan = projections(like, words) if degrees.tensor > 1 else None
    anatomy = replace(words, head=SCORE, tied=False) if spec.scores else words
    section = resolved.deepspeed.get("activation_checkpointing")

    def build(hf: PreTrainedModel, part: Part, shard: Callable[[nn.Module], None] | None = None) -> Stage:
        stage = build_stage(hf, anatomy, part, DTYPES[resolved.precision], device, shard=shard)
        if spec.adapter.r is not None:
            share = None if plan is None or shard is None else partial(share_adapter, plan, mesh.tensor)
            put_around(hf, spec.adapted, device, DTYPES[resolved.precision], share)
        set_up_layers(hf, [hf.get_submodule(anatomy.layers[index].path) for index in part.layers], model, section)
        return stage

    def measure(hf: PreTrainedModel, part: Part) -> float:
        return fastest_pass(build(hf, part), part, resolved.batch, model.loss_chunk_tokens)

    counts = layer_counts(resolved.pipeline_partition, mesh, hf, anatomy, measure)
    ends = hf.get_submodule(anatomy.embedding), hf.get_submodule(anatomy.head)
    index = mesh.place.pipeline
    first = sum(counts[:index])
    part = Part(range(first, first + counts[index]), first=index == 0, last=index == degrees.pipeline - 1)

    def shard(rest: nn.Module) -> None:
        assert plan is not None
        shard_model(rest, words, plan, mesh.tensor, device, DTYPES[resolved.precision])

    pipeline = PipelineLanguageModel(
        build(hf, part, None if plan is None else shard),
        mesh,
        _local_parameters(hf, anatomy, min(index, 1)),
        spec.shapes,
        ends if anatomy.tied else None,
        model.loss_chunk_tokens,
        counts,
    )
    pipeline.notes.append(explain(counts, resolved.batch.accumulation))
    if plan is not None and plan.whole:
        pipeline.notes.append(plan.whole)
    return pipeline


def layer_counts(
    asked: str | tuple[int, ...], mesh: Mesh, hf: PreTrainedModel, anatomy: Anatomy, measure: Measure
) -> tuple[int, ...]:
    """Decoder layers of each stage, as `pipeline.partition` asks for. The same on all ranks."""
    stages = mesh.degrees.pipeline
    if not isinstance(asked, str):
        return given(asked, len(anatomy.layers), stages)
    if asked == "uniform":
        return uniform(len(anatomy.layers), stages)
    if asked == "parameters":
        return balanced(parameters_of(hf, anatomy), stages)
    uniform(len(anatomy.layers), stages)  # stages that cannot be are refused before the measurement
    return balanced(seconds_of(measure, hf, anatomy, mesh), stages)


def parameters_of(hf: PreTrainedModel, anatomy: Anatomy) -> Weights:
    """Elements of the parts' parameters; a head tied to the embedding is held by the last stage as well."""

    def count(*paths: str) -> int:
        return sum(p.numel() for path in paths for p in hf.get_submodule(path).parameters())

    return Weights(
        before=count(*(part.path for part in anatomy.before)),
        layers=tuple(count(layer.path) for layer in anatomy.layers),
        after=count(*anatomy.after, anatomy.head),
    )


def _local_parameters(hf: nn.Module, anatomy: Anatomy, copy: int) -> list[LocalParameter]:
    """A tied weight bears the embedding's name on the last stage, too; of it there is a copy 0 and a copy 1."""
    found = []
    tied = [f"{anatomy.embedding}.weight", f"{anatomy.head}.weight"] if anatomy.tied else []
    for name, parameter in named_tensors(hf):
        held = local_parameter(tied[0] if name in tied else name, parameter)
        if name in tied:
            index, count = held.copy
            held = replace(held, copy=(index + count * copy, 2 * count))
        found.append(held)
    return found
