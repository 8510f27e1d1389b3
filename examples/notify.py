"""A tracker: a line of text for each event, as one would post to a chat (`trackers: {notify: {path: notes.txt}}`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain import Sink


@dataclass(kw_only=True)
class Notify(Sink, entry="notify"):
    """Appends lines to a file; posting them to a web hook takes one line more."""

    path: str = "notes.txt"
    """The file, within the run's folder."""

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        self.file, self.run_id = run_dir / self.path, run_id

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(f"{self.run_id}: {kind} {fields.get('step', '')}\n")
