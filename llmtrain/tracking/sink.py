"""`Sink`: a tracker of a run, such as the console, the local files, or a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmtrain.base.choice import Entry


class Sink(Entry, section="trackers"):
    """A tracker of a run, on rank 0. Each default does nothing.

    One of the YAML's `trackers`, such as a plugin's, is a dataclass with a name (`class Csv(Sink, entry="csv")`): its
    fields are below `trackers.csv`. Its methods run on a separate thread, one after another; they may wait and raise.
    Methods of the console and the local files do neither: training calls them.
    """

    MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules that it imports from packages that llmtrain does not need. Without them the run is refused, and the
    message says which extra of llmtrain to install (it has the tracker's name). They are imported before its thread
    starts: two threads that import large packages at once can deadlock on module locks, which Python resolves by
    handing out half-initialised modules."""

    title = ""
    """Its name in messages; empty: that of the class."""
    late = False
    """True: its rows are scores of earlier steps, and a separate process computes them."""

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Called once, before all others, on a tracker with a thread.

        Args:
            run_dir: the run's folder.
            run_id: the same in every launch of the run.
            config: YAML, DeepSpeed dict and environment, secrets redacted.
            start_step: step of the resumed checkpoint, 0 for a new run. Rows of later steps, from before a crash, come
                again.
        """

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Take a row of metrics, keyed as in docs/tracking.md. `more`: another row of the same step follows."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event; secrets in its fields are redacted."""

    def alert(self, title: str, text: str) -> None:
        """Notify people who are not watching the run; called in addition to `event`. Secrets are redacted."""

    def end_steps(self) -> None:
        """Called after the last step, before the end of the run."""

    def close(self, *, exit_code: int) -> None:
        """Write everything out, in at most 20 s. `exit_code`: 1 if the run has failed, else 0."""

    def fault(self, run_dir: Path, run_id: str, event: dict[str, Any]) -> None:
        """In place of `open`: mark a run as failed whose ranks hang or are dead. It may raise or hang: it is called in
        a process of its own. `event`: the text, cause and step of the fault, secrets redacted."""

    def abandon(self) -> None:
        """End everything that would hold up the process. Training calls it on its own thread, after a method that
        raised or does not return, without a time limit: it must not wait for the tracker."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a row of metrics; a list's as KEY/INDEX."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, (int, float)) and key not in ("step", "time_unix_s"):
            numbers[key] = float(value)
        elif isinstance(value, (list, tuple)):
            numbers |= {f"{key}/{index}": float(number) for index, number in enumerate(value)}
    return numbers
