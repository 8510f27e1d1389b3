"""Layers on pipeline stages: against every way that there is, in small cases."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from llmtrain.base.errors import ModelError
from llmtrain.models.parallel.pipeline import Weights, balanced, bubble_share, explain, given, uniform


def stage_weights(weights: Weights, counts: tuple[int, ...]) -> list[float]:
    sums, first = [], 0
    for count in counts:
        sums.append(sum(weights.layers[first : first + count]))
        first += count
    sums[0] += weights.before
    sums[-1] += weights.after
    return sums


def every_way(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [way for way in itertools.product(range(1, layers + 1), repeat=stages) if sum(way) == layers]


@pytest.mark.parametrize("seed", range(30))
def test_no_way_has_a_lighter_heaviest_stage_or_among_those_more_equal_ones(seed):
    rng = random.Random(seed)
    layers, stages = rng.randint(2, 8), rng.randint(2, 4)
    stages = min(stages, layers)
    weights = Weights(
        before=rng.choice([0.0, rng.random() * 5]),
        layers=tuple(rng.random() + 0.1 for _ in range(layers)),
        after=rng.choice([0.0, rng.random() * 5]),
    )

    def badness(counts: tuple[int, ...]) -> tuple[float, float]:
        each = stage_weights(weights, counts)
        return max(each), sum(weight * weight for weight in each)

    best = min(map(badness, every_way(layers, stages)))
    assert badness(balanced(weights, stages)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("layers", "stages", "want"), [(8, 4, (2, 2, 2, 2)), (4, 3, (1, 2, 1)), (7, 4, (2, 2, 2, 1)), (3, 2, (2, 1))]
)
def test_uniform(layers, stages, want):
    assert uniform(layers, stages) == want


@pytest.mark.parametrize(
    ("counts", "words"),
    [((2, 3), "with the sum 5"), ((4, 0), "at least 1"), ((1, 1, 2), "these are 3"), ((5, -1), "at least 1")],
)
def test_counts_that_cannot_be(counts, words):
    with pytest.raises(ModelError, match=r"pipeline\.partition.*\[2, 2\]") as caught:
        given(counts, 4, 2)
    assert words in str(caught.value)
    assert given((3, 1), 4, 2) == (3, 1)


def test_the_bubble():
    assert bubble_share(1, 8) == 0
    assert bubble_share(4, 1) == 0.75
    assert bubble_share(2, 3) == 0.25
    assert re.search(r"43%.*\(4 - 1\) / \(4 \+ 4 - 1\).*12 micro-batches.*20%", explain((2, 2, 2, 2), 4))
    assert bubble_share(4, 12) == pytest.approx(0.2)
    assert explain((2, 2), 8).count("%") == 1
