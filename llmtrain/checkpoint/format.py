"""The checkpoint on disk: names, the manifest, and the test for a complete one. No torch.

checkpoints/step-00000500/
  rank-00000.safetensors   the flat pieces that this rank owned, `kind/NAME` (`kind/NAME#1` the second of a tensor)
  trainer.json             step, tokens, data position, loss scaler, ids, the resolved run
  manifest.json            written last: no manifest, no checkpoint

Frozen parameters from a Hugging Face folder are left out: no step changes them, and they may be nearly all of a model.
The manifest names the folder and their checksums.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import open_regular
from llmtrain.base.untrusted import natural, word
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.addresses import commit_of, here
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import TensorFile

if TYPE_CHECKING:
    from llmtrain.models.source import ParameterSource


TYPES = ("F32", "BF16", "F16")
"""Types of the values in a checkpoint, by their names in safetensors."""


class FrozenSourceError(CheckpointError):
    """The folder of the frozen parameters has changed; the checkpoint itself may be intact."""


@dataclass(frozen=True, kw_only=True)
class FrozenSource:
    """Where the frozen parameters are that checkpoints leave out; NOWHERE if they leave out none."""

    folder: Path
    """Absolute."""
    checksums: dict[str, int]
    """Hugging Face name -> checksum of the full tensor in the folder, which does not depend on the layout."""
    parts: dict[str, list[tuple[str, str, Region]]]
    """Hugging Face name -> [(file, tensor in the file, the elements of the flat parameter that it holds)]."""

    def only(self, names: Collection[str]) -> FrozenSource:
        checksums = {name: self.checksums[name] for name in self.parts if name in names}
        return replace(self, checksums=checksums, parts={name: self.parts[name] for name in checksums})

    def files(self) -> list[Path]:
        """Return the weight files that hold at least one of these parameters."""
        return [self.folder / file for file in dict.fromkeys(f for parts in self.parts.values() for f, _, _ in parts)]

    def error(self, wrong: str) -> FrozenSourceError:
        """Return the error to raise. `wrong`: a clause that says what is wrong, and names file and tensor."""
        remedy = (
            "Put that folder back, or a link to it; or move away what is there now, and a resume reads "
            "model.pretrained instead"
        )
        if commit := commit_of(self.folder):
            remedy = f"Fetch it again: hf download {commit[0].name} --revision {commit[1]}"
        return FrozenSourceError(
            f"{wrong.rstrip('.')}. The checkpoint holds only the trained parameters; the frozen ones are read from "
            f"{self.folder}, which must be as it was when the run began. {remedy}."
        )

    def to_json(self) -> dict[str, Any]:
        """{"folder", "tensors": name -> [checksum, [[file, tensor, first element, elements], ...]]}."""
        tensors = {
            name: [self.checksums[name], [[file, tensor, part.start, part.numel] for file, tensor, part in parts]]
            for name, parts in self.parts.items()
        }
        return {"folder": str(self.folder), "tensors": tensors}

    @classmethod
    def from_json(cls, raw: Any) -> FrozenSource:
        """Read and check what `to_json` returned. Raises ValueError, TypeError, KeyError or AttributeError."""
        folder = Path(word(raw["folder"]))
        checksums, parts = {}, {}
        for name, (checksum, places) in raw["tensors"].items():
            checksums[word(name)] = natural(checksum, 2**64)
            parts[name] = [(word(f), word(tensor), Region(natural(at), natural(n))) for f, tensor, at, n in places]
        odd = [file for places in parts.values() for file, _, _ in places if Path(file).name != file]
        if odd:
            raise ValueError(f"a file with frozen parameters must have a plain name: {odd[0]!r}")
        if not folder.is_absolute():
            raise ValueError(f"the folder of the frozen parameters must be an absolute path: {str(folder)!r}")
        if empty := [name for name, places in parts.items() if not places]:
            raise ValueError(f"no part of the frozen parameter {empty[0]!r} is listed")
        return cls(folder=here(folder), checksums=checksums, parts=parts)


NOWHERE = FrozenSource(folder=Path("/"), checksums={}, parts={})
"""For checkpoints that leave out no parameter."""


def frozen_source(source: ParameterSource, names: Collection[str], checksums: dict[str, int]) -> FrozenSource:
    """Return the frozen parameters that a run's checkpoints leave out because a Hugging Face folder holds them, also if
    the model has an adapter or a score on top. `checksums`: by name."""
    from llmtrain.models.source import SafetensorsSource  # not in the checkpoint writer's process

    while (base := getattr(source, "base", None)) is not None:
        source = base
    if not isinstance(source, SafetensorsSource):
        return NOWHERE
    left_out = [name for name in source.order() if name in names and source.dtypes(name) <= {*TYPES}]
    return FrozenSource(
        folder=source.folder.absolute(),  # not resolved: on each host a link may lead elsewhere
        checksums={name: checksums[name] for name in left_out},
        parts={name: source.places(name) for name in left_out},
    )


# Proof that pieces cover a tensor exactly once. They come from a manifest, so they may be anything. No torch.
_RUNS = 4096  # a fused matrix has two or three sections; one with sections for each head still stays far below


def uncovered(regions: Sequence[Region], shape: Sequence[int]) -> str | None:
    """Return the first gap, overlap or piece beyond the tensor, as text; None: each element is covered exactly once."""
    total = math.prod(shape)
    strides = {region.stride for region in regions if region.runs}
    if not strides:
        return _chain(regions, total)
    if len(strides) > 1:
        return f"has pieces with strides of {' and '.join(map(str, sorted(strides)[:2]))} elements"
    end = max(region.end for region in regions)
    if end > total:
        return f"ends at element {end} of {total}"
    twice = _overlap(regions, strides.pop())
    if twice is not None:
        return f"has an overlap at element {twice}"
    covered = sum(region.numel for region in regions)
    return None if covered == total else f"has a gap: its pieces hold {covered} of {total} elements"


def _chain(regions: Sequence[Region], total: int) -> str | None:
    """Check that the regions cover elements 0 to `total` without gap or overlap; return the fault, or None."""
    end = 0
    for start, numel in sorted([(region.start, region.numel) for region in regions]):
        if start != end:
            return f"has a gap or an overlap at element {min(start, end)}"
        end += numel
    return None if end == total else f"ends at element {end} of {total}"


def _overlap(regions: Sequence[Region], stride: int) -> int | None:
    """Return an element that two pieces hold, or None, by a sweep over the tensor in lines of `stride` elements."""
    cells = [cell for region in regions for block in region.blocks() for cell in block.on(stride)]
    events = sorted(
        event
        for cell in cells
        # Drop cells that end above this line before adding new ones; popping from the right is O(1).
        for event in (
            (cell.line, 1, cell.column, cell.columns),
            (cell.line + cell.lines, 0, -cell.column, cell.columns),
        )
    )
    open_columns: list[tuple[int, int]] = []
    """(first column, one past the last) of the cells on this line, from left to right."""
    for line, begins, column, columns in events:
        span = (abs(column), abs(column) + columns)
        index = bisect_left(open_columns, span)
        if not begins:
            open_columns.pop(index)
            continue
        if index < len(open_columns) and open_columns[index][0] < span[1]:
            return line * stride + open_columns[index][0]
        if index and open_columns[index - 1][1] > span[0]:
            return line * stride + span[0]
        insort(open_columns, span)
    return None


def wrong_region(region: Region) -> str | None:
    """Return why `region`, whose numbers are natural, is not valid; None if it is."""
    if not region.contiguous:
        end = 0
        if len(region.runs) > _RUNS:
            return f"it has more than {_RUNS} runs"
        for offset, length in region.runs:
            if offset < end or length < 1:
                return "its runs are empty, overlap, or are not in order"
            end = offset + length
        if end > region.stride:
            return f"its runs are longer than its stride of {region.stride} elements"
        if region.skip >= sum(length for _, length in region.runs):
            return f"it skips {region.skip} elements, more than a period holds"
        if region.numel < 1:
            return "it is empty"
    elif region.stride or region.skip:
        return "it has a stride, but no runs"
    return None


FORMATS = (1, 2)
"""Format 2 is for checkpoints with frozen parameters in another folder, which a reader of format 1 would not find."""
OUTER = "outer."
"""Prefix of the kinds of tensors that a run's parts save; a run without these parts ignores them."""
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
HOSTS = "hosts"
"""Key in a layout whose hosts have separate folders: file -> the host that wrote it."""
_STEP_DIR = re.compile(r"step-([0-9]{8,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_JSON_LIMIT = 1 << 30  # bytes; 1,000 ranks with 6,000 pieces each stay below it


class DamagedCheckpoint(CheckpointError):
    """The checkpoint's files differ from its manifest; an older checkpoint may be intact."""


class UnknownFormat(CheckpointError):
    """An intact checkpoint that another version of llmtrain wrote."""


@dataclass(frozen=True)
class Piece:
    """A flat piece of one tensor in a file, where it has the name that `keys` gives."""

    kind: str
    """`param` (the fp32 master), or the optimizer's name of a moment."""
    name: str
    """Hugging Face name of the parameter."""
    region: Region
    """Elements of the flat tensor."""
    checksum: int
    """Layout-free checksum of the elements (storage/checksum.py); the pieces of a tensor add up to the tensor's."""

    def to_json(self) -> list[Any]:
        """Return [kind, name, start, elements, checksum], and if strided stride, skip, [[offset, length], ...]."""
        where = self.region
        strided = [] if where.contiguous else [where.stride, where.skip, where.runs]
        return [self.kind, self.name, where.start, where.numel, self.checksum, *strided]

    @classmethod
    def from_json(cls, raw: Any) -> Piece:
        """Read what `to_json` returned, and check every entry. Raises ValueError or TypeError."""
        kind, name, start, numel, checksum, *strided = raw
        region = Region(natural(start), natural(numel))
        if strided:
            stride, skip, runs = strided
            pairs = tuple((natural(offset), natural(length)) for offset, length in runs)
            region = replace(region, runs=pairs, stride=natural(stride), skip=natural(skip))
            if wrong := wrong_region(region):
                raise ValueError(f"a piece of {name!r} is not valid: {wrong}")
        return cls(_kind(kind), word(name), region, natural(checksum, 2**64))


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    bytes: int
    xxh3: str
    """xxh3-64 of the complete file, hexadecimal."""
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    tensors: dict[str, list[int]]
    """Hugging Face name -> full shape."""
    files: dict[str, FileEntry]
    layout: dict[str, Any]
    """The saving run's layout, for people to read: world_size, zero_stage, precision, degrees above 1; see HOSTS."""
    frozen: FrozenSource = NOWHERE
    """Where the parameters are that no file of the checkpoint holds."""

    def checksums(self) -> dict[tuple[str, str], int]:
        """Return (kind, name) -> layout-free checksum of the complete tensor."""
        sums = {(PARAM, name): checksum for name, checksum in self.frozen.checksums.items()}
        for entry in self.files.values():
            for piece in entry.pieces:
                key = (piece.kind, piece.name)
                sums[key] = (sums.get(key, 0) + piece.checksum) % 2**64
        return sums

    def elsewhere(self, folder: Path) -> dict[str, str]:
        """Return the files that are only in another host's folder: name -> that host."""
        hosts = self.layout.get(HOSTS)
        if not isinstance(hosts, dict):
            return {}
        return {name: str(hosts[name]) for name in hosts if name in self.files and not (folder / name).exists()}

    def to_json(self) -> str:
        raw = {
            "format": FORMATS[bool(self.frozen.parts)],
            "step": self.step,
            "layout": self.layout,
            "tensors": self.tensors,
            "files": {
                name: {"bytes": entry.bytes, "xxh3": entry.xxh3, "pieces": [piece.to_json() for piece in entry.pieces]}
                for name, entry in self.files.items()
            },
            **({"frozen": self.frozen.to_json()} if self.frozen.parts else {}),
        }
        return json.dumps({"manifest": raw, "xxh3": _digest(raw)}, separators=(",", ":"))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a checkpoint. Raises CheckpointError: when it is missing or not valid."""
        path = folder / MANIFEST
        try:
            signed = untrusted.loads(read_file(path))
            raw = signed["manifest"]
            if signed["xxh3"] != _digest(raw):
                raise CheckpointError(f"{path} is damaged: its checksum differs from its contents.")
            if raw["format"] not in FORMATS:
                raise UnknownFormat(
                    f"{path}: format {raw['format']!r} is none of the formats {FORMATS} that this version reads. "
                    "Use the version of llmtrain that wrote it, or a newer one."
                )
            tensors = {word(name): [natural(size) for size in shape] for name, shape in raw["tensors"].items()}
            files = {}
            for name, entry in raw["files"].items():
                if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
                    raise CheckpointError(f"{path}: {name!r} cannot be the name of a file in a checkpoint.")
                pieces = [Piece.from_json(piece) for piece in entry["pieces"]]
                files[name] = FileEntry(bytes=natural(entry["bytes"]), xxh3=str(entry["xxh3"]), pieces=pieces)
            layout = {str(key): value for key, value in raw["layout"].items()}
            frozen = FrozenSource.from_json(raw["frozen"]) if raw["format"] == FORMATS[1] else NOWHERE
            manifest = cls(step=natural(raw["step"]), tensors=tensors, files=files, layout=layout, frozen=frozen)
            manifest._check_pieces(path)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.") from None
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a manifest: {error!r}") from error
        return manifest

    def _check_pieces(self, path: Path) -> None:
        """Raise CheckpointError unless every piece belongs to a tensor, and each tensor is covered exactly once."""
        if TRAINER not in self.files:
            raise CheckpointError(f"{path} does not list {TRAINER}.")
        regions: dict[tuple[str, str], list[Region]] = {}
        for file, entry in self.files.items():
            if sum(piece.region.numel for piece in entry.pieces) > entry.bytes:
                raise CheckpointError(f"{path}: {file} has {entry.bytes} bytes, too few for the elements listed.")
            single = len({(piece.kind, piece.name) for piece in entry.pieces}) == len(entry.pieces)
            if not single and len(set(keys(entry.pieces))) != len(entry.pieces):
                raise CheckpointError(f"{path}: two pieces of {file} have the same name.")
            for piece in entry.pieces:
                if piece.name not in self.tensors:
                    raise CheckpointError(f"{path}: {piece.name!r} is in {file}, but its shape is missing.")
                regions.setdefault((piece.kind, piece.name), []).append(piece.region)
        for name, places in self.frozen.parts.items():
            if name not in self.tensors or (PARAM, name) in regions:
                raise CheckpointError(
                    f"{path}: the shape of the frozen {name!r} is missing, or a file here also has its values."
                )
            regions[PARAM, name] = [region for _, _, region in places]
        for (kind, name), parts in regions.items():
            if wrong := uncovered(parts, self.tensors[name]):
                raise CheckpointError(f"{path}: {kind} of {name} {wrong}.")
        lacking = [name for name in self.tensors if (PARAM, name) not in regions]
        if lacking:
            raise CheckpointError(f"{path}: no file holds the parameter {lacking[0]} ({len(lacking)} in all).")


def keys(pieces: list[Piece]) -> list[str]:
    """Return the pieces' names in their file: `kind/NAME` for the first piece of a tensor, then `kind/NAME#1`, ..."""
    seen: dict[str, int] = {}
    names = []
    for piece in pieces:
        name = f"{piece.kind}/{piece.name}"
        count = seen[name] = seen.get(name, -1) + 1
        names.append(f"{name}#{count}" if count else name)
    return names


def _digest(raw: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(raw, separators=(",", ":")).encode())


def _kind(value: Any) -> str:
    if "/" in word(value):
        raise ValueError(f"{value!r} cannot be a kind of tensor, as it has a slash")
    return value


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint's name; None for another name."""
    match = _STEP_DIR.fullmatch(folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders with a manifest, newest step first."""
    folders = [p for p in _children(checkpoints) if step_of(p) is not None and (p / MANIFEST).is_file()]
    return sorted(folders, key=lambda p: step_of(p) or 0, reverse=True)


def stale_folders(checkpoints: Path) -> list[Path]:
    """Return the folders that a killed save or deletion left."""
    return [p for p in _children(checkpoints) if p.name.endswith((".tmp", ".trash"))]


def _children(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (p for p in folder.iterdir() if p.is_dir())


def open_file(path: Path) -> int:
    """Open a file of a checkpoint for reading; never a link, a pipe or a device. Raises OSError."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, and files of a checkpoint must not be links")
    return open_regular(path, os.O_NOFOLLOW)


def read_file(path: Path) -> bytes:
    """Return the contents of a checkpoint's JSON file. Raises OSError."""
    with open(open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > _JSON_LIMIT:
            raise OSError(errno.EFBIG, f"it has more than {_JSON_LIMIT} bytes")
        return file.read(_JSON_LIMIT)


def differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a line `key: saved -> now` for every leaf that differs in two nested dicts."""
    lines = []
    for key in sorted(saved.keys() | now.keys()):
        path = f"{prefix}{key}"
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{path}.")
        elif old != new:
            lines.append(
                f"{path}: {'nothing' if old is None else repr(old)} -> {'nothing' if new is None else repr(new)}"
            )
    return lines


def misfit(file: TensorFile, entry: FileEntry) -> str | None:
    """Return a tensor `kind/NAME` on which the file's header and its entry in the manifest disagree, or None."""
    in_header = {name: entry.numel for name, entry in file.entries.items()}
    listed = {key: piece.region.numel for key, piece in zip(keys(entry.pieces), entry.pieces, strict=True)}
    return min(in_header.items() ^ listed.items())[0] if in_header != listed else None


def hash_file(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Return the file's xxh3-64 in hexadecimal; `advance` gets the size of each block (8 MiB). Raises OSError."""
    digest = xxhash.xxh3_64()
    with open(open_file(path), "rb", buffering=0) as file:
        while block := file.read(8 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def problems(folder: Path, manifest: Manifest, names: list[str], *, contents: bool = True) -> list[str]:
    """Return a line for each of the files `names` that is missing or has another size or (with `contents`) checksum."""
    problems = []
    for name in names:
        path, entry = folder / name, manifest.files[name]
        try:
            size = path.lstat().st_size
            if size != entry.bytes:
                problems.append(f"{name} has {size} bytes instead of {entry.bytes}")
            elif contents and hash_file(path) != entry.xxh3:
                problems.append(f"{name} is damaged: its checksum differs from the manifest")
        except FileNotFoundError:
            host = manifest.elsewhere(folder).get(name)
            problems.append(f"{name} is missing" + (f": it is on {host}" if host else ""))
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems
