"""Copies a run's checkpoints to an object store in the background, and fetches them into an empty folder.

`python -m llmtrain.features.mirror.upload` is a process of its own, so that no step waits for the network. A checkpoint
counts in the store once its manifest and all files in the manifest are there with their sizes: an upload that ends
early has no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.base import log
from llmtrain.base.child import Parent
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import scratch_folder
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.format import (
    MANIFEST,
    TRAINER,
    Manifest,
    complete_checkpoints,
    step_folder,
    step_of,
)
from llmtrain.checkpoint.remote import download, name_of
from llmtrain.checkpoint.retain import Best
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.verify import verify
from llmtrain.storage.object_store import Store, short

_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LAST_TRIES = 3
"""Tries at the end of a run, whose checkpoint is on its own disk anyway."""


class Mirrored:
    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def store(self) -> Store:
        """The folder in the store; the caller repeats failed calls. Raises StoreError, like all methods."""
        return Store(self._url, again=False)

    def complete(self) -> dict[int, bytes]:
        """step -> manifest, newest first."""
        sizes: dict[int, dict[str, int]] = {}
        for step, name, size in self._files():
            sizes.setdefault(step, {})[name] = size
        manifests = {step: self._manifest(step, sizes[step]) for step in sorted(sizes, reverse=True)}
        return {step: manifest for step, manifest in manifests.items() if manifest is not None}

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """(step, name, bytes) of each file of a checkpoint; files in deeper folders belong to other runs."""
        for path, stored in self.store.files().items():
            folder, _, name = path.rpartition("/")
            if "/" not in folder and (step := step_of(Path(folder))) is not None:
                yield step, name, stored.bytes

    def _manifest(self, step: int, sizes: dict[str, int]) -> bytes | None:
        """Return a checkpoint's manifest; None: not all of its files are in the store."""
        if MANIFEST not in sizes:
            return None
        with scratch_folder("mirror") as folder:
            try:
                path = folder / MANIFEST
                self.store.get(name_of(step, MANIFEST), path)
                files, content = Manifest.read(folder).files, path.read_bytes()
            except (CheckpointError, FileNotFoundError):  # it may be deleted just now
                return None
        return content if all(sizes.get(name) == entry.bytes for name, entry in files.items()) else None

    def incomplete(self, complete: Collection[int]) -> dict[int, bool]:
        """Return {step: it has a manifest} of the other steps; without one the upload ended early, or lost it."""
        files = {(step, name) for step, name, _ in self._files()}
        others = sorted({step for step, _ in files}.difference(complete))
        for step in others:
            with contextlib.suppress(FileNotFoundError):
                files |= {(step, MANIFEST)} if self.store.stat(name_of(step, MANIFEST)) else set()
        return {step: (step, MANIFEST) in files for step in others}

    def run(self, step: int) -> str | None:
        return self._trainer(step).run_id

    def _trainer(self, step: int) -> TrainerState:
        name = name_of(step, TRAINER)
        return TrainerState.parse(self.store.read(name), Path(name))

    def put(self, folder: Path, step: int) -> int:
        """Upload the files of a checkpoint that are in this folder, its manifest last; returns their bytes."""
        self.store.remove([name_of(step, MANIFEST)])  # of another course, which would fit some of these files
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == MANIFEST)
        for name in names:
            self.store.put(folder / name, name_of(step, name))
        return sum((folder / name).stat().st_size for name in names)

    def prune(self, steps: Sequence[int], keep: int, best: Best | None) -> None:
        """Delete all but the `keep` newest checkpoints and the best, and older remains of uploads. `steps`: of
        the complete ones, newest first."""
        stays = set(steps[: max(1, keep)])
        if best is not None and len(steps) > keep:
            figures = [(step, figure) for step in steps if (figure := best.figure(self._trainer(step))) is not None]
            stays |= {step for step, _ in best.first(figures)}
        oldest = min(stays, default=0)
        self.drop(lambda step: step not in stays and (step < oldest or step in steps))

    def drop(self, chosen: Callable[[int], bool]) -> None:
        names_of: dict[int, list[str]] = {}
        for step, name, _ in self._files():
            if chosen(step):
                names_of.setdefault(step, []).append(name)
        for step, names in names_of.items():
            # The manifest first: a deletion that ends early leaves nothing that seems complete.
            self.store.remove([name_of(step, MANIFEST)])
            self.store.remove([name_of(step, name) for name in names if name != MANIFEST])


def refuse_other(url: str, checkpoints: Path, *, continues: bool) -> None:
    """Refuse a store with checkpoints of another run, or newer ones of this run (unless it `continues` from its
    folder). The mirror's process reports a store that cannot be read. Raises CheckpointError."""
    local = complete_checkpoints(checkpoints) if continues else []
    try:
        store = Mirrored(url)
        newest = next(iter(store.complete()), None)
        stored_run = None if newest is None else store.run(newest)
        own_runs = [TrainerState.read(folder).run_id for folder in local[:1]]
    except (OSError, ValueError):  # a resume reports a damaged checkpoint
        return
    if newest is None:
        return
    where, name = f"mirror.url {redact_text(url)}", f"step-{newest:08d}"
    if stored_run not in own_runs:
        raise CheckpointError(
            f"{where}: it holds {name}, which this run has not written. Give each run an address of its own, or "
            f"continue from there: --resume auto in a folder without checkpoints"
        )
    if newest > (step_of(local[0]) or 0):
        raise CheckpointError(
            f"{where}: it holds {name} of this run, newer than {local[0]}. Remove the folder's checkpoints to continue "
            "from there, or the newer ones there to continue from here"
        )


def fetch_newest(url: str, checkpoints: Path, run_dir: str, beat: Callable[[], None]) -> Path | None:
    """Fetch the newest complete checkpoint into an empty folder and compare its checksums; None: there is none. Raises
    CheckpointError: the store cannot be read, no checkpoint is intact, or another run than `run_dir` wrote it."""
    written_for: Any = None
    try:
        store = Mirrored(url)
        steps = list(store.complete())
        others = store.incomplete(steps)
        damaged = [f"step-{step:08d}" for step, has_manifest in others.items() if has_manifest]
        without = [f"step-{step:08d}" for step, has_manifest in others.items() if not has_manifest]
        for step in steps:
            partial = step_folder(checkpoints, step).with_suffix(".mirror.tmp")
            shutil.rmtree(partial, ignore_errors=True)
            download(store.store, step, partial, beat)
            beat()
            intact = not verify(partial)
            written_for = TrainerState.read(partial).section("train").get("run_dir") if intact else None
            if intact and Path(str(written_for or run_dir)).name == Path(run_dir).name:
                if damaged and damaged[-1] > f"step-{step:08d}":
                    log.warn(f"mirror.url {redact_text(url)}: {damaged[-1]} is damaged there; step {step} is taken")
                return partial.rename(step_folder(checkpoints, step))
            shutil.rmtree(partial)
            if intact:
                break
    except Exception as error:  # each driver has its own
        raise CheckpointError(
            f"mirror.url {redact_text(url)}: cannot be read ({short(error)}); correct address or access, or "
            "leave it out to begin again"
        ) from error
    if written_for is not None:
        raise CheckpointError(
            f"mirror.url {redact_text(url)}: it holds checkpoints of the run {written_for}, and this one is "
            f"{run_dir}. Give each run an address of its own; to continue that one, give train.run_dir its name"
        )
    # An upload that ends early has no manifest; before there is a complete checkpoint a launch leaves one such step.
    if (damaged or len(without) > 1) and not steps:
        raise CheckpointError(
            f"mirror.url {redact_text(url)}: the manifest of {', '.join(damaged or without)} cannot be read, or "
            "lists other files than are there, and no other checkpoint is there. Put the checkpoint right or remove "
            "it; to begin again: --resume none"
        )
    if steps:
        raise CheckpointError(
            f"mirror.url {redact_text(url)}: none of its {len(steps)} checkpoints has the contents that its "
            "manifest lists; remove them, or leave mirror.url out to begin again"
        )
    if without:
        log.warn(
            f"mirror.url {redact_text(url)}: {without[0]} has no manifest there, as after an upload that ended "
            "early, and no other checkpoint is there: the run begins again"
        )
    return None


class _Mirroring:
    """Uploads a run's new checkpoints, one at a time, the newest first."""

    def __init__(
        self, checkpoints: Path, store: Mirrored, keep: int, best: Best | None, tell: Callable[..., None]
    ) -> None:
        self._checkpoints, self._store, self._keep, self._best, self._tell = checkpoints, store, keep, best, tell
        self._begun: set[int] = set()
        """Steps of which an upload has begun, and not ended."""
        self._done: int | None = None
        """The last mirrored step."""
        self.failures = 0
        """Number of failed tries in a row."""
        self._pause_s, self._not_before = _POLL_S, 0.0

    def newest(self) -> Path | None:
        """Return the newest checkpoint; None: it is mirrored."""
        complete = complete_checkpoints(self._checkpoints)
        return complete[0] if complete and step_of(complete[0]) != self._done else None

    def go_on(self, *, now: bool = False) -> None:
        """Mirror the newest checkpoint if it is due, or `now`; after a fault of the store, try later."""
        folder = self.newest()
        if folder is None or (not now and time.monotonic() < self._not_before):
            return
        step, began = step_of(folder) or 0, time.monotonic()
        # Links: retention may delete the checkpoint in the meantime.
        links = folder.with_name(f"{folder.name}.mirror-{os.getpid()}.tmp")
        try:
            size, stored = 0, self._store.complete()
            manifest, run = (folder / MANIFEST).read_bytes(), TrainerState.read(folder).run_id
            if stored and self._store.run(next(iter(stored))) != run:
                raise CheckpointError("it holds checkpoints of another run; give each run an address of its own")
            # Newer steps than the newest here, and another checkpoint of this step, belong to an abandoned course.
            given_up = {other for other in stored if other > step}
            given_up |= {step} if stored.get(step, manifest) != manifest else set()
            if given_up:
                self._store.drop(given_up.__contains__)
            if stored.get(step) != manifest:  # equal after another launch, or a deletion that failed
                shutil.copytree(folder, links, copy_function=os.link)
                if remains := self._begun - {step}:
                    self._store.drop(remains.__contains__)
                self._begun = {step}
                size = self._store.put(links, step)
                self._begun = set()
            older = [other for other in stored if other != step and other not in given_up]
            self._store.prune([step, *older], self._keep, self._best)
        except Exception as error:  # each driver has its own
            if folder.exists():  # else retention was faster than the links
                self._note_failure(step, error)
        else:
            self._done, self._pause_s, self.failures = step, _POLL_S, 0
            if size:
                self._tell("mirrored", step=step, bytes=size, seconds=round(time.monotonic() - began, 3))
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _note_failure(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._not_before = time.monotonic() + self._pause_s
        self._tell("mirror_failed", step=step, error=short(error))


def main() -> None:
    """Arguments: the folder, the URL, the number of checkpoints to keep, the best ones (JSON or null). It ends with its
    input or, after the word `finish`, when the newest checkpoint is mirrored."""
    checkpoints, url, keep, best = sys.argv[1:]
    choice: Any = json.loads(best)
    parent = Parent()
    parent.listen()

    def tell(kind: str, **fields: Any) -> None:
        parent.tell({"kind": kind, **fields})

    mirroring = _Mirroring(Path(checkpoints), Mirrored(url), int(keep), Best(**choice) if choice else None, tell)
    mirroring.go_on()
    while parent.asked(within_s=_POLL_S) != "finish":
        mirroring.go_on()
    before = mirroring.failures
    while mirroring.newest() is not None:
        mirroring.go_on(now=True)
        if mirroring.failures - before >= _LAST_TRIES:
            sys.exit(1)
        time.sleep(_POLL_S * (mirroring.failures > before))


if __name__ == "__main__":
    main()
