"""Workers on other hosts. On each one process, `python -m llmtrain.features.prepare_hosts.hosts`, has a worker for each
core, and passes their input and output on, over ssh or srun."""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llmtrain.base.child import Parent, child_environment, of_module
from llmtrain.base.errors import DataError
from llmtrain.base.threads import usable_cores
from llmtrain.cluster.hosts.hostfile import Host, is_here, read_hostfile
from llmtrain.cluster.hosts.ssh import on_hosts, options
from llmtrain.cluster.launch.slurm import hosts_of
from llmtrain.data.prepare import out_folder
from llmtrain.data.prepare.out_folder import PLAN
from llmtrain.data.prepare.pools import BEAT_S, Link, Lost, Place, local
from llmtrain.storage.addresses import is_url

_SERVING = "llmtrain.features.prepare_hosts.hosts"
_STARTS = 3
"""Starts of a host's workers, if they are lost."""
_REACHED_S = 30.0
_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0")


def places_on(where: str, processes: int | None) -> list[Place]:
    """The hosts in a hostfile, or in this Slurm job ("slurm").

    `processes`: per host; None: one per core. Raises DataError: a host cannot be reached; ConfigError: the hostfile is
    wrong, or this is no Slurm job.
    """
    if where == "slurm":
        named = [(host.name, [*_SRUN, "--nodelist", host.name]) for host in hosts_of(os.environ)]
    else:
        hosts = read_hostfile(where)
        _refuse_unreachable(hosts)
        ssh = ["ssh", *options(_REACHED_S)]
        named = [(host.name, [] if is_here(host.name) else [*ssh, "--", host.name]) for host in hosts]
    words = _command(processes)
    commands = {name: [*way, *(words if way[:1] != ["ssh"] else [shlex.join(words)])] for name, way in named}
    return [Place(partial(Link, name, command), workers=None, starts=_STARTS) for name, command in commands.items()]


def _command(processes: int | None) -> list[str]:
    """The command for a host, whose shell starts in another folder."""
    words = of_module(_SERVING, os.getcwd(), str(processes or 0))
    return ["env", f"PYTHONPATH={child_environment()['PYTHONPATH']}", *words]


def _refuse_unreachable(hosts: Sequence[Host]) -> None:
    names = [host.name for host in hosts if not is_here(host.name)]
    answers = on_hosts(names, ("test", "-x", sys.executable), timeout_s=_REACHED_S) if names else {}
    for name, answer in answers.items():
        if answer.trouble is not None and answer.code is None:
            raise DataError(f"--on: {name}: {answer.trouble.text} {answer.trouble.remedy}")
        if answer.code:
            raise DataError(f"--on: {name}: there is no {sys.executable}, this program's Python; install it there")


def main() -> None:
    """Serve as a host's workers. Arguments: the folder to work in, and the number of workers (0: one per core). Input
    and output are as a worker's, with `{"hello": workers}` after the settings, and `{"alive": true}` when idle."""
    folder, processes = sys.argv[1], int(sys.argv[2]) or usable_cores()
    answer = Parent().tell
    host = socket.gethostname()
    lines = open(os.dup(0), "rb", buffering=0)  # noqa: SIM115  # until the process ends
    settings = json.loads(lines.readline())
    plan, stored = settings.pop("plan"), is_url(settings["out"])
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(*([OSError] if stored else [])):  # another host may not have the folder
                os.chdir(folder)
            local = stack.enter_context(out_folder.seen(settings["out"]))
            plan_seen = (local / PLAN).read_text()
        except (OSError, DataError) as error:
            plan_seen = str(error)
        if plan_seen != plan and stored:
            text = f"{host} does not see the preparation in {settings['out']} ({plan_seen[:200]})"
            answer({"error": f"--on: {text}; give that host the store's credentials and a way to it"})
        elif plan_seen != plan:
            text = f"--on: {host} does not see {settings['out']} (looked from {folder}); --out, the sources and this "
            answer({"error": f"{text}program must be in a folder that all hosts share"})
        else:
            answer({"hello": processes})
            _serve({**settings, "here": str(local)}, processes, lines, answer, host)


def _serve(
    settings: Mapping[str, Any],
    processes: int,
    lines: io.RawIOBase,
    answer: Callable[[Mapping[str, Any]], None],
    host: str,
) -> None:
    """Give the units that arrive on `lines` to workers, until `lines` or a worker ends."""
    with selectors.DefaultSelector() as selector:
        workers = [place.open() for place in local(processes)]
        try:
            idle = list(workers)
            for worker in workers:
                worker.send(settings)
                selector.register(worker, selectors.EVENT_READ, worker)
            selector.register(lines, selectors.EVENT_READ)
            while True:
                if not (ready := selector.select(BEAT_S)):
                    answer({"alive": True})
                for key, _ in ready:
                    if key.data is None:
                        if not (line := lines.readline()):
                            return  # the preparation is gone
                        idle.pop().send(json.loads(line))
                        continue
                    for message in key.data.receive():
                        idle += [key.data] if "done" in message else []
                        answer(message)
        except Lost as lost:
            print(f"{host}: {lost}", file=sys.stderr)
        finally:
            for worker in workers:
                worker.end()


if __name__ == "__main__":
    main()
