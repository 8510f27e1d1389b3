"""Read corpora of token ids in the layouts of Megatron, datatrove and OLMo.

A layout is a class with `names` and `read`, which finds the ids in a file and the ends of its documents. Ids that a
file stores as shards do can be used in place; others are copied (prepare/worker.py).
"""

from __future__ import annotations

import functools
import os
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.data.prepare import inputs
from llmtrain.data.tokenize import Encoder
from llmtrain.storage.addresses import is_url
from llmtrain.storage.object_store import StoreError

_CHUNK = 4 << 20
"""Tokens that a search for the next end token reads at a time."""


@dataclass(frozen=True)
class TokenFile:
    """Token ids of a file, and where its documents end."""

    path: str
    ids: np.ndarray | inputs.StoredIds
    """Integers [tokens], mapped into memory if the file stores them unchanged."""
    ends: np.ndarray | None
    """Number of tokens up to each document's end, int64 [documents]; None: an end token follows each document."""
    begin: int | None
    """Bytes of the file before the first id; None: the ids are not stored contiguously and unchanged."""

    def documents(self, start: int, stop: int, separator_id: int) -> np.ndarray:
        """Return the borders of the documents that begin in tokens [start, stop), int64 [documents + 1].

        They are the beginning of the first document and the end of each. Empty: no document begins there.
        """
        if self.ends is not None:
            begins = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
            first, last = np.searchsorted(begins, [start, stop])
            return np.concatenate([begins[first : first + 1], self.ends[first:last]]).astype(np.int64)
        begins = np.flatnonzero(self.ids[max(start - 1, 0) : max(stop - 1, 0)] == separator_id) + max(start, 1)
        begins = np.concatenate([[0], begins]) if start == 0 else begins
        if not len(begins) or begins[0] >= len(self.ids):
            return np.empty(0, np.int64)
        end = int(begins[-1])
        while end < len(self.ids):  # the last one's end is in a later range
            found = np.flatnonzero(self.ids[end : end + _CHUNK] == separator_id)
            if len(found):
                end += int(found[0]) + 1
                break
            end = min(len(self.ids), end + _CHUNK)
        return np.append(begins, end).astype(np.int64)


class Layout(ABC):
    """A format in which a corpus of token ids is stored on disk."""

    title: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    """Name endings of files with ids."""
    index: ClassVar[str] = ""
    """Name ending of the index, in place of the one of the ids' file; empty: the layout has no index."""

    @classmethod
    def index_of(cls, path: str) -> str:
        return os.path.splitext(path)[0] + cls.index

    @classmethod
    def takes(cls, path: str) -> bool:
        return path.endswith(cls.names) and (not cls.index or inputs.is_file(cls.index_of(path)))

    @classmethod
    @abstractmethod
    def read(cls, path: str) -> TokenFile:
        """Map a file into memory, or decode it. Raises ValueError, OSError: it has another layout, or is damaged."""


def _mapped(path: str, dtype: np.dtype, begin: int = 0, tokens: int | None = None) -> np.ndarray | inputs.StoredIds:
    """Map the ids of a file. Raises ValueError: the file is too short, or ends within an id."""
    size = inputs.size(path) - begin
    count = size // dtype.itemsize if tokens is None else tokens
    if size < count * dtype.itemsize or (tokens is None and size % dtype.itemsize):
        raise ValueError(f"it has {size + begin} bytes, which are not {count} ids of {dtype.itemsize} bytes")
    if is_url(path):
        return inputs.StoredIds(path, dtype, begin, count)
    return np.memmap(path, dtype, "r", offset=begin, shape=(count,)) if count else np.empty(0, dtype)


class Megatron(Layout):
    """Megatron-LM and GPT-NeoX: ids in X.bin, sequences and documents in X.idx (MMIDIDX, or fairseq's TNTIDX)."""

    title = "Megatron"
    names = (".bin",)
    index = ".idx"
    types: ClassVar = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

    @classmethod
    def read(cls, path: str) -> TokenFile:
        index = cls.index_of(path)
        data = inputs.mapped(index)
        head = data[:64].tobytes()
        if head.startswith(b"MMIDIDX\x00\x00"):
            version, code, count, borders = struct.unpack_from("<QBQQ", head, 9)
            dtype, at = cls._type(code, index), 34
            lengths = data[at : at + 4 * count].view("<i4")
            pointers = data[at + 4 * count :][: 8 * count].view("<i8")
            documents = data[at + 12 * count :][: 8 * borders].view("<i8")
            starts = pointers // dtype.itemsize
        elif head.startswith(b"TNTIDX\x00\x00"):
            version, code, _, count, sizes, borders = struct.unpack_from("<6Q", head, 8)
            dtype, at = cls._type(code, index), 56
            offsets = data[at + 8 * (count + 1) :][: 8 * (count + 1)].view("<i8")
            starts, lengths = offsets[:-1], np.diff(offsets)
            documents = data[at + 16 * (count + 1) + 8 * sizes :][: 8 * borders].view("<i8")
        else:
            raise ValueError(f"{index} begins as neither version of Megatron's index")
        if version != 1 or len(lengths) != count or len(starts) != count or len(documents) != borders:
            raise ValueError(f"{index} has another version, or is cut off")
        ends = starts + lengths
        documents = documents if borders else np.arange(count + 1)
        if count and ((starts[1:] != ends[:-1]).any() or starts[0] or (lengths < 0).any()):
            raise ValueError(f"{index} orders its sequences differently from the file; write the index again")
        tokens = int(ends[-1]) if count else 0
        if documents[0] or documents[-1] != count or (np.diff(documents) < 0).any():
            raise ValueError(f"the documents of {index} do not fit its sequences")
        if (size := inputs.size(path)) != tokens * dtype.itemsize:
            raise ValueError(f"it has {size} bytes, and {index} is of {tokens} ids of {dtype.itemsize} bytes")
        before = np.concatenate([[0], ends])
        return TokenFile(path, _mapped(path, dtype), before[documents[1:]].astype(np.int64), 0)

    @classmethod
    def _type(cls, code: int, index: str) -> np.dtype:
        if code not in cls.types:
            raise ValueError(f"{index} says that the ids are of type {code}, which is not a type of integers")
        return np.dtype(cls.types[code])


class Datatrove(Layout):
    """datatrove: ids of 2 or 4 bytes in X.ds, the documents' ends in X.ds.index."""

    title = "datatrove"
    names = (".ds",)

    @classmethod
    def read(cls, path: str) -> TokenFile:
        ends = inputs.mapped(f"{path}.index").view("<u8").astype(np.int64) if inputs.is_file(f"{path}.index") else None
        if inputs.is_file(f"{path}.loss"):
            raise ValueError(f"{path}.loss says which ids are counted, and is not read; move it away to count all")
        size, width = inputs.size(path), 2
        if ends is not None and len(ends):
            if ends[-1] <= 0 or size % ends[-1] or size // ends[-1] not in (2, 4) or (np.diff(ends) < 0).any():
                raise ValueError(
                    f"{path}.index belongs to another file: it counts {ends[-1]} ids, and {path} has {size} bytes"
                )
            width = size // int(ends[-1])
        elif inputs.is_file(f"{path}.metadata"):
            first = inputs.read(f"{path}.metadata").decode().partition("\n")[0]
            width = int(first.rpartition("|")[2] or 2)
        return TokenFile(path, _mapped(path, np.dtype(f"<u{width}")), ends, 0)


class Npy(Layout):
    """.npy: numpy's one-dimensional integers; or OLMo's bare ids, 2 bytes or the named type (`part-0.uint32.npy`)."""

    title = ".npy"
    names = (".npy",)

    @classmethod
    def read(cls, path: str) -> TokenFile:
        with inputs.open_file(path, stop=4096) as stream:
            if stream.read(6) != np.lib.format.MAGIC_PREFIX:
                named = Path(path).suffixes[-2:-1]
                dtype = np.dtype(named[0][1:] if named in ([".uint8"], [".uint16"], [".uint32"]) else np.uint16)
                return TokenFile(path, _mapped(path, dtype.newbyteorder("<")), None, 0)
            stream.seek(0)
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            if len(shape) != 1 or dtype.kind not in "iu":
                raise ValueError(f"it holds an array {list(shape)} of {dtype}; it must be one-dimensional, of integers")
            plain = dtype.newbyteorder("<") == dtype
            return TokenFile(
                path, _mapped(path, dtype, stream.tell(), shape[0]), None, stream.tell() if plain else None
            )


LAYOUTS: tuple[type[Layout], ...] = (Megatron, Datatrove, Npy)


def layout_of(path: str) -> type[Layout] | None:
    return next((layout for layout in LAYOUTS if layout.takes(path)), None)


def is_index(path: str) -> bool:
    """Return True for a file that lies next to ids but has none, such as an index."""
    return path.endswith((".idx", ".ds.index", ".ds.metadata"))


def indexes(path: str) -> list[str]:
    layout = layout_of(path)
    beside = [f"{path}.index", *([layout.index_of(path)] if layout is not None and layout.index else [])]
    return [each for each in beside if inputs.is_file(each)]


@functools.lru_cache(maxsize=1)  # a worker gets the pieces of a file one after the other
def read(path: str) -> TokenFile:
    """Read a file of ids in any layout. Raises DataError: the layout is unknown, or the file is damaged."""
    layout = layout_of(path)
    if layout is None:
        known = "; ".join(f"{each.title}: {' or '.join(each.names)}" for each in LAYOUTS)
        raise DataError(f"{path}: not a known layout of token ids ({known}, each with its index next to it)")
    try:
        return layout.read(path)
    except StoreError as error:
        raise inputs.cannot_be_read(path, error) from None
    except (ValueError, KeyError, IndexError, TypeError, OSError, struct.error) as error:
        raise DataError(
            f"{path}: cannot be read as {layout.title} ({error}); copy it again, or write it again"
        ) from error


_SAMPLED = 1 << 16
"""Tokens of each file that are examined before the preparation."""
_LOOKED_AT = 16
_AS_IT_SHOULD = 0.9


_UPPER_HALVES = 16
"""Upper halves of 4-byte ids are below this for vocabularies up to a million."""


def beginnings(paths: list[str], separator_id: int) -> list[tuple[str, np.ndarray]]:
    """Return (path, first ids) of some of the files. Raises DataError: no end token marks the ends of documents."""
    found = []
    for path in paths[:: 1 + len(paths) // _LOOKED_AT]:
        file = read(path)
        if not len(file.ids):
            continue
        # A bare file does not say that its ids of 2 bytes are halves of 4-byte ids, which may be valid ids; a few ids
        # may look so by chance.
        some = file.ids[:_SAMPLED]
        may_be_halves = file.ends is None and some.dtype.itemsize == 2 and len(some) >= 64
        if may_be_halves and some[1::2].max() < _UPPER_HALVES <= some[::2].max():
            raise DataError(
                f"{path}: every second id is below {_UPPER_HALVES}, as if ids of 4 bytes were read as 2 bytes each; "
                "name the size in the file's name (X.uint32.npy) or, of datatrove, with X.ds.index or X.ds.metadata "
                "next to X.ds"
            )
        if file.ends is None and not (file.ids[:_CHUNK] == separator_id).any():
            raise DataError(
                f"{path}: no end token ({separator_id}, the tokenizer's eos_token) among the first "
                f"{min(len(file.ids), _CHUNK)} ids, so no document ends; give the ids' tokenizer with --tokenizer"
            )
        found.append((path, np.asarray(file.ids[:_SAMPLED]).astype(np.int64)))
    return found


def examine(samples: list[tuple[str, np.ndarray]], encoder: Encoder) -> bool:
    """Compare the tokenizer with samples of ids, (where they are from, int64 [tokens]) each, and log how well it fits.

    With the right tokenizer, ids do not change when they are decoded and encoded again. Warns if the tokenizer seems to
    be another one. Returns False, with a warning, if a sample does not begin with the tokens it puts before a text.

    Raises DataError: an id is outside the vocabulary.
    """
    same = total = 0
    for place, ids in samples:
        outside = (ids < 0) | (ids >= encoder.vocab_size)
        if outside.any():
            raise DataError(
                f"{place}: {outside.mean():.2%} of its first {len(ids)} ids are outside the tokenizer's vocabulary "
                f"[0, {encoder.vocab_size}), such as {ids[outside][0]}: they are another tokenizer's; give that one "
                "with --tokenizer"
            )
        kept = ids[~np.isin(ids, list(encoder.special))]
        again = encoder.encode([encoder.decode(kept.tolist())])[0]
        counts = np.minimum(*(np.bincount(each, minlength=encoder.vocab_size) for each in (kept, again)))
        same, total = same + int(counts.sum()), total + len(kept)
    place, ids = samples[0]
    log.info(f'{Path(place).name} begins: "{untrusted.shown(encoder.decode(ids[:60].tolist()))}"')
    share = same / max(total, 1)
    log.info(f"{share:.1%} of {units.count(total)} ids are unchanged when decoded and encoded again")
    if share < _AS_IT_SHOULD:
        log.warn("--tokenizer: decoded and encoded again, the text has other ids: were they made with this tokenizer?")
    begins = all(np.array_equal(ids[: len(encoder.begin)], encoder.begin) for _, ids in samples)
    if not begins:
        shown = untrusted.shown(encoder.decode(encoder.begin.tolist()))
        log.warn(
            f"the documents do not begin with {shown}, which this tokenizer puts before a text, and a model may "
            "expect it"
        )
    return begins
