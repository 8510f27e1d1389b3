"""Choose values for `auto` by memory: each candidate is rehearsed."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from llmtrain.base.errors import ConfigError
from llmtrain.config.run import RecomputeConfig, Run
from llmtrain.features.plan import PlanConfig
from llmtrain.features.plan.device import Machines
from llmtrain.features.plan.planned import with_chosen
from llmtrain.features.plan.rehearsal import Rehearsed
from llmtrain.models.spec import ModelSpec

Found = Mapping[int, Rehearsed]
Keep = Literal["attention"] | None
Peak = Callable[[RecomputeConfig], float]


def decide(asked: Run, machines: Machines, rehearsed: Callable[[Run], Found]) -> tuple[Run, Found]:
    """Choose the largest micro-batch and the fewest recomputed layers that fit and leave plan.memory_margin free.

    Returns the run with these values, and its rehearsal. Recomputation takes about a third of a step, so a smaller
    micro-batch is preferred: layers are recomputed only if a single sequence does not fit.
    """
    margin = asked.config.section(PlanConfig).memory_margin or 0.0
    room = math.inf if machines.memory is None else (1 - margin) * machines.memory
    tried: dict[tuple[int, RecomputeConfig], Found] = {}

    def peak(count: int, recompute: RecomputeConfig) -> float:
        if (count, recompute) not in tried:
            tried[count, recompute] = rehearsed(with_chosen(asked, count, recompute))
        least, _ = machines.room(needs(tried[count, recompute].values()), 0)
        return -least  # with an upper bound of what no tensor holds

    counts, recompute = micro_batches(asked), asked.config.model.recompute
    if recompute.layers == "auto":
        layers = ModelSpec.of(asked.config.model).facts.layers
        recompute = fewest_layers(lambda layers_again: peak(counts[0], layers_again), layers, room, keeps(asked))
        counts = counts if recompute.layers is None else counts[:1]
    fitting = bisect_right(counts, room, key=lambda count: peak(count, recompute))
    count = counts[max(0, fitting - 1)]
    peak(count, recompute)
    return with_chosen(asked, count, recompute), tried[count, recompute]


def needs(ranks: Iterable[Rehearsed]) -> int:
    """Return the bytes that the fullest rank needs on its device."""
    return max(rank.peak + rank.ahead for rank in ranks)


def on_host(machines: Machines, ranks: Iterable[Rehearsed]) -> int:
    """Return the bytes of tensors in a host's memory, if the host has the fullest ranks."""
    return machines.slots * max(rank.host if machines.on_gpu else rank.peak for rank in ranks)


def micro_batches(asked: Run) -> list[int]:
    """Return the micro-batches, from 1 on, that divide each stage's batch and that no rule refuses."""
    if asked.config.train.micro_batch != "auto":
        return [asked.batch.micro_batch]
    sequences, counts = asked.batch.accumulation, []
    for count in range(1, sequences + 1):
        if sequences % count == 0:
            with contextlib.suppress(ConfigError):
                with_chosen(asked, count, RecomputeConfig())
                counts.append(count)
    return counts


def keeps(run: Run) -> tuple[Keep, ...]:
    """Return the choices of what recomputed layers keep, the best one first.

    Attention's output is one of 24 tensors in a layer of Llama 3 8B. Keeping it saves the recomputation of the only
    kernel whose time grows with the square of the sequence length.
    """
    model = run.config.model
    if model.recompute.keep is not None:
        return (model.recompute.keep,)
    return ("attention", None) if model.attention in ("auto", "sdpa", "varlen") else (None,)


def fewest_layers(peak: Peak, layers: int, room: float, keeps: tuple[Keep, ...]) -> RecomputeConfig:
    """Return the fewest of `layers` whose recomputation makes the peak fit into `room` bytes.

    `keeps`: choices of what these layers keep; if none fits, the last one is used with all layers. Each layer frees the
    same bytes, or fewer once the peak is elsewhere, so a straight line from none to all is an upper bound.
    """
    plain = peak(RecomputeConfig())
    if plain <= room:
        return RecomputeConfig()
    for keep in keeps:
        every = peak(RecomputeConfig(layers="all", keep=keep))
        if every <= room:
            return RecomputeConfig(layers=math.ceil(layers * (plain - room) / (plain - every)), keep=keep)
    return RecomputeConfig(layers="all", keep=keeps[-1])
