"""Runs a program in a child process, and exchanges JSON lines with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def ending_with_parent(number: int = signal.SIGKILL) -> Callable[[], Any]:
    """Return a function to call in a new process, after which the kernel sends it the signal when the thread that
    started it ends."""
    return functools.partial(ctypes.CDLL(None).prctl, 1, number)  # PR_SET_PDEATHSIG of sys/prctl.h


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment with `more` and with llmtrain on PYTHONPATH."""
    search = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, search))}


def of_module(module: str, *words: str) -> list[str]:
    """Return the command that runs a module. -P: the user's folder may have, for example, a queue.py that is not
    Python's."""
    return [sys.executable, "-P", "-m", module, *words]


def _encoded(message: Any) -> bytes:
    """Return the message as one line. Values that JSON lacks, such as dates, become texts."""
    return json.dumps(message, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


class Lines:
    """Reads JSON objects, one a line, from a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with the next piece."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A host's start files may print before our process begins.
        return [json.loads(line) for line in lines if line.startswith((b'{"', b"{}"))]


class Child:
    """Starts a program that exchanges JSON lines with us over its standard input and output, where it uses `Parent`.
    `received` never waits; `end` and `close` wait until the program has ended."""

    def __init__(self, words: Sequence[str], **more: Any) -> None:
        """`more`: arguments for Popen, such as `pass_fds`, open files that the program gets under the same numbers."""
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One thread: more would compete for the cores that the parent uses.
            env=child_environment(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C in a terminal reaches only the parent, which then ends the child
            **more,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out, self._lines = self._process.stdin, self._process.stdout, Lines()
        self.is_closed = False
        """True if the program has closed its output or ended."""
        os.set_blocking(self._out.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def fileno(self) -> int:
        return self._out.fileno()

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.write(_encoded(message))
            self._in.flush()

    def received(self) -> list[dict[str, Any]]:
        """Return the messages since the last call."""
        messages: list[dict[str, Any]] = []
        while data := self._out.read(1 << 20):
            messages += self._lines.of(data)
        self.is_closed = data is not None
        return messages

    def end(self, within_s: float) -> None:
        """Close the program's input, and kill the program if it has not ended after `within_s`."""
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.close()

    def close(self) -> None:
        if self.code is None:  # later its id may belong to another process
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()


class Parent:
    """The child's side. Once it is made, prints of libraries go to standard error, not between the messages."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen(self) -> None:
        """Read messages in a thread, which ends this process when the parent has gone, even by kill -9."""

        def read() -> None:
            # Not sys.stdin: the interpreter aborts if a thread still waits in it at the end.
            for line in os.fdopen(os.dup(0), "rb"):
                self._asked.put(json.loads(line))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()

    def asked(self, within_s: float | None = None) -> Any:
        try:
            return self._asked.get(timeout=within_s)
        except queue.Empty:
            return None

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._answers.write(_encoded(message))
            self._answers.flush()


def read_marked(text: str, mark: str) -> dict[str, Any] | None:
    """Return the JSON object in the output's last line that begins with `mark`, or None."""
    lines = [line for line in text.splitlines() if line.startswith(mark)]
    return dict(json.loads(lines[-1].removeprefix(mark))) if lines else None
