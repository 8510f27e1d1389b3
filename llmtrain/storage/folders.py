"""Folders in stores: downloaded completely, once per host, into this user's cache.

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
"""Bytes that a download leaves free."""

Choose = Callable[[Sequence[str], Path], Sequence[str]]
"""Chooses the files to fetch, given all names and the folder with the files of earlier choices."""
Wrong = Callable[[str], UserError]
"""Makes an error from a clause that names the rule, and the remedy."""


def fetch(url: str, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> tuple[Path, str]:
    """Files of a folder in a store. One process of a host downloads, the others wait.

    Args:
        revision: as returned before; the store is not asked if all files are here. None: the present one.

    Returns: the folder, and its revision. Raises what `wrong` makes; a choice may raise too.
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
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # a damaged note is made anew
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
                raise wrong("no file is there. Correct the address")
            if revision not in (None, now):
                raise wrong("its files have changed since the run began. Put the former ones back")
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
    """Run the block in one process of this host, or of all hosts that share the folder.

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
    """Announce a download. Raises what `wrong` makes if the folder `place` has no room. `files`: bytes by name."""
    total, free = sum(files.values()), shutil.disk_usage(place).free
    if free < total + _SPARE:
        raise wrong(
            f"{units.size(total)} must be fetched, and {place} on {socket.gethostname()} has {units.size(free)} "
            f"free. Make room, or set {remedy}"
        )
    line = f"fetching {name}: {units.counted(len(files), 'file')}, {units.size(total)}"
    print(untrusted.shown(line), file=sys.stderr, flush=True)  # standard output is for the model's words in `generate`


def _files(store: Store) -> dict[str, Stored]:
    """Files of the folder and one level below, without names that no path can have."""
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
