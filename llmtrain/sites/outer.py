"""Arithmetic of a round: the outer step, updates that are too large, and compressed differences.

A site adds the loss of a compression to its next difference (error feedback; F. Seide et al., "1-Bit Stochastic
Gradient Descent", Interspeech 2014): the sum after decoding differs from the true sum by the last round's loss only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from llmtrain.optim.message_formats import BLOCK, Format
from llmtrain.optim.outer_methods import SitesConfig

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_CHUNK = 1 << 18
"""Elements updated at a time: the fp64 temporaries stay in the cache."""


def outer_step(
    method: SitesConfig, common: Array, momentum: Array, found: Mapping[str, Array], weights: Mapping[str, float]
) -> tuple[Array, Array]:
    """Return (common, momentum) after the outer update, as new arrays, bit-equal on every site: numpy rounds after each
    operation on every processor, and sums run in the order of the names. `found`: site -> its parameters; if empty,
    nothing changes. `weights`: tokens by site. All arrays: fp32 [n]."""
    common, momentum = common.copy(), momentum.copy()
    total = sum(weights[site] for site in sorted(found))
    if not total:
        return common, momentum
    for low in range(0, len(common), _CHUNK):
        part = slice(low, low + _CHUNK)
        mean = np.zeros(len(common[part]))
        for site in sorted(found):
            mean += found[site][part].astype(np.float64) * (weights[site] / total)
        method.step(common[part], momentum[part], mean)
    return common, momentum


def squared_distance(before: Array | None, after: Array) -> float:
    """Return the squared L2 norm of after - before, or of after, fp32 [n], summed in fp64."""
    total = 0.0
    for low in range(0, len(after), _CHUNK):
        difference = after[low : low + _CHUNK].astype(np.float64)
        if before is not None:
            difference -= before[low : low + _CHUNK]
        total += float(difference @ difference)
    return total


LARGEST = 100.0
"""Largest allowed ratio of a site's change per step to the others'. A site of 1 step among sites of 500 stays below:
their summed change is 500 times one step's if all steps agree in direction, 22 times if they are independent."""


def outsized(squares: Mapping[str, float], steps: Mapping[str, float], own: str) -> dict[str, str]:
    """Return site -> reason for each update that is too large, compared with the lower median of the changes per step,
    or with this site's own if that is larger: of three sites or more, one cannot make others look too large. `squares`:
    site -> squared L2 norm of its change. `steps`: optimizer steps in it. `own`: may be missing in `squares`."""
    changes = {site: math.sqrt(square) / max(steps[site], 1.0) for site, square in squares.items()}
    if not changes:
        return {}
    usual = max(sorted(changes.values())[(len(changes) - 1) // 2], changes.get(own, 0.0))
    return {
        site: f"its update is {change / usual:.3g} times what the others change in a step; the limit is {LARGEST:g}"
        for site, change in changes.items()
        if usual and change > LARGEST * usual
    }


_AT_ONCE = 1 << 10
"""Blocks at a time: the temporaries stay in the cache."""


def encode(form: type[Format], values: Array) -> Bytes:
    """Return the concatenated records of `values` [n]; zeros pad the last block."""
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
    """Return the values [blocks * BLOCK] of complete records."""
    rows = records.reshape(-1, form.record)
    values = np.empty((len(rows), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        for low in range(0, len(rows), _AT_ONCE):
            values[low : low + _AT_ONCE] = form.unpack(rows[low : low + _AT_ONCE])
    return values.reshape(-1)


class Feedback:
    """Error feedback of one rank: adds the losses of earlier messages to the next difference."""

    def __init__(self, form: type[Format], size: int) -> None:
        self.form = form
        self.residual: Array = np.zeros(size, np.float32)
        """Sum of the losses that no later message has compensated, fp32 [size]."""
        self._after = slice(0, 0), self.residual[:0]

    def encode(self, difference: Array, part: slice) -> tuple[Bytes, Array]:
        """Return (records of all `size` elements, with difference + residual in `part`; the part after decoding).
        `part` must begin with a block."""
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
        """Reset: the last update may or may not have been applied."""
        self.residual = np.zeros_like(self.residual)

    def delivered(self) -> None:
        """Record that the last message was applied: its loss becomes the residual of the part."""
        part, lost = self._after
        self.residual = self.residual.copy()  # a save may be reading it
        self.residual[part] = lost
