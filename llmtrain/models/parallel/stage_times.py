"""How long the parts of a model take, for pipeline stages that are balanced by time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from llmtrain.base.errors import ModelError
from llmtrain.config.batch import Batch
from llmtrain.models.head import Head
from llmtrain.models.parallel.balance import Weights
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parallel.stage import Part, Stage
from llmtrain.models.score import gives_scores
from llmtrain.models.structure.anatomy import Anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RUNS = 5
"""The fastest counts: whatever else the machine does only adds."""
Measure = Callable[["PreTrainedModel", Part], float]
"""Turns a model into the stage that has this part of it, and returns its seconds for a micro-batch."""


def seconds_of(measure: Measure, hf: PreTrainedModel, anatomy: Anatomy, mesh: Mesh) -> Weights:
    """Forward and backward time of each part on a micro-batch of the run, in seconds; all ranks get rank 0's.

    One part at a time has memory, and layers of one kind are measured once.

    Raises:
        ModelError: on all ranks, when a part does not run on rank 0.
    """
    box: list[Any] = [None]
    if mesh.rank == 0:
        try:
            box = [_measured(measure, hf, anatomy)]
        except RuntimeError as error:  # out of memory, a kernel that is missing
            box = [str(error)]
    dist.broadcast_object_list(box, group=mesh.site, group_src=0)
    if isinstance(box[0], str):
        raise ModelError(
            f"pipeline.partition = time: the parts cannot be measured: {box[0]}. Use parameters or a list of counts."
        )
    return box[0]


def _measured(measure: Measure, hf: PreTrainedModel, anatomy: Anatomy) -> Weights:
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(anatomy.layers):
        module = hf.get_submodule(layer.path)
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        kinds.setdefault((layer.sliding, shapes), []).append(index)
    count = len(anatomy.layers)
    nothing = range(count, count)

    def seconds(layers: range, first: bool = False, last: bool = False) -> float:
        return measure(copy.deepcopy(hf), Part(layers, first=first, last=last))

    idle = seconds(nothing)  # masks and rotary embeddings are made on every stage
    before = seconds(nothing, first=True) - idle
    layers = [0.0] * count
    for indices in kinds.values():
        index = indices[-1]
        alone = seconds(range(index, index + 1), first=index == 0) - idle - (before if index == 0 else 0.0)
        for each in indices:
            layers[each] = max(alone, 0.0)
    after = seconds(nothing, last=True) - idle
    return Weights(before=max(before, 0.0), layers=tuple(layers), after=max(after, 0.0))


def fastest_pass(stage: Stage, part: Part, batch: Batch, chunk: int) -> float:
    """Seconds of the fastest of a few forward and backward passes on a micro-batch.

    `chunk`: tokens whose logits exist at one time in the loss.
    """
    config: Any = stage.hf.config
    size = (batch.micro_batch, batch.sequence_length)
    device = next((p.device for p in stage.parameters()), get_accelerator().current_device_name())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0.0, 0.02)
    tokens = torch.randint(0, config.vocab_size, size, generator=generator).to(device)
    hidden = torch.randn((*size, config.hidden_size), generator=generator).to(device, config.dtype)
    best = float("inf")
    for _ in range(_RUNS):
        get_accelerator().synchronize()
        began = time.perf_counter()
        given = tokens if part.first else hidden.requires_grad_()
        out = stage(given)
        _backward(stage, out, tokens, part.last, chunk)
        get_accelerator().synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _backward(stage: Stage, out: Any, tokens: torch.Tensor, last: bool, chunk: int) -> None:
    if last:
        head = Head(stage.hf, chunk)
        loss = head.scores(out).sum() if gives_scores(stage.hf.config) else head.nll_sum(out, tokens)
        loss.backward()
    elif out.requires_grad:
        out.backward(torch.ones_like(out))
