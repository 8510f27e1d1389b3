"""A folder of results in an object store: written on this host, uploaded, there as a whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from llmtrain.base import units
from llmtrain.base.errors import UserError
from llmtrain.base.files import cache_folder, lock_folder
from llmtrain.storage.object_store import Store, StoreError

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
