"""steps.bin: loss, gradient norm and rate of each step, and the loss by data-parallel group.

A row has a head of 48 bytes and 4 bytes for each group, little-endian. Rows are appended in the order of their steps; a
kill leaves at most one torn row, the last, which is cut off when the file is opened again.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.files import open_regular, replace_file
from llmtrain.tracking.local import AppendedFile

STEPS = "steps.bin"
LOOKS = "replay.jsonl"
"""File of a replay with a line for each step."""
REPLAYED = "LLMTRAIN_REPLAY"
"""Environment variable with the task of a replay's ranks, as JSON."""
_HEAD, _STEP = struct.Struct("<QQIIddd"), struct.Struct("<Q")
_SKIPPED, _LEFT_OUT = 1, 2
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step as the run has computed it; equal to the bit in a replay on the same ranks."""

    step: int
    """Steps done after it: the first step is 1."""
    weight: int
    """Divisor of the loss: tokens or pairs."""
    loss: float = math.nan
    """Mean over the global batch; NaN without a counted token."""
    norm: float = math.nan
    """Gradient norm as in metrics.jsonl; NaN if there is none."""
    lr_factor: float
    skipped: bool = False
    """Its update was not applied: the loss or gradient was not finite, or no token counted."""
    left_out: bool = False
    """Its update was left out as an outlier (spikes.skip_outliers)."""
    shares: tuple[float, ...] = ()
    """Sum of each data-parallel group's losses, fp32."""

    def pack(self) -> bytes:
        flags = _SKIPPED * self.skipped + _LEFT_OUT * self.left_out
        head = _HEAD.pack(self.step, self.weight, flags, len(self.shares), self.loss, self.norm, self.lr_factor)
        return head + array("f", self.shares).tobytes()


def read_steps(path: Path, first: int = 0) -> Iterator[StepRow]:
    """Yield the undamaged rows from step `first` on. Raises OSError."""
    return (row for row, _ in _rows(path, first))


def _rows(path: Path, first: int = 0) -> Iterator[tuple[StepRow, int]]:
    """Yield each row that fits, and its end. Bytes between two such rows are damaged."""
    with open(open_regular(path), "rb", buffering=_BLOCK) as file:
        size, at, before, layout = os.fstat(file.fileno()).st_size, 0, 0, 0
        while at + _HEAD.size <= size:
            file.seek(at)
            step, weight, flags, groups, loss, norm, lr_factor = _HEAD.unpack(file.read(_HEAD.size))
            end = at + _HEAD.size + 4 * groups
            fits = 0 < groups <= (size - at - _HEAD.size) // 4 and flags <= 3
            shares, after = (file.read(4 * groups), file.read(_STEP.size)) if fits else (b"", b"")
            # A row fits if its step is the next one and its size that of the row before. Where one differs (other
            # ranks, rows lost by a power cut), the row after it must follow: a flipped bit does not make a row.
            follows = end == size or (len(after) == _STEP.size and _STEP.unpack(after)[0] == step + 1)
            fits &= (step == before + 1 or (step > before and follows)) and (groups == layout or follows)
            if not fits:
                at += 4
                continue
            if step >= first:
                marks: dict[str, Any] = {"skipped": bool(flags & _SKIPPED), "left_out": bool(flags & _LEFT_OUT)}
                row = StepRow(step=step, weight=weight, loss=loss, norm=norm, lr_factor=lr_factor, **marks)
                yield replace(row, shares=tuple(array("f", shares))), end
            at, before, layout = end, step, groups


class StepFile(AppendedFile):
    lost = "and a replay has nothing to compare with"

    def __init__(self, path: Path, *, start_step: int) -> None:
        """Cut off the rows of later steps than `start_step`: the launch trains them again. A damaged file is kept as
        steps.bin.damaged, without its damage as steps.bin."""
        self.damage = ""
        """What this launch has found damaged, or missing at the end."""

        def repair(path: Path) -> None:
            if not path.exists():
                return
            steps, size, bytes_of_rows, end, last = set(), 0, 0, 0, _HEAD.size + 4
            for row, end in _rows(path):  # noqa: B007
                bytes_of_rows += (last := _HEAD.size + 4 * len(row.shares))
                if row.step <= start_step:
                    steps.add(row.step)
                    size += last
            # A kill leaves less than a row, at the end.
            is_damaged = end > bytes_of_rows or path.stat().st_size - end >= last
            if is_damaged:
                with open(path, "rb") as file:
                    replace_file(path.with_name(f"{path.name}.damaged"), iter(lambda: file.read(_BLOCK), b""))
                replace_file(path, (row.pack() for row, _ in _rows(path) if row.step <= start_step))
            else:
                os.truncate(path, size)
            if is_damaged or max(steps, default=0) < start_step:
                first = 1 if is_damaged else min(steps, default=1)
                missing = [step for step in range(first, start_step + 1) if step not in steps]
                was = f" was damaged and is kept as {path}.damaged; its readable rows are written again." * is_damaged
                gap = f" A replay cannot compare the steps {units.spans(missing, most=4)}, which have no row."
                self.damage = f"{path}:{was}{gap * bool(missing)}"
                log.warn(self.damage)

        super().__init__(path, repair)

    def append(self, rows: Sequence[StepRow]) -> None:
        self.add(b"".join(row.pack() for row in rows))
