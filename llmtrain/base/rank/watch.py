"""The rank's side of the watch: its heartbeat, its exceptions, and the start of the host's agent.

`begin` before torch is imported, `met` when the ranks know each other, `describe` when the run is known, then `left` or
`failed` at the end. Without DeepSpeed's launcher (LOCAL_SIZE) there is no watch, and none of these does anything. No
failure of the watch ends a run.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from llmtrain.base import log
from llmtrain.base.child import child_environment
from llmtrain.base.errors import UserError
from llmtrain.base.rank import messages, stderr
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
from llmtrain.base.rank.processes import MARK, Process, identify, stat
from llmtrain.base.rank.stacks import Frame, excerpt, own_line, place

_AGENT_STARTS_S = 20.0
_CONNECT_GRACE_S = 30.0
_MOST_OF_REASON = 1000

_folder: Path | None = None
_stack_file: TextIO | None = None
_has_failed = False
_launchers: tuple[Process, ...] = ()
alone_s: float | None = None
"""fault.stall_timeout_s, in seconds, of a rank that no agent watches."""


def launchers() -> tuple[Process, ...]:
    """DeepSpeed's launcher and its parent at the rank's start."""
    return _launchers


def _parents() -> tuple[Process, ...]:
    if "LOCAL_SIZE" not in os.environ:
        return ()
    found = identify(os.getppid())
    above = stat(found.pid) if found else None
    parents = (found, identify(above.parent) if above else None)
    return tuple(process for process in parents if process is not None and process.pid > 1)


def begin(*, stall_timeout_s: float, start_timeout_s: float, run_dir: str, agent: str) -> None:
    """Start the heartbeat and, on local rank 0, the agent, before anything slow. `agent`: its module."""
    global _folder, _stack_file, _has_failed, alone_s
    _has_failed = False
    alone_s = stall_timeout_s if _folder is None else None
    os.environ.pop(MARK, None)
    if "LOCAL_SIZE" not in os.environ or _folder is not None:
        return
    rank, local_rank = log.rank(), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        folder = make_folder()
        _stack_file = open(of_rank(folder, rank, "stack"), "a")  # noqa: SIM115  # faulthandler writes to it for ever
        faulthandler.enable(_stack_file)
        # faulthandler restores this handler at the latest while Python shuts down, when the agent may still signal.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, _stack_file, all_threads=False)
        os.mkfifo(of_rank(folder, rank, "ask"), 0o600)
        asked = os.open(of_rank(folder, rank, "ask"), os.O_RDWR | os.O_CLOEXEC)
        heart.connect(of_rank(folder, rank, "beat"), rank=rank, local_rank=local_rank)
        if local_rank == 0:
            _start_agent(agent, folder, stall_timeout_s, start_timeout_s, os.path.abspath(run_dir))
    except OSError as error:
        log.warn(f"the run is not watched: {error.strerror} ({error.filename})")
        return
    if _on_gpu() and not os.isatty(2):  # after the agent's start: it prints where the rank did
        try:
            stderr.keep_end(of_rank(folder, rank, "stderr"), _start)
        except OSError as error:
            log.warn(
                f"the watch will miss NCCL's last lines before it ends a rank: {error.strerror} ({error.filename})"
            )
    _thread.start_new_thread(_answer, (asked, _stack_file.fileno(), threading.get_ident()))  # forks come before threads
    _folder, alone_s = folder, None
    os.environ[MARK] = str(folder)  # marks every process that this rank starts


def _answer(asked: int, file: int, thread: int) -> None:
    """Write a thread's stack whenever the agent asks, with Python's lock: without it faulthandler ended ranks by
    SIGSEGV."""
    while os.read(asked, 64):
        lines, frame = ["Stack (most recent call first):"], sys._current_frames().get(thread)
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        os.write(file, "\n".join([*lines, ""]).encode(errors="replace"))


def _on_gpu() -> bool:
    """True if this rank will compute on a GPU, as far as is known before torch is imported."""
    return os.path.exists("/dev/nvidiactl") and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def agent_address() -> dict[str, Any] | None:
    """The address of this host's agent, on local rank 0; None elsewhere, or without an agent."""
    agent = None
    if _folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        deadline = time.monotonic() + _AGENT_STARTS_S
        while agent is None and time.monotonic() < deadline:
            agent = read_json(_folder / AGENT)
            if agent is None:
                time.sleep(0.05)
    return agent


def met(everyone: list[dict[str, Any]]) -> None:
    """Give the agent the job's hosts, and the supervisor the ranks: rank, host, local_rank, device, pid,
    `agent_address`."""
    if log.rank() == 0:
        keys = ("rank", "host", "local_rank", "device", "pid")
        messages.emit("place", ranks=[{key: each.get(key) for key in keys} for each in everyone])
    root = everyone[0]
    if _folder is None or os.environ.get("LOCAL_RANK", "0") != "0" or root["agent"] is None:
        return
    ranks: dict[str, list[int]] = {}
    for each in everyone:
        ranks.setdefault(each["host"], []).append(each["rank"])
    job = {
        "root": {"host": root["host"], "address": os.environ.get("MASTER_ADDR", "127.0.0.1"), **root["agent"]},
        "is_root": log.rank() == 0,
        "hosts": ranks,
    }
    _write(_folder / JOB, job)


def describe(**about_run: Any) -> None:
    """Set the facts about the run for fault reports: `tracking` and `run_id` for W&B, `experts`, `zero_stage`."""
    if _folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        _write(_folder / RUN, about_run)


def tend(flight_recorder: Callable[[], Mapping[str, Any]]) -> None:
    """Answer the agent's request for NCCL's flight recorder (`_dump_nccl_trace_json`); call it often, on a GPU."""
    stderr.mend()
    if _folder is None or not (_folder / RECORD_WANTED).exists():
        return
    answer = of_rank(_folder, log.rank(), "record")
    if not answer.exists():
        _write(answer, {"groups": [vars(group) for group in excerpt(flight_recorder())]})


def left(code: int) -> None:
    """Record that the rank exits with this code. After a 0 nothing counts as a fault."""
    heart.left(code)
    faulthandler.unregister(STACK_SIGNAL)


@contextlib.contextmanager
def outcome_reported() -> Iterator[None]:
    """Report a rank's end to agent and supervisor."""
    global _launchers
    _launchers = _parents()  # now: after seconds of imports a launcher that has been killed is no parent any more
    try:
        yield
        left(0)
    except UserError as error:
        if _folder is not None and not error.everywhere:  # the others may not have met it
            with contextlib.suppress(OSError):
                write_refusal(_folder, log.rank(), str(error)[:_MOST_OF_REASON])
        left(error.exit_code)
        if log.rank() == 0 or (not error.everywhere and os.environ.get("LOCAL_RANK") == "0"):
            cause = error.__cause__  # of an error that the ranks have agreed on
            passing = error.passing or (isinstance(cause, UserError) and cause.passing)
            status = "failed" if passing else "refused"
            messages.emit("end", status=status, code=error.exit_code, reason=str(error))
        raise
    except KeyboardInterrupt:
        left(130)
        raise
    except SystemExit as error:
        if not error.code:
            left(0)
        raise
    except Exception as error:
        reported = failed(error)
        # An echo of a peer's end: the agent explains which peer it is, and more tracebacks would bury that.
        distant = isinstance(error, (RuntimeError, ConnectionError)) and is_echo(_words(error))
        if reported and distant and os.environ.get(messages.VERBOSE) != "1":
            raise SystemExit(1) from None
        raise


def failed(error: BaseException) -> bool:
    """Report a bug that ends this rank. True if the agent has received it."""
    global _has_failed
    if _folder is None or heart.is_leaving() or isinstance(error, (UserError, SystemExit, KeyboardInterrupt)):
        return False
    if _has_failed:
        return True
    _has_failed = True  # the first call knows the phase
    lines = [Frame(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))]
    frame = own_line(lines)
    try:
        write_error(_folder, log.rank(), _words(error), place(frame) if frame else "", heart.in_phase())
    except OSError:
        return False
    return (_folder / AGENT).exists()


def _words(error: BaseException) -> str:
    """The last line of the traceback; NCCL's errors with the reason that follows "Last error:"."""
    return f"{type(error).__name__}: {with_reason(str(error))}".removesuffix(": ")[:500]


def _start_agent(agent: str, folder: Path, stall_s: float, start_s: float, run_dir: str) -> None:
    settings = {
        "folder": str(folder),
        "launcher": os.getppid(),
        "local_size": int(os.environ["LOCAL_SIZE"]),
        "stall_s": stall_s,
        # Beyond fault.start_timeout_s, so that gloo's own error comes first; the judge's stall_s is added to this.
        "connects_s": start_s + _CONNECT_GRACE_S - stall_s,
        "run_dir": run_dir,
        "host": socket.gethostname(),
    }
    words = [sys.executable, "-m", agent, json.dumps(settings)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        _start(words, nothing)
    finally:
        os.close(nothing)


def _start(words: list[str], standard_input: int) -> None:
    """Start a process that is no child of this one, so that killing this rank's tree spares it. Raises OSError."""
    environment = child_environment()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.dup2(standard_input, 0)
            os.closerange(3, 1024)  # a pipe of the user's would otherwise stay open as long as the process
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
