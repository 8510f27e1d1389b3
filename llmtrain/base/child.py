"""A module of llmtrain in a child process, and its environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, with llmtrain on PYTHONPATH: installed or not, the child finds it."""
    search = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, search))}


class Child:
    """Runs a module that reads lines and writes JSON lines; only `close` waits for it."""

    def __init__(self, module: str, *words: str) -> None:
        """Start the process; `words`: its arguments."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C reaches the ranks, which end it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out, self._said = self._process.stdin, self._process.stdout, b""
        os.set_blocking(self._out.fileno(), False)

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.poll()

    def send(self, line: str) -> None:
        """Write a line to it, if it still runs."""
        with contextlib.suppress(BrokenPipeError):
            self._in.write(line.encode() + b"\n")
            self._in.flush()

    def received(self) -> list[dict[str, Any]]:
        """Return its messages since the last call."""
        while data := self._out.read(1 << 16):
            self._said += data
        *lines, self._said = self._said.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()


def read_marked(text: str, mark: str) -> dict[str, Any] | None:
    """The JSON object in the last line of a program's output that begins with `mark`; None where there is none."""
    lines = [line for line in text.splitlines() if line.startswith(mark)]
    return dict(json.loads(lines[-1].removeprefix(mark))) if lines else None
