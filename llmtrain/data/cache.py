"""A cache on each host for prepared folders in object stores, shared by the ranks and the runs of the host.

Each folder of the cache is a copy of one folder of a store with one manifest. A file in it is complete and matches the
manifest, or it is missing. Small files are downloaded when the folder is opened, and shards in the background as far as
they fit (data/download.py). What is missing of a shard is read from the store.

A process that has a folder open holds a shared lock on it. A folder without a lock may be deleted to make room.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import cache_folder, folder_bytes, lock_file, lock_folder, replace_file
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.redact import redact_text
from llmtrain.data.manifest import NAME, SAMPLE, URL, Manifest, parse_manifest
from llmtrain.storage.object_store import Store, StoreError, problem_of

Item = TypeVar("Item")
Result = TypeVar("Result")

_AT_ONCE = 64
"""Concurrent requests: with a round trip of 0.1 s each, 64 sequences then take as long as one."""
_GIVE_UP_S = 300.0
"""Time after which a store without an answer is given up; other ranks wait for 600 s by default (fault.timeout_s)."""
_AGAIN_S = 2.0
_LEFT_FREE = 1 << 30
"""Bytes of the disk that downloads leave free."""
_LOCK, _VERSIONS, _USED = ".lock", ".versions.json", ".used"


def root_of(cache: str | None) -> Path:
    """Return the cache folder of this host. `cache`: data.cache."""
    return cache_folder() / "data" if cache is None else Path(cache).expanduser()


class StoreGone(DataError):
    passing = True


def opened(url: str, root: Path) -> CachedFolder:
    """Open this host's copy of a prepared folder in a store; a process opens each once. Raises DataError."""
    if (wrong := problem_of(url)) is not None:
        raise DataError(f"{redact_text(url)}: {wrong[0]}; {wrong[1]}")
    url = url.rstrip("/")
    key = (url, str(root))
    found = _open.get(key)
    if found is None:
        found = _open[key] = CachedFolder(url, root)
    return found


def copied(folder: Path) -> CachedFolder:
    """Open the copy in a folder of a cache. Raises DataError: its store has changed, or cannot be read."""
    found = opened((folder / URL).read_text(), folder.parent)
    if not os.path.samefile(found.path, folder):
        raise DataError(f"{folder}: is a copy of {found.shown}, which has been prepared again since then")
    return found


_open: weakref.WeakValueDictionary[tuple[str, str], CachedFolder] = weakref.WeakValueDictionary()


class CachedFolder:
    """A prepared folder in a store, of which this host may have some files."""

    def __init__(self, url: str, root: Path) -> None:
        """Open the folder and download its small files. Raises DataError."""
        self.url = url
        self._store = self._from_store(lambda: Store(url))
        try:
            content = self._from_store(lambda: self._store.read(NAME))
        except FileNotFoundError:
            raise DataError(
                f"{self.shown}: holds no {NAME}, so it is not (or not fully) prepared; correct the URL, or upload the "
                "folder again"
            ) from None
        self.manifest: Manifest = parse_manifest(content, f"{self.shown}/{NAME}")
        self._listed = self._from_store(self._store.files)
        self.path = root / f"{url.rpartition('/')[2]}-{xxhash.xxh3_64_hexdigest(url.encode() + content)}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held = _hold(self.path)
            weakref.finalize(self, _release, self.path, self._held)
            (self.path / _USED).touch()
            if not (self.path / NAME).is_file():
                with _locked(self.path / _LOCK):
                    replace_file(self.path / URL, url.encode())
                    replace_file(self.path / NAME, content)
        except OSError as error:
            raise self._unwritable(error) from error
        # A key of a store may hold "..", or lead deeper.
        tokenizer = [
            name for name in self._listed if name == f"tokenizer/{Path(name).name}" and Path(name).name != ".."
        ]
        self.fetch([*tokenizer, SAMPLE, *self._sums])

    @property
    def shown(self) -> str:
        return redact_text(self.url)

    @property
    def _sums(self) -> dict[str, str]:
        rows = {
            Path(shard.file).with_suffix(".rows").name: shard.rows
            for shard in chain(*self.manifest.shards.values())
            if shard.rows
        }
        return {"tokenizer/tokenizer.json": self.manifest.tokenizer_fingerprint, **rows}

    def size(self, name: str) -> int | None:
        """Return the bytes of a file in the store; None: the store does not have it."""
        return self._listed[name].bytes if name in self._listed else None

    def fetch(self, names: Collection[str]) -> None:
        """Download files that are not here; files that the store does not have are skipped. Raises DataError."""
        try:
            with _locked(self.path / _LOCK):
                self._fetch([name for name in dict.fromkeys(names) if name in self._listed])
        except OSError as error:
            raise self._unwritable(error) from error

    def _fetch(self, names: list[str]) -> None:
        known = self._known()
        missing = [
            name for name in names if known.get(name) != self._listed[name].version or not (self.path / name).is_file()
        ]
        if not missing:
            return
        remove_partials(self.path, missing)
        for folder in {(self.path / name).parent for name in missing}:
            folder.mkdir(exist_ok=True)
        each(lambda name: self.get(name, lambda path: self._is_whole(name, path)), missing)
        known |= {name: self._listed[name].version for name in missing}
        replace_file(self.path / _VERSIONS, json.dumps(known).encode())

    def _known(self) -> dict[str, str]:
        """Return the store's version of each small file that is here."""
        try:
            known = untrusted.loads((self.path / _VERSIONS).read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _is_whole(self, name: str, path: Path) -> bool:
        wanted = self._sums.get(name)
        content = path.read_bytes()
        digest = xxhash.xxh3_64_hexdigest if wanted is None or len(wanted) == 16 else xxhash.xxh3_128_hexdigest
        return len(content) == self._listed[name].bytes and wanted in (None, "", digest(content))

    def get(self, name: str, whole: Callable[[Path], bool]) -> None:
        """Download a file, and once more if `whole` rejects it. Raises DataError; OSError: it cannot be written."""
        path = self.path / name
        arriving = path.with_name(f"{path.name}.{os.getpid()}.partial")
        if shutil.disk_usage(self.path).free < self._listed[name].bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            for _ in range(2):
                try:
                    self._from_store(lambda: self._store.get(name, arriving), time.monotonic() + _GIVE_UP_S)
                except FileNotFoundError:
                    raise self._gone(name) from None
                if whole(arriving):
                    arriving.rename(path)
                    return
        finally:
            arriving.unlink(missing_ok=True)
        raise DataError(
            f"{self.shown}/{name}: its checksum differs from {NAME}, also after a second download: the "
            "file was changed or is damaged; upload the folder again"
        )

    def read(self, parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read bytes [start, stop) of files in the store concurrently, as they were when the folder was opened.

        Raises DataError: minutes without an answer, or a file has changed.
        """
        until = time.monotonic() + _GIVE_UP_S
        found = each(lambda part: self._from_store(lambda: self._part(*part), until), parts, self.shown, until)
        # Not every driver can read a given version. If the version is the old one after a read, so are the bytes.
        names = list(dict.fromkeys(name for name, _, _ in parts))
        each(lambda name: self._from_store(lambda: self._refuse_changed(name), until), names, self.shown, until)
        return found

    def _part(self, name: str, start: int, stop: int) -> bytes:
        try:
            return self._store.read(name, start, stop)
        except FileNotFoundError:
            raise self._gone(name) from None

    def _refuse_changed(self, name: str) -> None:
        try:
            found = self._store.stat(name)
        except FileNotFoundError:
            raise self._gone(name) from None
        if found != self._listed[name]:
            raise DataError(
                f"{self.shown}/{name}: was changed since it was opened, so its tokens differ from the run's; put "
                "the former file back, or prepare into a folder of another name"
            )

    def _gone(self, name: str) -> DataError:
        return DataError(f"{self.shown}/{name}: is gone since the folder was opened; put it back")

    def _from_store(self, ask: Callable[[], Result], until: float = 0.0) -> Result:
        """Call `ask` again after failures until time `until`. Raises DataError; FileNotFoundError: there is no file."""
        while True:
            try:
                return ask()
            except StoreError as error:
                if error.final or time.monotonic() >= until:
                    kind = DataError if error.final else StoreGone
                    raise kind(
                        f"{self.shown}: cannot be read from {socket.gethostname()} ({error}); correct address or access"
                    ) from None
                time.sleep(_AGAIN_S)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"data.cache: {error.filename or self.path} cannot be written ({error.strerror}); make room, or name "
            "another folder of this host"
        )


def _hold(folder: Path) -> int:
    """Create a folder and take a shared lock on it, which keeps others from deleting it. Raises OSError."""
    while True:
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            handle = lock_folder(folder, wait=True, shared=True)
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                return handle
            os.close(handle)


def _release(folder: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        (folder / _USED).touch()
    os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = lock_file(path)
    try:
        yield
    finally:
        os.close(handle)


def remove_partials(folder: Path, names: Iterable[str]) -> None:
    """Remove partial downloads of dead processes. The caller holds the lock that downloads need."""
    for name in names:
        path = folder / name
        for left in path.parent.glob(f"{path.name}.*.partial"):
            left.unlink(missing_ok=True)


def make_room(root: Path, wanted: int, bound: float) -> bool:
    """Delete folders that no process has open, the least recently used first, until `wanted` bytes fit.

    Returns False if they do not fit even then. The caller must be the only process that downloads into this cache.
    """
    # Other folders are not ours to delete.
    sizes = {path: folder_bytes(path) for path in root.iterdir() if (path / URL).is_file()}
    over = max(sum(sizes.values()) + wanted - bound, wanted + _LEFT_FREE - shutil.disk_usage(root).free)
    going: dict[Path, int] = {}
    try:
        for folder in sorted(sizes, key=_used_at):
            if over <= 0:
                break
            with contextlib.suppress(OSError):  # in use, or just deleted
                going[folder] = lock_folder(folder)
                over -= sizes[folder]
        if over > 0:
            return False
        for folder in going:
            shutil.rmtree(folder)
        return True
    finally:
        for handle in going.values():
            os.close(handle)


def _used_at(folder: Path) -> float:
    try:
        return (folder / _USED).stat().st_mtime
    except OSError:
        return 0.0


# --- concurrent requests, and the threads that wait for them ---


_waits: dict[int, tuple[float, str]] = {}
"""Thread -> (time since when it has been waiting for a store, the store)."""


def waiting() -> tuple[float, str] | None:
    """Return (seconds, store) of the thread that has waited longest for a store; None: no thread waits."""
    now = time.monotonic()
    return max(((now - since, of) for since, of in list(_waits.values())), default=None)


def each(ask: Callable[[Item], Result], items: Sequence[Item], of: str = "", until: float = math.inf) -> list[Result]:
    """Call `ask` for all items in parallel threads, which do not keep the process from ending, and return the results.

    `of`: the store's name. Raises the first failure; StoreGone if results are missing at time `until`.
    """
    found: dict[int, Result] = {}
    errors: list[BaseException] = []
    todo = iter(list(enumerate(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number, item = next(todo, (-1, None))
            if number < 0:
                return
            try:
                found[number] = ask(item)  # type: ignore[arg-type]
            except BaseException as error:  # the caller's to raise
                errors.append(error)

    threads = [threading.Thread(target=work, name="store", daemon=True) for _ in range(min(len(items), _AT_ONCE))]
    _waits[threading.get_ident()] = (time.monotonic(), of)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
                if threading.current_thread() is threading.main_thread():  # a reader's thread proves nothing
                    heart.beat()
                if thread.is_alive() and time.monotonic() > until + _AGAIN_S:
                    silence = StoreGone(f"{of}: does not answer {socket.gethostname()}; check the network")
                    raise errors[0] if errors else silence
    finally:
        del _waits[threading.get_ident()]
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(items))]
