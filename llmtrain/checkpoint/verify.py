"""Verification of a checkpoint against its manifest, byte by byte. No torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmtrain.base.errors import CheckpointError
from llmtrain.base.log import Progress
from llmtrain.checkpoint.format import (
    MANIFEST,
    OUTER,
    TRAINER,
    TYPES,
    FileEntry,
    FrozenSource,
    FrozenSourceError,
    Manifest,
    Piece,
    hash_file,
    keys,
    misfit,
    open_file,
    problems,
)
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.writer import as_fp32
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum_part_array
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import ITEM_BYTES, TensorFile, TensorFileError

_CHUNK = 4 << 20  # elements
_NAMED = 5  # damaged tensors of a file that are named
_RANK_FILE = re.compile(r"rank-([0-9]+)\.safetensors")


def verify(
    folder: Path,
    *,
    whole: bool = True,
    filled: Callable[[Path], contextlib.AbstractContextManager[None]] = lambda path: contextlib.nullcontext(),
) -> list[str]:
    """Return the faults of a checkpoint, one line each, after reading every byte on all cores.

    The frozen parameters are left to `verify_frozen`. `whole`: False if files in other hosts' folders may be missing.
    `filled`: context in which a file has its contents, not only its size.
    """
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return [str(error).replace(f"{folder}/", "")]
    files = sorted(manifest.files.keys() - (set() if whole else manifest.elsewhere(folder).keys()))
    total = sum(manifest.files[name].bytes for name in files)
    with Progress(f"verifying {folder.name}", total) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(_verify_file, folder, name, manifest, bar.advance, filled) for name in files}
        wrong = {name: problem for name, job in jobs.items() if (problem := job.result())}
    lines = []
    for name, text in wrong.items():
        of_rank = _RANK_FILE.fullmatch(name)
        lines.append(f"{name} (rank {int(of_rank[1])}): {text}" if of_rank else f"{name}: {text}")
    if len(wrong) == len(files) > 1 and all((folder / name).exists() for name in wrong):
        lines.insert(0, f"{MANIFEST} seems to belong to another checkpoint: no file has the contents that it lists")
    if TRAINER not in wrong:
        try:
            lines += TrainerState.read(folder).disagreements(folder, manifest)
        except CheckpointError as error:
            lines.append(str(error).replace(f"{folder}/", ""))
    return lines


def verify_frozen(folder: Path) -> list[str]:
    """Return the fault of the frozen parameters, after reading all their bytes; [] if none, or without a valid
    manifest."""
    try:
        changed = wrong_frozen(Manifest.read(folder).frozen)
    except CheckpointError:
        return []
    return [str(changed)] if changed else []


def wrong_frozen(source: FrozenSource, names: Iterable[str] | None = None) -> FrozenSourceError | None:
    """Compare the frozen parameters (only those of `names`) with their checksums. Returns the error, or None."""
    some = source.only(source.parts.keys() if names is None else set(names))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            files = {path.name: stack.enter_context(TensorFile(path)) for path in some.files()}
            sums = list(pool.map(lambda name: _frozen_sum(some, files, name), some.parts))
        except TensorFileError as error:
            return some.error(str(error))
    bad = [name for name, total in zip(some.parts, sums, strict=True) if total != some.checksums[name]]
    if not bad:
        return None
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return some.error(f"{some.folder} has other values of {', '.join(bad[:_NAMED])}{more} than the manifest says")


def _frozen_sum(source: FrozenSource, files: dict[str, TensorFile], name: str) -> int | None:
    """Return the checksum of a frozen parameter; None if the folder's files lack a part."""
    total = 0
    for file, tensor, region in source.parts[name]:
        entry = files[file].entries.get(tensor)
        if entry is None or entry.dtype not in TYPES or entry.numel != region.numel:
            return None
        total += _checksum(files[file], tensor, Piece(PARAM, name, region, 0))
    return total % 2**64


def _verify_file(
    folder: Path,
    name: str,
    manifest: Manifest,
    advance: Callable[[int], None],
    filled: Callable[[Path], contextlib.AbstractContextManager[None]],
) -> str:
    entry = manifest.files[name]
    faults = problems(folder, manifest, [name], contents=False)
    if faults:
        return faults[0].removeprefix(name).lstrip(": ")
    try:
        with filled(folder / name):
            intact = hash_file(folder / name, advance) == entry.xxh3
            if not entry.pieces:
                return "" if intact else "its contents differ from the manifest"
            return _wrong_pieces(folder / name, entry, intact)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except TensorFileError as error:
        return f"its header is damaged: {str(error).replace(f'{folder}/{name}', 'the file')}"


def _wrong_pieces(path: Path, entry: FileEntry, intact: bool) -> str:
    """Compare the header with the manifest, and list damaged pieces unless `intact`. Raises TensorFileError."""
    with TensorFile(path, open_file(path)) as file:
        if odd := misfit(file, entry):
            return f"its tensors are not those in the manifest: see {odd}"
        strange = [key for key, entry in file.entries.items() if entry.dtype not in TYPES]
        if strange:
            return f"{strange[0]} has the type {file.entries[strange[0]].dtype}, which no checkpoint has"
        if intact:
            return ""
        named = zip(keys(entry.pieces), entry.pieces, strict=True)
        bad = [piece for key, piece in named if _checksum(file, key, piece) != piece.checksum]
    if not bad:
        return "its header or the padding behind it was changed; its tensors are intact"
    texts = [f"{piece.kind} of {piece.name} [{_where(piece.region)}]" for piece in bad[:_NAMED]]
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"{len(bad)} of {len(entry.pieces)} tensors are damaged: {', '.join(texts)}{more}"


def damaged_parts(folder: Path, name: str, entry: FileEntry, beat: Callable[[], None]) -> list[str]:
    """Return a line for each tensor of the run's parts in a file that differs from the manifest. Calls `beat` before
    each tensor. Raises CheckpointError."""
    damaged = []
    with TensorFile(folder / name, open_file(folder / name)) as file:
        for key, piece in zip(keys(entry.pieces), entry.pieces, strict=True):
            if piece.kind.startswith(OUTER):
                beat()
                if _checksum(file, key, piece) != piece.checksum:
                    damaged.append(f"{name}: {piece.kind} of {piece.name} differs from the manifest")
    return damaged


def _where(region: Region) -> str:
    step = "" if region.contiguous else f", {region.numel} elements in rows {region.stride} apart"
    return f"{region.first}:{region.end}{step}"


def _checksum(file: TensorFile, key: str, piece: Piece) -> int:
    region = piece.region
    dtype, total = file.entries[key].dtype, 0
    buffer = memoryview(bytearray(min(region.numel, _CHUNK) * ITEM_BYTES[dtype]))
    for first in range(0, region.numel, _CHUNK):
        count = min(_CHUNK, region.numel - first)
        raw = buffer[: count * ITEM_BYTES[dtype]]
        file.read_into(key, first, raw)
        total += checksum_part_array(as_fp32(raw, 0, 0, count, dtype), region.part(first, first + count))
    return total % 2**64
