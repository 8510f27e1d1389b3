"""`Sink`: a tracker of a run, such as the console, the local files, or one of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmtrain.base.choice import Entry


class Sink(Entry, section="trackers"):
    """A tracker of a run, on rank 0. The default methods do nothing.

    An entry of the YAML's `trackers`, such as a plugin's, is a dataclass with a name (`class Csv(Sink, entry="csv")`),
    whose fields are below `trackers.csv`. Its methods run one after another on a separate thread; they may wait and
    raise. The methods of the console and the local files must do neither, since training calls them directly.
    """

    MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules that the tracker imports from packages that llmtrain does not need. If one is missing the run is refused,
    and the message says which extra of llmtrain to install (it has the tracker's name). They are imported before the
    tracker's thread starts: two threads that import large packages at once can deadlock on module locks, which Python
    resolves by handing out half-initialised modules."""

    title = ""
    """The tracker's name in messages; empty: the name of the class."""
    late = False
    """True if its rows are scores of earlier steps, which a separate process computes."""

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Called once, before all other methods, on a tracker with a thread.

        Args:
            run_dir: the run's folder.
            run_id: the same in every launch of the run.
            config: YAML, DeepSpeed dict and environment, secrets redacted.
            start_step: step of the resumed checkpoint, 0 for a new run. Rows of later steps that a crashed launch has
                logged are logged again.
        """

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Log a row of metrics, with the keys of docs/tracking.md. `more`: another row of the same step follows."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Log an event; secrets in its fields are redacted."""

    def alert(self, title: str, text: str) -> None:
        """Notify people who are not watching the run; called in addition to `event`. Secrets are redacted."""

    def end_steps(self) -> None:
        """Called after the last step, before the end of the run."""

    def close(self, *, exit_code: int) -> None:
        """Write everything out, in at most 20 s. `exit_code`: 1 if the run has failed, else 0."""

    def fault(self, run_dir: Path, run_id: str, event: dict[str, Any]) -> None:
        """Mark a run as failed whose ranks hang or are dead. Called in place of `open`, in a separate process, so it
        may raise or hang. `event`: text, cause and step of the fault, secrets redacted."""

    def abandon(self) -> None:
        """End everything that would keep the process from ending. Training calls it on its own thread, after a method
        that raised or does not return. There is no time limit, so it must not wait for the tracker."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a row of metrics; those of a list as KEY/INDEX."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, (int, float)) and key not in ("step", "time_unix_s"):
            numbers[key] = float(value)
        elif isinstance(value, (list, tuple)):
            numbers |= {f"{key}/{index}": float(number) for index, number in enumerate(value)}
    return numbers
