"""Give the units of `llmtrain prepare` to workers. A worker is a process that reads and writes lines of JSON."""

from __future__ import annotations

import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.child import Child, of_module
from llmtrain.base.errors import DataError
from llmtrain.base.threads import usable_cores
from llmtrain.data.prepare.out_folder import PLAN
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import UnitRecord, WorkerSettings

_TRIES = 3
"""If this many workers were lost with the same unit, the unit counts as the cause."""
_ENDED_S = 3.0
BEAT_S = 5.0
"""Interval in seconds at which an idle link to several workers says that it is alive."""
_SILENT_S = 60.0
"""Seconds without a message after which such a link counts as lost: its process or its host is frozen or gone."""


class Lost(Exception):
    """The workers behind a link are gone."""


class Link(Child):
    """A child process: a worker, or a process that passes units on to several workers elsewhere."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        super().__init__(words)
        self.name = name

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Raises Lost."""
        found = self.received()
        if found or not self.is_closed:
            return found
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "the machine may be out of memory: use fewer --processes" if code == -signal.SIGKILL else "see above"
        raise Lost(f"{self.name} (process {self._process.pid}) {how} ({hint})")

    def end(self, within_s: float = _ENDED_S) -> None:
        """End the workers; they remove their temporary files first."""
        super().end(within_s)


@dataclass(frozen=True)
class Place:
    open: Callable[[], Link]
    """Starts the process. Raises Lost."""
    workers: int | None = 1
    """Number of units in parallel. None: the link passes units on to several workers. It gets the settings and the text
    of the preparation's plan, answers with `{"hello": NUMBER}`, and sends `{"alive": true}` when idle."""
    starts: int = 1
    """How often the place is started, if it is lost; 1: the first loss ends the preparation."""


def local(processes: int | None) -> list[Place]:
    """Return the places of this host. `processes`: None: one for each core."""
    worker = Place(partial(Link, "a worker", of_module("llmtrain.data.prepare.worker")))
    return [worker] * (processes or usable_cores())


class _Running:
    """A place whose process is running."""

    def __init__(self, place: Place, starts: int, greeting: Mapping[str, Any]) -> None:
        self.place, self.starts = place, starts
        self.link = place.open()
        self.room = place.workers or 0
        self.under_way: dict[int, Unit] = {}
        self.heard = time.monotonic()
        self.link.send(greeting)

    def is_silent(self, now: float) -> bool:
        """Return True if a link to another host has been silent for too long; local workers may be silent."""
        return self.place.workers is None and now - self.heard > _SILENT_S

    def give(self, waiting: list[Unit]) -> None:
        while waiting and len(self.under_way) < self.room:
            unit = waiting.pop()
            self.under_way[unit.index] = unit
            self.link.send(unit.as_dict())


def run_units(
    given: Iterable[Unit],
    settings: WorkerSettings,
    places: Sequence[Place],
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, UnitRecord], None],
) -> None:
    """Process the units at these places. After an exception, also KeyboardInterrupt, no worker is left running.

    Raises DataError: from a unit; no place is left; several workers were lost with the same unit.
    """
    waiting = list(reversed(list(given)))
    greeting = asdict(settings)
    if any(place.workers is None for place in places):
        greeting["plan"] = Path(settings.here, PLAN).read_text()
    running: list[_Running] = []
    losses: Counter[int] = Counter()
    with selectors.DefaultSelector() as selector:

        def start(place: Place, starts: int) -> None:
            try:
                opened = _Running(place, starts, greeting)
            except Lost as lost:
                log.warn(f"{lost}: it makes no shards of this preparation")
                return
            running.append(opened)
            selector.register(opened.link, selectors.EVENT_READ, opened)
            opened.give(waiting)

        def lose(gone: _Running, why: Lost) -> None:
            running.remove(gone)
            selector.unregister(gone.link)
            gone.link.end()
            if gone.place.starts == 1:
                raise DataError(f"{why}; run the same command again: finished shards are kept")
            losses.update(list(gone.under_way))
            if worst := next((unit for unit in gone.under_way.values() if losses[unit.index] >= _TRIES), None):
                raise DataError(
                    f"{why}; {_TRIES} workers were lost while they made shard {worst.index}, which begins in "
                    f"{worst.pieces[0].label}: look there for a document that takes all memory"
                )
            log.warn(f"{why}; its {units.counted(len(gone.under_way), 'shard')} under way will be done again")
            waiting.extend(reversed(gone.under_way.values()))
            if gone.starts < gone.place.starts:
                start(gone.place, gone.starts + 1)
            for other in running:
                other.give(waiting)

        try:
            for place in places[: len(waiting)]:
                start(place, 1)
            while waiting or any(each.under_way for each in running):
                if not running:
                    raise DataError("no host is left to continue; run the same command again: finished shards are kept")
                for key, _ in selector.select(BEAT_S):
                    _handle(key.data, waiting, on_progress, on_done, lose)
                now = time.monotonic()
                for each in [each for each in running if each.is_silent(now)]:
                    lose(each, Lost(f"{each.link.name} has said nothing for {units.duration(_SILENT_S)}"))
        finally:
            for each in running:
                each.link.end()


def _handle(
    running: _Running,
    waiting: list[Unit],
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, UnitRecord], None],
    lose: Callable[[_Running, Lost], None],
) -> None:
    try:
        messages = running.link.receive()
    except Lost as lost:
        lose(running, lost)
        return
    running.heard = time.monotonic()
    for message in messages:
        if "error" in message:
            raise DataError(message["error"])
        if "alive" in message:
            continue
        if "hello" in message:
            running.room = message["hello"]
            running.give(waiting)
            continue
        unit = running.under_way[message["unit"]]
        if "progress" in message:
            on_progress(unit, message["progress"])
        else:
            del running.under_way[unit.index]
            running.give(waiting)  # first: the worker computes while the parent keeps its books
            on_done(unit, UnitRecord.from_dict(message["done"]))
