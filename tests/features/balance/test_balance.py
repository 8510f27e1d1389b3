"""Shares of a step: every sequence once, the best shares, and when they change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from llmtrain.data.stream.order import rows_of
from llmtrain.features.balance import part as load_balance
from llmtrain.features.balance.part import Balance, share_out


@pytest.mark.parametrize(("sequences", "accumulation"), [((8, 4), 3), ((3, 9), 3), ((16, 8, 5, 11), 4), ((7,), 2)])
def test_every_sequence_of_a_step_is_in_one_micro_batch(sequences: tuple[int, ...], accumulation: int) -> None:
    groups = range(len(sequences))
    parts = [rows_of(sequences, accumulation, m, group) for m in range(accumulation) for group in groups]
    assert list(itertools.chain(*parts)) == list(range(sum(sequences)))  # in this order: no gap and none twice
    for group in groups:
        sizes = [len(rows_of(sequences, accumulation, m, group)) for m in range(accumulation)]
        assert sum(sizes) == sequences[group] and max(sizes) - min(sizes) <= 1 <= min(sizes)


def test_equal_shares_are_the_order_of_equal_ranks() -> None:
    micro, accumulation, ranks = 4, 3, 2
    for m, rank in itertools.product(range(accumulation), range(ranks)):
        first = (m * ranks + rank) * micro
        assert rows_of((12, 12), accumulation, m, rank) == range(first, first + micro)


@pytest.mark.parametrize("unit", [1, 3])
def test_no_other_shares_end_earlier(unit: int) -> None:
    """Against all of them."""
    rng = random.Random(unit)
    for _ in range(60):
        seconds, least, most, total = [rng.uniform(0.5, 3) for _ in range(3)], 3, 12, 18
        found = share_out(seconds, total, least=least, most=most, unit=unit)
        legal = [
            each
            for each in itertools.product(range(least, most + 1, unit), repeat=3)
            if sum(each) == total and all((one - least) % unit == 0 for one in each)
        ]
        ends = [max(s * n for s, n in zip(seconds, each, strict=True)) for each in legal]
        assert found in legal and max(s * n for s, n in zip(seconds, found, strict=True)) == min(ends)


def decide(shares: Balance, paces: Sequence[int], steps: int = 30) -> list[tuple[int, tuple[int, ...]]]:
    """(step, shares) of each change."""
    changes = [(step, shares.measured(paces)) for step in range(1, steps + 1)]
    return [(step, change.after) for step, change in changes if change is not None]


def made(groups: Sequence[int] = (0, 1), at_once: bool = False, kept: object = None) -> Balance:
    balance = Balance(groups, global_batch=24, accumulation=3, at_once=at_once)
    balance.restore(kept)
    return balance


def test_a_rank_at_half_speed_takes_half_as_much() -> None:
    shares = made()
    first = load_balance.SETTLE_STEPS + load_balance.WINDOW_STEPS
    assert decide(shares, (10, 20)) == [(first, (16, 8))] and shares.sequences == (16, 8)
    assert [each for _, each in decide(shares, (20, 10))] == [(8, 16)]  # it is the other that is slow now
    assert decide(made(at_once=True), (10, 20)) == [(first, (15, 9))]  # as many in each of three micro-batches
    assert decide(made(), (1, 1000)) == [(first, (21, 3))]  # one in each micro-batch is the least
    fast = [10, *[1000] * 7]
    many = Balance(range(8), global_batch=96, accumulation=3, at_once=False)
    assert decide(many, fast)[0][1][0] == 24  # twice micro_batch in each is the most


def test_what_a_change_says() -> None:
    shares = made()
    (change,) = [each for each in (shares.measured((10**9, 2 * 10**9)) for _ in range(10)) if each]
    assert (change.equal_s, change.before_s, change.after_s, change.ideal_s) == (24, 24, 16, 16)
    assert all(value in str(change) for value in ("16, 8", "100%", "67%")), change


def test_noise_and_one_slow_step_change_nothing() -> None:
    rng, shares = random.Random(0), made()
    for step in range(400):
        held_up = 50 if step % 5 == 0 else 1
        assert shares.measured((round(1000 * rng.uniform(0.97, 1.03)) * held_up, 1000)) is None
    assert made().measured((0, 0)) is None


def test_a_rank_that_does_not_know_yet_is_waited_for() -> None:
    shares = made()
    for _ in range(40):
        assert shares.measured((10, 0)) is None
    assert decide(shares, (10, 20))


def test_the_slowest_rank_of_a_group_counts() -> None:
    assert decide(made((0, 0, 1, 1)), (10, 20, 10, 10))[0][1] == (8, 16)


def test_shares_go_on_where_they_fit() -> None:
    shares = made()
    decide(shares, (10, 20))
    kept = {"sequences": list(shares.sequences)}
    assert made(kept=kept).sequences == (16, 8)
    assert made(at_once=True, kept=kept).sequences == (12, 12)  # micro-batches of 16 would not be equal
    assert made(range(4), kept=kept).sequences == (6, 6, 6, 6)
    wrong = ([16, 9], [24, 0], [22, 2], [16.0, 8.0], [True, 23], "16", [16, 8, 0], None)
    for each in (None, [], {"sequences": 3}, *({"sequences": one} for one in wrong)):
        assert made(kept=each).sequences == (12, 12), each
