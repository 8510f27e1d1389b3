"""Fewer bytes for a difference between parameters, and the error feedback that makes up for what they lose.

Each format writes a record of a fixed size for each block of `BLOCK` elements, so that any blocks can be served without
their neighbours, and everybody who decodes a record gets the same bits.

What a site loses in a round it adds to its next difference (error feedback; F. Seide et al., "1-Bit Stochastic
Gradient Descent", Interspeech 2014): after any number of rounds the sum of what was decoded differs from the true sum
by the last round's loss alone. For sign and topk that loss stays bounded because each record takes a fixed share out of
the squared norm (S. P. Karimireddy et al., arXiv 1901.09847). topk with 2-bit values under DiLoCo: arXiv 2508.15706.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Compress = Literal["none", "bf16", "int8", "int4", "topk", "sign"]

BLOCK = 256
"""Elements that share a scale."""
_KEPT = 16
"""Elements of a block that topk sends."""
_AT_ONCE = 1 << 10
"""Blocks at a time: the temporaries stay in the cache."""


class Format(Protocol):
    """How a block is written."""

    record: int
    """Bytes of a block."""

    def pack(self, values: Array) -> Bytes:
        """Records [n, record] of values [n, BLOCK]. Not finite elements make a record that is not finite either."""
        ...

    def unpack(self, records: Bytes) -> Array:
        """Values [n, BLOCK] of records [n, record], whatever these hold."""
        ...


class Bf16:
    """The upper half of each fp32, rounded to nearest even: off by 2^-8 of the element at most."""

    record = 2 * BLOCK

    def pack(self, values: Array) -> Bytes:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        halves = np.where(np.isfinite(values), rounded, 0x7FC0).astype("<u2")
        return halves.view(np.uint8)

    def unpack(self, records: Bytes) -> Array:
        halves = np.ascontiguousarray(records).view("<u2").astype(np.uint32)
        return (halves << 16).view(np.float32)


class Int8:
    """Steps of 1/127 of the block's largest element: off by half a step at most."""

    record = 4 + BLOCK

    def pack(self, values: Array) -> Bytes:
        scale, steps = _steps(values, 127)
        return np.concatenate([_to_bytes(scale), steps.view(np.uint8)], axis=1)

    def unpack(self, records: Bytes) -> Array:
        return _from_bytes(records, 0) * np.ascontiguousarray(records[:, 4:]).view(np.int8).astype(np.float32)


class Int4:
    """Steps of 1/7 of the block's largest element, two to a byte: off by half a step at most."""

    record = 4 + BLOCK // 2

    def pack(self, values: Array) -> Bytes:
        scale, steps = _steps(values, 7)
        nibbles = (steps + 8).view(np.uint8)
        return np.concatenate([_to_bytes(scale), nibbles[:, ::2] | nibbles[:, 1::2] << 4], axis=1)

    def unpack(self, records: Bytes) -> Array:
        steps = np.empty((len(records), BLOCK), np.float32)
        steps[:, ::2] = records[:, 4:] & 15
        steps[:, 1::2] = records[:, 4:] >> 4
        return _from_bytes(records, 0) * (steps - 8)


class TopK:
    """The 16 largest elements of a block: position, sign, and to which of two magnitudes each belongs.

    The magnitudes are the means of the larger and of the smaller half of them: a mean m over n elements takes n m^2 out
    of the squared norm, so what a record loses is smaller than what it was made of.
    """

    record = 8 + _KEPT + _KEPT // 4

    def pack(self, values: Array) -> Bytes:
        size = np.abs(values)
        order = np.argsort(size, axis=1)[:, : -_KEPT - 1 : -1]  # from the largest; NaN counts as largest
        kept = np.take_along_axis(size, order, axis=1)
        negative = np.take_along_axis(values, order, axis=1) < 0
        half = _KEPT // 2
        magnitudes = [_to_bytes(part.mean(axis=1, keepdims=True)) for part in (kept[:, :half], kept[:, half:])]
        small = np.broadcast_to(np.arange(_KEPT) >= half, order.shape)
        return np.concatenate(
            [*magnitudes, order.astype(np.uint8), np.packbits(negative, axis=1), np.packbits(small, axis=1)], axis=1
        )

    def unpack(self, records: Bytes) -> Array:
        order = records[:, 8 : 8 + _KEPT].astype(np.intp)
        bits = np.unpackbits(records[:, 8 + _KEPT :], axis=1).astype(bool)
        size = np.where(bits[:, _KEPT:], _from_bytes(records, 4), _from_bytes(records, 0))
        values = np.zeros((len(records), BLOCK), np.float32)
        np.put_along_axis(values, order, np.where(bits[:, :_KEPT], -size, size), axis=1)
        return values


class Sign:
    """Each element's sign, and the mean of the block's absolute values."""

    record = 4 + BLOCK // 8

    def pack(self, values: Array) -> Bytes:
        scale = np.abs(values).mean(axis=1, keepdims=True)
        return np.concatenate([_to_bytes(scale), np.packbits(values < 0, axis=1)], axis=1)

    def unpack(self, records: Bytes) -> Array:
        scale = _from_bytes(records, 0)
        return np.where(np.unpackbits(records[:, 4:], axis=1).astype(bool), -scale, scale)


_FORMATS: dict[Compress, Format] = {
    "bf16": Bf16(), "int8": Int8(), "int4": Int4(), "topk": TopK(), "sign": Sign(),
}  # fmt: skip


def format_of(compress: Compress) -> Format | None:
    """None where fp32 is sent."""
    return _FORMATS.get(compress)


def encode(form: Format, values: Array) -> Bytes:
    """The records of `values` [n], one after another; the last block is filled with zeros."""
    blocks = -(-len(values) // BLOCK)
    records = np.empty((blocks, form.record), np.uint8)
    with np.errstate(all="ignore"):
        for low in range(0, blocks, _AT_ONCE):
            part = values[low * BLOCK : (low + _AT_ONCE) * BLOCK]
            filled = np.zeros((-(-len(part) // BLOCK), BLOCK), np.float32)
            filled.reshape(-1)[: len(part)] = part
            records[low : low + _AT_ONCE] = form.pack(filled)
    return records.reshape(-1)


def decode(form: Format, records: Bytes) -> Array:
    """The values of whole records, [blocks * BLOCK]."""
    rows = records.reshape(-1, form.record)
    values = np.empty((len(rows), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        for low in range(0, len(rows), _AT_ONCE):
            values[low : low + _AT_ONCE] = form.unpack(rows[low : low + _AT_ONCE])
    return values.reshape(-1)


class Feedback:
    """The differences of one rank, with what earlier ones have lost."""

    def __init__(self, form: Format, size: int) -> None:
        """`size`: elements of a difference."""
        self.form = form
        self.residual: Array = np.zeros(size, np.float32)
        """What has not been delivered, fp32 [size]."""
        self._after = slice(0, 0), self.residual[:0]

    def encode(self, difference: Array, part: slice) -> tuple[Bytes, Array]:
        """(records of all `size` elements, those of a part being difference + residual; what everybody decodes from
        them for the part). The part begins with a block."""
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
        """Nobody knows whether the last difference has become part of the model."""
        self.residual = np.zeros_like(self.residual)

    def delivered(self) -> None:
        """What was encoded last has become part of the model: its loss is the residual now."""
        part, lost = self._after
        self.residual = self.residual.copy()  # a save may be reading it
        self.residual[part] = lost


def _steps(values: Array, most: int) -> tuple[Array, npt.NDArray[np.int8]]:
    """(size of a step [n, 1], steps [n, BLOCK] from -most to most)."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(most)
    steps = np.rint(values / np.where(scale > 0, scale, 1))
    return scale, np.nan_to_num(np.clip(steps, -most, most)).astype(np.int8)


def _to_bytes(column: Array) -> Bytes:
    """fp32 [n, 1] as [n, 4]."""
    return np.ascontiguousarray(column, "<f4").view(np.uint8)


def _from_bytes(records: Bytes, at: int) -> Array:
    """fp32 [n, 1] of each record's bytes [at, at + 4)."""
    return np.ascontiguousarray(records[:, at : at + 4]).view("<f4").astype(np.float32)
