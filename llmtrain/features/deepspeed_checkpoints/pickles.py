"""PyTorch's .pt files from elsewhere, read without trust: the pickle in them may only use the names in a list here.

A .pt file is a zip archive of a pickle and of one record for each storage. torch.load builds its objects on the meta
device, so a pickle's claims take no memory; data is read by position, and only from a record of the size that the
storage claims. torch.load does not check the archive's CRC32, so a flipped bit would pass: `verify` does.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import open_file
from llmtrain.storage.pieces import byte_view

# Limits on the objects of a foreign pickle, checked before and after torch builds them: names, size, depth.
# A few hundred bytes can describe 2^40 values (a tuple of twice the same tuple, forty times) or tuples that are 200,000
# deep: to print, hash or compare them would take for ever, fill the memory or overflow the stack of C.


MAX_DEPTH = 64
"""Largest depth of nested values. DeepSpeed's own files have 8."""
MAX_VALUES = 50_000_000
"""Largest number of values in a file, repeated ones included. 100,000 parameters with Adam's state: 3 million."""
_MAX_TUPLE = 1_000_000  # values in one tuple, which might be hashed or printed at once
_MAKES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "BINPERSID"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}

_Size = tuple[int, int]
_ONE: _Size = (1, 1)


class Record:
    """Placeholder for DeepSpeed's small classes: the pickle's values become attributes, nothing runs."""


class TooMuch(ValueError):
    """A pickle describes more values, or deeper ones, than any checkpoint."""


def names(data: bytes) -> Iterator[tuple[str, str]]:
    """(instruction, the name that it asks for or "") for each instruction of a pickle. Measures tuples, because torch
    may hash one while it reads; `measure` does the rest. Raises TooMuch; ValueError, IndexError: it is no pickle."""
    stack: list[_Size | None] = []  # depth and values of each; None is a mark
    memo: dict[Any, _Size | None] = {}
    total = 0
    for code, argument, _ in pickletools.genops(data):
        yield code.name, str(argument).replace(" ", ".") if code.name == "GLOBAL" else ""
        if code.name in _PUT:
            memo[argument] = stack[-1]
            continue
        if code.name in _GET:
            stack.append(memo.get(argument, _ONE))
            continue
        taken = _take(stack, code.stack_before)
        made = _ONE
        if code.name in _MAKES:
            made = (1 + max((depth for depth, _ in taken), default=0), 1 + sum(size for _, size in taken))
        total += 1 + sum(size for _, size in taken)
        if made[0] > MAX_DEPTH or made[1] > _MAX_TUPLE or total > MAX_VALUES:
            raise TooMuch(_too_much(made[0], total))
        stack.extend(None if kind is pickletools.markobject else made for kind in code.stack_after)


def _take(stack: list[_Size | None], before: list[Any]) -> list[_Size]:
    """Pop an instruction's operands: `before` lists them, down to a mark if it has one."""
    taken: list[_Size] = []
    below = len(before)
    if pickletools.markobject in before:
        below = before.index(pickletools.markobject)
        while (value := stack.pop()) is not None:
            taken.append(value)
    return taken + [stack.pop() or _ONE for _ in range(below)]


def measure(tree: Any) -> None:
    """Refuse a tree that is too deep, holds too many values, or contains itself. Raises TooMuch."""
    sizes: dict[int, _Size] = {}
    open_: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(tree, False)]
    while waiting:
        value, seen = waiting.pop()
        if id(value) in sizes:
            continue
        parts = _parts(value)
        if seen:
            inner = [sizes.get(id(part), _ONE) for part in parts]  # values without parts are not in it
            depth, size = 1 + max(d for d, _ in inner), 1 + sum(s for _, s in inner)
            if depth > MAX_DEPTH or size > MAX_VALUES:
                raise TooMuch(_too_much(depth, size))
            sizes[id(value)] = depth, size
            open_.discard(id(value))
        elif parts:
            if id(value) in open_:
                raise TooMuch("its pickle holds a value that contains itself")
            open_.add(id(value))
            waiting.append((value, True))
            several = (part for part in parts if isinstance(part, (Mapping, list, tuple, set, Record)))
            waiting += [(part, False) for part in several if id(part) not in sizes]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return list(vars(value).values()) if isinstance(value, Record) else []


def _too_much(depth: int, values: int) -> str:
    return (
        f"its pickle describes values {depth} deep (at most {MAX_DEPTH}), or for {values} of them (at most "
        f"{MAX_VALUES}): no training writes that, and it was not built"
    )


def shown(value: Any) -> str:
    """A foreign value for a message: a number or a short text unchanged, else its type."""
    if isinstance(value, (bool, int, float)) or value is None:
        return repr(value)[:80]
    if isinstance(value, str):
        return repr(value[:50])
    return f"a {type(value).__name__}"


_PICKLE_LIMIT = 256 << 20  # bytes; 100,000 tensors take about 20 MB
_LOCAL_HEADER = 30  # bytes, before the name and the extra field of a zip record
_BLOCK = 8 << 20
# Of a zip archive's end: mark, size and start of the list of records, length of the comment; and the same in 64 bits.
_END = struct.Struct("<4s8xIIH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s36xQQ")


class _Ignored:
    """Placeholder for any other object of a training script; it accepts everything and keeps nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_STANDINS: dict[str, Any] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Record,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Record,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": Record,
    "argparse.Namespace": _Ignored,
    "numpy.ndarray": _Ignored,
    "numpy.dtype": _Ignored,
    "numpy.core.multiarray._reconstruct": _Ignored,
    "numpy.core.multiarray.scalar": _Ignored,
    "numpy._core.multiarray._reconstruct": _Ignored,
    "numpy._core.multiarray.scalar": _Ignored,
}
_PLAIN = {
    "collections.OrderedDict",
    "_codecs.encode",  # the form of bytes in torch's pickles
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",  # a parameter that has attributes
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(f"torch.{kind.__name__}" for kind in torch._storage_classes),
}
_UNSEEN = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}  # names that a scan would not see


class PickleFile:
    """One .pt file. `tree`: its content, tensors without values, which `read` gets. Raises CheckpointError: no complete
    zip of stored records, a pickle that names more than plain data, or a tensor that does not fit its record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.bytes = os.fstat(file.fileno()).st_size
            with self._damage():
                self._check_directory(file.fileno())
                archive = zipfile.ZipFile(file)
                self._records = self._find_records(archive, file.fileno())
                self._check_names(archive)
            self.tree = self._load(file)

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Read every byte once and compare the archive's CRC32s; `advance` gets the bytes."""
        with self._open() as file, self._damage():
            archive = zipfile.ZipFile(file)
            for info in archive.infolist():
                with self._damage(info.filename), archive.open(info) as record:
                    while block := record.read(_BLOCK):
                        advance(len(block))

    def tensor(self, value: Any) -> Tensor:
        """Check that a value of `tree` is a tensor, in order within its record. Raises CheckpointError."""
        if not isinstance(value, Tensor) or any(hasattr(Tensor, name) for name in vars(value)):
            self._refuse(f"{shown(value)} is where a tensor belongs")
        tensor, storage = value, value.untyped_storage()
        at = getattr(storage, "_checkpoint_offset", None)
        if self._records.get(at) != storage.nbytes():  # type: ignore[arg-type]
            self._refuse(f"a tensor of shape {list(tensor.shape)} does not fit the record that it names")
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if not tensor.is_contiguous() or end > storage.nbytes():
            self._refuse(f"a tensor of shape {list(tensor.shape)} is not stored in one piece")
        return tensor

    def read(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flat tensor from `tensor`, in its precision. Raises CheckpointError."""
        assert 0 <= start <= stop <= tensor.numel()
        out = torch.empty(stop - start, dtype=tensor.dtype)
        storage: Any = tensor.untyped_storage()
        at = storage._checkpoint_offset + (tensor.storage_offset() + start) * tensor.element_size()
        view, done = byte_view(out), 0
        with self._open() as file:
            while done < view.nbytes:
                try:
                    count = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], at + done)
                except OSError as error:
                    self._refuse(f"it cannot be read at byte {at + done}: {error.strerror}")
                if count == 0:
                    self._refuse(f"it ends at byte {at + done}: it was cut short while being read")
                done += count
        return out

    def number(self, value: Any) -> float:
        """A counter, which some optimizers keep as a number and others as a tensor of one element."""
        if isinstance(value, Tensor) and self.tensor(value).numel() == 1:
            value = self.read(value, 0, 1).item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self._refuse(f"{shown(value)} is where a number belongs")
        return value

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """Open the file for this block only, because a checkpoint may have more files than a process may open."""
        try:
            handle = open_file(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error.strerror}") from error
        with open(handle, "rb", buffering=0) as file:
            yield file

    def _check_directory(self, handle: int) -> None:
        """Refuse an archive whose list of records is not right before its end: zipfile uses the end, torch's miniz the
        offsets, and the two would see different lists."""
        end = self.bytes - _END.size
        if end < 0 or os.pread(handle, 4, 0) != b"PK\3\4":  # without it torch would read a bare pickle
            raise zipfile.BadZipFile("it does not begin with a zip record")
        mark, size, start, comment = _END.unpack(os.pread(handle, _END.size, end))
        locator = os.pread(handle, _LOCATOR.size, max(0, end - _LOCATOR.size))
        if locator.startswith(b"PK\6\7"):  # zip64, which torch always writes
            end = _LOCATOR.unpack(locator)[1]
            if end != self.bytes - _END.size - _LOCATOR.size - _END_64.size:
                raise zipfile.BadZipFile("its list of records has two ends")
            size, start = _END_64.unpack(os.pread(handle, _END_64.size, end))[1:]
        if mark != b"PK\5\6" or comment or start + size != end:
            raise zipfile.BadZipFile("its list of records is not at its end")

    def _find_records(self, archive: zipfile.ZipFile, handle: int) -> dict[int, int]:
        """Position of the data -> size, of each record. torch reads with another program (miniz), which ignores case in
        names and takes anything else for a pickle: it must not find another one."""
        records: dict[int, int] = {}
        listed = archive.infolist()
        folded = {info.filename.casefold() for info in listed}
        folder = listed[0].filename.partition("/")[0] if listed else ""
        plain = all(info.filename == info.orig_filename and info.filename.isprintable() for info in listed)
        same_folder = all(info.filename.startswith(f"{folder}/") for info in listed)
        if len(folded) != len(listed) or not plain or not same_folder or archive.comment:
            self._refuse("it is no archive that torch.save writes: one folder, and no name twice")
        if [name for name in folded if name.endswith("/data.pkl")] != [f"{folder}/data.pkl".casefold()]:
            self._refuse("it is no archive that torch.save writes: one pickle")
        if f"{folder}/data.pkl" not in archive.namelist() or min(info.header_offset for info in listed) != 0:
            self._refuse("it is no archive that torch.save writes: it begins with something else, or has no data.pkl")
        if f"{folder}/byteorder" in archive.namelist() and archive.read(f"{folder}/byteorder") != b"little":
            self._refuse("its tensors were written by a big-endian machine; save it again on another")
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                self._refuse(f"its record {info.filename!r} is compressed; torch.save never does that")
            head = os.pread(handle, _LOCAL_HEADER, info.header_offset)
            name_bytes, extra_bytes = struct.unpack("<HH", head[26:])
            at = info.header_offset + _LOCAL_HEADER + name_bytes + extra_bytes
            if at + info.file_size > self.bytes:
                self._refuse(f"its record {info.filename!r} claims {info.file_size} bytes, the file has {self.bytes}")
            records[at] = info.file_size
        return records

    def _check_names(self, archive: zipfile.ZipFile) -> None:
        """Scan the pickle's instructions; nothing is built. Raises CheckpointError for a name that is not listed."""
        (info,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if info.file_size > _PICKLE_LIMIT:
            self._refuse(f"its pickle has {info.file_size} bytes (limit {_PICKLE_LIMIT})")
        try:
            for code, name in names(archive.read(info)):
                if code in _UNSEEN or (name and name not in _PLAIN and name not in _STANDINS):
                    self._refuse(
                        f"its pickle asks for {name or code}, which is not on the list of plain data that is read "
                        "from foreign files. Nothing of it was run. If it is state that a training script added "
                        "(client_state), save the checkpoint without it"
                    )
        except TooMuch as error:
            self._refuse(str(error))

    def _load(self, file: BinaryIO) -> Any:
        file.seek(0)
        allowed: list[Any] = [(standin, name) for name, standin in _STANDINS.items()]
        try:
            with torch.serialization.safe_globals(allowed):
                tree = torch.load(file, map_location="meta", weights_only=True)
            measure(tree)
            return tree
        except TooMuch as error:
            self._refuse(str(error))
        except (pickle.UnpicklingError, RuntimeError, MemoryError) as error:
            head, _, reason = str(error).partition("WeightsUnpickler error:")
            self._refuse(f"it cannot be loaded: {' '.join((reason or head).split())[:200]}")
        except (LookupError, ValueError, TypeError, AttributeError, EOFError, ArithmeticError, AssertionError) as error:
            self._refuse(f"it cannot be loaded, it is damaged: {type(error).__name__}")

    @contextmanager
    def _damage(self, record: str = "") -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            self._refuse(f"{f'its record {record!r}' if record else 'it'} is damaged, or it is no .pt file: {error}")
        except (OSError, ValueError, LookupError) as error:
            self._refuse(f"it cannot be read: {error}")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}.")


class _Sink:
    """Passes torch.save's output to `write` as memoryviews."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write

    def write(self, data: bytes) -> int:
        self._write(memoryview(data))
        return len(data)

    def flush(self) -> None:
        pass


def write_pickle(tree: Any, write: Callable[[memoryview], None]) -> None:
    """Write the bytes of torch.save(tree), piece by piece."""
    torch.save(tree, _Sink(write))  # type: ignore[arg-type]
