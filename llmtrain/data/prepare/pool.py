"""The worker processes of `llmtrain prepare`, seen from the parent.

Plain subprocesses and pipes, not multiprocessing: nothing appears in /dev/shm, a worker that is killed shows as
the end of its pipe instead of a hang, and when the parent dies (kill -9) the workers see the end of theirs.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from llmtrain.base.child import child_environment
from llmtrain.base.errors import DataError
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import WorkerSettings


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self.unit: Unit | None = None
        self._partial_line = b""
        self.process = subprocess.Popen(
            # -P: a corpus of code may lie in the current folder, and its queue.py must not be imported for Python's.
            [sys.executable, "-P", "-m", "llmtrain.data.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One core a worker: the tokenizers' own threads would fight over the cores that the workers fill.
            env=child_environment(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which then ends the workers
        )
        self._send(asdict(settings))

    def give(self, unit: Unit) -> None:
        self.unit = unit
        self._send(unit.as_dict())

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; the end of its output will tell

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. Raises DataError when the worker is gone."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise DataError(self._obituary(self.process.wait()))
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _obituary(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "the machine may be out of memory: use fewer --processes" if code == -signal.SIGKILL else "see above"
        return (
            f"a worker (process {self.process.pid}) {how} ({hint}); run the same command again: "
            "finished shards are kept"
        )

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass
        self.process.wait()


def run_units(
    units: Iterable[Unit],
    settings: WorkerSettings,
    processes: int,
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, dict[str, Any]], None],
) -> None:
    """Process `units` in `processes` workers. An exception, Ctrl-C included, leaves no worker behind."""
    waiting = list(reversed(list(units)))
    workers: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(processes, len(waiting))):
                worker = _Worker(settings)
                workers.append(worker)
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                worker.give(waiting.pop())
            while any(worker.unit is not None for worker in workers):
                for key, _ in selector.select():
                    _handle(key.data, waiting, on_progress, on_done)
        finally:
            for worker in workers:
                worker.end()


def _handle(
    worker: _Worker,
    waiting: list[Unit],
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, dict[str, Any]], None],
) -> None:
    for message in worker.receive():
        assert worker.unit is not None
        if "progress" in message:
            on_progress(worker.unit, message["progress"])
        elif "error" in message:
            raise DataError(message["error"])
        else:
            finished, worker.unit = worker.unit, None
            # The next unit first: the worker computes while the parent keeps its books.
            if waiting:
                worker.give(waiting.pop())
            on_done(finished, message["done"])
