"""Export to an object store: refused where something else is, and replacing an earlier one of the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.format import read_trainer
from llmtrain.checkpoint.hf.exporting import refuse_more
from llmtrain.checkpoint.hf.folder_files import MARK, run_id
from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.models.parameters import CONFIG
from llmtrain.storage.folders import clear, scratch_for, told, upload
from llmtrain.storage.object_store import Store, problem_of

_LAST_IN_STORE = ("config.json", CONFIG)
"""Files that readers look for first: of a model, of an adapter."""


class ExportStore:
    def __init__(self, url: str, checkpoint: Path, asked_by: str) -> None:
        """Raises CheckpointError: the store cannot be used, or holds something else."""
        self._url, self._asked_by = redact_text(url), asked_by
        self._run = run_id(checkpoint, read_trainer(checkpoint))
        if found := problem_of(url, writes=True):
            raise self.wrong("; ".join(found))
        with told(self.wrong):
            self._store = Store(url)
            self._refuse_others()

    def wrong(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._asked_by} {self._url}: {text}.")

    def put(self, folder: Path) -> str:
        """Replace an earlier export. Returns a description. Raises CheckpointError."""
        with told(self.wrong, folder):
            before = self._refuse_others()
            if before:
                clear(self._store, first=(MARK,), last=_LAST_IN_STORE)
            words = upload(folder, self._store, first=(MARK,), last=_LAST_IN_STORE)
        replaced = f", instead of the export of step {before.get('step')}" if before else ""
        return f"{self._url}: {words}{replaced}"

    def _refuse_others(self) -> Mapping[str, Any]:
        """The record of an earlier export; empty: there is none."""
        there = self._store.files()
        if not there.keys() - {MARK}:  # an upload or a deletion that ended early
            return {}
        try:
            mark = untrusted.loads(self._store.read(MARK), infinite=True) if MARK in there else {}
            ours = mark["run"] == self._run
        except (ValueError, KeyError, TypeError):
            mark, ours = {}, False
        if not ours:
            raise self.wrong(
                "files are there that are no earlier export of this run; nothing was written. Give another address"
            )
        refuse_more(self._url, mark, there.keys())
        return mark


def export_to_store(checkpoint: Path, url: str, export: Callable[[Path], Report]) -> Report:
    """Have `export` write a folder on this host's disk, and upload it. Raises CheckpointError."""
    store = ExportStore(url, checkpoint, "to-hf")
    with scratch_for(url, store.wrong) as folder:
        report = export(folder)
        report.lines[:] = [line.replace(str(folder), redact_text(url)) for line in report.lines]
        report.add("uploaded", store.put(folder))
    return report
