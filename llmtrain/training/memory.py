"""The number of layers that model.recompute.layers: auto stands for: as few as the device's memory asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import psutil
import torch

from llmtrain.base import units
from llmtrain.config.run import RecomputeConfig, ResolvedRun
from llmtrain.config.topology import ranks_of_this_host
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.models.run.activations import Activations, count_activations
from llmtrain.models.spec import ModelSpec
from llmtrain.training.examine import bytes_of_a_rank

MARGIN = 0.1
"""Share of what is free that stays so: fragments, the communication library's buffers, kernels' working memory."""
_BUCKET = 500_000_000
"""Elements: DeepSpeed's default of reduce_bucket_size."""
_LIVE = 1_050_000_000
"""Elements: DeepSpeed's defaults of stage3_max_live_parameters and stage3_prefetch_bucket_size; compiled layers have
room for two of them (engine/deepspeed/build.py)."""

Keep = Literal["attention"] | None
Count = Callable[[int | Literal["all"] | None, Keep], Activations]


def decide_recomputation(resolved: ResolvedRun, spec: ModelSpec, ranks: Ranks) -> tuple[ResolvedRun, list[str]]:
    """Put a number in place of auto, the same on all ranks, before the model is there; returns a note with the
    bytes."""
    if resolved.run.model.recompute.layers != "auto":
        return resolved, []
    chosen, note = layers_for(min(from_all(ranks, free_bytes(ranks.device))), resolved, spec)
    mix = replace(resolved.mix, recomputes=chosen.layers is not None, keep_attention=chosen.keep is not None)
    run = replace(resolved.run, model=replace(resolved.run.model, recompute=chosen))
    return replace(resolved, run=run, mix=mix), [note]


def layers_for(free: int, resolved: ResolvedRun, spec: ModelSpec) -> tuple[RecomputeConfig, str]:
    """The layers that a rank with so many free bytes recomputes, and the numbers behind it in words."""
    others = held_bytes(resolved, spec)
    chosen, words = fewest_layers(
        lambda layers, keep: count_activations(resolved, spec, layers, keep),
        spec.facts.layers,
        free * (1 - MARGIN) - others,
        keeps(resolved),
    )
    note = (
        f"model.recompute.layers auto: {words}. Counted: {units.size(free)} free, {MARGIN:.0%} of it left alone; "
        f"{units.size(others)} of weights, gradients, optimizer state and DeepSpeed's buffers"
    )
    return chosen, note


def keeps(resolved: ResolvedRun) -> tuple[Keep, ...]:
    """Choices of the results that recomputed layers keep, the first one first: attention's, if they all fit. They take
    one of the 24 tensors of a layer of Llama 3 8B, and spare the one kernel that grows with the square of the
    length."""
    model = resolved.run.model
    if model.recompute.keep is not None:
        return (model.recompute.keep,)
    return ("attention", None) if model.attention in ("auto", "sdpa", "varlen") else (None,)


def fewest_layers(count: Count, layers: int, room: float, kept: tuple[Keep, ...]) -> tuple[RecomputeConfig, str]:
    """As few of the `layers` as activations of `room` bytes ask for, and the numbers in words. `kept`: choices of what
    recomputed layers keep; if activations fit with none, the last one with all layers."""
    plain = count(None, None)
    if plain.most <= room:
        return RecomputeConfig(), f"none of {layers} layers, whose activations take {units.size(plain.most)}"
    for keep in kept:
        every = count("all", keep)
        freed = (plain.kept - every.kept) / layers
        if every.most <= room and freed > 0:
            # The backward pass begins with all that is kept, less what the recomputed layers have freed by then.
            fewest = min(layers, -int(-(plain.most - room) // freed))
            chosen = RecomputeConfig(layers=fewest, keep=keep)
            return chosen, (
                f"{fewest} of {layers} layers{', attention kept' if keep else ''}: activations take "
                f"{units.size(plain.most)} without, each of these frees {units.size(freed)}"
            )
    return RecomputeConfig(layers="all", keep=kept[-1]), (
        f"all {layers} layers, and by this count that is not enough: activations still take {units.size(every.most)}"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that this rank can have: of its device, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // ranks_of_this_host()


def held_bytes(resolved: ResolvedRun, spec: ModelSpec) -> float:
    """About what a rank's device holds beside activations: what trains, the values that an online reference began with,
    and DeepSpeed's buffers of a backward pass. (A teacher is there before the free bytes are asked for.)"""
    mix, facts = resolved.mix, spec.facts
    held = bytes_of_a_rank(resolved, facts)
    on_host = {"optimizer"} if mix.offload_optimizer else set()
    on_host |= {"weights"} if mix.offload_param else set()
    zero = resolved.deepspeed.get("zero_optimization") or {}
    # A bucket of gradients and its copy, in fp32 if they are summed so.
    bucket = min(facts.trained, zero.get("reduce_bucket_size", _BUCKET)) * (8 if mix.zero_stage > 0 else 0)
    live = zero.get("stage3_max_live_parameters", max(_LIVE, 2 * facts.parameters // facts.layers))
    live = live if mix.zero_stage == 3 else 0
    wide = 4 if mix.precision == "fp32" else 2
    gathered = min(facts.parameters, live) * wide
    began = 0.0
    if resolved.run.objective.reference == "online":  # training/setup.py base_of
        shards = resolved.degrees.world_size if mix.zero_stage == 3 else 1
        began = wide * sum(math.prod(spec.shapes[name]) for name in spec.saved) / shards
    return sum(size for kind, size in held.items() if kind not in on_host) + began + bucket + gathered
