"""A transformers causal language model cut into pipeline stages: DeepSpeed's PipelineModule, with this rank's part."""

from __future__ import annotations

import contextlib
import io
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.config.run import Run
from llmtrain.models.adapter import put_around
from llmtrain.models.experts import avoid_grouped_product
from llmtrain.models.fp8 import use_fp8
from llmtrain.models.head import Head, Loss
from llmtrain.models.language import documents_in_rows
from llmtrain.models.neftune import Neftune, text_lengths
from llmtrain.models.parallel.deepspeed_private import overrides, set_bounds
from llmtrain.models.parallel.layers import set_up_layers
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parallel.tensor import shard_model, share_adapter
from llmtrain.models.parameters import LocalParameter, local_parameter, named_tensors
from llmtrain.models.score import SCORE, at_the_last_place
from llmtrain.models.skeleton import DTYPES, decoder_layers, materialise
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.decoder_parts import AbsentAfter, AbsentBefore, AbsentLayer, Anatomy
from llmtrain.models.transformers_private import matrices

# How many layers each pipeline stage gets, and how long stages wait. Standard library only.


_KEY = "pipeline.partition"


@dataclass(frozen=True, kw_only=True)
class Weights:
    before: float
    """Weight of the embedding, which is on the first pipeline stage."""
    layers: tuple[float, ...]
    after: float
    """Weight of final norm and head (a tied head, too), which are on the last pipeline stage."""


def bubble_share(stages: int, micro_batches: int) -> float:
    """Return the share of a step's time in which a pipeline stage waits, if all stages take equally long. The schedule
    is 1F1B (Narayanan et al., arXiv 1806.03377): a step takes the time of M + S - 1 micro-batches."""
    return (stages - 1) / (micro_batches + stages - 1)


def explain(layers: Sequence[int], micro_batches: int) -> str:
    """Return a line on the pipeline stages for the log. `layers`: number of decoder layers in each stage."""
    stages = len(layers)
    share = bubble_share(stages, micro_batches)
    line = (
        f"pipeline of {stages} stages with {' + '.join(map(str, layers))} decoder layers, {micro_batches} "
        f"micro-batches a step (train.accumulation): each stage waits {share:.0%} of the time, "
        f"({stages} - 1) / ({micro_batches} + {stages} - 1), if all take equally long"
    )
    if share > 0.2:
        enough = 4 * (stages - 1)  # (S - 1) / (4 (S - 1) + S - 1) = 1/5
        line += f"; with {enough} micro-batches it would be 20%"
    return line


def given(counts: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """Return the user's layer counts. Raises ModelError if they do not fit the model and the number of stages."""
    _check_stages(layers, stages)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ModelError(
            f"{_KEY} = {list(counts)}: these are {len(counts)} counts with the sum {sum(counts)}. Give one count for "
            f"each of the {stages} pipeline stages, at least 1 each, with the sum {layers} (the model's layers), such "
            f"as {list(uniform(layers, stages))}."
        )
    return tuple(counts)


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Return layer counts that differ by at most one: the middle stages have more, the stage with the head last."""
    _check_stages(layers, stages)
    count, more = divmod(layers, stages)
    middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - stages + 1), stage))
    return tuple(count + (stage in middle[:more]) for stage in range(stages))


def balanced(weights: Weights, stages: int) -> tuple[int, ...]:
    """Return the layer counts with the lightest possible heaviest stage, and the other stages as equal as that
    allows."""
    _check_stages(len(weights.layers), stages)
    heaviest, _ = _best(weights, stages, lambda so_far, own: max(so_far, own))
    _, counts = _best(weights, stages, lambda so_far, own: so_far + own * own if own <= heaviest else math.inf)
    return counts


def _best(weights: Weights, stages: int, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """Return cost and counts of the cheapest partition. `join`: (cost of earlier stages, a stage's weight) -> total
    cost."""
    layers = len(weights.layers)
    sums = [0.0, *accumulate(weights.layers)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # number of placed layers: cost, counts
    for stage in range(stages):
        left = stages - stage - 1
        ends = (weights.before if stage == 0 else 0.0) + (weights.after if left == 0 else 0.0)
        best = {
            stop: min(
                (join(cost, sums[stop] - sums[first] + ends), (*counts, stop - first))
                for first, (cost, counts) in best.items()
                if first < stop
            )
            for stop in range(stage + 1 if left else layers, layers - left + 1)
        }
    return best[layers]


def _check_stages(layers: int, stages: int) -> None:
    if stages > layers:
        raise ModelError(
            f"pipeline.stages = {stages}: each stage needs at least one decoder layer, but the model has {layers}. Use "
            f"at most {layers} stages."
        )


# A pipeline stage is the transformers model itself, without the parts of other stages. So transformers' own code makes
# masks, rotary embeddings and all other inputs of a layer on every stage.


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Entrance(AbsentLayer):
    """The last absent layer before a pipeline stage's own layers. It returns the received hidden state and drops its
    input, because the first stage has already scaled and projected the embeddings."""

    received: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the received hidden state [B, T, H]."""
        received, self.received = self.received, None
        assert received is not None
        return super().forward(received)


class Stage(nn.Module):
    def __init__(self, hf: PreTrainedModel, entrance: Entrance | None) -> None:
        super().__init__()
        self.hf = hf
        self._entrance = (entrance,)  # in a tuple, so that it is not registered as a submodule twice
        self.noise: Neftune | None = None
        """Adds noise to the embeddings in training; on the first pipeline stage only."""
        self.conclude: Callable[[Tensor], Tensor] | None = None
        """On the last pipeline stage: computes the loss from the hidden state."""
        self.wants_logits = False
        """True if `conclude` gets transformers' own logits instead of the hidden state."""

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """`inputs`: tokens or hidden states, with positions [B, T] if rows hold several documents. Returns the hidden
        states in the same form; on the last pipeline stage the result of `conclude`."""
        first, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        kwargs: dict[str, Any] = {"use_cache": False}
        if positions is not None:
            kwargs["position_ids"] = positions
        (entrance,) = self._entrance
        if entrance is None:
            kwargs["input_ids"] = first
            if self.noise is not None:
                self.noise.lengths_BT = text_lengths(first, positions)
        else:
            entrance.received = first
            # Only its shape matters. Not the received state itself: some models scale their embeddings in place (CTRL).
            kwargs["inputs_embeds"] = torch.zeros_like(first)
        with documents_in_rows(positions):
            if self.wants_logits:
                with at_the_last_place(self.hf.config):
                    out = self.hf(**kwargs).logits
            else:
                out = self.hf.base_model(**kwargs).last_hidden_state
        if self.conclude is not None:
            return self.conclude(out)
        return out if positions is None else (out, positions)


@dataclass(frozen=True)
class Part:
    layers: range
    first: bool
    """The part has the embedding, and all other modules before the first layer."""
    last: bool
    """The part has final norm and head."""


def build_stage(
    hf: PreTrainedModel,
    anatomy: Anatomy,
    part: Part,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Callable[[PreTrainedModel], None] | None = None,
) -> Stage:
    """Turn the model's skeleton into a pipeline stage, with uninitialised parameters on the device. `shard`: allocates
    this rank's shards first, if ranks share matrices or experts."""
    entrance = _cut(hf, anatomy, part, dtype)
    if shard is not None:
        shard(hf)
    materialise(hf, device, dtype)
    hf.config.use_cache, hf.config.dtype = False, dtype
    return Stage(hf, entrance)


def _cut(hf: PreTrainedModel, anatomy: Anatomy, part: Part, dtype: torch.dtype) -> Entrance | None:
    """Take other pipeline stages' parts out of the model. Returns the module that receives the hidden state; None on
    the first stage."""
    as_tuple = anatomy.layers_return_tuples
    absent: dict[str, nn.Module] = {
        layer.path: AbsentLayer(as_tuple) for index, layer in enumerate(anatomy.layers) if index not in part.layers
    }
    entrance = None
    if not part.first:
        entrance = absent[anatomy.layers[part.layers.start - 1].path] = Entrance(as_tuple)
        absent |= {before.path: AbsentBefore(before.width, dtype) for before in anatomy.before}
    if not part.last:
        absent |= {path: AbsentAfter() for path in (*anatomy.after, anatomy.head)}
    for path, module in absent.items():
        hf.set_submodule(path, module)
    return entrance


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class _Tie(TiedLayerSpec):
    """Tells DeepSpeed that two pipeline stages share a weight; in the chain of layers it does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__("embedding", nn.Module, forward_fn=lambda _, passing: passing)
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


class PipelineLanguageModel(PipelineModule):
    """DeepSpeed's pipeline module with this rank's stage. The last pipeline stage returns the loss of a micro-batch."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        parameters: list[LocalParameter],
        shapes: dict[str, tuple[int, ...]],
        tied: tuple[nn.Module, nn.Module] | None,
        chunk: int,
    ) -> None:
        degrees, place = mesh.degrees, mesh.place
        stages = degrees.pipeline
        specs: list[Any] = [LayerSpec(nn.Identity)] * stages  # DeepSpeed builds only this rank's
        specs[place.pipeline] = stage
        bounds = list(range(stages + 1))
        if tied is not None:
            specs = [_Tie(tied[0]), *specs, _Tie(tied[1])]
            bounds = [0, *range(2, stages + 1), stages + 2]
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=degrees.tensor, num_dp=degrees.data)
        # DeepSpeed prints its topology and seeds, and broadcasts tied weights with gradients on.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(specs, topology=topology, partition_method=bounds)
        self.stage = stage
        for name, parameter in [] if tied is None else tied[1].named_parameters():
            if name != "weight":  # else a tied head's bias counts as a copy, and not in the norm
                parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
        if place.pipeline == stages - 1:
            # Not DeepSpeed's loss_fn, which runs outside of the engine's forward pass and its hooks: with it
            # DeepSpeed's BF16_Optimizer lost the head's gradients.
            stage.conclude = self._loss
            self.head = Head(stage.hf, chunk)
        self.notes: list[str] = []
        """Lines for the log at the start of a run."""
        self.routing: None = None
        """Always None: the routers of a mixture of experts are not watched in a pipeline."""
        self._parameters_here = parameters
        self._shapes = shapes
        self.factor: Callable[[], float] = lambda: 1.0
        """Returns the factor on a micro-batch's summed loss in training."""
        self.losses: deque[Loss] = deque()
        """Loss functions of the micro-batches whose forward pass has not begun; on the last pipeline stage."""
        self.sums: list[Tensor] = []
        """Sums of the micro-batches since the list was emptied; on the last pipeline stage."""

    @overrides(PipelineModule)
    def _partition_layers(self, method: list[int] = ()) -> None:  # type: ignore[assignment]
        """Set the bounds of the pipeline stages, which DeepSpeed passes to this hook as it got them from us."""
        self.parts = method
        set_bounds(self, method[self.stage_id], method[self.stage_id + 1])

    @property
    def hf(self) -> PreTrainedModel:
        return self.stage.hf

    @property
    def config(self) -> PreTrainedConfig:
        return self.stage.hf.config

    @property
    def wants_logits(self) -> bool:
        return self.stage.wants_logits

    @wants_logits.setter
    def wants_logits(self, wanted: bool) -> None:
        # Other stages still return hidden states, which transformers' forward would scale or cap like logits.
        self.stage.wants_logits = wanted and self.stage.conclude is not None

    def local_parameters(self) -> list[LocalParameter]:
        return self._parameters_here

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def matrices(self) -> Iterator[tuple[nn.Parameter, int, int, bool]]:
        """Yield the matrices of this rank's layers, as `LanguageModel.matrices` does."""
        return matrices(decoder_layers(self.hf))

    def _loss(self, hidden: Tensor) -> Tensor:
        """Return the loss of a micro-batch, in training times `factor`."""
        loss = self.losses.popleft()
        sums = loss(self.head, hidden) if self.stage.wants_logits else self.head.compute(loss, hidden)
        self.sums.append(sums.detach())
        return sums[0] * self.factor() if self.training else sums[0]


def build_pipeline(run: Run, spec: ModelSpec, device: torch.device, mesh: Mesh) -> PipelineLanguageModel:
    """Return this rank's pipeline stage with uninitialised parameters; those of other stages never get memory. Raises
    ModelError: transformers cannot build the model, or it cannot be cut into these stages."""
    model, degrees = run.config.model, run.mix.degrees
    hf = spec.own_skeleton()
    words, plan = spec.anatomy, spec.projections if degrees.tensor > 1 else None
    anatomy = replace(words, head=SCORE, tied=False) if spec.scores else words

    def build(hf: PreTrainedModel, part: Part, shard: Callable[[PreTrainedModel], None] | None = None) -> Stage:
        stage = build_stage(hf, anatomy, part, DTYPES[run.mix.precision], device, shard=shard)
        avoid_grouped_product(hf, DTYPES[run.mix.precision])
        if spec.adapter.r is not None:
            share = None if plan is None or shard is None else partial(share_adapter, plan, mesh.tensor)
            put_around(hf, spec.adapted, device, DTYPES[run.mix.precision], share)
        if model.neftune_noise_alpha and part.first:
            stage.noise = Neftune(hf.get_submodule(anatomy.embedding), model.neftune_noise_alpha)
        layers = [hf.get_submodule(anatomy.layers[index].path) for index in part.layers]
        if model.fp8 is not None:
            use_fp8(layers, model.fp8, emulated=device.type == "cpu")
        set_up_layers(hf, layers, model, run.mix)
        return stage

    counts = layer_counts(run.pipeline_partition, degrees.pipeline, hf, anatomy)
    ends = hf.get_submodule(anatomy.embedding), hf.get_submodule(anatomy.head)
    index = mesh.place.pipeline
    first = sum(counts[:index])
    part = Part(range(first, first + counts[index]), first=index == 0, last=index == degrees.pipeline - 1)

    experts = None
    if degrees.expert > 1:
        from llmtrain.models.parallel.expert_parallel import find_experts, shard_experts

        experts = find_experts(hf, run.mix, run.expert_parallel)

    def shard(rest: PreTrainedModel) -> None:
        if plan is not None:
            shard_model(rest, words, plan, mesh.tensor, device, DTYPES[run.mix.precision])
        if experts is not None:
            shard_experts(rest, experts, run.mix, run.expert_parallel, device)

    pipeline = PipelineLanguageModel(
        build(hf, part, None if plan is None and experts is None else shard),
        mesh,
        _local_parameters(hf, anatomy, min(index, 1)),
        spec.shapes,
        ends if anatomy.tied else None,
        model.loss_chunk_tokens,
    )
    pipeline.notes.append(explain(counts, run.batch.accumulation))
    if plan is not None and plan.note:
        pipeline.notes.append(plan.note)
    if experts is not None:
        pipeline.notes.append(f"experts shared by {degrees.expert} ranks of each stage (DeepSpeed's AutoEP)")
    return pipeline


def layer_counts(asked: str | tuple[int, ...], stages: int, hf: PreTrainedModel, anatomy: Anatomy) -> tuple[int, ...]:
    """Return the number of decoder layers of each pipeline stage, by `pipeline.partition`. Raises ModelError."""
    if not isinstance(asked, str):
        return given(asked, len(anatomy.layers), stages)
    if asked == "uniform":
        return uniform(len(anatomy.layers), stages)
    return balanced(parameters_of(hf, anatomy), stages)


def parameters_of(hf: PreTrainedModel, anatomy: Anatomy) -> Weights:
    """Return the numbers of elements of the model's parts. A head tied to the embedding counts in `after`, too."""

    def count(*paths: str) -> int:
        return sum(p.numel() for path in paths for p in hf.get_submodule(path).parameters())

    return Weights(
        before=count(*(part.path for part in anatomy.before)),
        layers=tuple(count(layer.path) for layer in anatomy.layers),
        after=count(*anatomy.after, anatomy.head),
    )


def _local_parameters(hf: nn.Module, anatomy: Anatomy, copy: int) -> list[LocalParameter]:
    """Return this stage's parameters. A tied weight has the embedding's name on both its stages, with copies 0 and
    1."""
    parameters = []
    tied = [f"{anatomy.embedding}.weight", f"{anatomy.head}.weight"] if anatomy.tied else []
    for name, parameter in named_tensors(hf):
        local = local_parameter(tied[0] if name in tied else name, parameter)
        if name in tied:
            index, count = local.copy
            local = replace(local, copy=(index + count * copy, 2 * count))
        parameters.append(local)
    return parameters
