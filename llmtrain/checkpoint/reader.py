"""Reads slices of a checkpoint's tensors, from any number of files. Also a ParameterSource."""

from __future__ import annotations

import resource
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import Manifest, keys, misfit, open_file
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.pieces import DTYPE_OF, read_shared
from llmtrain.storage.region import Region, Shared, shared
from llmtrain.storage.tensorfile import TensorFile, TensorFileError


@dataclass(frozen=True)
class _Held:
    region: Region
    file: str
    """Name in the checkpoint's folder; for a frozen parameter the path of the file in its model's folder."""
    key: str


class CheckpointReader:
    """Reads tensors for several threads, without a cache. Raises CheckpointError if the checkpoint is damaged."""

    def __init__(self, folder: Path, manifest: Manifest | None = None, parameters: str = PARAM) -> None:
        """`parameters`: kind of tensor, such as an average, that is read in place of each parameter that has one."""
        self.folder = folder
        self.origin = f"resume: {folder}"
        self.manifest = manifest or Manifest.read(folder)
        self._where: dict[tuple[str, str], list[_Held]] = {}
        """(kind, name) -> pieces, in the order of their first elements."""
        for file, entry in self.manifest.files.items():
            for key, piece in zip(keys(entry.pieces), entry.pieces, strict=True):
                self._where.setdefault((piece.kind, piece.name), []).append(_Held(piece.region, file, key))
        source = self.manifest.frozen
        for name, pieces in source.parts.items():
            self._where[PARAM, name] = [_Held(r, str(source.folder / file), tensor) for file, tensor, r in pieces]
        self._instead = {name for kind, name in self._where if kind == parameters != PARAM}
        self._kind = parameters
        for name in self._instead:
            self._where[PARAM, name] = self._where[parameters, name]
        for parts in self._where.values():
            parts.sort(key=lambda piece: piece.region.first)
        self._strided = {key for key, parts in self._where.items() if not all(p.region.contiguous for p in parts)}
        self._files: dict[str, TensorFile] = {}
        # A checkpoint of a thousand ranks has more files than a process may hold open by default.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self.manifest.files) > soft // 2 and soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._lock = threading.Lock()

    def checksums(self) -> dict[tuple[str, str], int]:
        """Return (kind, name) -> checksum of the values that `read_kind` returns."""
        sums = self.manifest.checksums()
        return sums | {(PARAM, name): sums[self._kind, name] for name in self._instead}

    def tensors(self) -> set[tuple[str, str]]:
        return set(self._where)

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._where}

    def order(self) -> list[str]:
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.manifest.tensors[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements of a parameter in fp32."""
        return self.read_kind(PARAM, name, start, stop)

    def read_region(self, name: str, region: Region) -> Tensor:
        """Return a region of a parameter in fp32."""
        return self.read_kind_region(PARAM, name, region)

    def read_kind(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flat parameter or moment in fp32. Raises CheckpointError."""
        return self.read_kind_region(kind, name, Region(start, stop - start))

    def read_kind_region(self, kind: str, name: str, region: Region) -> Tensor:
        """Return a region of a parameter or moment in fp32. Raises CheckpointError, also when a part is missing."""
        wanted = list(self._overlapping(kind, name, region))
        for piece, _ in wanted:
            self._check_piece(piece)  # before memory is allocated for its elements
        overlap = sum(some.rows * some.length for _, rows in wanted for some in rows)
        if overlap < region.numel:
            raise CheckpointError(f"{self.folder} holds {overlap} of {region.numel} elements of {kind} of {name}.")
        out = torch.empty(region.numel, dtype=torch.float32)
        for piece, rows in wanted:
            file = self._open(piece.file)
            try:
                for some in rows:
                    read_shared(file, piece.key, some, out)
            except TensorFileError as error:
                raise self._error(piece.file, str(error)) from error
        return out

    def files_of(self, kind: str, name: str, region: Region) -> set[str]:
        """Return the checkpoint's files that a read of the region opens. Raises CheckpointError."""
        return {piece.file for piece, _ in self._overlapping(kind, name, region)} & self.manifest.files.keys()

    def _overlapping(self, kind: str, name: str, region: Region) -> Iterator[tuple[_Held, list[Shared]]]:
        """Yield the pieces that overlap the region, with the common elements."""
        parts = self._where.get((kind, name))
        if parts is None:
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}.")
        index = 0
        if (kind, name) not in self._strided:  # each piece then begins where the previous one ends
            index = max(0, bisect_right(parts, region.first, key=lambda piece: piece.region.start) - 1)
        for piece in parts[index:]:
            if piece.region.first >= region.end:
                return
            rows = list(shared(region, piece.region))
            if rows:
                yield piece, rows

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def check(self, file: str) -> None:
        """Raise CheckpointError if the header of a rank's file does not list the pieces in the manifest."""
        entry = self.manifest.files[file]
        handle = self._open(file)
        if handle.bytes != entry.bytes:
            raise CheckpointError(f"{self.folder / file} has {handle.bytes} bytes instead of {entry.bytes}.")
        if odd := misfit(handle, entry):
            raise CheckpointError(f"{self.folder / file} does not hold what the manifest says: see {odd}.")

    def frozen_types(self) -> dict[str, str]:
        """Return frozen parameter -> dtype in its folder, unless its parts have several. Raises FrozenSourceError."""
        types: dict[str, str] = {}
        for name in self.manifest.frozen.parts:
            for piece in self._where[PARAM, name]:
                self._check_piece(piece)
            first, *others = {self._open(piece.file).entries[piece.key].dtype for piece in self._where[PARAM, name]}
            types |= {} if others else {name: first}
        return types

    def _check_piece(self, piece: _Held) -> None:
        entry = self._open(piece.file).entries.get(piece.key)
        if entry is None or entry.dtype not in DTYPE_OF or entry.numel != piece.region.numel:
            place = self.folder / piece.file
            raise self._error(piece.file, f"{place} does not hold what the manifest says: see {piece.key}.")

    def _error(self, file: str, text: str) -> CheckpointError:
        return CheckpointError(text) if file in self.manifest.files else self.manifest.frozen.error(text)

    def _open(self, file: str) -> TensorFile:
        with self._lock:
            if file not in self._files:
                path = self.folder / file
                try:
                    mine = file in self.manifest.files  # a model's folder may hold links, as the Hub's cache does
                    self._files[file] = TensorFile(path, open_file(path) if mine else None)
                except OSError as error:
                    host = self.manifest.elsewhere(self.folder).get(file)
                    where = f"; it is on {host}: copy the files of all hosts into one folder" if host else ""
                    raise CheckpointError(f"{path} cannot be opened: {error.strerror}{where}") from error
                except TensorFileError as error:
                    raise self._error(file, str(error)) from error
            return self._files[file]
