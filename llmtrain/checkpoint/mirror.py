"""A second home for a run's checkpoints, in an object store: uploaded in the background, fetched where there are none.

`python -m llmtrain.checkpoint.mirror` does it beside the run, a process of its own, so that no step waits for the
network. A checkpoint counts there once its manifest and all files that the manifest lists are there with their sizes:
an upload that ends early is as if it had never begun. Access is by fsspec, whose drivers find their credentials in
environment and files.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest, complete_checkpoints, step_folder, step_of
from llmtrain.checkpoint.retain import Best
from llmtrain.checkpoint.verify import verify
from llmtrain.storage.object_store import Store, short

_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LAST_TRIES = 3
"""Tries at the end of a run, whose checkpoint is on its own disk anyway."""


class Mirrored:
    """Checkpoints in an object store."""

    def __init__(self, url: str) -> None:
        """Raises StoreError, as all methods do."""
        self.store = Store(url, again=False)  # the caller tries again

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        sizes: dict[int, dict[str, int]] = {}
        for path, stored in self.store.files().items():
            folder, _, name = path.rpartition("/")
            if (step := step_of(Path(folder))) is not None:
                sizes.setdefault(step, {})[name] = stored.bytes
        return [step for step in sorted(sizes, reverse=True) if self._is_whole(step, sizes[step])]

    def _is_whole(self, step: int, sizes: dict[str, int]) -> bool:
        if MANIFEST not in sizes:
            return False
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.store.get(_name(step, MANIFEST), Path(folder) / MANIFEST)
                files = Manifest.read(Path(folder)).files
            except (CheckpointError, FileNotFoundError):  # it may be deleted just now
                return False
        return all(sizes.get(name) == entry.bytes for name, entry in files.items())

    def put(self, folder: Path, step: int) -> int:
        """Upload the files of a checkpoint that are in this folder, its manifest last; returns their bytes."""
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == MANIFEST)
        for name in names:
            self.store.put(folder / name, _name(step, name))
        return sum((folder / name).stat().st_size for name in names)

    def get(self, step: int, into: Path, beat: Callable[[], None]) -> None:
        """Download a checkpoint. `beat`: called before each file. Raises CheckpointError: a file's name is no name."""
        into.mkdir(parents=True)
        self.store.get(_name(step, MANIFEST), into / MANIFEST)
        for name in Manifest.read(into).files:
            beat()
            self.store.get(_name(step, name), into / name)

    def prune(self, keep: int, best: Best | None) -> None:
        """Delete the checkpoints that are older than the `keep` newest complete ones and none of the best, and what an
        upload left that ended before them."""
        found = self.complete()
        stays = set(found[: max(1, keep)])
        if best is not None and len(found) > keep:
            trainers = {step: untrusted.loads(self.store.read(_name(step, TRAINER))) for step in found}
            figures = [(step, figure) for step in found if (figure := best.figure(trainers[step])) is not None]
            stays |= {step for step, _ in best.first(figures)}
        there: dict[int, list[str]] = {}
        for path in self.store.files():
            if (step := step_of(Path(path).parent)) is not None:
                there.setdefault(step, []).append(path)
        for step in there.keys() - stays:
            if step < min(stays, default=0) or step in found:
                # The manifest first: a deletion that ends early leaves nothing that seems whole.
                self.store.remove([_name(step, MANIFEST)])
                self.store.remove([path for path in there[step] if not path.endswith(f"/{MANIFEST}")])


def _name(step: int, name: str) -> str:
    return f"{step_folder(Path(), step).name}/{name}"


def fetch_newest(url: str, checkpoints: Path, beat: Callable[[], None]) -> Path | None:
    """Fetch the newest whole checkpoint into an empty folder of checkpoints; None: the store has none.

    Its checksums are compared before it counts. Raises CheckpointError: the store cannot be read, or none is intact.
    """
    try:
        store = Mirrored(url)
        steps = store.complete()
        for step in steps:
            partial = step_folder(checkpoints, step).with_suffix(".mirror.tmp")
            shutil.rmtree(partial, ignore_errors=True)
            store.get(step, partial, beat)
            beat()
            if not verify(partial):
                return partial.rename(step_folder(checkpoints, step))
            shutil.rmtree(partial)
    except Exception as error:  # each driver has its own
        raise CheckpointError(
            f"checkpoint.mirror {redact_text(url)}: cannot be read ({short(error)}); correct address or access, or "
            "leave it out to begin anew"
        ) from error
    if steps:
        raise CheckpointError(
            f"checkpoint.mirror {redact_text(url)}: none of its {len(steps)} checkpoints has the contents that its "
            "manifest lists; remove them, or leave checkpoint.mirror out to begin anew"
        )
    return None


class _Mirroring:
    """Uploads a run's checkpoints as they become complete, one at a time, the newest first."""

    def __init__(
        self, checkpoints: Path, store: Mirrored, keep: int, best: Best | None, tell: Callable[..., None]
    ) -> None:
        self._checkpoints, self._store, self._keep, self._best, self._tell = checkpoints, store, keep, best, tell
        self._done: int | None = None
        """The step that was mirrored last."""
        self.failures = 0
        """Tries that have failed in a row."""
        self._pause_s, self._not_before = _POLL_S, 0.0

    def newest(self) -> Path | None:
        """The newest checkpoint, if it is not mirrored."""
        found = complete_checkpoints(self._checkpoints)
        return found[0] if found and step_of(found[0]) != self._done else None

    def go_on(self, *, now: bool = False) -> None:
        """Mirror the newest checkpoint if it is time for it, or now; a fault of the store is told, and tried again
        later."""
        folder = self.newest()
        if folder is None or (not now and time.monotonic() < self._not_before):
            return
        step, began = step_of(folder) or 0, time.monotonic()
        # Links: retention may delete the checkpoint meanwhile.
        held = folder.with_name(f"{folder.name}.mirror-{os.getpid()}.tmp")
        try:
            size = 0
            if step not in self._store.complete():  # as after another launch, or a deletion that failed
                shutil.copytree(folder, held, copy_function=os.link)
                size = self._store.put(held, step)
            self._store.prune(self._keep, self._best)
        except Exception as error:  # each driver has its own
            if folder.exists():  # else retention was faster than the links
                self._failed(step, error)
        else:
            self._done, self._pause_s, self.failures = step, _POLL_S, 0
            if size:
                self._tell("mirrored", step=step, bytes=size, seconds=round(time.monotonic() - began, 3))
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._not_before = time.monotonic() + self._pause_s
        self._tell("mirror_failed", step=step, error=short(error))


def main() -> None:
    """Arguments: the folder of checkpoints, the URL, how many stay there, what the best ones are (JSON, or null).

    It ends when its input ends, at once; or, after the word `finish`, when the newest checkpoint is mirrored.
    """
    checkpoints, url, keep, best = sys.argv[1:]
    choice: Any = json.loads(best)
    finish = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "finish":
                finish.set()
        os._exit(0)  # whoever started this is gone: what is half there does not count

    def tell(kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)

    threading.Thread(target=listen, daemon=True).start()
    mirroring = _Mirroring(Path(checkpoints), Mirrored(url), int(keep), Best(**choice) if choice else None, tell)
    while not finish.is_set():
        mirroring.go_on()
        finish.wait(_POLL_S)
    before = mirroring.failures
    while mirroring.newest() is not None:
        mirroring.go_on(now=True)
        if mirroring.failures - before >= _LAST_TRIES:
            sys.exit(1)
        time.sleep(_POLL_S * (mirroring.failures > before))


if __name__ == "__main__":
    main()
