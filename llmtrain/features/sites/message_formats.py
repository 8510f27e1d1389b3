"""Formats in which sites send the changes of their parameters: the values of `sites.compress`.

A new one is a class here: `pack` and `unpack`. Each writes a record of a fixed size for each block of
`BLOCK` elements, so that any blocks can be served without their neighbours, and every site decodes a record to the same
bits. The section `sites` (outer_methods.py) names and describes them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

Array = Any
"""numpy's, fp32."""
Bytes = Any
"""numpy's, uint8."""

BLOCK = 256
"""Elements that share a scale."""
FORMATS: dict[str, type[Format]] = {}
"""Value of `sites.compress` -> format, in the order of their definition: the smallest loss first."""


class Format:
    """Encoding of a block as a record."""

    record: ClassVar[int]
    """Bytes of a block."""

    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()
        FORMATS[name] = cls

    @staticmethod
    def pack(values: Array) -> Bytes:
        """Return the records [n, record] of values [n, BLOCK]; NaN and infinity must stay visible in a record."""
        raise NotImplementedError

    @staticmethod
    def unpack(records: Bytes) -> Array:
        """Return the values [n, BLOCK] of records [n, record], which may hold anything."""
        raise NotImplementedError


class Bf16(Format, name="bf16"):
    """The upper 16 bits of each fp32 change, off by 2^-8 of it at most."""

    record = 2 * BLOCK

    @staticmethod
    def pack(values: Array) -> Bytes:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # to nearest even
        halves = np.where(np.isfinite(values), rounded, 0x7FC0).astype("<u2")
        return halves.view(np.uint8)

    @staticmethod
    def unpack(records: Bytes) -> Array:
        halves = np.ascontiguousarray(records).view("<u2").astype(np.uint32)
        return (halves << 16).view(np.float32)


class Int8(Format, name="int8"):
    """Steps of 1/127 of a block's largest change, off by half a step at most."""

    record = 4 + BLOCK

    @staticmethod
    def pack(values: Array) -> Bytes:
        scale, steps = _steps(values, 127)
        return np.concatenate([_to_bytes(scale), steps.view(np.uint8)], axis=1)

    @staticmethod
    def unpack(records: Bytes) -> Array:
        return _scale_of(records) * np.ascontiguousarray(records[:, 4:]).view(np.int8).astype(np.float32)


class Int4(Format, name="int4"):
    """Steps of 1/7 of a block's largest change, two to a byte, off by half a step at most."""

    record = 4 + BLOCK // 2

    @staticmethod
    def pack(values: Array) -> Bytes:
        scale, steps = _steps(values, 7)
        nibbles = (steps + 8).view(np.uint8)
        return np.concatenate([_to_bytes(scale), nibbles[:, ::2] | nibbles[:, 1::2] << 4], axis=1)

    @staticmethod
    def unpack(records: Bytes) -> Array:
        steps = np.empty((len(records), BLOCK), np.float32)
        steps[:, ::2] = records[:, 4:] & 15
        steps[:, 1::2] = records[:, 4:] >> 4
        return _scale_of(records) * (steps - 8)


def _steps(values: Array, most: int) -> tuple[Array, Any]:
    """Return (size of a step [n, 1], steps [n, BLOCK] from -most to most, int8)."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(most)
    steps = np.rint(values / np.where(scale > 0, scale, 1))
    return scale, np.nan_to_num(np.clip(steps, -most, most)).astype(np.int8)


def _to_bytes(column: Array) -> Bytes:
    return np.ascontiguousarray(column, "<f4").view(np.uint8)


def _scale_of(records: Bytes) -> Array:
    return np.ascontiguousarray(records[:, :4]).view("<f4").astype(np.float32)
