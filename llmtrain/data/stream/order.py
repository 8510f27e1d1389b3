"""Compute the order of a run's sequences: which set comes next in a mixture, an epoch's order, a rank's sequences.

The order of an epoch is a pure function of (seed, epoch, index): a Feistel network on the rectangle rows x columns >= n
with modular addition, and cycle walking back into [0, n) (J. Black and P. Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). Any position is found in O(1), so that resume is a seek. The keyed round function is xxh3_64,
whose values are fixed by its specification.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import xxhash


@dataclass(frozen=True, kw_only=True)
class _Node:
    left: _Node | int
    right: _Node | int
    share: Fraction
    """Share of this node's sequences that its left branch gets."""

    def left_count(self, k: int) -> int:
        a, b = self.share.numerator, self.share.denominator
        return (2 * k * a + b) // (2 * b)


class Mixture:
    """Which of the sets 0..n-1 each sequence comes from, by positive weights, which need not sum to 1.

    The set of the k-th sequence is a pure function of k, in O(log sets). Method: the sets are the leaves of a binary
    tree (Huffman's, on the weights). An inner node splits its first k sequences between its two branches by rounding:
    the left one gets floor(k * p + 1/2), p its exact share. That count grows by 0 or 1 as k grows by 1, so each
    sequence goes to one branch, and the counts of all sets for any k follow from the root down without replay. Shares
    are exact fractions: the count of a set among the first k stays within 2 of k times its share (within 1 for two or
    three sets), because a node's error shrinks by the share of each branch below.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        # Fraction(str(0.1)) is the 1/10 that the user wrote; Fraction(0.1) would be the nearest binary number.
        exact = [weight if isinstance(weight, Fraction) else Fraction(str(weight)) for weight in weights]
        assert exact and all(weight > 0 for weight in exact), weights
        total = sum(exact, Fraction(0))
        self.shares = [weight / total for weight in exact]
        self._root = _huffman(self.shares)

    def locate(self, k: int) -> tuple[int, int]:
        """Return (j, i): the k-th sequence (k >= 0) is the i-th of set j."""
        node = self._root
        while isinstance(node, _Node):
            before = node.left_count(k)
            if node.left_count(k + 1) > before:
                node, k = node.left, before
            else:
                node, k = node.right, k - before
        return node, k

    def counts(self, k: int) -> list[int]:
        """Return how many of the first k sequences come from each set."""
        counts = [0] * len(self.shares)
        pending: list[tuple[_Node | int, int]] = [(self._root, k)]
        while pending:
            node, reached = pending.pop()
            if isinstance(node, _Node):
                left = node.left_count(reached)
                pending += [(node.left, left), (node.right, reached - left)]
            else:
                counts[node] = reached
        return counts

    def sequence(self, member: int, index: int) -> int:
        """Return the k of sequence `index` of set `member`: the inverse of `locate`."""
        low, high = index, int((index + 3) / self.shares[member]) + 1  # a count stays within 2 of k times its share
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle + 1)[member] > index:
                high = middle
            else:
                low = middle + 1
        return low


def _huffman(shares: list[Fraction]) -> _Node | int:
    # The running number breaks ties, so that equal weights give the same tree everywhere.
    heap: list[tuple[Fraction, int, _Node | int]] = [(share, j, j) for j, share in enumerate(shares)]
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) > 1:
        small, _, right = heapq.heappop(heap)
        large, _, left = heapq.heappop(heap)
        heapq.heappush(heap, (small + large, made, _Node(left=left, right=right, share=large / (small + large))))
        made += 1
    return heap[0][2]


_ROUNDS = 8  # four would do for statistics on large n; small epochs need more to look shuffled


def permute(n: int, seed: int, epoch: int, member: int, index: int) -> int:
    """Return the sequence in [0, n) at position `index` of the epoch: a permutation for fixed (n, seed, epoch, member).

    `member`: number of the set in its mixture (0 without a mixture).
    """
    assert 0 <= index < n, (index, n)
    rows, columns, key = _network(n, seed, epoch, member)
    position = index
    while True:  # rows * columns exceeds n by less than `rows`: almost always once
        row, column = divmod(position, columns)
        for round_ in range(0, _ROUNDS, 2):
            row = (row + xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_, column), key)) % rows
            column = (column + xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_ + 1, row), key)) % columns
        position = row * columns + column
        if position < n:
            return position


def position_of(n: int, seed: int, epoch: int, member: int, sequence: int) -> int:
    """Return the position of a sequence in the epoch: the inverse of `permute`."""
    assert 0 <= sequence < n, (sequence, n)
    rows, columns, key = _network(n, seed, epoch, member)
    position = sequence
    while True:
        row, column = divmod(position, columns)
        for round_ in reversed(range(0, _ROUNDS, 2)):
            column = (column - xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_ + 1, row), key)) % columns
            row = (row - xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_, column), key)) % rows
        position = row * columns + column
        if position < n:
            return position


def _network(n: int, seed: int, epoch: int, member: int) -> tuple[int, int, int]:
    """Return rows, columns and key of an epoch's Feistel network."""
    rows = math.isqrt(n - 1) + 1
    # The key is a hash of all three, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common.
    key = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed % (1 << 64), epoch, member))
    return rows, -(-n // rows), key


def rows_of(sequences: Sequence[int], accumulation: int, micro: int, group: int) -> range:
    """Return the sequences of one micro-batch of a data-parallel group, counted from the step's first.

    Each sequence of the step is in one micro-batch of one group; the micro-batches of a group differ by one sequence at
    most. With equal shares the order is by micro-batch, and within it by group.

    Args:
        sequences: how many sequences of a step each group has; at least `accumulation` each.
        accumulation: micro-batches of a step.
    """

    def until(each: int, micros: int) -> int:
        return each * micros // accumulation

    first = sum(until(each, micro) for each in sequences)
    first += sum(until(each, micro + 1) - until(each, micro) for each in sequences[:group])
    own = sequences[group]
    return range(first, first + until(own, micro + 1) - until(own, micro))
