"""Exports to an object store, in place of an earlier export of the same run; refused if anything else is there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain.base import units, untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import cache_folder, lock_folder
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.hf.exporting import refuse_more
from llmtrain.checkpoint.hf.folder_files import MARK, run_id
from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.models.parameters import CONFIG
from llmtrain.storage.object_store import Store, StoreError, problem_of

_LAST_IN_STORE = ("config.json", CONFIG)
"""Files that readers look for first, of a model and of an adapter: written last, and removed first."""


class ExportStore:
    def __init__(self, url: str, checkpoint: Path, asked_by: str) -> None:
        """`asked_by`: named in messages. Raises CheckpointError if the store cannot be used, or holds something
        else."""
        self._url, self._asked_by = redact_text(url), asked_by
        self._run = run_id(checkpoint, TrainerState.read(checkpoint))
        if problems := problem_of(url, writes=True):
            raise self.wrong("; ".join(problems))
        with self._name_errors():
            self._store = Store(url)
            self._refuse_others()

    def wrong(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._asked_by} {self._url}: {text}.")

    def put(self, folder: Path) -> str:
        """Upload `folder`, and remove an earlier export before. Returns a description. Raises CheckpointError."""
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        with self._name_errors(folder):
            before = self._refuse_others()
            if before:  # readers must find no partial export; the record of the run goes last
                stored = self._store.files().keys()
                leading = [name for name in _LAST_IN_STORE if name in stored]
                for some in (leading, sorted(stored - {MARK, *leading}), [MARK]):
                    self._store.remove(some)
            for name in sorted(names, key=lambda name: (name in _LAST_IN_STORE, name != MARK, name)):
                self._store.put(folder / name, name)  # raises StoreError if the file's size differs there
        total = sum((folder / name).stat().st_size for name in names)
        replaced = f", instead of the export of step {before.get('step')}" if before else ""
        return f"{self._url}: {units.counted(len(names), 'file')}, {units.size(total)}{replaced}"

    @contextlib.contextmanager
    def scratch(self, url: str) -> Iterator[Path]:
        """A context with a path on this host's disk for the export. It is the same at each start of a command, so that
        an export can continue, and is removed if the block ends without an error. Raises CheckpointError."""
        folder = cache_folder() / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder)
        except BlockingIOError:
            raise self.wrong("another process of this host is writing it; wait for it") from None
        except OSError as error:
            text = f"{folder} cannot be made: {error.strerror}; set LLMTRAIN_CACHE to a folder with room"
            raise self.wrong(text) from error
        try:
            out = folder / (url.rstrip("/").rpartition("/")[2] or "out")
            shutil.rmtree(out, ignore_errors=True)  # left by a start whose upload failed
            yield out
            shutil.rmtree(folder)
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _name_errors(self, left: Path | None = None) -> Iterator[None]:
        """Turns an error of the store into a CheckpointError. `left`: the complete local copy, for the message."""
        try:
            yield
        except StoreError as error:
            copy = f"; the complete copy is in {left}" if left is not None else ""
            text = f"the store cannot be used ({error}){copy}. Correct the address or the access to it"
            raise self.wrong(text) from error

    def _refuse_others(self) -> Mapping[str, Any]:
        """Return the record of an earlier export of this run, or {}. Raises CheckpointError if other files are
        there."""
        stored = self._store.files()
        if not stored.keys() - {MARK}:  # left by an upload or a deletion that ended early
            return {}
        try:
            mark = untrusted.loads(self._store.read(MARK), infinite=True) if MARK in stored else {}
            of_this_run = mark["run"] == self._run
        except (ValueError, KeyError, TypeError):
            mark, of_this_run = {}, False
        if not of_this_run:
            raise self.wrong("its files are no earlier export of this run; nothing was written. Give another address")
        refuse_more(self._url, mark, stored.keys())
        return mark


def export_to_store(checkpoint: Path, url: str, export: Callable[[Path], Report]) -> Report:
    """Call `export` to write a folder on this host's disk, and upload the folder. Raises CheckpointError."""
    store = ExportStore(url, checkpoint, "to-hf")
    with store.scratch(url) as folder:
        report = export(folder)
        report.lines[:] = [line.replace(str(folder), redact_text(url)) for line in report.lines]
        report.add("uploaded", store.put(folder))
    return report
