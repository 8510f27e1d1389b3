"""The few Linux calls that Python 3.11 lacks. Standard library only: the hosts' first process imports it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# The order in which a process must enter them: after the mount namespace, /proc is the host's.
NAMESPACES = {"net": CLONE_NEWNET, "uts": CLONE_NEWUTS, "ipc": CLONE_NEWIPC, "pid": CLONE_NEWPID, "mnt": CLONE_NEWNS}

MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def unshare_all() -> None:
    """New namespaces of every kind in NAMESPACES; the process id's only for children. Raises OSError if not root."""
    _checked(_libc.unshare(sum(NAMESPACES.values())), "unshare")


def enter(pid: int) -> None:
    """Join the namespaces of a process; children are born in its process id namespace. Raises OSError."""
    opened = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in NAMESPACES}
    for kind, fd in opened.items():
        _checked(_libc.setns(fd, NAMESPACES[kind]), f"setns {kind}")
        os.close(fd)


def mount(source: str, target: Path | str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError with the target's name."""
    result = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(result, f"mount {target}")


def bind(source: str, target: Path | str) -> None:
    """Show a file or folder, with what is mounted below it, at a second place."""
    mount(source, target, flags=MS_BIND | MS_REC)


def die_with_parent() -> None:
    """SIGKILL for this process as soon as its parent has ended, however it ended."""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
