"""A rank under the watch: writes files for the host's agent, which local rank 0 starts, and answers the agent."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from llmtrain.base import log
from llmtrain.base.child import child_environment
from llmtrain.base.errors import number_in
from llmtrain.base.rank import stderr
from llmtrain.base.rank.device_faults import is_echo, with_reason
from llmtrain.base.rank.folder import (
    AGENT,
    JOB,
    RECORD_WANTED,
    RUN,
    STACK_SIGNAL,
    make_folder,
    of_rank,
    read_json,
    write_error,
    write_json,
    write_refusal,
)
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.rank.processes import MARK
from llmtrain.base.rank.stacks import Frame, excerpt, own_line, place

_AGENT_STARTS_S = 20.0
_CONNECT_GRACE_S = 30.0
_MOST_OF_REASON = 1000
_STACK_BYTES = 16 << 10


def begin(*, stall_timeout_s: float, start_timeout_s: float, run_dir: str, agent: str) -> Watched:
    """Start the heartbeat and, on local rank 0, the agent. `agent`: the agent's module. Raises OSError."""
    rank, local_rank = log.rank(), number_in("LOCAL_RANK", 0)
    folder = make_folder()
    stack_file = open(of_rank(folder, rank, "stack"), "a")  # noqa: SIM115  # faulthandler writes to it for ever
    # Reserve room for the stack of a crash, in case /dev/shm is full later (FALLOC_FL_KEEP_SIZE).
    ctypes.CDLL(None).fallocate(stack_file.fileno(), 1, ctypes.c_long(0), ctypes.c_long(_STACK_BYTES))
    faulthandler.enable(stack_file)
    # faulthandler restores this handler when Python shuts down, and the agent may still signal then.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, stack_file, all_threads=False)
    os.mkfifo(of_rank(folder, rank, "ask"), 0o600)
    asked = os.open(of_rank(folder, rank, "ask"), os.O_RDWR | os.O_CLOEXEC)
    heart.connect(of_rank(folder, rank, "beat"), rank=rank, local_rank=local_rank)
    if local_rank == 0:
        _start_agent(agent, folder, stall_timeout_s, start_timeout_s, os.path.abspath(run_dir))
    if on_gpu() and not os.isatty(2):  # after the agent's start, so that the agent prints directly
        try:
            stderr.keep_end(of_rank(folder, rank, "stderr"), start)
        except OSError as error:
            log.warn(
                f"the watch will miss NCCL's last lines before it ends a rank: {error.strerror} ({error.filename})"
            )
    _thread.start_new_thread(_answer, (asked, stack_file.fileno(), threading.get_ident()))  # after all forks
    os.environ[MARK] = str(folder)  # marks every process that this rank starts
    return Watched(folder, stack_file)


@dataclass
class Watched:
    """The rank's side of the watch, after `begin`."""

    folder: Path
    stack_file: TextIO | None = None
    has_failed: bool = False
    about_run: dict[str, Any] = field(default_factory=dict)

    def agent_address(self) -> dict[str, Any] | None:
        agent = None
        deadline = time.monotonic() + _AGENT_STARTS_S
        while agent is None and time.monotonic() < deadline:
            agent = read_json(self.folder / AGENT)
            if agent is None:
                time.sleep(0.05)
        return agent

    def met(self, everyone: list[dict[str, Any]]) -> None:
        from llmtrain.base.rank.interfaces import GLOO  # with psutil

        root = everyone[0]
        if root["agent"] is None:
            return
        ranks: dict[str, list[int]] = {}
        for rank in everyone:
            ranks.setdefault(rank["host"], []).append(rank["rank"])
        job = {
            "root": {"host": root["host"], "address": os.environ.get("MASTER_ADDR", "127.0.0.1"), **root["agent"]},
            "is_root": log.rank() == 0,
            "store": number_in("MASTER_PORT", 0),
            "interface": name if "," not in (name := os.environ.get(GLOO, "")) else "",
            "hosts": ranks,
        }
        _write(self.folder / JOB, job)

    def describe(self, about_run: dict[str, Any]) -> None:
        self.about_run |= about_run
        _write(self.folder / RUN, self.about_run)

    def tend(self, flight_recorder: Callable[[], Mapping[str, Any]]) -> None:
        stderr.mend()
        if (self.folder / RECORD_WANTED).exists():
            answer = of_rank(self.folder, log.rank(), "record")
            if not answer.exists():
                _write(answer, {"groups": [vars(group) for group in excerpt(flight_recorder())]})

    def left(self) -> None:
        faulthandler.unregister(STACK_SIGNAL)

    def refused(self, reason: str) -> None:
        """Record the user's mistake that ends this rank."""
        with contextlib.suppress(OSError):
            write_refusal(self.folder, log.rank(), reason[:_MOST_OF_REASON])

    def failed(self, error: BaseException) -> bool:
        """Record the bug that ends this rank, once. Returns True if the host has an agent to read it."""
        if self.has_failed:
            return True
        self.has_failed = True  # the first call knows the phase
        lines = [Frame(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))]
        frame = own_line(lines)
        try:
            write_error(self.folder, log.rank(), _words(error), place(frame) if frame else "", heart.in_phase())
        except OSError:
            return False
        return (self.folder / AGENT).exists()


def is_echo_of_peer(error: Exception) -> bool:
    """Return True for an error that echoes a peer's end. The agent names that peer, which more tracebacks would
    hide."""
    return isinstance(error, (RuntimeError, ConnectionError)) and is_echo(_words(error))


def _words(error: BaseException) -> str:
    """Return the traceback's last line, for NCCL with the reason after "Last error:"."""
    return f"{type(error).__name__}: {with_reason(str(error))}".removesuffix(": ")[:500]


def _answer(asked: int, file: int, thread: int) -> None:
    """Write a thread's stack whenever the agent asks. Holds Python's lock: without it, faulthandler ended ranks by
    SIGSEGV."""
    while os.read(asked, 64):
        lines, frame = ["Stack (most recent call first):"], sys._current_frames().get(thread)
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        os.write(file, "\n".join([*lines, ""]).encode(errors="replace"))


def on_gpu() -> bool:
    """Return True if this rank will compute on a GPU, as far as that is known before torch is imported."""
    return os.path.exists("/dev/nvidiactl") and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def _start_agent(agent: str, folder: Path, stall_s: float, start_s: float, run_dir: str) -> None:
    settings = {
        "folder": str(folder),
        "launcher": os.getppid(),
        "local_size": number_in("LOCAL_SIZE"),
        "stall_s": stall_s,
        # Beyond fault.start_timeout_s, so that gloo's own error comes first; the judge's stall_s is added to this.
        "connects_s": start_s + _CONNECT_GRACE_S - stall_s,
        "run_dir": run_dir,
        "host": socket.gethostname(),
    }
    words = [sys.executable, "-m", agent, json.dumps(settings)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        start(words, nothing)
    finally:
        os.close(nothing)


def start(words: list[str], standard_input: int) -> None:
    """Start a process that is not a child of this one, so that killing this rank's tree spares it. Raises OSError."""
    environment = child_environment()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.dup2(standard_input, 0)
            os.closerange(3, 1024)  # else the process would keep the user's pipes open
            os.chdir("/")
            os.execve(sys.executable, words, environment)
        finally:
            os._exit(127)
    os.waitpid(child, 0)


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        write_json(path, value)
    except OSError as error:
        log.warn(f"a file of the watch cannot be written: {error.strerror} ({path})")
