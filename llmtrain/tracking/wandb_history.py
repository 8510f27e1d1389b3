"""Steps of a run that W&B has already, and those to be sent again from metrics.jsonl.

W&B's own step, `_step`, is the training step. It can only grow: the server and `wandb sync` move a row whose step is
taken to the next free one. So each step must be sent once over all launches, and offline there is no server to ask:
the files of the earlier launches tell.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.tracking.local import read_rows

_BLOCK = 32768  # LevelDB's log format: chunks never cross a block
_HEADER = 7  # of the file, and of each chunk
_TAIL_BLOCKS = 64  # 2 MiB: many log points, and a moment to read


def records(path: Path, first_block: int = 0) -> Iterator[tuple[bytes, int]]:
    """(protobuf record, offset of its end) of a .wandb file, from the first that begins in block `first_block` on.

    The file is a 7-byte header, then LevelDB's log format: blocks of 32 KiB, chunks of checksum, length and kind. A
    record that a kill tore is left out.
    """
    with open(path, "rb") as stream:
        stream.seek(first_block * _BLOCK)
        data = stream.read()
    at = 0 if first_block else _HEADER
    parts: list[bytes] | None = None
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0:  # the writer left the rest of the block empty
            at += left
            continue
        at += _HEADER
        if at + length > len(data):
            return
        if kind in (1, 2):  # a whole record, or the first chunk of one
            parts = []
        if parts is not None:
            parts.append(data[at : at + length])
        at += length
        if parts is not None and kind in (1, 4):
            yield b"".join(parts), first_block * _BLOCK + at
            parts = None


def _last_step(path: Path) -> tuple[int, int]:
    """(step of the last history row in a .wandb file, -1 when it has none; offset where its last whole record ends)."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # chosen when it is imported

    last = end = -1
    blocks = path.stat().st_size // _BLOCK
    for first_block in dict.fromkeys((max(0, blocks - _TAIL_BLOCKS), 0)):
        for payload, offset in records(path, first_block):
            end = offset
            try:
                record = Record.FromString(payload)
            except DecodeError:
                continue
            if record.WhichOneof("record_type") == "history":
                last = record.history.step.num
        if last >= 0:
            break
    return last, end


def earlier_launches(run_dir: Path, run_id: str) -> dict[Path, int]:
    """The .wandb file of each earlier launch of the W&B run, and the last step in it (-1: none); no unreadable ones.

    A record that a kill tore is cut off: `wandb sync` would stop there, and upload no later launch.
    """
    found = {}
    for path in sorted((run_dir / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        try:
            found[path], end = _last_step(path)
            if end < 0:
                mark_uploaded(path)  # there is nothing in it
            elif end < path.stat().st_size:
                os.truncate(path, end)
        except (OSError, ImportError, AttributeError):  # W&B's private modules may move
            continue
    return found


def mark_uploaded(path: Path) -> None:
    """`wandb sync` leaves the file alone from now on: its rows have been sent another way, or it has none."""
    path.with_suffix(".wandb.synced").touch()


def rows_after(metrics: Path, size: int, step: int) -> list[dict[str, Any]]:
    """The rows of the first `size` bytes of metrics.jsonl whose step is above `step`, one for each step."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(metrics, size)[0]:
        if isinstance(at := row.get("step"), int) and at > step:
            merged[at] = {**merged.get(at, {}), **{key: _number(value) for key, value in row.items()}}
    return [merged[at] for at in sorted(merged)]


def _number(value: Any) -> Any:
    """JSON has no NaN and infinities: metrics.jsonl spells them as strings."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
