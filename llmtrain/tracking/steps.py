"""steps.bin: loss, gradient norm and rate of each step, and the loss by data-parallel group.

A row has a head of 48 bytes and 4 bytes for each group, little-endian. Rows are appended in the order of their steps; a
kill leaves at most one torn row, the last, which is cut off when the file is opened again.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.tracking.local import AppendedFile

STEPS = "steps.bin"
LOOKS = "replay.jsonl"
"""File of a replay with a line for each step."""
REPLAYED = "LLMTRAIN_REPLAY"
"""Environment variable with the task of a replay's ranks, as JSON."""
_HEAD = struct.Struct("<QQIIddd")
_SKIPPED, _LEFT_OUT = 1, 2


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step as the run has computed it; equal to the bit in a replay on the same ranks."""

    step: int
    """Steps done after it: the first step is 1."""
    weight: int
    """Divisor of the loss: tokens or pairs."""
    loss: float
    """Mean over the global batch; NaN without a counted token."""
    norm: float
    """Gradient norm as in metrics.jsonl; NaN if there is none."""
    lr_factor: float
    skipped: bool
    """Its update was not applied: the loss or gradient was not finite, or no token counted."""
    left_out: bool
    """Its update was left out as an outlier (optim.skip_outliers)."""
    shares: tuple[float, ...]
    """Sum of each data-parallel group's losses, fp32."""

    def pack(self) -> bytes:
        flags = _SKIPPED * self.skipped + _LEFT_OUT * self.left_out
        head = _HEAD.pack(self.step, self.weight, flags, len(self.shares), self.loss, self.norm, self.lr_factor)
        return head + array("f", self.shares).tobytes()


def read_steps(path: Path, first: int = 0) -> Iterator[StepRow]:
    """Yield complete rows from step `first` on. Raises OSError."""
    with open(path, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            step, weight, flags, groups, loss, norm, lr_factor = _HEAD.unpack(head)
            if step < first:
                file.seek(4 * groups, os.SEEK_CUR)
                continue
            if len(body := file.read(4 * groups)) < 4 * groups:
                return
            yield StepRow(step=step, weight=weight, loss=loss, norm=norm, lr_factor=lr_factor,
                          skipped=bool(flags & _SKIPPED), left_out=bool(flags & _LEFT_OUT),
                          shares=tuple(array("f", body)))  # fmt: skip


class StepFile(AppendedFile):
    lost = "and a replay has nothing to compare with"

    def __init__(self, path: Path, *, start_step: int) -> None:
        """Cut off the rows of later steps than `start_step`: the launch trains them again."""

        def repair(path: Path) -> None:
            if not path.exists():
                return
            size = 0
            for row in read_steps(path):
                if row.step > start_step:
                    break
                size += len(row.pack())
            os.truncate(path, size)

        super().__init__(path, repair)

    def append(self, rows: Sequence[StepRow]) -> None:
        self.add(b"".join(row.pack() for row in rows))
