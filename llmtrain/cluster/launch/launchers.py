"""Two ways to start a job's ranks: pdsh, which runs `host.py` on each host, and Slurm's srun."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from llmtrain.base.errors import ConfigError
from llmtrain.base.files import scratch_folder
from llmtrain.base.rank import messages
from llmtrain.cluster.hosts.hostfile import Host, is_here
from llmtrain.cluster.hosts.ssh import on_hosts
from llmtrain.cluster.hosts.variables import deliver, remove
from llmtrain.cluster.launch import slurm
from llmtrain.cluster.launch.job import AGENTS_LEAVE_S, Guardian, Job, end_all, say, signal_ranks
from llmtrain.cluster.launch.placement import (
    Examine,
    Placement,
    address_of_first,
    check,
    check_programs,
    command,
    environment,
    host_words,
    threads,
)

_ANSWER_S = 10.0
_SRUN_LEAVES_S, _POLL_S = 10.0, 0.2


class Launcher(ABC):
    """Starts the ranks of a job, asks them to save and leave, ends them, and finds the hosts that still answer."""

    def check(self, placement: Placement) -> None:  # noqa: B027  # some take any placement
        """Raise ConfigError if the launcher cannot start this placement."""

    @abstractmethod
    def command(self, placement: Placement) -> list[str]:
        """Return the start command for --dry-run, with names in place of values that are only known at a start."""

    @abstractmethod
    def start(self, placement: Placement) -> AbstractContextManager[Job]:
        """A context with the started job. At its end no process of the job is left on any host that answers. Raises
        ConfigError."""

    def met(self, ranks: Sequence[dict[str, Any]]) -> None:  # noqa: B027  # some find the ranks without
        """Take the ranks in the message `place`."""

    @abstractmethod
    def ask_to_leave(self, placement: Placement, job: Job, ranks: Sequence[dict[str, Any]], number: int) -> None:
        """Ask the ranks to save and leave, with signal `number` if the launcher can choose one."""

    @abstractmethod
    def end(self, placement: Placement, job: Job) -> None:
        """End all processes of the job at once."""

    @abstractmethod
    def answering(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        """Return the hosts on which the launcher can still start a process."""


class Pdsh(Launcher):
    """Starts ranks on the hosts with pdsh over ssh, or directly if this host is the only one."""

    def __init__(self, mark: str, examine: Examine | None = None) -> None:
        self._mark, self._examine = mark, examine
        self._guardian: Guardian | None = None

    def check(self, placement: Placement) -> None:
        check(placement)

    def command(self, placement: Placement) -> list[str]:
        over = () if placement.alone else ("pdsh", "-w", ",".join(placement.names))
        return [*over, *host_words(placement, "ADDRESS", "PORT")]

    @contextlib.contextmanager
    def start(self, placement: Placement) -> Iterator[Job]:
        check_programs(placement)
        cores, port = _cores_and_port(placement)
        if not os.environ.get("OMP_NUM_THREADS"):
            placement = placement.sending(OMP_NUM_THREADS=str(threads(placement, cores)))
        address = "127.0.0.1" if placement.alone else self._first_address(placement, port)
        secret = None
        if placement.travel.private and not placement.alone:
            secret = deliver(placement.names, placement.travel.private)
            placement = placement.sending(**{messages.SECRETS: secret})
        with contextlib.ExitStack() as stack:
            try:
                argv = command(placement, address, port)
                with Job(argv, environment(placement, os.environ), self._mark) as job:
                    guardian = Guardian(placement.names, self._mark, secret, job.output)
                    self._guardian = stack.enter_context(guardian)
                    yield job
            finally:
                # The agents of a complete job end at once; after a fault one may still report to a tracker.
                for line in end_all(placement.names, self._mark, AGENTS_LEAVE_S):
                    say(f"warning: {line}")
                if secret is not None:
                    remove(placement.names, secret)

    def _first_address(self, placement: Placement, port: int) -> str:
        """Return the address by which the other hosts reach the first one. Raises ConfigError."""
        examine, self._examine = self._examine, None  # only once: before restarts `answering` asks the hosts
        address = None if examine is None else examine(placement.hosts, port)
        return address or address_of_first(placement.hosts)

    def met(self, ranks: Sequence[dict[str, Any]]) -> None:
        if self._guardian is not None:
            self._guardian.met(ranks)

    def ask_to_leave(self, placement: Placement, job: Job, ranks: Sequence[dict[str, Any]], number: int) -> None:
        reached = signal_ranks(placement.names, self._mark, ranks, number)
        if reached < len(ranks):
            say(f"warning: {reached} of {len(ranks)} ranks were reached; the others hear of it at the next step")

    def end(self, placement: Placement, job: Job) -> None:
        end_all(placement.names, self._mark)

    def answering(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        others = [host.name for host in hosts if not is_here(host.name)]
        answers = on_hosts(others, ("true",), timeout_s=_ANSWER_S) if others else {}
        return tuple(host for host in hosts if host.name not in answers or answers[host.name].code == 0)


class Slurm(Launcher):
    """Starts ranks with srun within an allocation; each start is a job step with this launch's name."""

    def __init__(self, mark: str) -> None:
        self._mark, self._step = mark, f"llmtrain-{mark}"

    def command(self, placement: Placement) -> list[str]:
        return slurm.command(placement.hosts, placement.words, "NAME")

    @contextlib.contextmanager
    def start(self, placement: Placement) -> Iterator[Job]:
        slurm.check_programs()
        port = _facts_here()["port"] if is_here(placement.names[0]) else random.randrange(20000, 30000)
        with scratch_folder("launch") as made:
            ranks = made / "ranks"
            ranks.write_text(slurm.hostfile(placement.hosts))
            meeting = {"MASTER_ADDR": address_of_first(placement.hosts), "MASTER_PORT": str(port)}
            env = {
                **os.environ,
                **placement.travel.open,
                **placement.travel.private,
                **meeting,
                "SLURM_HOSTFILE": str(ranks),
            }
            with Job(slurm.command(placement.hosts, placement.words, self._step), env, self._mark) as job:
                yield job

    def ask_to_leave(self, placement: Placement, job: Job, ranks: Sequence[dict[str, Any]], number: int) -> None:
        # In a thread: Slurm may take a minute, and a second Ctrl-C must be noticed.
        threading.Thread(target=self._ask_slurm, args=(job,), name="ask", daemon=True).start()

    def _ask_slurm(self, job: Job) -> None:
        problem = slurm.ask_to_leave(self._step)
        if problem is not None and job.code() is None:
            say(f"warning: the ranks were not asked to save and leave: {problem}")

    def end(self, placement: Placement, job: Job) -> None:
        # Two SIGINT within a second make srun end its tasks; after SIGKILL they would end by Slurm's timeouts.
        job.signal(signal.SIGINT)
        time.sleep(0.2)
        job.signal(signal.SIGINT)
        until = time.monotonic() + _SRUN_LEAVES_S
        while job.code() is None and time.monotonic() < until:
            time.sleep(_POLL_S)

    def answering(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        return slurm.answering(hosts)


def launcher_of(name: str, mark: str, examine: Examine | None = None) -> Launcher:
    return Slurm(mark) if name == "slurm" else Pdsh(mark, examine)


_FACTS = (
    "import json, os, random, socket\n"
    "s = socket.socket()\n"
    # Below the ports for outgoing connections, so that no process takes it before the start.
    "for port in random.sample(range(20000, 30000), 100):\n"
    "    try: s.bind(('', port)); break\n"
    "    except OSError: pass\n"
    "print(json.dumps({'port': s.getsockname()[1], 'cores': len(os.sched_getaffinity(0))}))"
)


def _cores_and_port(placement: Placement) -> tuple[dict[str, int], int]:
    """Return (host -> its cores, a free port of the first host). Raises ConfigError, which names hosts that failed."""
    if placement.alone:
        local = _facts_here()
        return {placement.names[0]: local["cores"]}, local["port"]
    answers = on_hosts(placement.names, (sys.executable, "-c", _FACTS), timeout_s=30.0)
    problems = []
    facts = {}
    for name, answer in answers.items():
        try:
            facts[name] = json.loads(answer.stdout)
        except ValueError:
            why = answer.stderr.strip().rpartition("\n")[2] or f"code {answer.code}"
            problem = f"{answer.trouble.text}: {answer.trouble.remedy}" if answer.trouble else None
            problems.append(f"  {name}: {problem or f'{sys.executable} does not run there ({why})'}")
    if problems:
        head = f"{len(problems)} of {len(placement.hosts)} hosts cannot be used"
        raise ConfigError("\n".join([head, *problems]))
    return {name: int(fact["cores"]) for name, fact in facts.items()}, int(facts[placement.names[0]]["port"])


def _facts_here() -> dict[str, int]:
    done = subprocess.run((sys.executable, "-c", _FACTS), capture_output=True, text=True, check=True)
    return {str(name): int(value) for name, value in json.loads(done.stdout).items()}
