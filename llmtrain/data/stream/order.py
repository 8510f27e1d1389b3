"""The order of the sequences of an epoch: a pure function of (seed, epoch, index) that is never stored; and which of a
step a rank takes.

Method: a Feistel network on the rectangle rows x columns >= n with modular addition, and cycle walking back into
[0, n) (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Any position is found in
O(1), so that resume is a seek. The keyed round function is xxh3_64, whose values are fixed by its specification.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import xxhash

_ROUNDS = 8  # four would do for statistics on large n; small epochs need more to look shuffled


def permute(n: int, seed: int, epoch: int, member: int, index: int) -> int:
    """Where position `index` of the epoch lies in [0, n). `member` is the set's place in a mixture (0 outside one).

    For fixed (n, seed, epoch, member) this is a permutation of [0, n).
    """
    assert 0 <= index < n, (index, n)
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    # The key is a hash of all three, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common.
    key = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed % (1 << 64), epoch, member))
    position = index
    while True:  # rows * columns exceeds n by less than `rows`: almost always once
        row, column = divmod(position, columns)
        for round_ in range(0, _ROUNDS, 2):
            row = (row + xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_, column), key)) % rows
            column = (column + xxhash.xxh3_64_intdigest(struct.pack("<QQ", round_ + 1, row), key)) % columns
        position = row * columns + column
        if position < n:
            return position


def rows_of(sequences: Sequence[int], accumulation: int, micro: int, group: int) -> range:
    """Which sequences of a step, counted from its first, one micro-batch of a group holds.

    Each of the step's sequences is in one micro-batch of one group; the micro-batches of a group differ by one at most.
    Equal shares give the order of equal ranks: micro-batch by micro-batch, within each group by group.

    Args:
        sequences: of a step, by group; each at least `accumulation`.
        accumulation: micro-batches of a step.
        micro: index of the micro-batch.
        group: index of the group.
    """

    def until(each: int, micros: int) -> int:
        return each * micros // accumulation

    first = sum(until(each, micro) for each in sequences)
    first += sum(until(each, micro + 1) - until(each, micro) for each in sequences[:group])
    own = sequences[group]
    return range(first, first + until(own, micro + 1) - until(own, micro))
