"""The weight files of a Hugging Face folder and the tensors in each: as `save_pretrained` cuts them, or as given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.models.layout import FolderLayout, Part
from llmtrain.models.source import SINGLE, SafetensorsSource
from llmtrain.storage.tensorfile import ITEM_BYTES, TensorFile, header_bytes

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""safetensors' name of a type by ours."""
_ORDER = ("F32", "BF16", "F16")  # of the types in a file that the safetensors library writes
MAX_SHARD_BYTES = 5 * 10**9
"""Largest weight file unless asked otherwise: a restart after a kill repeats one file at most."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One weight file."""

    tensors: dict[str, str]
    """Tensor -> safetensors' name of its type, in the order of the file."""
    metadata: dict[str, str]
    align: int
    """The data starts at a multiple of so many bytes."""


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The weight files of a folder."""

    shards: dict[str, Shard]
    """By file name, in the order of writing."""
    parts: dict[str, Part]
    """Part of the model that each tensor is."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ITEM_BYTES[d] * self.parts[t].numel for s in self.shards.values() for t, d in s.tensors.items())

    def dtype_of(self) -> dict[str, str]:
        """Tensor -> safetensors' name of its type."""
        return {tensor: dtype for shard in self.shards.values() for tensor, dtype in shard.tensors.items()}

    def index(self, parameters: int) -> str | None:
        """The text of model.safetensors.index.json as `save_pretrained` writes it; None for a single file."""
        if list(self.shards) == [SINGLE]:
            return None
        weight_map = {tensor: file for file, shard in self.shards.items() for tensor in shard.tensors}
        metadata = {"total_parameters": parameters, "total_size": self.bytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def cut(layout: FolderLayout, dtypes: Mapping[str, str], max_shard_bytes: int) -> WeightFiles:
    """The files that `save_pretrained` writes for a model whose parameters have these types (name -> "F32", ...).

    Tensors go one after another into a file until the next would pass the limit (rule and names:
    huggingface_hub, serialization/_base.py); a tensor above the limit has a file of its own. The experts of a layer,
    views of one parameter, count as one tensor.
    """
    dtype_of = {tensor: dtypes[part.parameter] for tensor, part in layout.tensors.items()}
    members: dict[int, list[str]] = {}
    for tensor in layout.tensors:
        members.setdefault(layout.together[tensor][0], []).append(tensor)
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for tensors in members.values():
        size = layout.together[tensors[0]][1] * ITEM_BYTES[dtype_of[tensors[0]]]
        if size > max_shard_bytes:
            groups.append(tensors)
            continue
        if filled + size > max_shard_bytes:
            groups.append(current)
            current, filled = [], 0
        current += tensors
        filled += size
    groups += [current] if current else []
    total = len(groups)
    names = [SINGLE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    shards = {
        name: Shard(tensors=_in_order(group, dtype_of), metadata={"format": "pt"}, align=8)
        for name, group in zip(names, groups, strict=True)
    }
    return WeightFiles(shards=shards, parts=layout.tensors)


def _in_order(group: list[str], dtype_of: Mapping[str, str]) -> dict[str, str]:
    """The order of the safetensors library."""
    return {tensor: dtype_of[tensor] for tensor in sorted(group, key=lambda name: (_ORDER.index(dtype_of[name]), name))}


def describe(source: SafetensorsSource) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's record of the folder that it came from, and the files that cannot come back byte by byte.

    Tensors that the model computes itself, and those that repeat a tied weight, are left out.
    """
    left_out = {*source.placement.derived, *source.placement.twins}
    files: dict[str, TensorFile] = {file.path.name: file for file in source.file_of.values()}
    known, changed = {}, []
    for name, file in sorted(files.items()):
        entries = sorted(file.entries.items(), key=lambda item: (item[1].begin, item[1].end))
        kept = {tensor: entry.dtype for tensor, entry in entries if tensor not in left_out}
        held = {tensor: (entry.dtype, entry.shape) for tensor, entry in entries}
        written = next((a for a in (8, 1) if _begins(file, header_bytes(held, file.metadata, a))), None)
        if written is None or len(kept) < len(entries):
            changed.append(name)
        if kept:
            known[name] = {"tensors": kept, "metadata": file.metadata, "align": written or 8}
    return known, changed


def _begins(file: TensorFile, header: bytes) -> bool:
    with open(file.path, "rb") as handle:
        return handle.read(file.bytes - sum(e.end - e.begin for e in file.entries.values())) == header


def as_described(layout: FolderLayout, known: Mapping[str, Any]) -> WeightFiles:
    """The files that `describe` remembered."""
    shards = {name: Shard(**fields) for name, fields in known.items()}
    placement = layout.place(tensor for shard in shards.values() for tensor in shard.tensors)
    parts = {tensor: part for parts in placement.parts.values() for tensor, part in parts}
    return WeightFiles(shards=shards, parts=parts)
