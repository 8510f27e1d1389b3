"""`Sink`: a tracker of a run, such as the console, the local files, W&B, or a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtrain.base.choice import Entry


class Sink(Entry, section="trackers"):
    """A tracker of a run, on rank 0. Each default does nothing.

    A plugin's tracker is a dataclass with a name (`class Csv(Sink, entry="csv")`): its fields stand below
    `trackers.csv`. Its methods run on a thread of its own, one after another; they may wait and raise. Those of
    llmtrain's own trackers do neither: training calls them.
    """

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Called once at first, on a plugin's tracker.

        Args:
            run_dir: the run's folder.
            run_id: the same in every launch of the run.
            config: YAML, DeepSpeed dict and environment, secrets redacted.
            start_step: step of the checkpoint that the run goes on from, 0 for a new one. Rows of later steps, from
                before a crash, come again.
        """

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Take a row of metrics, keyed as in docs/metrics.md. `more`: another row of the same step follows."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event; secrets in its fields are redacted."""

    def end_steps(self) -> None:
        """Called after the last step; what follows is the end of the run."""

    def close(self, *, exit_code: int) -> None:
        """Write everything out, in at most 20 s. `exit_code`: 1 if the run has failed, else 0."""
