"""Which layers stand on which pipeline stage, and how long stages wait for each other. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmtrain.base.errors import ModelError

_KEY = "pipeline.partition"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the parts of a model weigh: parameters, or seconds of a micro-batch's forward and backward pass."""

    before: float
    """What only the first stage has: the embedding."""
    layers: tuple[float, ...]
    after: float
    """What only the last stage has: final norm and head; a tied head weighs here as well."""


def bubble_share(stages: int, micro_batches: int) -> float:
    """Share of a step's time in which a stage waits, when all stages take equally long: (S - 1) / (M + S - 1).

    The schedule is 1F1B (Narayanan et al., arXiv 1806.03377): a step takes as long as M + S - 1 micro-batches.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def explain(layers: Sequence[int], micro_batches: int) -> str:
    """One line for a person about stages, micro-batches and the bubble. `layers`: of each stage."""
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
    """The user's layer counts per stage. Raises ModelError when they cannot be."""
    _check_stages(layers, stages)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ModelError(
            f"{_KEY} = {list(counts)}: one count for each of the {stages} stages is needed, at least 1 each, {layers} "
            f"(the model's layers) in all; these are {len(counts)} with {sum(counts)} in all. For example "
            f"{list(uniform(layers, stages))}."
        )
    return tuple(counts)


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Layers as evenly as they go: the middle gets one more first, the stage with the head last."""
    _check_stages(layers, stages)
    each, more = divmod(layers, stages)
    middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - stages + 1), stage))
    return tuple(each + (stage in middle[:more]) for stage in range(stages))


def balanced(weights: Weights, stages: int) -> tuple[int, ...]:
    """Layer counts for which the heaviest stage is as light as can be, and the others as equal as that allows."""
    _check_stages(len(weights.layers), stages)
    heaviest, _ = _best(weights, stages, lambda so_far, own: max(so_far, own))
    _, counts = _best(weights, stages, lambda so_far, own: so_far + own * own if own <= heaviest else math.inf)
    return counts


def _best(weights: Weights, stages: int, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The counts with the least cost; `join`: cost of the stages before, weight of a stage -> cost of them all."""
    layers = len(weights.layers)
    sums = [0.0, *accumulate(weights.layers)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # layers that are placed: cost, counts
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
            f"pipeline.stages = {stages}: each stage needs at least one decoder layer, and the model has {layers}. Use "
            f"at most {layers} stages."
        )
