"""Workers of `llmtrain prepare`, on this machine and on others, and their units.

A worker is a process with a pipe. On another host one process, `python -m llmtrain.data.prepare.pools`, has a worker
for each core, and passes their input and output on, over ssh or srun.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.child import Child, Parent, child_environment, of_module
from llmtrain.base.errors import DataError
from llmtrain.base.threads import usable_cores
from llmtrain.cluster.hosts.hostfile import Host, is_here, read_hostfile
from llmtrain.cluster.hosts.ssh import on_hosts, options
from llmtrain.cluster.launch.slurm import hosts_of
from llmtrain.data.prepare import out_folder
from llmtrain.data.prepare.out_folder import PLAN
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import UnitRecord, WorkerSettings
from llmtrain.storage.addresses import is_url

_MODULE = "llmtrain.data.prepare.pools"
_STARTS = 3
"""Starts of a host's workers, if they are lost."""
_TRIES = 3
"""Lost workers after which their common unit counts as the cause."""
_REACHED_S = 30.0
_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0")
_ENDED_S = 3.0
_BEAT_S = 5.0
"""Interval at which an idle host says that it is alive."""
_SILENT_S = 60.0
"""Silence after which a host is lost: its process is frozen, or it has no power and its connection no keepalive."""


class Lost(Exception):
    """The workers of a link are gone."""


class Link(Child):
    """A process of ours: a worker, or ssh or srun with a host's workers."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        super().__init__(words)
        self.name = name

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. Raises Lost."""
        found = self.received()
        if found or not self.is_closed:
            return found
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "the machine may be out of memory: use fewer --processes" if code == -signal.SIGKILL else "see above"
        raise Lost(f"{self.name} (process {self._process.pid}) {how} ({hint})")

    def end(self, within_s: float = _ENDED_S) -> None:
        """End the workers, which then leave no temporary files."""
        super().end(within_s)


@dataclass(frozen=True)
class Place:
    open: Callable[[], Link]
    """Raises Lost."""
    workers: int | None = 1
    """Units in parallel; None: the worker reports the number."""
    starts: int = 1
    """Number of starts, if the place is lost; 1: a loss ends the preparation."""


def local(processes: int) -> list[Place]:
    return [Place(partial(Link, "a worker", of_module("llmtrain.data.prepare.worker")))] * processes


# --- other hosts ---


def places_on(where: str, processes: int | None) -> list[Place]:
    """The hosts in a hostfile, or in this Slurm job ("slurm").

    `processes`: per host; None: one per core. Raises DataError: a host cannot be reached; ConfigError: the hostfile is
    wrong, or this is no Slurm job.
    """
    if where == "slurm":
        named = [(host.name, [*_SRUN, "--nodelist", host.name]) for host in hosts_of(os.environ)]
    else:
        hosts = read_hostfile(where)
        _refuse_unreachable(hosts)
        ssh = ["ssh", *options(_REACHED_S)]
        named = [(host.name, [] if is_here(host.name) else [*ssh, "--", host.name]) for host in hosts]
    words = _command(processes)
    return [
        Place(partial(Link, name, [*before, *(words if before[:1] != ["ssh"] else [shlex.join(words)])]),
              workers=None, starts=_STARTS)
        for name, before in named
    ]  # fmt: skip


def _command(processes: int | None) -> list[str]:
    """The command for a host, whose shell starts in another folder."""
    words = of_module(_MODULE, os.getcwd(), str(processes or 0))
    return ["env", f"PYTHONPATH={child_environment()['PYTHONPATH']}", *words]


def _refuse_unreachable(hosts: Sequence[Host]) -> None:
    names = [host.name for host in hosts if not is_here(host.name)]
    answers = on_hosts(names, ("test", "-x", sys.executable), timeout_s=_REACHED_S) if names else {}
    for name, answer in answers.items():
        if answer.trouble is not None and answer.code is None:
            raise DataError(f"--on: {name}: {answer.trouble.text} {answer.trouble.remedy}")
        if answer.code:
            raise DataError(f"--on: {name}: there is no {sys.executable}, this program's Python; install it there")


def main() -> None:
    """Serve as a host's workers. Arguments: the folder to work in, and the number of workers (0: one per core). Input
    and output are as a worker's, with `{"hello": workers}` after the settings, and `{"alive": true}` when idle."""
    folder, processes = sys.argv[1], int(sys.argv[2]) or usable_cores()
    answer = Parent().tell
    host = socket.gethostname()
    lines = open(os.dup(0), "rb", buffering=0)  # noqa: SIM115  # until the process ends
    settings = json.loads(lines.readline())
    plan, stored = settings.pop("plan"), is_url(settings["out"])
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(*([OSError] if stored else [])):  # another host may not have the folder
                os.chdir(folder)
            here = stack.enter_context(out_folder.seen(settings["out"]))
            found = (here / PLAN).read_text()
        except (OSError, DataError) as error:
            found = str(error)
        if found != plan and stored:
            answer({"error": f"--on: {host} does not see the preparation in {settings['out']} ({found[:200]}); give "
                     "that host the store's credentials and a way to it"})  # fmt: skip
        elif found != plan:
            answer({"error": f"--on: {host} does not see {settings['out']} (looked from {folder}); --out, the sources "
                    "and this program must be in a folder that all hosts share"})  # fmt: skip
        else:
            answer({"hello": processes})
            _serve({**settings, "here": str(here)}, processes, lines, answer, host)


def _serve(
    settings: Mapping[str, Any],
    processes: int,
    lines: io.RawIOBase,
    answer: Callable[[Mapping[str, Any]], None],
    host: str,
) -> None:
    """Give the units that arrive on `lines` to workers, until `lines` or a worker ends."""
    with selectors.DefaultSelector() as selector:
        workers = [place.open() for place in local(processes)]
        try:
            idle = list(workers)
            for worker in workers:
                worker.send(settings)
                selector.register(worker, selectors.EVENT_READ, worker)
            selector.register(lines, selectors.EVENT_READ)
            while True:
                if not (ready := selector.select(_BEAT_S)):
                    answer({"alive": True})
                for key, _ in ready:
                    if key.data is None:
                        if not (line := lines.readline()):
                            return  # the preparation is gone
                        idle.pop().send(json.loads(line))
                        continue
                    for message in key.data.receive():
                        idle += [key.data] if "done" in message else []
                        answer(message)
        except Lost as lost:
            print(f"{host}: {lost}", file=sys.stderr)
        finally:
            for worker in workers:
                worker.end()


# --- distribution of the units ---


class _Running:
    """An open place."""

    def __init__(self, place: Place, starts: int, greeting: Mapping[str, Any]) -> None:
        self.place, self.starts = place, starts
        self.link = place.open()
        self.room = place.workers or 0
        self.under_way: dict[int, Unit] = {}
        self.heard = time.monotonic()
        self.link.send(greeting)

    def is_silent(self, now: float) -> bool:
        """True for a host that should have sent a message; a local worker sends one only when it has news."""
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
    """Process the units at these places. An exception, Ctrl-C included, leaves no worker running.

    Raises DataError: a unit's, no place is left, or several workers were lost with one unit.
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
                log.warn(f"{lost}: it does no shard of this preparation")
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
                    f"{why}; {_TRIES} times workers were lost while they did shard {worst.index} (it begins in "
                    f"{worst.pieces[0].label}): look there for a document that takes all memory"
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
                for key, _ in selector.select(_BEAT_S):
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


if __name__ == "__main__":
    main()
