"""Columns: outputs of a reference or teacher for prepared data, which `llmtrain reference` writes next to the shards.

A reference's column, for answers that an objective compares: reference-SPLIT.f32 has a little-endian fp32 number, an
answer's log-probability in nats, for each row. If the kind of row has mismatched answers, a second number per row
follows: the log-probability of another prompt's answer after this row's prompt. reference.json is written last.

A teacher's column, for distillation: for each token that the loss counts, the k tokens that the teacher finds
likeliest. teacher-SPLIT.f32 has k + 1 little-endian fp32 for each: the natural logarithms of their probabilities at a
temperature, likeliest first, and of the mass of all others; teacher-SPLIT.words has the k ids, uint16 if the teacher's
vocabulary allows it, else uint32. teacher.json is written last. For conversations the column has an entry for each
counted token except a row's first one, row by row. In a text, what a token is predicted from
depends on the sequence length T, so for texts the entries are the labels of sequences of that length, and the files'
names begin with teacher-T.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.data.manifest import NEW_COLUMN, SPLITS, Split
from llmtrain.data.shards import PreparedSet

_REFERENCE = "reference.json"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a reference's column was computed from: the model's weights and the data."""

    weights: str
    """`weights_hash` of the reference's parameters."""
    data: str
    """The manifest's data_fingerprint, a hash of the tokens and masks, which also depend on the chat template."""
    precision: str
    """fp32, bf16 or fp16."""
    files: dict[str, str]
    """Split -> xxh3_64 of the column's file."""
    model: dict[str, Any]
    """Configuration of the model, as in config.json."""


def numbers(folder: PreparedSet, split: Split) -> int:
    """Return how many log-probabilities a reference's column has for a split."""
    return folder.manifest.documents[split] * (2 if folder.kind.mismatched else 1)


def write_reference(
    folder: PreparedSet, weights: str, precision: str, columns: Mapping[Split, np.ndarray], model: dict[str, Any]
) -> None:
    """Write `columns`, fp32 [numbers] per split. Raises DataError when the folder cannot be written."""
    files: dict[str, str] = {}
    try:
        (folder.folder / _REFERENCE).unlink(missing_ok=True)
        for split in SPLITS:
            data = columns[split].astype("<f4").tobytes()
            replace_file(folder.folder / f"reference-{split}.f32", data)
            files[split] = xxhash.xxh3_64_hexdigest(data)
        made = Reference(
            weights=weights, data=folder.manifest.data_fingerprint, precision=precision, files=files, model=model
        )
        replace_file(folder.folder / _REFERENCE, json.dumps(asdict(made), indent=1).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{folder.folder}: the column cannot be written ({error.strerror}); make room in it") from error


def read_reference(folder: PreparedSet, precision: str) -> tuple[Reference, dict[Split, np.ndarray]]:
    """Read a reference's column, fp32 [numbers] per split. Raises DataError: it is missing, damaged or outdated."""
    path = folder.folder / _REFERENCE
    folder.fetch([_REFERENCE, *(f"reference-{split}.f32" for split in SPLITS)])
    if not path.is_file():
        raise DataError(f"{folder.name}: has no log-probabilities of the reference; {NEW_COLUMN}")
    try:
        found = Reference(**untrusted.loads(path.read_bytes(), infinite=True))
        data = {split: (folder.folder / f"reference-{split}.f32").read_bytes() for split in SPLITS}
        damaged = [split for split in SPLITS if xxhash.xxh3_64_hexdigest(data[split]) != found.files[split]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {NEW_COLUMN}") from error
    if found.data != folder.manifest.data_fingerprint:
        raise DataError(f"{path}: was made from other data than the folder holds now; {NEW_COLUMN}")
    if found.precision != precision:
        raise DataError(
            f"{path}: was computed in {found.precision}, and this run computes in {precision}; {NEW_COLUMN}"
        )
    damaged += [split for split in SPLITS if len(data[split]) != 4 * numbers(folder, split)]
    if damaged:
        raise DataError(
            f"{path}: the numbers of the {damaged[0]} split have changed since they were written; {NEW_COLUMN}"
        )
    return found, {split: np.frombuffer(data[split], dtype="<f4") for split in SPLITS}


# --- a teacher's column ---


@dataclass(frozen=True, kw_only=True)
class TeacherColumn:
    """What a teacher's column was computed from: the model's weights, the data and the settings."""

    weights: str
    """`weights_hash` of the teacher's parameters."""
    data: str
    """The manifest's data_fingerprint: tokenizer, tokens, and their counted bits."""
    windows: list[Any] | None
    """Sequence length, isolate_documents and mask_document_starts, if the data are texts; None: conversations."""
    top_k: int
    temperature: float
    vocabulary: int
    """Size of the teacher's vocabulary."""
    precision: str
    """Precision of the teacher's forward pass, as `Mix.arithmetic` has it."""
    places: dict[str, int]
    """Split -> number of entries in the column."""
    files: dict[str, str]
    """File name -> xxh3_64."""
    model: dict[str, Any] | None = None
    """Configuration of the model, as in `Reference`; None: unknown, or any."""

    @property
    def stem(self) -> str:
        return column_stem(None if self.windows is None else self.windows[0])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    @property
    def bytes_a_place(self) -> int:
        return 4 * (self.top_k + 1) + self.dtype.itemsize * self.top_k


def column_stem(length: int | None) -> str:
    """Return how the names of a teacher's files begin. `length`: sequence length of texts; None: conversations."""
    return "teacher" if length is None else f"teacher-{length}"


@dataclass(frozen=True, kw_only=True)
class Taught:
    """A teacher's column of one split, mapped into memory."""

    path: Path
    words: np.ndarray
    """Ids of the k likeliest tokens, [places, k]."""
    logs: np.ndarray
    """Their log-probabilities and that of all other tokens, fp32 [places, k + 1]."""
    vocabulary: int

    def read(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return words, int64 [n, k], and logs, fp32 [n, k + 1], of `places` [n]. Raises DataError for damaged ones."""
        words, logs = self.words[places].astype(np.int64), self.logs[places].astype(np.float32)
        right = np.abs(np.exp(logs).sum(1) - 1) < 0.01  # False for NaN and unwritten places
        if not right.all() or int(words.max(initial=0)) >= self.vocabulary:
            raise DataError(f"{self.path}: holds numbers that are no probabilities: it is damaged; {NEW_COLUMN}")
        return words, logs


def _parts(folder: Path, split: Split, column: TeacherColumn) -> dict[Path, tuple[np.dtype, int]]:
    """Return the files of log-probabilities and of ids, each with its dtype and its values per place."""
    return {
        folder / f"{column.stem}-{split}.f32": (np.dtype("<f4"), column.top_k + 1),
        folder / f"{column.stem}-{split}.words": (column.dtype, column.top_k),
    }


class ColumnWriter:
    """Writes a teacher's column, places in any order, under temporary names, and renames the files at the end."""

    def __init__(self, folder: PreparedSet, column: TeacherColumn) -> None:
        """Make the files. Raises DataError: the disk has no room for the column."""
        self._folder, self._column = folder.folder, column
        self._told = folder.folder / f"{column.stem}.json"
        self._files = {split: _parts(folder.folder, split, column) for split in SPLITS}
        size = sum(column.places.values()) * column.bytes_a_place
        try:
            # Delete the former column first: its room is needed, and its numbers differ.
            for path in [self._told, *(path for files in self._files.values() for path in files)]:
                path.unlink(missing_ok=True)
            free = shutil.disk_usage(self._folder).free
            if size > free:
                raise DataError(
                    f"{self._folder}: the teacher's column takes {size:,} bytes, and {free:,} are free; "
                    "make room, or set objective.top_k lower"
                )
            self._arrays = {
                split: [
                    _made(_partial(path), dtype, (column.places[split], width))
                    for path, (dtype, width) in files.items()
                ]
                for split, files in self._files.items()
            }
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, split: Split, places: np.ndarray, words: np.ndarray, logs: np.ndarray) -> None:
        """Write the values of some places: `places` [n], `words` [n, k], `logs` [n, k + 1]."""
        own_logs, own_words = self._arrays[split]
        own_logs[places], own_words[places] = logs, words

    def finish(self) -> None:
        """Rename the files. Raises DataError when the column cannot be written."""
        made: dict[str, str] = {}
        try:
            for split, files in self._files.items():
                for path, array in zip(files, self._arrays[split], strict=True):
                    if isinstance(array, np.memmap):
                        array.flush()
                    with open(_partial(path), "rb") as file:
                        made[path.name] = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
                    os.replace(_partial(path), path)
            column = asdict(replace(self._column, files=made))
            replace_file(self._told, json.dumps(column, indent=1).encode() + b"\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def discard(self) -> None:
        for files in self._files.values():
            for path in files:
                _partial(path).unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self._folder}: the column cannot be written ({error.strerror}); make room in it")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _made(path: Path, dtype: Any, shape: tuple[int, int]) -> np.ndarray:
    if not shape[0]:
        path.write_bytes(b"")
        return np.empty(shape, dtype=dtype)
    with open(path, "wb") as file:  # a full disk says so now, and does not kill a later write with SIGBUS
        os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1] * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def read_column(folder: PreparedSet, wanted: TeacherColumn) -> tuple[TeacherColumn, dict[Split, Taught]]:
    """Read the teacher's column of a folder. `wanted`: what it must be of, without weights, precision and files.

    Raises DataError: it is missing, damaged, or of something else.
    """
    path = folder.folder / f"{wanted.stem}.json"
    folder.fetch([path.name, *(path.name for split in SPLITS for path in _parts(folder.folder, split, wanted))])
    if not path.is_file():
        of = "" if wanted.windows is None else f" in sequences of {wanted.windows[0]} tokens"
        raise DataError(f"{folder.name}: has no column of the teacher's likeliest words{of}; {NEW_COLUMN}")
    try:
        found = TeacherColumn(**untrusted.loads(path.read_bytes(), infinite=True))
        there, here = asdict(found), {key: value for key, value in asdict(wanted).items() if key != "model"}
        if any(type(there[key]) is not type(here[key]) for key in here):
            raise TypeError("a value in it has another type")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {NEW_COLUMN}") from error
    if found.data != wanted.data:
        raise DataError(f"{path}: was made from other data than the folder holds now; {NEW_COLUMN}")
    for key, name in _COMPARED.items():
        if there[key] != here[key]:
            raise DataError(f"{path}: {name}: {there[key]} there, and {here[key]} in this run; {NEW_COLUMN}")
    taught: dict[Split, Taught] = {}
    for split in SPLITS:
        count, arrays = found.places[split], []
        for file, (dtype, width) in _parts(folder.folder, split, found).items():
            size = count * width * dtype.itemsize
            if not file.is_file() or file.stat().st_size != size:
                raise DataError(f"{file}: does not have the {size:,} bytes that {path.name} records; {NEW_COLUMN}")
            shape = (count, width)  # no empty file can be mapped
            arrays.append(np.memmap(file, dtype=dtype, mode="r", shape=shape) if count else np.empty(shape, dtype))
        logs, words = arrays
        taught[split] = Taught(path=path, words=words, logs=logs, vocabulary=found.vocabulary)
    return found, taught


_COMPARED = {
    "top_k": "objective.top_k",
    "temperature": "objective.temperature",
    "vocabulary": "words of the model",
    "windows": "data.sequence_length, isolate_documents, mask_document_starts",
    "places": "counted tokens",
}
