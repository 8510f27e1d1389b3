"""Downloads folders from stores, once per host, into this user's cache.

A folder's revision is a digest of its files' names, sizes and versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llmtrain.base import units, untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import content_of, lock_folder, replace_file
from llmtrain.storage.addresses import place_of
from llmtrain.storage.object_store import Store, Stored, StoreError, problem_of

_SPARE = 64 << 20
"""Bytes that must stay free after a download."""

Choose = Callable[[Sequence[str], Path], Sequence[str]]
"""(all names, the folder with the files of earlier choices) -> names of the files to download."""
Wrong = Callable[[str], UserError]
"""Makes an error from a clause with rule and remedy."""


def fetch(url: str, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> tuple[Path, str]:
    """Download the chosen files of a folder in a store. One process of a host downloads, and the others wait.

    Args:
        revision: as returned before; if all its files are here, the store is not asked. None: the present revision.

    Returns (the folder, its revision). Raises what `wrong` makes; a choice may raise, too.
    """
    if problem := problem_of(url):
        raise wrong("; ".join(problem))
    place = place_of(url)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{place} cannot be made: {error.strerror}. Set LLMTRAIN_CACHE to a folder of yours"
        raise wrong(text) from error
    with alone(place):
        folder, note = place / str(revision), place / f"{revision}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # a damaged note is written again
            if revision is not None:
                sizes: dict[str, int] = untrusted.loads(content_of(note))
                chosen = [name for choose in choices for name in choose(sorted(sizes), folder)]
                if sizes and all((folder / name).stat().st_size == sizes[name] for name in chosen):
                    return folder, revision
        try:
            store = Store(url)
            stored = _files(store)
            now = _revision(stored)
            if not stored:
                raise wrong("there is no file at this address. Correct it")
            if revision not in (None, now):
                raise wrong("its files have changed since the run began. Restore the earlier ones")
            folder, note = place / now, place / f"{now}.json"
            folder.mkdir(exist_ok=True)
            replace_file(note, json.dumps({name: stored.bytes for name, stored in stored.items()}).encode())
            for choose in choices:
                _complete(store, stored, folder, choose(sorted(stored), folder), wrong)
            if _revision(_files(store)) != now:
                shutil.rmtree(folder)
                raise wrong("its files were changed while they were fetched. Start again")
        except (StoreError, FileNotFoundError) as error:
            raise wrong(f"cannot be fetched ({error}). Correct the address or the access to it") from error
        except OSError as error:
            text = f"{place} cannot be written: {error.strerror}. Set LLMTRAIN_CACHE to a folder with room"
            raise wrong(text) from error
    return folder, now


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """A context that one process at a time enters, of this host or of all hosts that share the folder.

    Without locks, or without write access to the folder (it may be complete), no process waits.
    """
    handle = None
    with contextlib.suppress(OSError):
        lock.mkdir(parents=True, exist_ok=True)
        handle = lock_folder(lock, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def announce(name: str, files: Mapping[str, int], place: Path, remedy: str, wrong: Wrong) -> None:
    """Print that a download begins. Raises wrong(message) if the disk of `place` is too full. `files`: name ->
    bytes."""
    total, free = sum(files.values()), shutil.disk_usage(place).free
    if free < total + _SPARE:
        raise wrong(
            f"{units.size(total)} must be downloaded, but {place} on {socket.gethostname()} has {units.size(free)} "
            f"free. Make room, or set {remedy}"
        )
    line = f"fetching {name}: {units.counted(len(files), 'file')}, {units.size(total)}"
    print(untrusted.shown(line), file=sys.stderr, flush=True)  # standard output is for the text of `generate`


def _files(store: Store) -> dict[str, Stored]:
    """Return the files of the folder and one level below, without names that no path can have."""
    files = store.files()
    return {name: stored for name, stored in files.items() if name.count("/") < 2 and ".." not in name.split("/")}


def _revision(files: Mapping[str, Stored]) -> str:
    lines = [json.dumps([name, stored.bytes, stored.version]) for name, stored in sorted(files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


def _complete(store: Store, stored: Mapping[str, Stored], folder: Path, chosen: Sequence[str], wrong: Wrong) -> None:
    todo = {name: stored[name].bytes for name in chosen if not (folder / name).is_file()}
    if todo:
        announce(store.url, todo, folder, "LLMTRAIN_CACHE to a folder with room", wrong)
    for name in todo:
        (folder / name).parent.mkdir(exist_ok=True)
        store.get(name, folder / name)
