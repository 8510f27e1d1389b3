"""Slices of the tensors of one checkpoint, from whichever files hold them. Also a ParameterSource."""

from __future__ import annotations

import resource
import threading
from bisect import bisect_right
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.checkpoint.format import PARAM, Manifest, misfit, open_file
from llmtrain.errors import CheckpointError
from llmtrain.models.source import DTYPE_OF, byte_view
from llmtrain.models.tensorfile import TensorFile, TensorFileError


class CheckpointReader:
    """Reads are safe from several threads. Nothing is cached or mapped: a read costs its own bytes and no more.

    Raises:
        CheckpointError: no checkpoint, or its files do not hold what its manifest says.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.origin = f"resume: {folder}"
        self.manifest = manifest or Manifest.read(folder)
        self._where: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        for file, entry in self.manifest.files.items():
            for piece in entry.pieces:
                self._where.setdefault((piece.kind, piece.name), []).append((piece.start, piece.numel, file))
        for parts in self._where.values():
            parts.sort()
        self._files: dict[str, TensorFile] = {}
        _allow_open_files(len(self.manifest.files))
        self._lock = threading.Lock()

    def tensors(self) -> set[tuple[str, str]]:
        """(kind, name) of everything that it holds."""
        return set(self._where)

    def kinds(self) -> set[str]:
        """param and the optimizer's moments."""
        return {kind for kind, _ in self._where}

    def order(self) -> list[str]:
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.manifest.tensors[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """fp32 values [start, stop) of the flat parameter."""
        return self.read_kind(PARAM, name, start, stop)

    def read_kind(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """The same for a moment of the optimizer. Raises CheckpointError."""
        parts = self._where.get((kind, name))
        if parts is None:
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}.")
        index = max(0, bisect_right(parts, (start, 2**63, "")) - 1)
        wanted = []
        for first, count, file in parts[index:]:
            if first >= stop:
                break
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                self._check_piece(file, f"{kind}/{name}", count)  # before memory is taken for what it claims
                wanted.append((file, low - first, slice(low - start, high - start)))
        out = torch.empty(stop - start, dtype=torch.float32)
        for file, offset, place in wanted:
            self._read_piece(file, f"{kind}/{name}", offset, out[place])
        return out

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def check(self, file: str) -> None:
        """Whether a rank file holds the pieces that the manifest lists, by its header. Raises CheckpointError."""
        entry = self.manifest.files[file]
        handle = self._open(file)
        if handle.bytes != entry.bytes:
            raise CheckpointError(f"{self.folder / file} has {handle.bytes} bytes instead of {entry.bytes}.")
        if odd := misfit(handle, entry):
            raise CheckpointError(f"{self.folder / file} does not hold what the manifest says: see {odd}.")

    def _check_piece(self, file: str, key: str, count: int) -> None:
        entry = self._open(file).entries.get(key)
        if entry is None or entry.dtype not in DTYPE_OF or entry.numel != count:
            raise CheckpointError(f"{self.folder / file} does not hold what the manifest says: see {key}.")

    def _read_piece(self, file: str, key: str, start: int, out: Tensor) -> None:
        handle = self._open(file)
        try:
            dtype = DTYPE_OF[handle.entries[key].dtype]
            raw = out if dtype == out.dtype else torch.empty(out.numel(), dtype=dtype)
            handle.read_into(key, start, byte_view(raw))
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error
        if raw is not out:
            out.copy_(raw)

    def _open(self, file: str) -> TensorFile:
        with self._lock:
            if file not in self._files:
                path = self.folder / file
                try:
                    self._files[file] = TensorFile(path, open_file(path))
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
                except TensorFileError as error:
                    raise CheckpointError(str(error)) from error
            return self._files[file]


def _allow_open_files(count: int) -> None:
    """A checkpoint of a thousand ranks has more files than a process may hold open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count > soft // 2 and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
