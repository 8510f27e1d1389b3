"""Checkpoints at a URL: listed without downloading their files, or downloaded into this user's cache.

A URL names a folder of checkpoints, a run's folder, a checkpoint's folder, or FOLDER/step-N.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import scratch_folder
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest, step_folder, step_of
from llmtrain.checkpoint.listing import find_checkpoints
from llmtrain.checkpoint.verify import verify
from llmtrain.storage.addresses import is_url, place_of
from llmtrain.storage.folders import alone, announce
from llmtrain.storage.object_store import Store, StoreError, problem_of

_STEP = re.compile(r"step-([0-9]{1,18})")


def name_of(step: int, name: str) -> str:
    """Return the name that a checkpoint's file has in a store."""
    return f"{step_folder(Path(), step).name}/{name}"


def download(store: Store, step: int, into: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Download a checkpoint; calls `beat` before each file. Raises CheckpointError: when its manifest is not valid;
    StoreError, FileNotFoundError."""
    into.mkdir(parents=True)
    store.get(name_of(step, MANIFEST), into / MANIFEST)
    for name in Manifest.read(into).files:
        beat()
        store.get(name_of(step, name), into / name)


class Remote:
    def __init__(self, url: str) -> None:
        """Raises CheckpointError: when the store cannot be used."""
        self._given = redact_text(url)
        if problems := problem_of(url):
            raise self._wrong("; ".join(problems))
        base, _, last = url.rstrip("/").rpartition("/")
        step = _STEP.fullmatch(last)
        run = base if step else url.rstrip("/")
        self._step = int(step[1]) if step else None
        with self._name_errors():
            beside = {name.partition("/")[0] for name in Store(run).files() if name.partition("/")[2]}
            inside = "checkpoints" in beside and not any(map(_STEP.fullmatch, beside))
            self.url = f"{run}/checkpoints" if inside else run
            self._store = Store(self.url)
        self._name = run.removesuffix("/checkpoints").rpartition("/")[2]

    @contextlib.contextmanager
    def outline(self) -> Iterator[Path]:
        """A context with a temporary run folder for the checkpoints at the URL. Manifests and trainer.json are
        downloaded; other files are holes with the right sizes and ages. Raises CheckpointError."""
        with scratch_folder("outline") as scratch:
            checkpoints = scratch / (self._name or "run") / "checkpoints"
            checkpoints.mkdir(parents=True)
            with self._name_errors():
                for name, stored in self._store.files().items():
                    folder, _, file = name.rpartition("/")
                    step = step_of(Path(folder)) if "/" not in folder else None
                    if step is None or self._step not in (None, step):
                        continue
                    path = checkpoints / folder / file
                    path.parent.mkdir(exist_ok=True)
                    if file in (MANIFEST, TRAINER):
                        self._store.get(name, path)
                    else:
                        path.touch()
                        os.truncate(path, stored.bytes)
                    if stored.modified_s is not None:
                        os.utime(path, (stored.modified_s, stored.modified_s))
            try:
                yield checkpoints.parent
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(checkpoints.parent), self._given)) from None

    @contextlib.contextmanager
    def filled(self, path: Path) -> Iterator[None]:
        """A context in which a file of an outline has its contents. Raises CheckpointError."""
        if path.name in (MANIFEST, TRAINER):
            yield
            return
        size = path.stat().st_size
        with self._name_errors():
            self._store.get(f"{path.parent.name}/{path.name}", path)
        try:
            yield
        finally:
            path.write_bytes(b"")
            os.truncate(path, size)

    def fetch(self, outlined: Path) -> Path:
        """Return an outlined checkpoint's folder in the cache, downloaded and verified. Raises CheckpointError."""
        place = place_of(self.url)
        checkpoints = place / (self._name or "run") / "checkpoints"
        folder, partial = checkpoints / outlined.name, checkpoints / f"{outlined.name}.tmp"
        manifest = Manifest.read(outlined)
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            with alone(place):
                wanted = (outlined / MANIFEST).read_bytes()
                if (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == wanted:
                    return folder
                for old in (folder, partial):
                    shutil.rmtree(old, ignore_errors=True)
                sizes = {name: entry.bytes for name, entry in manifest.files.items()}
                remedy = "LLMTRAIN_CACHE to a folder with room"
                announce(f"{self.url}/{outlined.name}", sizes, place, remedy, self._wrong)
                with self._name_errors():
                    download(self._store, manifest.step, partial)
                if wrong := verify(partial):
                    shutil.rmtree(partial)
                    raise self._wrong(f"{outlined.name} is damaged in the store: {wrong[0]}. Take another checkpoint")
                return partial.rename(folder)
        except OSError as error:
            text = f"{place} cannot be written: {error.strerror}. Set LLMTRAIN_CACHE to a folder with room"
            raise self._wrong(text) from error

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except (StoreError, FileNotFoundError) as error:
            text = f"cannot be read ({error}). Correct the address or the access to it"
            raise self._wrong(text) from error

    def _wrong(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._given}: {text}.")


def checkpoints_at(path: str, count: int = 1, find: Callable[[Path], list[Path]] = find_checkpoints) -> list[Path]:
    """Return the first `count` checkpoints that `find` returns; of a URL, downloaded. Raises CheckpointError."""
    if not is_url(path):
        return find(Path(path))[:count]
    remote = Remote(path)
    with remote.outline() as outline:
        return [remote.fetch(folder) for folder in find(outline)[:count]]
