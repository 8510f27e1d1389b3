"""The output folder of `llmtrain prepare`: on this host (and on hosts that share it), or in an object store.

Each host that works on a folder in a store keeps a copy of all files except shards in a scratch folder, among its
temporary files. A shard is written there, uploaded when it is complete, and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from llmtrain.base import log, units
from llmtrain.base.errors import DataError
from llmtrain.base.files import lock_folder, replace_file
from llmtrain.base.redact import redact_text
from llmtrain.data import manifest as manifests
from llmtrain.data.manifest import SAMPLE, SPLITS, Manifest
from llmtrain.data.prepare.inputs import AT_ONCE
from llmtrain.storage.addresses import is_url
from llmtrain.storage.object_store import Store, StoreError, problem_of

UNFINISHED = "unfinished"
PLAN = f"{UNFINISHED}/plan.json"
HELD_OUT = f"{UNFINISHED}/held_out.npy"
REJECTED = "rejected.jsonl"
_OWNER = f"{UNFINISHED}/owner"
_HOSTS = 64
"""Most scratch folders of one preparation on a host. (A worker that seems lost keeps its own.)"""


class OutFolder:
    """A folder on this host, whose files are written in place."""

    owner = ""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.here = path
        """Folder in which the plan, the tokenizer and other small files are read and written."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Allow only one `prepare` in a folder. The lock is on the folder itself and ends with its process.

        Raises DataError: another one holds the folder, or the folder cannot be written.
        """
        out = self.here
        existed = out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(out)
        except BlockingIOError as error:
            raise DataError(f"--out {out}: another `llmtrain prepare` is at work in it; wait for it") from error
        except OSError as error:
            raise DataError(f"--out {out}: cannot be made a folder ({error.strerror}); choose another") from error
        try:  # from here on no other process writes into the folder
            yield
        except OSError as error:
            raise DataError(
                f"--out {out}: cannot be written ({error.strerror or error}); make room and run the same command again"
            ) from error
        finally:
            for partial in out.glob("*.tmp"):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
            for partial in (out / UNFINISHED).glob("*"):
                if partial.is_dir():  # of a worker that was killed
                    shutil.rmtree(partial, ignore_errors=True)
                elif partial.suffix == ".tmp":
                    partial.unlink()
            if not existed and not any(out.iterdir()):
                out.rmdir()
            os.close(lock)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files by name, for a link those of its target. Folders may be among the names."""
        return {entry.name: entry.stat().st_size if entry.exists() else 0 for entry in self.here.iterdir()}

    def claim(self) -> None:
        """Claim the folder, so that all earlier commands on it end."""

    def refuse_taken(self, sizes: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raise DataError if a later command has claimed the folder, or a written file has another size."""

    def show(self, *names: str) -> None:
        """Publish files or folders of `here`, so that other hosts and later commands see them."""

    def bring(self, names: Iterable[str]) -> None:
        """Copy missing files to `here`."""

    def take(self, own: Path) -> None:
        """Move a unit's files from the worker's folder `own`, the record last, because it marks the unit as done."""
        for name in _of_unit(own):
            (own / name).replace(self.here / name)

    def remove(self, names: Iterable[str]) -> None:
        for path in (self.here / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _of_unit(own: Path) -> list[str]:
    """Names of a unit's complete files: shards, hashes, record."""
    files = [path for path in own.rglob("*") if path.is_symlink() or path.is_file()]
    files.sort(key=lambda path: (path.parent != own, path.suffix == ".json", path.name))
    return [str(path.relative_to(own)) for path in files if path.suffix != ".tmp"]


class StoredFolder(OutFolder):
    """A folder in an object store, by URL.

    Stores have no locks: a command claims the folder, and earlier ones end before their next shard. A later command
    with the same settings and sources makes the same bytes.
    """

    def __init__(self, url: str, here: Path = Path(), owner: str = "") -> None:
        """`here`, `owner`: scratch folder and claim of the command, for its workers. Raises StoreError."""
        self.name = url.rstrip("/")
        self.here = here
        self.owner = owner or secrets.token_hex(8)
        self._store = Store(self.name)

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            with _scratch(self.name, "command", 1) as self.here:
                files = self._store.files()
                wanted = [name for name in files if name in (manifests.NAME, REJECTED, SAMPLE)]
                wanted += [name for name in files if name.startswith(f"{UNFINISHED}/") and name.endswith(".json")]
                self.bring([*wanted, *_tokenizer(files)])
                yield
        except BlockingIOError as error:
            raise DataError(f"--out {self.name}: another `llmtrain prepare` is at work in it; wait for it") from error
        except OSError as error:
            raise DataError(
                f"--out {self.name}: cannot be used ({error.strerror or error}); check the URL, the store's "
                f"credentials on this host, the network and the room in {tempfile.gettempdir()} (TMPDIR), and run the "
                "same command again: finished shards are kept"
            ) from error

    def sizes(self) -> dict[str, int]:
        return {name: stored.bytes for name, stored in self._store.files().items() if name}

    def claim(self) -> None:
        self._store.write(self.owner.encode(), _OWNER)

    def refuse_taken(self, sizes: Mapping[str, int] = MappingProxyType({})) -> None:
        try:
            owner = self._store.read(_OWNER).decode()
        except FileNotFoundError:  # the later one has ended, or has cleared the folder
            owner = ""
        if owner != self.owner:
            raise DataError(
                f"--out {self.name}: another `llmtrain prepare` has begun to work in it, and this one ends; let one of "
                "them run"
            )
        there = self.sizes() if sizes else {}
        if wrong := [name for name, size in sizes.items() if there.get(name) != size]:
            raise DataError(
                f"--out {self.name}: {wrong[0]} has changed since it was written; run the same command again, which "
                "makes it again"
            )

    def show(self, *names: str) -> None:
        for name in names:
            path = self.here / name
            files = [name] if path.is_file() else _tokenizer(map(str, _below(self.here, path)))
            for each in files:
                self._store.put(self.here / each, each)

    def bring(self, names: Iterable[str]) -> None:
        def one(name: str) -> None:
            (self.here / name).parent.mkdir(parents=True, exist_ok=True)
            self._store.get(name, self.here / name)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(one, [name for name in names if not (self.here / name).exists()]))

    def take(self, own: Path) -> None:
        self.refuse_taken()
        for name in _of_unit(own):
            self._store.put(own / name, name)
            (own / name).unlink()

    def remove(self, names: Iterable[str]) -> None:
        gone = list(names)
        super().remove(gone)
        below = [name for name in self._store.files() if any(name == n or name.startswith(f"{n}/") for n in gone)]
        # The plan goes last: without it the files of a preparation would be taken for somebody else's.
        self._store.remove([name for name in below if name != PLAN])
        self._store.remove([name for name in below if name == PLAN])


def _below(root: Path, folder: Path) -> list[Path]:
    return [path.relative_to(root) for path in sorted(folder.rglob("*")) if path.is_file()]


def _tokenizer(names: Iterable[str]) -> list[str]:
    """Return the tokenizer's files with tokenizer.json last, which marks them as complete; empty if it is missing."""
    last = "tokenizer/tokenizer.json"
    found = [name for name in names if name.startswith("tokenizer/")]
    return [*(name for name in found if name != last), last] if last in found else []


def opened(out: str, here: str = "", owner: str = "") -> OutFolder:
    """Open the folder of --out. Raises DataError: the URL is wrong, or the store cannot be used."""
    if not is_url(out):
        return OutFolder(Path(out))
    if (problem := problem_of(out, writes=True)) is not None:
        raise DataError(f"--out {redact_text(out)}: {problem[0]}; {problem[1]}")
    try:
        return StoredFolder(out, Path(here), owner)
    except StoreError as error:
        raise DataError(f"--out {out}: cannot be used ({error}); check the URL and the store's settings") from None


@contextmanager
def seen(out: str) -> Iterator[Path]:
    """Open the folder for workers on another host, with plan, tokenizer and held-out documents.

    Raises OSError, DataError.
    """
    folder = opened(out)
    if not isinstance(folder, StoredFolder):
        yield folder.here
        return
    with _scratch(folder.name, "workers", _HOSTS) as folder.here:
        files = folder.sizes()
        folder.bring([*(name for name in (PLAN, HELD_OUT) if name in files), *_tokenizer(files)])
        yield folder.here


@contextmanager
def _scratch(url: str, role: str, places: int) -> Iterator[Path]:
    """Yield an empty scratch folder on this host. Raises OSError; BlockingIOError: all `places` are in use."""
    name = f"llmtrain-prepare-{os.getuid()}-{socket.gethostname()}-{xxhash.xxh3_64_hexdigest(url.encode())}-{role}"
    for place in range(places):
        path = Path(tempfile.gettempdir(), f"{name}-{place}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # another user's link, perhaps to our files
            raise PermissionError(f"{path} belongs to another user; set TMPDIR to a folder of your own")
        with contextlib.suppress(BlockingIOError):
            lock = lock_folder(path)
            break
    else:
        raise BlockingIOError
    try:
        for left in path.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


# --- new, unfinished, or complete ---

_SHOWN = 3
"""Most paths of a glob that a message names."""
_SOON_DONE_AGAIN_BYTES = 64 << 20
"""Up to this size, about a minute's work, shards of an attempt with different settings are deleted without asking."""


def already_complete(out: OutFolder, plan: dict[str, Any]) -> Manifest:
    """Return the manifest of a complete folder. Raises DataError if it was prepared differently from `plan`."""
    manifest = manifests.read_manifest(out.here)
    sizes = out.sizes()
    for name, size in bytes_of_shards(manifest).items():
        if sizes.get(name) != size:
            raise DataError(
                f"--out {out.name}: {name} has {sizes.get(name, 'no')} bytes, the manifest says {size}; delete the "
                "folder and prepare it again"
            )
    different = _differences(manifest.settings, plan["settings"])
    if manifest.source["stat"] != plan["stat"]:
        different.append("the source files have changed since")
    if different:
        raise DataError(
            f"--out {out.name}: it already holds data that was prepared differently: {'; '.join(different)}. "
            "Choose another --out, or delete the folder to prepare it again"
        )
    out.remove([UNFINISHED])  # a kill between manifest and clean-up leaves it
    log.info(f"{out.name}: already complete, nothing to do ({units.count(sum(manifest.tokens.values()))} tokens)")
    return manifest


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {_short(before.get(key))} and is now {_short(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    """Format a setting for a message; of a glob with many paths only some are named."""
    if not isinstance(value, list) or len(value) <= _SHOWN:
        return repr(value)
    return f"[{', '.join(map(repr, value[:_SHOWN]))} and {units.counted(len(value) - _SHOWN, 'other')}]"


def start_or_continue(out: OutFolder, plan: dict[str, Any]) -> dict[str, Any]:
    """Write `unfinished/plan.json` and remove files of another plan. Returns `plan`.

    If an earlier run with the same settings did not finish, its plan is returned, with its `moment`.
    """
    path, sizes = out.here / PLAN, out.sizes()
    if path.exists():
        before = json.loads(path.read_bytes())
        different = _differences(before["settings"], plan["settings"])
        done_bytes = sum(sizes[n] for n in _made(sizes) if n.endswith(".bin") and not (out.here / n).is_symlink())
        if different and done_bytes > _SOON_DONE_AGAIN_BYTES:
            raise DataError(
                f"--out {out.name}: an unfinished preparation with other settings is there, {units.size(done_bytes)} "
                f"of tokens: {'; '.join(different)}. Repeat its settings to finish it, choose another --out, or delete "
                "the folder"
            )
        out.claim()
        if not different and before["stat"] == plan["stat"]:
            return {**plan, **before}
        why = "its settings differ from those of" if different else "the source files have changed since"
        log.info(f"{out.name}: {why} the last, unfinished run: starting over")
        clear(out)
    elif any(not name.endswith(".tmp") and name.partition("/")[0] != UNFINISHED for name in sizes):
        raise DataError(f"--out {out.name}: the folder is not empty and not made by `llmtrain prepare`; choose another")
    (out.here / UNFINISHED).mkdir(exist_ok=True)
    out.claim()
    replace_file(path, json.dumps(plan).encode())
    out.show(PLAN)
    return plan


def clear(out: OutFolder) -> None:
    out.remove([*_made(out.sizes()), REJECTED, SAMPLE, "tokenizer", UNFINISHED])


def bytes_of_shards(manifest: Manifest) -> dict[str, int]:
    width = np.dtype(manifest.dtype).itemsize
    shards = [shard for split in SPLITS for shard in manifest.shards[split]]
    return {shard.file: shard.tokens * width if shard.bytes is None else shard.bytes for shard in shards}


def _made(names: Iterable[str]) -> list[str]:
    patterns = ("*-*.bin", "*-*.rows", "*.origins.parquet")
    return [name for name in names if "/" not in name and any(fnmatchcase(name, each) for each in patterns)]
