"""The placement of a start: hosts and their ranks, environment, and the command that starts the ranks."""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmtrain.base import units
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank import messages
from llmtrain.base.redact import redact_argv
from llmtrain.cluster.hosts.hostfile import Host, is_alone
from llmtrain.cluster.hosts.ssh import NO_PDSH
from llmtrain.cluster.hosts.variables import Travel, assignments, for_pdsh, read_env_file, travelling
from llmtrain.cluster.launch.job import TRAIN, on_terminal

# After a link was cut, TCP would try for 15 minutes: ssh gives up after 15 s.
_SSH_OPTIONS = "-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 -oServerAliveCountMax=2"
_MAX_COMMAND = (128 << 10) - 1
"""Longest argument in Linux (MAX_ARG_STRLEN): for pdsh and sshd the complete command is one argument."""
HOST = "llmtrain.cluster.launch.host"
"""Module that starts the ranks of a host."""
_NUMBER = "--node_rank=%n"
"""pdsh replaces %n by the host's place in its list."""
_SPARE = 512
"""Bytes of the command that are kept free for address, port, threads and the secrets' file."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line has before `--`, with hosts and words resolved."""

    hosts: tuple[Host, ...]
    words: tuple[str, ...]
    launcher: str
    max_restarts: int
    min_hosts: int
    env_file: str | None
    dry_run: bool
    carried: Mapping[str, str] = field(default_factory=dict)
    """Further variables for the ranks, which are too long for a command line."""
    verbose: bool = False
    """True: show the ranks' process ids, and the tracebacks of ranks that fail because another one has ended."""


Examine = Callable[[Sequence[Host], int], str | None]
"""(hosts, port of the rendezvous) -> the first host's address as the other hosts know it, or None. Examines the hosts
before the first start. Raises ConfigError."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """What launch knows about the run."""

    folder: str
    resume: str
    """The key `resume`; auto: a start continues from the newest checkpoint."""
    again: str
    """Names the command that continues the run, for messages."""
    start_timeout_s: float
    examine: Examine | None
    batches: Sequence[int]
    """Sequences per optimizer step in each stage of the data, which a restart on fewer hosts keeps."""
    resolve: Callable[[Sequence[str], int], Sequence[int]]
    """(command line, number of ranks) -> such batches. Raises ConfigError if the run is not valid on so many ranks."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    hosts: tuple[Host, ...]
    words: tuple[str, ...]
    """Arguments of `llmtrain train`: --config RUN.yaml and the overrides."""
    travel: Travel
    verbose: bool = False

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def world_size(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def alone(self) -> bool:
        """True if this host is the only one, whose ranks are started without ssh."""
        return is_alone(self.hosts)

    def sending(self, **variables: str) -> Placement:
        return replace(self, travel=replace(self.travel, open={**self.travel.open, **variables}))


def make_placement(options: Options, hosts: Sequence[Host], mark: str, words: Sequence[str] = ()) -> Placement:
    """Return the placement on `hosts`. `words`: replace the command line's. Raises ConfigError."""
    of_file = read_env_file(options.env_file) if options.env_file else {}
    own_variables = {messages.SUPERVISED: "1", messages.LAUNCH: mark}
    own_variables |= {messages.VERBOSE: "1"} if options.verbose else {}
    own_variables |= {messages.TERMINAL: "1"} if on_terminal() else {}
    travel = travelling(os.environ, {**of_file, **own_variables})
    travel = replace(travel, private={**travel.private, **options.carried})
    return Placement(hosts=tuple(hosts), words=tuple(words or options.words), travel=travel, verbose=options.verbose)


def check(placement: Placement) -> None:
    """Raise ConfigError if pdsh cannot start this placement."""
    if placement.alone:
        return
    problems = [
        f"the argument {word!a} has a line break, and no shell can pass it on: put the value into the YAML"
        for word in placement.words
        if "\n" in word or "\r" in word
    ]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    length = len(os.fsencode(command(placement, "", "")[-1])) + _SPARE
    if length > _MAX_COMMAND:
        raise ConfigError(
            f"the command for each of {len(placement.hosts)} hosts would have {length} bytes, but Linux allows "
            f"{_MAX_COMMAND}: it has the names and devices of all hosts. Use fewer hosts, "
            "give them shorter names, or use `--launcher slurm`, which has no such command"
        )


def check_programs(placement: Placement) -> None:
    if not placement.alone and shutil.which("pdsh") is None:
        raise ConfigError(f"{NO_PDSH[0]}: {NO_PDSH[1]}")


def command(placement: Placement, address: str, port: int | str) -> list[str]:
    """Return the command that starts the ranks here or, over pdsh, on each host."""
    words = host_words(placement, address, port)
    if placement.alone:
        return words
    number = words.index(_NUMBER)
    quoted = [*map(for_pdsh, words[:number]), _NUMBER, *map(for_pdsh, words[number + 1 :])]
    line = f"cd {for_pdsh(os.getcwd())} && env {' '.join([*assignments(placement.travel.open), *quoted])}"
    return ["pdsh", "-S", "-f", str(len(placement.hosts)), "-w", ",".join(placement.names), line]


def host_words(placement: Placement, address: str, port: int | str) -> list[str]:
    """Return the command to run on a host."""
    world = json.dumps({host.name: list(host.devices) for host in placement.hosts})
    return [
        *(sys.executable, "-u", "-m", HOST),
        f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}",
        *(() if placement.alone else (_NUMBER,)),
        *(f"--master_addr={address}", f"--master_port={port}"),
        *(("--verbose",) if placement.verbose else ()),
        *(*TRAIN, *placement.words),
    ]


def environment(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `command`. Without ssh the ranks inherit it; else it has no private variables."""
    if placement.alone:
        return {**environ, **placement.travel.open, **placement.travel.private}
    public = {name: value for name, value in environ.items() if name not in placement.travel.private}
    options = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {_SSH_OPTIONS}".strip()
    return {**public, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}


def address_of_first(hosts: Sequence[Host]) -> str:
    """Return the address by which the other hosts reach the first one. Raises ConfigError if its name has no
    address."""
    first = _resolve(hosts[0].name)
    if first.startswith("127.") and len(hosts) > 1:
        # Debian's /etc/hosts gives a host's own name 127.0.1.1: take the address from which it sends to another host.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((_resolve(hosts[1].name), 9))
            except OSError:
                return first
            return str(probe.getsockname()[0])
    return first


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"host {name}: its name has no address here ({error.strerror}): put it into /etc/hosts or DNS"
        ) from None


def threads(placement: Placement, cores: Mapping[str, int]) -> int:
    """Return the number of OMP threads per rank with which the ranks of a host do not compete for its cores."""
    return max(1, min((cores[host.name] // host.slots for host in placement.hosts if host.name in cores), default=1))


def describe(placement: Placement, options: Options, argv: Sequence[str]) -> str:
    """Return the text of --dry-run, which shows names of variables but no values."""
    hosts = units.counted(len(placement.hosts), "host")
    lines = [f"{hosts}, {units.counted(placement.world_size, 'rank')}"]
    width = max(len(host.name) for host in placement.hosts)
    digits = int(math.log10(max(1, placement.world_size - 1))) + 1
    first = 0
    for host in placement.hosts:
        span = f"{first:{digits}}" + (f" to {first + host.slots - 1:{digits}}" if host.slots > 1 else "")
        lines.append(f"  {host.name:<{width}}  ranks {span}  devices {units.spans(host.devices)}")
        first += host.slots
    shown = shlex.join(redact_argv(argv))
    lines += [f"command: {shown}", f"folder:  {os.getcwd()}"]
    inherited = placement.alone or options.launcher == "slurm"
    how = "inherited" if inherited else "on each host's command line"
    lines.append(f"environment, {how}: {' '.join(sorted(placement.travel.open)) or '(nothing)'}")
    private = "inherited" if inherited else "in a file of mode 0600"
    lines.append(f"secret variables, {private}: {' '.join(sorted(placement.travel.private)) or '(nothing)'}")
    restarts = units.counted(options.max_restarts, "restart")
    lines.append(f"after a fault: at most {restarts}, on at least {options.min_hosts} of {hosts}")
    return "\n".join(lines)


def place_lines(placement: Placement, ranks: list[dict[str, Any]]) -> list[str]:
    """Return a line for each rank, with the hostfile's name of its host, and the host's own name if that differs."""
    lines = []
    for rank in ranks:
        name = host_of_rank(placement.hosts, rank["rank"]) or rank["host"]
        own_name = "" if rank["host"] == name else f" ({rank['host']})"
        lines.append(f"rank {rank['rank']} -> {name}{own_name} -> {rank['device']}, local rank {rank['local_rank']}")
    return lines


def host_of_rank(hosts: Sequence[Host], rank: int) -> str:
    names = [host.name for host in hosts for _ in range(host.slots)]
    return names[rank] if rank < len(names) else ""
