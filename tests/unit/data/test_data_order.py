"""The order of an epoch and the schedule of a mixture."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.stream.order import Mixture, permute


def test_order_changes_with_seed_epoch_and_member_and_only_with_them() -> None:
    def order(*key: int) -> list[int]:
        return [permute(500, *key, i) for i in range(500)]

    orders = [order(0, 0, 0), order(1, 0, 0), order(0, 1, 0), order(0, 0, 1), order(1, 1, 0)]
    assert len({tuple(o) for o in orders}) == len(orders)
    assert order(1, 1, 0) == orders[-1]
    # A golden value: a change of the method would silently reorder everybody's half-finished runs.
    assert [permute(1000, 0, 0, 0, i) for i in range(6)] == [668, 673, 429, 959, 426, 319]


def test_order_looks_shuffled() -> None:
    n = 2000
    order = [permute(n, 0, 0, 0, i) for i in range(n)]
    assert sum(a == i for i, a in enumerate(order)) < 10  # fixed points: 1 expected
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 12  # neighbours kept: 2 expected
    mean = (n - 1) / 2
    covariance = sum((i - mean) * (a - mean) for i, a in enumerate(order)) / n
    assert abs(covariance / (n * n / 12)) < 0.08  # 3.6 standard deviations


def test_a_seek_into_a_huge_epoch_is_instant() -> None:
    n = 10**12 + 39
    positions = [permute(n, 5, 9, 2, i) for i in (0, 1, n // 2, n - 1)]
    assert len(set(positions)) == 4 and all(0 <= p < n for p in positions)


weights = st.lists(st.integers(1, 1000), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(weights=weights, start=st.integers(0, 10**12))
def test_mixture_is_exact_at_any_distance(weights: list[int], start: int) -> None:
    mixture = Mixture([Fraction(w) for w in weights])
    bound = 1 if len(weights) <= 3 else 2
    counts = mixture.counts(start)
    for k in range(start, start + 60):
        assert sum(counts) == k
        assert all(abs(count - k * share) <= bound for count, share in zip(counts, mixture.shares, strict=True)), (
            k,
            counts,
        )
        j, i = mixture.locate(k)
        assert mixture.sequence(j, i) == k
        assert i == counts[j]  # the next of its set: none is skipped, none comes twice
        counts[j] += 1
        assert counts == mixture.counts(k + 1)


def test_weights_are_the_decimal_numbers_that_were_written() -> None:
    mixture = Mixture([0.1, 0.2, 0.7])
    assert mixture.shares == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]
    assert mixture.counts(10**15) == [10**14, 2 * 10**14, 7 * 10**14]
    assert Mixture([1, 2, 7]).counts(12345) == mixture.counts(12345)  # they need not sum to 1
