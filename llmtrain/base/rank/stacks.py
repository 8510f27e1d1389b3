"""Where a rank is: frames of its Python stack, and NCCL's flight recorder."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


_WRAPS = ("llmtrain/base/rank/heartbeat.py", "llmtrain/engine/ranks/ranks.py")
"""Files whose functions wrap every collective: the line that calls them says more."""


def place(frame: Frame) -> str:
    return f"{short(frame.file)}:{frame.line} ({frame.function})"


def short(file: str) -> str:
    """Return the path from the package's folder on; for other files the last two parts."""
    for package in ("llmtrain/", "deepspeed/", "torch/", "transformers/"):
        _, mark, tail = file.rpartition(f"/{package}")
        if mark:
            return package + tail
    return "/".join(file.split("/")[-2:])


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of libraries, or None."""
    own_frames = [f for f in stack if "/llmtrain/" in f.file or not re.search(r"/lib(64)?/python[\d.]+/", f.file)]
    around = [f for f in own_frames if not f.file.endswith(_WRAPS)]
    return next(iter(around or own_frames or stack), None)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What NCCL's flight recorder has on one rank for one process group."""

    group: str
    """The group's name, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group's members."""
    begun: int
    """Number of the newest collective that this rank has queued on its device; 0: none is recorded."""
    pending: int = 0
    """Number of the oldest collective that has not ended on the device; 0: all have ended."""
    name: str = ""
    """Name of the pending collective."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Recorded:
        """Parse the `vars` of a `Recorded`. Raises TypeError, KeyError, ValueError."""
        numbers = {key: int(raw[key]) for key in ("begun", "pending")}
        return cls(group=str(raw["group"]), ranks=tuple(map(int, raw["ranks"])), name=str(raw["name"]), **numbers)


def excerpt(trace: Mapping[str, Any]) -> list[Recorded]:
    """Return a `Recorded` for each group in `_dump_nccl_trace_json`, without point-to-point calls, whose numbers differ
    by rank."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in trace.get("entries", ()):
        if not entry["is_p2p"]:
            groups.setdefault(str(entry["process_group"][0]), []).append(entry)
    records = []
    for group, entries in groups.items():
        about = trace["pg_config"].get(group, {})
        open_ = [entry for entry in entries if entry["state"] != "completed"]
        oldest = min(open_, key=_number) if open_ else None
        records.append(
            Recorded(
                group=group,
                ranks=tuple(ast.literal_eval(about.get("ranks") or "[]")),
                begun=max(map(_number, entries)),
                pending=0 if oldest is None else _number(oldest),
                name="" if oldest is None else str(oldest["profiling_name"]).removeprefix("nccl:"),
            )
        )
    return records


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])
