"""Compressed differences between parameters, and error feedback for what compression loses.

What a site loses in a round it adds to its next difference (error feedback; F. Seide et al., "1-Bit Stochastic
Gradient Descent", Interspeech 2014): after any number of rounds the sum of what was decoded differs from the true sum
by the last round's loss alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmtrain.optim.message_formats import BLOCK, Format

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_AT_ONCE = 1 << 10
"""Blocks at a time: the temporaries stay in the cache."""


def encode(form: type[Format], values: Array) -> Bytes:
    """Return the concatenated records of `values` [n]; the last block is padded with zeros."""
    blocks = -(-len(values) // BLOCK)
    records = np.empty((blocks, form.record), np.uint8)
    with np.errstate(all="ignore"):
        for low in range(0, blocks, _AT_ONCE):
            part = values[low * BLOCK : (low + _AT_ONCE) * BLOCK]
            filled = np.zeros((-(-len(part) // BLOCK), BLOCK), np.float32)
            filled.reshape(-1)[: len(part)] = part
            records[low : low + _AT_ONCE] = form.pack(filled)
    return records.reshape(-1)


def decode(form: type[Format], records: Bytes) -> Array:
    """Return the values [blocks * BLOCK] of whole records."""
    rows = records.reshape(-1, form.record)
    values = np.empty((len(rows), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        for low in range(0, len(rows), _AT_ONCE):
            values[low : low + _AT_ONCE] = form.unpack(rows[low : low + _AT_ONCE])
    return values.reshape(-1)


class Feedback:
    """Error feedback of one rank: adds what earlier messages lost to the next difference."""

    def __init__(self, form: type[Format], size: int) -> None:
        self.form = form
        self.residual: Array = np.zeros(size, np.float32)
        """Sum of the losses that no later message has made up for, fp32 [size]."""
        self._after = slice(0, 0), self.residual[:0]

    def encode(self, difference: Array, part: slice) -> tuple[Bytes, Array]:
        """Return (records of all `size` elements, with difference + residual in `part`; what the part decodes to).

        `part` must begin with a block.
        """
        assert part.start % BLOCK == 0
        wanted = difference + self.residual[part]
        written = encode(self.form, wanted)
        decoded = decode(self.form, written)[: len(wanted)]
        self._after = part, wanted - decoded
        records = np.zeros(-(-len(self.residual) // BLOCK) * self.form.record, np.uint8)
        low = part.start // BLOCK * self.form.record
        records[low : low + len(written)] = written
        return records, decoded

    def forget(self) -> None:
        """Reset error feedback: the last update may or may not have been applied."""
        self.residual = np.zeros_like(self.residual)

    def delivered(self) -> None:
        """The last message was applied: its loss becomes the residual of the part."""
        part, lost = self._after
        self.residual = self.residual.copy()  # a save may be reading it
        self.residual[part] = lost
