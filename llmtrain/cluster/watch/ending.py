"""Ends the processes of a job on this host: its ranks, all below them, and all with the job's mark in their environment
(a data worker whose rank is dead)."""

from __future__ import annotations

import os
import signal
import time

from llmtrain.base.rank import messages
from llmtrain.base.rank.processes import Process, descendants, has_mark, identify, pids, words

_GENTLE = ("wandb-core",)
"""Programs that remove their sockets when they are asked to end."""
_GENTLE_S = 2.0
_WITHIN_S = 8.0
_LAUNCHER_LEAVES_S = 40.0
_LAUNCHER = "deepspeed.launcher.launch"
_JOB = ("--world_info=", "--master_addr=", "--master_port=")


def end_host(ranks: list[Process], launcher: Process | None, mark: str) -> list[int]:
    """End all processes of the job on this host; return the ids of those that stay."""
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
        # it looks for codes above 0 (launcher/runner.py main); a SIGTERM during its Python's shutdown also gives 0.
        deadline = time.monotonic() + _LAUNCHER_LEAVES_S
        while launcher.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.send(signal.SIGKILL)
    return sorted(process.pid for process in known if process.alive())


def _family(known: set[Process], mark: str) -> set[Process]:
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
    """Return arguments that only this job's processes have, its hosts and port. None: it is not DeepSpeed's launcher as
    `deepspeed` starts it."""
    argv = words(launcher)
    found = [next((word for word in argv if word.startswith(start)), "") for start in _JOB]
    return tuple(found) if _is_launcher(argv) and all(found) else None


def _is_launcher(words: list[str]) -> bool:
    return any(_LAUNCHER in word or word.endswith("deepspeed/launcher/launch.py") for word in words)


def close_output() -> None:
    """Redirect output to /dev/null: an ssh connection stays open while a process can write to it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
