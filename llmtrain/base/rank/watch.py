"""The rank's side of the watch: its heartbeat, its exceptions, and the start of the host's agent.

Call `begin` before torch is imported, `met` when the ranks know each other, `describe` when the run is known, and
`left` or `failed` at the end. Without an agent or DeepSpeed's launcher (LOCAL_SIZE) there is no watch, and these
functions do nothing. No failure of the watch ends a run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.rank import messages
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.rank.processes import MARK, Process, identify, stat

if TYPE_CHECKING:
    from llmtrain.base.rank.watched import Watched

_watched: Watched | None = None
_launchers: tuple[Process, ...] = ()
alone_s: float | None = None
"""`FaultConfig.longest_s` if no agent watches this rank, else None."""


def launchers() -> tuple[Process, ...]:
    """Return DeepSpeed's launcher and its parent, as they were at the rank's start."""
    return _launchers


def _parents() -> tuple[Process, ...]:
    if "LOCAL_SIZE" not in os.environ:
        return ()
    launcher = identify(os.getppid())
    above = stat(launcher.pid) if launcher else None
    parents = (launcher, identify(above.parent) if above else None)
    return tuple(process for process in parents if process is not None and process.pid > 1)


def begin(*, stall_timeout_s: float, start_timeout_s: float, run_dir: str, agent: str) -> None:
    """Start the heartbeat and, on local rank 0, the agent, before anything slow. `agent`: its module; empty: no
    agent."""
    global _watched, alone_s
    os.environ.pop(MARK, None)
    if _watched is not None:
        _watched.has_failed, alone_s = False, None
        return
    alone_s = stall_timeout_s
    if not agent or "LOCAL_SIZE" not in os.environ:
        return
    from llmtrain.base.rank import watched

    try:
        _watched = watched.begin(
            stall_timeout_s=stall_timeout_s, start_timeout_s=start_timeout_s, run_dir=run_dir, agent=agent
        )
    except OSError as error:
        log.warn(f"the run is not watched: {error.strerror} ({error.filename})")
        return
    alone_s = None


def _first_of_host() -> Watched | None:
    return _watched if os.environ.get("LOCAL_RANK", "0") == "0" else None


def agent_address() -> dict[str, Any] | None:
    """Return the address of this host's agent on local rank 0; None elsewhere, or without an agent."""
    first = _first_of_host()
    return None if first is None else first.agent_address()


def met(everyone: list[dict[str, Any]]) -> None:
    """Give the agent the job's hosts, and the supervisor its ranks. `everyone`: for each rank rank, host, local_rank,
    device, pid, agent."""
    if log.rank() == 0:
        keys = ("rank", "host", "local_rank", "device", "pid")
        messages.emit("place", ranks=[{key: rank.get(key) for key in keys} for rank in everyone])
    if (first := _first_of_host()) is not None:
        first.met(everyone)


def describe(**about_run: Any) -> None:
    """Add facts about the run for fault reports: `sections` of features and `run_id` for trackers, `experts` ..."""
    if (first := _first_of_host()) is not None:
        first.describe(about_run)


def tend(flight_recorder: Callable[[], Mapping[str, Any]]) -> None:
    """If the agent asks for NCCL's flight recorder (`_dump_nccl_trace_json`), write it; call this often, on a GPU."""
    if _watched is not None:
        _watched.tend(flight_recorder)


def left(code: int) -> None:
    """Record that the rank exits with this code. After code 0 nothing counts as a fault."""
    heart.left(code)
    if _watched is not None:
        _watched.left()


@contextlib.contextmanager
def outcome_reported() -> Iterator[None]:
    """A context that reports the rank's end to agent and supervisor."""
    global _launchers
    _launchers = _parents()  # now: after the imports, a killed launcher would no longer be the parent
    log.keep_output()
    try:
        yield
        left(0)
    except UserError as error:
        if _watched is not None and not error.everywhere:  # other ranks may not have it
            _watched.refused(str(error))
        left(error.exit_code)
        if log.rank() == 0 or (not error.everywhere and os.environ.get("LOCAL_RANK") == "0"):
            cause = error.__cause__  # the error that an AgreedError carries
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
        if failed(error) and os.environ.get(messages.VERBOSE) != "1":
            from llmtrain.base.rank.watched import is_echo_of_peer

            if is_echo_of_peer(error):
                raise SystemExit(1) from None
        raise


def failed(error: BaseException) -> bool:
    """Report a bug that ends this rank. Returns True if the host has an agent to read it."""
    if _watched is None or heart.is_leaving() or isinstance(error, (UserError, SystemExit, KeyboardInterrupt)):
        return False
    return _watched.failed(error)
