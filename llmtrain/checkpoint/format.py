"""The checkpoint on disk: names, the manifest, and how to tell a complete one. No torch.

checkpoints/step-00000500/
  rank-00000.safetensors   the flat slices that this rank owned, `kind/NAME`
  trainer.json             step, tokens, data position, loss scaler, ids, the resolved run
  manifest.json            written last: no manifest, no checkpoint
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llmtrain.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
_STEP_DIR = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the checkpoint and what it holds."""

    bytes: int
    xxh3: str
    """xxh3-64 of the whole file, hexadecimal."""
    fragments: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(kind, Hugging Face name, first element in the flat tensor, elements)."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The table of contents; its presence makes the folder a checkpoint."""

    step: int
    tensors: dict[str, list[int]]
    """Full shape by Hugging Face name."""
    checksums: dict[str, int]
    """Layout-free checksum of each assembled fp32 parameter (models/checksum.py)."""
    files: dict[str, FileEntry]
    layout: dict[str, Any]
    """How it was saved, for people: ranks, ZeRO stage, precision."""
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=None, separators=(",", ":"))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError when there is none, or it is not one."""
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text())
            if raw["format"] != FORMAT:
                raise CheckpointError(
                    f"{path}: format {raw['format']} is not the format {FORMAT} that this version reads."
                )
            files = {}
            for name, entry in raw["files"].items():
                if Path(name).name != name:
                    raise CheckpointError(f"{path}: the file name {name!r} leaves the checkpoint's folder.")
                entry["fragments"] = [(str(k), str(n), int(s), int(c)) for k, n, s, c in entry["fragments"]]
                files[name] = FileEntry(**entry)
            raw["files"] = files
            return cls(**raw)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}.") from None
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a manifest: {error!r}") from error


def step_folder(checkpoints: Path, step: int) -> Path:
    """checkpoints/step-00000500."""
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, or None for any other name."""
    match = _STEP_DIR.fullmatch(folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders that have a manifest, newest step first."""
    found = [p for p in _children(checkpoints) if step_of(p) is not None and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


def stale_folders(checkpoints: Path) -> list[Path]:
    """What a killed save or a killed deletion left behind."""
    return [p for p in _children(checkpoints) if p.name.endswith(".tmp")]


def _children(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (p for p in folder.iterdir() if p.is_dir())


def read_trainer(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint. Raises CheckpointError."""
    try:
        return json.loads((folder / TRAINER).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / TRAINER} cannot be read: {error}") from error


def hash_file(path: Path) -> str:
    """xxh3-64 of a file, hexadecimal; 8 MiB at a time."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()


def problems(folder: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """What is wrong with these files of a checkpoint: missing, another size, another checksum."""
    found = []
    for name in names:
        path, entry = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                found.append(f"{name} has {size} bytes instead of {entry.bytes}")
            elif hash_file(path) != entry.xxh3:
                found.append(f"{name} is damaged: its checksum differs from the manifest")
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def sync(path: Path) -> None:
    """fsync a file or a folder: rename alone does not survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_checkpoint(folder: Path) -> None:
    """Delete so that a kill in the middle leaves no checkpoint that looks complete."""
    doomed = folder.with_name(folder.name + ".tmp") if not folder.name.endswith(".tmp") else folder
    if doomed != folder:
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
