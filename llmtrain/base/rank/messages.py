"""What a job and its supervisor exchange: the file with a launch's secrets for its ranks, and messages to the
supervisor.

A message is a line of JSON on standard output, after a mark with the launch's random id, which no text of a model or a
file can contain. Nothing is printed unless LLMTRAIN_SUPERVISED is 1.

    kind        fields
    wait        the ranks cannot meet yet, since files are being downloaded; sent repeatedly
    place       ranks: list of {rank, host, local_rank, device, pid}; sent once, when the ranks have met
    progress    text ("": ended), share (0 to 1, or None): sent in place of lines on standard output if TERMINAL is 1
    checkpoint  step of a complete checkpoint
    fault       text: for the user, cause: its name, ranks: that differ, step: steps done, signature: equal for two
                faults of one kind at one step, unfit: leave out the hosts of these ranks, again: False if another
                start would meet the same fault. Sent by an agent (watched.py).
    end         status: complete | stopped (from outside) | ended (by a part of the run) | refused | failed (a fault
                of the hosts, not of the user), code: the exit code, reason: or None
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from llmtrain.base import log, untrusted
from llmtrain.base.errors import ConfigError

SUPERVISED = "LLMTRAIN_SUPERVISED"
LAUNCH = "LLMTRAIN_LAUNCH"
"""Environment variable of every process of a launch, on every host: the launch's mark, which no other launch has."""
SECRETS = "LLMTRAIN_SECRETS"
"""Path of the file with the variables that no command line may show; not set if the launch has none."""
TERMINAL = "LLMTRAIN_TERMINAL"
"""1 if the supervisor has a terminal, on which it shows the progress itself."""
VERBOSE = "LLMTRAIN_VERBOSE"
"""1: ranks that fail because a peer is gone show their tracebacks, too."""
_ADDRESS = {"rank": int, "host": str, "local_rank": int, "device": str, "pid": int}
_NEEDED: dict[str, dict[str, Any]] = {
    "wait": {},
    "place": {"ranks": list},
    "progress": {"text": str},
    "checkpoint": {"step": int},
    "fault": {},
    "end": {"status": str, "code": int},
}
"""Kind -> the fields that a message must have, with their types."""
_OPTIONAL = {"share": (int, float), "reason": str, "text": str, "cause": str, "signature": str, "step": int,
             "ranks": list, "unfit": bool, "again": bool}  # fmt: skip


def mark_of(launch: str) -> str:
    """Return the mark of a launch's messages. `launch`: the value of LAUNCH in its processes."""
    return f"llmtrain:{launch}: "


def emit(kind: str, **fields: Any) -> None:
    """Send a message to the supervisor, if any, in one write, so that lines of several ranks do not mix."""
    assert kind in _NEEDED, kind
    if not supervised():
        return
    mark = mark_of(os.environ.get(LAUNCH, ""))
    line = f"{mark}{json.dumps({'kind': kind, **fields}, separators=(',', ':'))}\n"
    with contextlib.suppress(OSError):  # the supervisor is gone
        log.reopen()
        sys.stdout.flush()
        os.write(1, line.encode())


@contextlib.contextmanager
def waiting(every_s: float = 30.0) -> Iterator[None]:
    done = threading.Event()

    def tell() -> None:
        while not done.wait(every_s):
            emit("wait")

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def supervised() -> bool:
    return os.environ.get(SUPERVISED) == "1"


def show_progress() -> Callable[[str, float | None], None] | None:
    """Return a function (text, share done) that shows progress on the supervisor's terminal; None without one."""
    if not supervised() or os.environ.get(TERMINAL) != "1":
        return None
    return lambda text, share: emit("progress", text=text, share=share)


def parse(line: str, launch: str = "") -> dict[str, Any] | None:
    """Return the message in a line of a job's output, with its fields' types checked; None: the line has no message.
    pdsh puts "host: " before a line. `launch`: see `mark_of`."""
    _, mark, rest = line.partition(mark_of(launch))
    if not mark:
        return None
    try:
        message = untrusted.loads(rest)
    except ValueError:
        return None
    kind = message.get("kind") if isinstance(message, dict) else None
    if kind not in list(_NEEDED):
        return None
    types = {key: type_ for key, type_ in _OPTIONAL.items() if message.get(key) is not None}
    each_is = _ADDRESS if kind == "place" else int
    fits = _is(message, {**types, **_NEEDED[kind]}) and all(_is(rank, each_is) for rank in message.get("ranks") or [])
    return message if fits else None


def _is(value: Any, wanted: Any) -> bool:
    """Return True if the value, or each wanted field of it, has the wanted type."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_is(value.get(key), type_) for key, type_ in wanted.items())
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def load_secrets() -> list[str]:
    """Put the secrets that `deliver` has sent into this process's environment. Returns their names. Raises ConfigError
    if the file of LLMTRAIN_SECRETS is missing, or open to other users."""
    shown = os.environ.get(SECRETS)
    if shown is None:
        return []
    try:
        handle = os.open(os.path.expanduser(shown), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{SECRETS}={shown}: cannot be read on host {os.uname().nodename} ({error.strerror}). "
            "`llmtrain launch` writes it and later removes it: start the run with launch again, or unset the variable"
        ) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            rule = f"must be a plain file of this user with mode 0600, not {stat.filemode(status.st_mode)}"
            raise ConfigError(f"{SECRETS}={shown}: {rule} of user {status.st_uid}: remove it and launch again")
        with open(handle, "rb", closefd=False) as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    finally:
        os.close(handle)
    for name, _, value in pairs:
        os.environb[name] = value
    return [os.fsdecode(name) for name, _, _ in pairs]
