"""Folders that URLs name: fetched into this user's cache, once for each host and as a whole, or written here
and uploaded.

The revision of a folder is a digest of the names, sizes and versions of its files: one that changes in the store is
another revision, fetched beside the one that a run began with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from llmtrain.base import units, untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import cache_folder, lock_folder, replace_file
from llmtrain.storage.object_store import Store, Stored, StoreError, problem_of

_SPARE = 64 << 20
"""Bytes that a download leaves free."""


def place_of(url: str) -> Path:
    """The folder of this host's cache for a URL: files of each revision in a folder of that name."""
    return cache_folder() / "stores" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def fetch(
    url: str,
    revision: str | None,
    choices: Sequence[Callable[[Sequence[str], Path], Sequence[str]]],
    wrong: Callable[[str], UserError],
) -> tuple[Path, str]:
    """Files of a folder in a store, on this host. One process of a host fetches, the others wait for it.

    Args:
        revision: which one, as it was returned before; the store is not asked if all of it is here. None: what is there
            now.
        choices: each takes the names of the files and the folder here, with what the ones before it have chosen, and
            returns which to fetch.
        wrong: makes an error of a clause that names the rule, and the remedy.

    Returns: the folder, and its revision. Raises what `wrong` makes; a choice may raise, too.
    """
    if found := problem_of(url):
        raise wrong("; ".join(found))
    place = place_of(url)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{place} cannot be made: {error.strerror}. Set LLMTRAIN_CACHE to a folder of yours"
        raise wrong(text) from error
    with alone(place):
        folder, note = place / str(revision), place / f"{revision}.json"
        with contextlib.suppress(OSError, ValueError):
            if revision is not None:
                sizes: dict[str, int] = json.loads(note.read_bytes())
                chosen = [name for choose in choices for name in choose(sorted(sizes), folder)]
                if all((folder / name).stat().st_size == sizes[name] for name in chosen):
                    return folder, revision
        try:
            store = Store(url)
            there = _files(store)
            now = _revision(there)
            if not there:
                raise wrong("no file is there. Correct the address")
            if revision not in (None, now):
                raise wrong("its files are others than those that the run began with. Put those back")
            folder, note = place / now, place / f"{now}.json"
            folder.mkdir(exist_ok=True)
            replace_file(note, json.dumps({name: stored.bytes for name, stored in there.items()}).encode())
            for choose in choices:
                _complete(store, there, folder, choose(sorted(there), folder), wrong)
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
    """One process of this host, or of all hosts that share the folder. A folder that cannot be written may still have
    everything, and some file systems have no locks: then nobody waits."""
    handle = None
    with contextlib.suppress(OSError):
        lock.mkdir(parents=True, exist_ok=True)
        handle = lock_folder(lock, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def announce(name: str, files: Mapping[str, int], place: Path, remedy: str, wrong: Callable[[str], UserError]) -> None:
    """Say what is fetched. Raises what `wrong` makes where the folder `place` has no room. `files`: bytes by name."""
    total, free = sum(files.values()), shutil.disk_usage(place).free
    if free < total + _SPARE:
        raise wrong(
            f"{units.size(total)} are to be fetched, and {place} on {socket.gethostname()} has {units.size(free)} "
            f"free. Make room, or set {remedy}"
        )
    line = f"fetching {name}: {units.counted(len(files), 'file')}, {units.size(total)}"
    print(untrusted.shown(line), file=sys.stderr, flush=True)  # on standard output `generate` has the model's words


def _files(store: Store) -> dict[str, Stored]:
    """Files of the folder and one level below, as models have them, without names that a path could not take."""
    found = store.files()
    return {name: stored for name, stored in found.items() if name.count("/") < 2 and ".." not in name.split("/")}


def _revision(files: Mapping[str, Stored]) -> str:
    """40 hexadecimal digits, as a commit has."""
    lines = [json.dumps([name, stored.bytes, stored.version]) for name, stored in sorted(files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


def _complete(
    store: Store,
    there: Mapping[str, Stored],
    folder: Path,
    chosen: Sequence[str],
    wrong: Callable[[str], UserError],
) -> None:
    todo = {name: there[name].bytes for name in chosen if not (folder / name).is_file()}
    if todo:
        announce(store.url, todo, folder, "LLMTRAIN_CACHE to a folder with room", wrong)
    for name in todo:
        (folder / name).parent.mkdir(exist_ok=True)
        store.get(name, folder / name)


Wrong = Callable[[str], UserError]
"""Makes an error of a clause that names the rule, and the remedy."""


def upload(folder: Path, store: Store, *, first: Collection[str] = (), last: Collection[str]) -> str:
    """Upload the files of a folder to one that has none of them, or those of an upload that ended early.

    Args:
        first: names of files that say whose folder it is.
        last: names of the files that readers look for. While they are missing there, nothing is.

    Returns the number and the sizes of the files, in words. Raises StoreError: also where a file there has another size
    than here.
    """
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda name: (name in last, name not in first, name)):
        store.put(folder / name, name)
    total = sum((folder / name).stat().st_size for name in names)
    return f"{units.counted(len(names), 'file')}, {units.size(total)}"


def clear(store: Store, *, first: Collection[str] = (), last: Collection[str]) -> None:
    """Delete all files of a folder, those of `last` before all others, and those of `first` at the end."""
    names = store.files().keys()
    leading, marks = [name for name in names if name in last], [name for name in names if name in first]
    for some in (leading, sorted(names - {*leading, *marks}), marks):
        store.remove(some)


@contextlib.contextmanager
def scratch_for(url: str, wrong: Wrong) -> Iterator[Path]:
    """A path on this host's disk for what goes to a URL, the same for each start of a command, so that it can go on.

    It is removed when the block ends without an error. Raises what `wrong` makes: another process writes it, or it
    cannot be made.
    """
    folder = cache_folder() / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except BlockingIOError:
        raise wrong("another process of this host is writing it; wait for it") from None
    except OSError as error:
        text = f"{folder} cannot be made: {error.strerror}; set LLMTRAIN_CACHE to a folder with room"
        raise wrong(text) from error
    try:
        out = folder / (url.rstrip("/").rpartition("/")[2] or "out")
        shutil.rmtree(out, ignore_errors=True)  # of a start whose upload failed
        yield out
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextlib.contextmanager
def told(wrong: Wrong, left: Path | None = None) -> Iterator[None]:
    """What a store refuses inside the block is said as `wrong` says it. `left`: where what was to go there is whole.

    Raises what `wrong` makes.
    """
    try:
        yield
    except StoreError as error:
        kept = f"; what was to go there is whole in {left}" if left is not None else ""
        raise wrong(f"the store cannot be used ({error}){kept}. Correct the address or the access to it") from error
