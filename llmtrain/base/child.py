"""A program in a child process, and messages of JSON lines between the two."""

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
    """Return a function for a new process, to which the kernel sends the signal when the thread that has started it
    ends."""
    return functools.partial(ctypes.CDLL(None).prctl, 1, number)  # PR_SET_PDEATHSIG of sys/prctl.h


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, with llmtrain on PYTHONPATH."""
    search = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, search))}


def of_module(module: str, *words: str) -> list[str]:
    """The command that runs a module. -P: the user's folder may have a queue.py that is not Python's."""
    return [sys.executable, "-P", "-m", module, *words]


def _encoded(message: Any) -> bytes:
    """One line. Values that JSON lacks, such as dates, become texts."""
    return json.dumps(message, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


class Lines:
    """JSON objects, one a line, of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that end in the next piece."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A host's start files may print before our process begins.
        return [json.loads(line) for line in lines if line.startswith((b'{"', b"{}"))]


class Child:
    """Runs a program that reads and writes JSON lines (`Parent` is its side); only `end` and `close` wait for it."""

    def __init__(self, words: Sequence[str], **more: Any) -> None:
        """`more`: arguments of Popen, such as `pass_fds`: open files for the program, under the same numbers."""
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One core each: the threads of libraries would fight over the cores that the parent fills.
            env=child_environment(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which then ends the child
            **more,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out, self._lines = self._process.stdin, self._process.stdout, Lines()
        self.is_closed = False
        """The program has closed its output, or ended."""
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
        """Close the program's input, and kill it after `within_s`."""
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.close()

    def close(self) -> None:
        if self.code is None:  # afterwards its number may be another one's
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()


class Parent:
    """A child's side. From here on a library's prints go to standard error, not between the messages."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen(self) -> None:
        """Read messages in a thread. At their end the parent is gone, even by kill -9, and so is this process."""

        def read() -> None:
            # Not sys.stdin: the interpreter closes it at its end, and aborts while a thread waits in it.
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
    """The JSON object in the output's last line that begins with `mark`."""
    lines = [line for line in text.splitlines() if line.startswith(mark)]
    return dict(json.loads(lines[-1].removeprefix(mark))) if lines else None
