"""Read W&B's offline files back without W&B's server."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 32768
_HEADER = 7
"""Bytes at the beginning of the file, and of each chunk."""


def records(data: bytes) -> Iterator[bytes]:
    """The protobuf records of a .wandb file, which has LevelDB's log format, without one that a kill tore."""
    at, parts = _HEADER, []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if left < _HEADER or kind == 0:  # the rest of the block is empty
            at += left
            continue
        at += _HEADER + length
        if at > len(data):
            return
        parts = [*(parts if kind in (3, 4) else ()), data[at - length : at]]
        if kind in (1, 4):
            yield b"".join(parts)


def read_back(folder: Path) -> dict:
    """Run id, configuration and history rows of one offline folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict = {"config": {}, "rows": [], "metrics": {}, "summary": {}, "exit": None}
    (path,) = folder.glob("*.wandb")
    for payload in records(path.read_bytes()):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["id"] = record.run.run_id
            found["project"] = record.run.project
            found["group"], found["job_type"] = record.run.run_group, record.run.job_type
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            names = [(item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item]
            found["rows"].append({name: json.loads(value) for name, value in names})
        elif kind == "summary":
            names = [(item.key or ".".join(item.nested_key), item.value_json) for item in record.summary.update]
            found["summary"] |= {name: json.loads(value) for name, value in names}
        elif kind == "metric":
            found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found
