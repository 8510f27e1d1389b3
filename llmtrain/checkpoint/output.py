"""Output of a conversion: streamed, restartable after a kill, and complete or absent; also as a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import CheckpointError, UserError
from llmtrain.base.files import lock_folder
from llmtrain.checkpoint.durable import DurableFile, remove_tree, sync, write_durably
from llmtrain.checkpoint.format import MANIFEST, TRAINER, FileEntry, Manifest, Piece
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum
from llmtrain.storage.pieces import byte_view
from llmtrain.storage.region import whole
from llmtrain.storage.tensorfile import ITEM_BYTES, header_bytes, numel

JOURNAL = "unfinished.jsonl"
_CHUNK = 4 << 20  # elements read, converted and written at a time
_READERS = 2


def claim(partial: Path) -> int:
    """Make a folder to write into, and lock it. Returns the handle that holds the lock. Raises CheckpointError."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        return lock_folder(partial)
    except BlockingIOError:
        raise CheckpointError(f"{partial} is being written by another process. Wait for it.") from None
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be made: {error.strerror}. Give another folder.") from error


class OutputFolder:
    """A folder that has its final name only after `commit`. Until then it is NAME.tmp, with a journal of the finished
    files, and after a kill the same conversion (one with an equal `plan`) continues it. A UserError inside the context
    removes it. Raises CheckpointError: when the folder exists, another process writes it, or it cannot be made."""

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out = out
        self.partial = out.with_name(out.name + ".tmp")
        self._plan = json.loads(json.dumps(plan))
        self._finished: dict[str, Any] = {}

    def __enter__(self) -> OutputFolder:
        if self.out.exists():
            raise CheckpointError(f"{self.out} exists already; nothing was written. Give another name or move it away.")
        self._made = [folder for folder in self.partial.parents if not folder.exists()]
        self._lock = claim(self.partial)
        self._read_plan()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):
            remove_tree(self.partial)
            with contextlib.suppress(OSError):  # a folder with other contents stays
                for folder in self._made:
                    folder.rmdir()
        os.close(self._lock)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{self.partial} cannot be written: {error.strerror}. Fix the cause and start the same command again: "
                f"it continues there. Or delete the folder."
            ) from error

    def need(self, total_bytes: int) -> None:
        """Raise CheckpointError if the disk has no room for `total_bytes`, less those of finished files."""
        have = sum(info["bytes"] for info in self._finished.values())
        free = shutil.disk_usage(self.partial).free
        if total_bytes - have > free:
            raise CheckpointError(
                f"no space for {self.out}: it needs {units.size(total_bytes - have)}, {units.size(free)} are free."
            )

    def file(self, name: str, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Call `write` to make the file, unless an earlier start has finished it. Records and returns what `write`
        returns, a dict with at least "bytes"."""
        if name not in self._finished:
            info = write(self.partial / name)
            with open(self.partial / JOURNAL, "a") as journal:
                journal.write(json.dumps({"file": name, "info": info}) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
            self._finished[name] = json.loads(json.dumps(info))
        return self._finished[name]

    def commit(self) -> Path:
        """Give the folder its final name. Syncs every file and folder in it before."""
        (self.partial / JOURNAL).unlink()
        for path in [*self.partial.rglob("*"), self.partial]:
            sync(path)
        self.partial.rename(self.out)
        sync(self.out.parent)
        return self.out

    def _read_plan(self) -> None:
        journal = self.partial / JOURNAL
        lines = journal.read_text().splitlines() if journal.is_file() else []
        with contextlib.suppress(ValueError):
            if lines and untrusted.loads(lines[0]) == self._plan:
                for line in lines[1:]:
                    entry = untrusted.loads(line)
                    path = self.partial / entry["file"]
                    if path.is_file() and path.stat().st_size == entry["info"]["bytes"]:
                        self._finished[entry["file"]] = entry["info"]
        if self._finished:
            log.info(f"continuing {self.partial}: {len(self._finished)} files are finished")
        for path in list(self.partial.rglob("*")):
            if not path.is_dir() and str(path.relative_to(self.partial)) not in self._finished:
                path.unlink()
        with open(journal, "w") as file:
            file.write(json.dumps(self._plan) + "\n")
            for name, info in self._finished.items():
                file.write(json.dumps({"file": name, "info": info}) + "\n")


def stream_tensors(
    path: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str, int, int], Tensor],
    *,
    metadata: dict[str, str] | None = None,
    align: int = 8,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write a safetensors file {name: (dtype, shape)} in this order; a few chunks of 4 M elements are in memory.

    Args:
        read: (name, start, stop) -> the flat elements in the tensor's dtype; called from several threads.
        align: the data starts at a multiple of this number of bytes.
        advance: gets the bytes written.

    Returns {"bytes", "xxh3"} of the durable file. Raises OSError.
    """
    with DurableFile(path) as file:
        file.write(memoryview(header_bytes(tensors, metadata or {}, align)))
        for name, chunk in _read_ahead(tensors, read):
            data = byte_view(chunk.contiguous())
            assert chunk.element_size() == ITEM_BYTES[tensors[name][0]], name
            file.write(data)
            advance(data.nbytes)
        size, xxh3 = file.close()
    return {"bytes": size, "xxh3": xxh3}


def _read_ahead(
    tensors: dict[str, tuple[str, tuple[int, ...]]], read: Callable[[str, int, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read-ahead") as pool:
        waiting: deque[tuple[str, Future[Tensor]]] = deque()
        try:
            for name, (_, shape) in tensors.items():
                total = numel(shape)
                for start in range(0, total, _CHUNK):
                    waiting.append((name, pool.submit(read, name, start, min(total, start + _CHUNK))))
                    if len(waiting) > _READERS:
                        first, chunk = waiting.popleft()
                        yield first, chunk.result()
            while waiting:
                first, chunk = waiting.popleft()
                yield first, chunk.result()
        finally:
            for _, left in waiting:
                left.cancel()


_FILE_BYTES = 4 << 30

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name in the file -> (dtype, shape)."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint that a conversion makes: complete fp32 tensors."""

    step: int
    shapes: Mapping[str, tuple[int, ...]]
    """By Hugging Face name."""
    moments: Mapping[str, set[str]] = field(default_factory=dict)
    """Kind of optimizer moments -> names of the parameters that have it. Empty: parameters alone."""
    read: Callable[[str, str, int, int], Tensor]
    """(kind, name, start, stop) -> those elements of the flat tensor in fp32; called from several threads."""
    trainer: dict[str, Any]
    layout: dict[str, Any]


def build_checkpoint(
    out: Path,
    contents: Contents,
    plan: dict[str, Any],
    *,
    advance: Callable[[int], None] = lambda count: None,
    read_again: bool = True,
) -> Path:
    """Write the checkpoint folder `out` (for example step-00000500).

    Args:
        plan: identifies the conversion; a restart with an equal plan continues it.
        advance: gets the bytes written.
        read_again: read every byte back before the folder gets its name; False if the caller does that.

    Raises:
        CheckpointError: as OutputFolder, or when a file that is read back is damaged.
    """
    shapes, moments = contents.shapes, contents.moments
    keys = {f"{kind}/{name}": (kind, name) for kind, names in {PARAM: set(shapes), **moments}.items() for name in names}
    groups = _files(keys, shapes)

    def write(path: Path, group: Tensors) -> dict[str, Any]:
        sums: dict[str, dict[int, int]] = {key: {} for key in group}  # by chunk: several threads add chunks

        def chunk(key: str, start: int, stop: int) -> Tensor:
            values = contents.read(*keys[key], start, stop).float()
            sums[key][start] = checksum(values, start)
            return values

        info = stream_tensors(path, group, chunk, align=4096, advance=advance)
        return {**info, "sums": {key: sum(parts.values()) % 2**64 for key, parts in sums.items()}}

    with OutputFolder(out, plan) as folder:
        folder.need(sum(4 * numel(shape) for group in groups for _, shape in group.values()) + (16 << 20))
        files: dict[str, FileEntry] = {}
        for index, group in enumerate(groups):
            name = f"rank-{index:05d}.safetensors"
            info = folder.file(name, lambda path, group=group: write(path, group))  # type: ignore[misc]
            pieces = [Piece(*keys[key], whole(shape), info["sums"][key]) for key, (_, shape) in group.items()]
            files[name] = FileEntry(bytes=info["bytes"], xxh3=info["xxh3"], pieces=pieces)
        size, xxh3 = write_durably(folder.partial / TRAINER, json.dumps(contents.trainer, indent=1))
        files[TRAINER] = FileEntry(bytes=size, xxh3=xxh3)
        tensors = {name: list(shape) for name, shape in shapes.items()}
        manifest = Manifest(step=contents.step, tensors=tensors, files=files, layout=contents.layout)
        write_durably(folder.partial / MANIFEST, manifest.to_json())
        if read_again:
            from llmtrain.checkpoint.verify import verify

            if wrong := verify(folder.partial):
                raise CheckpointError(
                    f"{out} was not written: its files differ when they are read back: {wrong[0]}. Nothing was kept."
                )
        return folder.commit()


def _files(keys: Mapping[str, tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]) -> list[Tensors]:
    place = {name: index for index, name in enumerate(shapes)}
    groups: list[Tensors] = [{}]
    size = 0
    for key, (_, name) in sorted(keys.items(), key=lambda item: (place[item[1][1]], item[0])):
        grows = 4 * numel(shapes[name])
        if groups[-1] and size + grows > _FILE_BYTES:
            groups.append({})
            size = 0
        groups[-1][key] = ("F32", shapes[name])
        size += grows
    return groups
