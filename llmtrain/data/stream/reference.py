"""A column of prepared preferences: each answer's log-probability under a reference model.

`llmtrain reference` writes it once, beside the shards: reference-SPLIT.f32 has a little-endian fp32 number (nats) for
each row, and reference.json, written last, says of which weights, which data and which precision. Of unpaired answers
as many numbers follow: of each row's prompt with the answer of its partner (unpaired.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.data.manifest import SPLITS, Manifest, Split
from llmtrain.data.shards import PreparedSet

NAME = "reference.json"
REMEDY = "run `llmtrain reference RUN.yaml`, which writes it anew"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a column belongs to."""

    weights: str
    """`weights_hash` of the reference's parameters."""
    data: str
    """The manifest's data_fingerprint: tokens, masks and so the template."""
    precision: str
    """fp32, bf16 or fp16."""
    files: dict[str, str]
    """Split -> xxh3_64 of its file."""


def numbers(manifest: Manifest, split: Split) -> int:
    """How many the column of a split has."""
    return manifest.documents[split] * (2 if (manifest.chat or {}).get("unpaired") else 1)


def weights_hash(checksums: Mapping[str, int]) -> str:
    """Of the checksums of all parameters by name."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(checksums.items())).encode())


def write_reference(folder: PreparedSet, weights: str, precision: str, columns: Mapping[Split, np.ndarray]) -> None:
    """`columns`: fp32 [numbers] of each split. Raises DataError when the folder cannot be written."""
    files: dict[str, str] = {}
    try:
        (folder.folder / NAME).unlink(missing_ok=True)
        for split in SPLITS:
            data = columns[split].astype("<f4").tobytes()
            replace_file(folder.folder / f"reference-{split}.f32", data)
            files[split] = xxhash.xxh3_64_hexdigest(data)
        made = Reference(weights=weights, data=folder.manifest.data_fingerprint, precision=precision, files=files)
        replace_file(folder.folder / NAME, json.dumps(asdict(made), indent=1).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{folder.folder}: the column cannot be written ({error.strerror}); make room in it") from error


def read_reference(folder: PreparedSet, precision: str) -> tuple[Reference, dict[Split, np.ndarray]]:
    """The column, fp32 [numbers] of each split. Raises DataError when it is not there, damaged, or of other data."""
    path = folder.folder / NAME
    if not path.is_file():
        raise DataError(f"{folder.folder}: has no log-probabilities of the reference; {REMEDY}")
    try:
        found = Reference(**untrusted.loads(path.read_bytes()))
        data = {split: (folder.folder / f"reference-{split}.f32").read_bytes() for split in SPLITS}
        damaged = [split for split in SPLITS if xxhash.xxh3_64_hexdigest(data[split]) != found.files[split]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {REMEDY}") from error
    if found.data != folder.manifest.data_fingerprint:
        raise DataError(f"{path}: is of other data than the folder holds now; {REMEDY}")
    if found.precision != precision:
        raise DataError(f"{path}: was computed in {found.precision}, and this run computes in {precision}; {REMEDY}")
    damaged += [split for split in SPLITS if len(data[split]) != 4 * numbers(folder.manifest, split)]
    if damaged:
        raise DataError(f"{path}: the numbers of the {damaged[0]} split are not those that it tells of; {REMEDY}")
    return found, {split: np.frombuffer(data[split], dtype="<f4") for split in SPLITS}
