"""Compressed differences between parameters, and error feedback for what compression loses.

Each format writes a record of a fixed size for each block of `BLOCK` elements, so that any blocks can be served without
their neighbours, and every site decodes a record to the same bits.

What a site loses in a round it adds to its next difference (error feedback; F. Seide et al., "1-Bit Stochastic
Gradient Descent", Interspeech 2014): after any number of rounds the sum of what was decoded differs from the true sum
by the last round's loss alone. For sign that loss stays bounded because each record takes a fixed share out of the
squared norm (S. P. Karimireddy et al., arXiv 1901.09847). A new format is a class here and a word of `sites.compress`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that share a scale."""
_AT_ONCE = 1 << 10
"""Blocks at a time: the temporaries stay in the cache."""


class Format:
    """Encoding of a block as a record."""

    record: ClassVar[int]
    """Bytes of a block."""
    encode_s: ClassVar[float]
    """Seconds of one core for an element that is sent, the sender's decoding included (docs/networks.md, "Plan")."""
    decode_s: ClassVar[float]
    """The seconds for an element received from one site."""
    gentle: ClassVar[bool] = True
    """`sites plan` may recommend it; False if it loses most of a round's change."""

    def pack(self, values: Array) -> Bytes:
        """Return the records [n, record] of values [n, BLOCK]; NaN and infinity must stay visible in a record."""
        raise NotImplementedError

    def unpack(self, records: Bytes) -> Array:
        """Return the values [n, BLOCK] of records [n, record], which may hold anything."""
        raise NotImplementedError


class Bf16(Format):
    """The upper half of each fp32, rounded to nearest even: off by 2^-8 of the element at most."""

    record = 2 * BLOCK
    encode_s, decode_s = 8e-9, 2.4e-9

    def pack(self, values: Array) -> Bytes:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        halves = np.where(np.isfinite(values), rounded, 0x7FC0).astype("<u2")
        return halves.view(np.uint8)

    def unpack(self, records: Bytes) -> Array:
        halves = np.ascontiguousarray(records).view("<u2").astype(np.uint32)
        return (halves << 16).view(np.float32)


class Int8(Format):
    """Steps of 1/127 of the block's largest element: off by half a step at most."""

    record = 4 + BLOCK
    encode_s, decode_s = 7e-9, 2.0e-9

    def pack(self, values: Array) -> Bytes:
        scale, steps = _steps(values, 127)
        return np.concatenate([_to_bytes(scale), steps.view(np.uint8)], axis=1)

    def unpack(self, records: Bytes) -> Array:
        return _from_bytes(records, 0) * np.ascontiguousarray(records[:, 4:]).view(np.int8).astype(np.float32)


class Int4(Format):
    """Steps of 1/7 of the block's largest element, two to a byte: off by half a step at most."""

    record = 4 + BLOCK // 2
    encode_s, decode_s = 8e-9, 2.7e-9

    def pack(self, values: Array) -> Bytes:
        scale, steps = _steps(values, 7)
        nibbles = (steps + 8).view(np.uint8)
        return np.concatenate([_to_bytes(scale), nibbles[:, ::2] | nibbles[:, 1::2] << 4], axis=1)

    def unpack(self, records: Bytes) -> Array:
        steps = np.empty((len(records), BLOCK), np.float32)
        steps[:, ::2] = records[:, 4:] & 15
        steps[:, 1::2] = records[:, 4:] >> 4
        return _from_bytes(records, 0) * (steps - 8)


class Sign(Format):
    """Each element's sign, and the mean of the block's absolute values."""

    record = 4 + BLOCK // 8
    encode_s, decode_s = 8e-9, 6.2e-9
    gentle = False

    def pack(self, values: Array) -> Bytes:
        scale = np.abs(values).mean(axis=1, keepdims=True)
        return np.concatenate([_to_bytes(scale), np.packbits(values < 0, axis=1)], axis=1)

    def unpack(self, records: Bytes) -> Array:
        scale = _from_bytes(records, 0)
        return np.where(np.unpackbits(records[:, 4:], axis=1).astype(bool), -scale, scale)


FORMATS: dict[str, Format] = {"bf16": Bf16(), "int8": Int8(), "int4": Int4(), "sign": Sign()}
"""Value of `sites.compress` -> format, from the one that loses least; `none` sends fp32 parameters."""


def encode(form: Format, values: Array) -> Bytes:
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


def decode(form: Format, records: Bytes) -> Array:
    """Return the values [blocks * BLOCK] of whole records."""
    rows = records.reshape(-1, form.record)
    values = np.empty((len(rows), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        for low in range(0, len(rows), _AT_ONCE):
            values[low : low + _AT_ONCE] = form.unpack(rows[low : low + _AT_ONCE])
    return values.reshape(-1)


class Feedback:
    """Error feedback of one rank: adds what earlier messages lost to the next difference."""

    def __init__(self, form: Format, size: int) -> None:
        """`size`: elements of a difference."""
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


def _steps(values: Array, most: int) -> tuple[Array, npt.NDArray[np.int8]]:
    """Return (size of a step [n, 1], steps [n, BLOCK] from -most to most)."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(most)
    steps = np.rint(values / np.where(scale > 0, scale, 1))
    return scale, np.nan_to_num(np.clip(steps, -most, most)).astype(np.int8)


def _to_bytes(column: Array) -> Bytes:
    """Return fp32 [n, 1] as bytes [n, 4]."""
    return np.ascontiguousarray(column, "<f4").view(np.uint8)


def _from_bytes(records: Bytes, at: int) -> Array:
    """Return the fp32 [n, 1] in bytes [at, at + 4) of each record."""
    return np.ascontiguousarray(records[:, at : at + 4]).view("<f4").astype(np.float32)
