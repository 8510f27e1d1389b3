"""Linux processes: facts from /proc, and ending those of a job on this host, and no others.

/proc is read without psutil: the agent does it twice a second for every rank. A process is identified by its id and the
time of its start, so that a reused id is never hit. A job's processes are its ranks, all below them, and all with the
job's mark in their environment (a data worker whose rank is dead).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from llmtrain.cluster import messages

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that the watch uses."""

    state: str
    """R running, S sleeping, D waiting for a disk or a file server, T stopped, t traced, Z ended, X going."""
    parent: int
    cpu_s: float
    """Processor time of all its threads."""
    started: int
    """Clock ticks after the boot: together with the process id, the identity of a process."""
    resident: int
    """Bytes of memory that it holds."""
    exit_status: int
    """As waitpid gives it, of a process that has ended and was not waited for yet."""


def stat(pid: int) -> Stat | None:
    """The stat of a process; None when there is none of this id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    try:
        return Stat(
            state=fields[0].decode(),
            parent=int(fields[1]),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            started=int(fields[19]),
            resident=int(fields[21]) * _PAGE,
            exit_status=int(fields[49]),
        )
    except (IndexError, ValueError):
        return None


def bytes_moved(pid: int) -> int:
    """Bytes that a process has read and written, caches included; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = file.read().split(b"\n")
        return int(lines[0].split()[1]) + int(lines[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def pids() -> list[int]:
    """Ids of the processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def words(pid: int) -> list[str]:
    """The command line; empty for a process that has ended or that is another user's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def has_mark(pid: int, mark: str) -> bool:
    """True if a process was started with this mark in its environment; those of other users cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def descendants(roots: set[int]) -> set[int]:
    """All processes below the given ones, without them."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        found = stat(pid)
        if found is not None:
            children.setdefault(found.parent, []).append(pid)
    below: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in below and child not in roots:
                below.add(child)
                queue.append(child)
    return below


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for lack of memory; 0 where it does not count them."""
    try:
        with open("/proc/vmstat", "rb") as file:
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def waits_in(pid: int) -> str:
    """The kernel function in which a process waits; empty where the kernel does not show it."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            found = file.read().strip()
    except OSError:
        return ""
    return "" if found == "0" else found


MARK = "LLMTRAIN_WATCH"
"""Environment variable of every process of a job: the folder of its heartbeats on this host."""
_GENTLE = ("wandb-core",)
"""Programs that remove their sockets when they are asked to end."""
_GENTLE_S = 2.0
_WITHIN_S = 8.0
_LAUNCHER_LEAVES_S = 40.0
_LAUNCHER = "deepspeed.launcher.launch"
_JOB = ("--world_info=", "--master_addr=", "--master_port=")


@dataclass(frozen=True)
class Process:
    """A process, identified for good."""

    pid: int
    started: int

    def alive(self) -> bool:
        """True if it runs; a zombie does not."""
        found = stat(self.pid)
        return found is not None and found.started == self.started and found.state not in "ZX"

    def send(self, number: int) -> None:
        """Signal it, if its id is still its own."""
        if self.alive():
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def identify(pid: int) -> Process | None:
    """The process of this id; None without one."""
    found = stat(pid)
    return None if found is None else Process(pid, found.started)


def end_host(ranks: list[Process], launcher: Process | None, mark: str) -> list[int]:
    """End all processes of the job on this host; returns the ids of those that stay (in a system call, say)."""
    deadline = time.monotonic() + _WITHIN_S
    began = time.monotonic()
    known: set[Process] = set(ranks)
    ours = launcher is not None and _is_launcher(words(launcher.pid))
    while True:
        known |= _family(known, mark)
        alive = [process for process in known if process.alive()]
        if not alive or time.monotonic() > deadline:
            break
        for process in alive:
            gentle = any(os.path.basename(word) in _GENTLE for word in words(process.pid)[:2])
            waits = gentle and time.monotonic() - began < _GENTLE_S
            process.send(signal.SIGTERM if waits else signal.SIGKILL)
        time.sleep(0.1)
    if launcher is not None and ours:
        # It sees them dead within a second and exits with their code. After a signal `deepspeed` would exit with 0, as
        # it looks for codes above 0 (launcher/runner.py main); SIGTERM does so, too, while its Python shuts down.
        deadline = time.monotonic() + _LAUNCHER_LEAVES_S
        while launcher.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.send(signal.SIGKILL)
    return sorted(process.pid for process in known if process.alive())


def _family(known: set[Process], mark: str) -> set[Process]:
    """All processes below the known ones or with the mark, without this one."""
    below = descendants({process.pid for process in known if process.alive()})
    marked = {pid for pid in pids() if has_mark(pid, mark)}
    found = (identify(pid) for pid in (below | marked) - {os.getpid()})
    return {process for process in found if process is not None}


def end_ssh(job: tuple[str, ...], wait_s: float) -> None:
    """End `deepspeed`'s ssh connections of the job (`job_of`) after `wait_s`: one to a silent host would stay, and pdsh
    and `deepspeed` would wait for it."""
    deadline = time.monotonic() + wait_s
    while connections := _connections(job):
        if time.monotonic() > deadline:
            for process in connections:
                process.send(signal.SIGTERM)
            return
        time.sleep(0.2)


def _connections(job: tuple[str, ...]) -> list[Process]:
    launch = os.environ.get(messages.LAUNCH, "")  # part of the command, too: two launches may have chosen one port
    found = []
    for pid in pids():
        argv = words(pid)
        text = " ".join([*argv, ""])
        if argv and os.path.basename(argv[0]) == "ssh" and launch in text and all(f"{word} " in text for word in job):
            found.append(identify(pid))
    return [process for process in found if process is not None]


def job_of(launcher: int) -> tuple[str, ...] | None:
    """Arguments that only this job's processes have: its hosts and port. None unless it is DeepSpeed's launcher as
    `deepspeed` starts it."""
    argv = words(launcher)
    found = [next((word for word in argv if word.startswith(start)), "") for start in _JOB]
    return tuple(found) if _is_launcher(argv) and all(found) else None


def _is_launcher(words: list[str]) -> bool:
    return any(_LAUNCHER in word or word.endswith("deepspeed/launcher/launch.py") for word in words)


def close_output() -> None:
    """Redirect output to /dev/null: an ssh connection stays open as long as a process can write to it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
