"""The hosts of a job, their ranks, and the names of this host.

DeepSpeed's own reader (deepspeed/launcher/runner.py `_parse_hostfile`) searches for a pattern and ignores the rest of a
line, so it accepts `slots=4x`, `-oProxyCommand=...` (ssh runs it) and `node[0-3]` (pdsh expands it, DeepSpeed does
not). The grammar here is a strict part of DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from llmtrain.base import units
from llmtrain.base.errors import ConfigError

MAX_SLOTS = 1024
"""Most ranks of a host. A larger number is a typing error: no host has 1,024 devices or cores."""
MAX_BYTES = 4 << 20
"""Largest hostfile: with 10,000 hosts it has 0.3 MB, so a larger file is something else."""
_SHOWN = 100

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,9})")
_WHOLE = re.compile(r"0|[1-9][0-9]{0,9}")
# ssh and the resolver read `1`, `0177.1` and `0x7f.1` as addresses (inet_aton), not as names.
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")

FORM = "NAME slots=COUNT"


class HostfileError(ConfigError):
    """The hostfile, --include or --exclude is wrong. `problems`: one line for each problem."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = units.counted(len(problems), "problem")
        lines = [f"{where}: {count}", *(f"  {problem}" for problem in problems[:_SHOWN])]
        if len(problems) > _SHOWN:
            lines.append(f"  and {len(problems) - _SHOWN} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    slots: int
    """Number of ranks to start; always len(devices)."""
    devices: tuple[int, ...]
    """Device numbers of the ranks, ascending: 0 to slots - 1 unless --include or --exclude chose others."""
    line: int
    """Line number in the hostfile, from 1."""


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts in the order of the file; the first one has rank 0. Raises HostfileError with all problems."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        # DeepSpeed takes a missing hostfile for "train on this host alone", with only a warning.
        remedy = f"give --hostfile the path of a file with a line `{FORM}` for each host"
        raise HostfileError(str(path), [f"cannot be read ({error.strerror}): {remedy}"]) from None
    if len(raw) > MAX_BYTES:
        raise HostfileError(str(path), [f"larger than {MAX_BYTES >> 20} MiB: this is not a hostfile"])
    hosts, problems = _parse(raw)
    if problems:
        raise HostfileError(str(path), problems)
    return tuple(hosts)


def _parse(raw: bytes) -> tuple[list[Host], list[str]]:
    hosts: list[Host] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(re.split(rb"\r\n|\r|\n", raw), start=1):
        text, problem = _decoded(line, number)
        if problem is None and text.strip(" \t") and not text.lstrip(" \t").startswith("#"):
            host, problem = _host(text, number)
            name = re.split(r"[ \t]", text.strip(" \t"), maxsplit=1)[0]
            first = seen.setdefault(name.lower(), number)
            if first != number:
                repeated = f"host {_shown(name)} is in line {first} already: one line for each host, with all its slots"
                problem = repeated if problem is None else f"{repeated}; {problem}"
            if host is not None:
                hosts.append(host)
        if problem is not None:
            problems.append(f"line {number}: {problem}")
    if not hosts and not problems:
        problems.append(f"no hosts: write a line `{FORM}` for each")
    return hosts, problems


def _decoded(line: bytes, number: int) -> tuple[str, str | None]:
    if number == 1 and line.startswith(b"\xef\xbb\xbf"):
        return "", "a byte order mark before the first character: save the file as UTF-8 without BOM"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "", f"byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8: save the file as UTF-8"
    for column, character in enumerate(text, start=1):
        if character != "\t" and (character < " " or "\x7f" <= character < "\xa0"):
            return "", f"control character {character!a} in column {column}: remove it"
    return text, None


def _host(text: str, number: int) -> tuple[Host | None, str | None]:
    words = [word for word in re.split(r"[ \t]+", text) if word]
    for index, word in enumerate(words):
        if word.startswith("#"):
            words = words[:index]
            break
    wrong = []
    problem = name_problem(words[0])
    if problem is not None:
        wrong.append(problem)
    slots = 0
    if len(words) < 2:
        wrong.append(f"no slots after {_shown(words[0])}: write `{FORM}`, COUNT being the ranks to start there")
    else:
        slots, problem = _slots(words[1])
        if problem is not None:
            wrong.append(problem)
    if len(words) > 2:
        rest = " ".join(words[2:])
        wrong.append(f"stray text {_shown(rest)}: a line is `{FORM}`, and a comment starts with a blank and #")
    if wrong:
        return None, "; ".join(wrong)
    return Host(name=words[0], slots=slots, devices=tuple(range(slots)), line=number), None


def _slots(word: str) -> tuple[int, str | None]:
    matched = _SLOTS.fullmatch(word)
    if matched is None:
        rule = f"slots=COUNT with COUNT a whole number from 1 to {MAX_SLOTS} and nothing around it"
        return 0, f"{_shown(word)} is not {rule}: write for example slots=8"
    count = int(matched[1])
    if count > MAX_SLOTS:
        return 0, f"slots={count} is more than {MAX_SLOTS}: write the number of devices of this host"
    return count, None


def name_problem(name: str) -> str | None:
    """Return why ssh, pdsh and DeepSpeed cannot take the host `name`, or None. For pdsh and --include `:`, `,`, `@`,
    `[` and `^` have other meanings, so a name is no IPv6 address and no user@host."""
    if len(name) > 253:
        return f"host {_shown(name)} has {len(name)} characters: at most 253"
    if with_port := re.fullmatch(r"([^:@]+):(\d{1,5})", name):
        return (
            f"host {_shown(name)}: a port cannot be given here: write {with_port[1]}, and `Port {with_port[2]}` for "
            "this host in ~/.ssh/config"
        )
    if re.fullmatch(r"\[?[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%.*)?\]?", name):
        return (
            f"host {_shown(name)}: pdsh cannot take an IPv6 address: give it a name in /etc/hosts, and write the name"
        )
    if "@" in name:
        return f"host {_shown(name)}: pdsh and --include read @ otherwise: put `User` for this host in ~/.ssh/config"
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            return f"host {_shown(name)} would be read as an address: write a name, or four numbers from 0 to 255"
        return None
    for label in labels:
        if not _LABEL.fullmatch(label):
            rule = "is a name of letters, digits, - and _, its parts joined by dots, or an IPv4 address"
            return f"host {_shown(name)}: a host {rule}: write the name that `ssh NAME` reaches"
    return None


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 80 else f"{text[:80]!a}..."


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the chosen hosts and devices by DeepSpeed's grammar: `NAME[:DEVICE[,DEVICE ...]]`, joined by @; a name
    alone chooses all devices of the host. Raises HostfileError with all problems."""
    if include and exclude:
        raise HostfileError("--include and --exclude", ["both are given: give only one"])
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    if not text:
        return tuple(hosts)
    named, problems = _filter(hosts, text)
    if problems:
        raise HostfileError(f"{flag} {text}", problems)
    chosen = []
    for host in hosts:
        which = named.get(host.name, ())
        keep = [d for d in host.devices if (d in which) == (flag == "--include")]
        if keep:
            chosen.append(replace(host, slots=len(keep), devices=tuple(keep)))
    if not chosen:
        raise HostfileError(f"{flag} {text}", ["no host is left: leave at least one device of one host"])
    return tuple(chosen)


def _filter(hosts: Sequence[Host], text: str) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return (host -> its devices in `text`, the problems)."""
    by_name = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        host = by_name.get(name)
        if host is None:
            near = difflib.get_close_matches(name, list(by_name), n=1)
            more = f" and {len(by_name) - 8} more" if len(by_name) > 8 else ""
            has = f"did you mean {near[0]}?" if near else f"it has {', '.join(list(by_name)[:8])}{more}"
            problems.append(f"host {_shown(name)} is not in the hostfile: {has}")
            continue
        devices = host.devices
        if colon:
            words = numbers.split(",")
            odd = [w for w in words if not _WHOLE.fullmatch(w) or int(w) not in host.devices]
            if odd:
                has = units.spans(host.devices)
                problems.append(f"no device {', '.join(map(_shown, odd))} on host {name}: the hostfile gives it {has}")
                continue
            devices = tuple(int(w) for w in words)
        if name in named and not (colon and set(named[name]) != set(host.devices)):
            problems.append(f"host {name} is named twice: name it once, with all the devices that are meant")
        named[name] = (*named.get(name, ()), *devices)
    return named, problems


def this_machine() -> Host:
    """Return this host with all of its NVIDIA GPUs, or two ranks on its CPU if it has none or they are hidden."""
    slots = 0
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and os.environ.get("DS_ACCELERATOR") != "cpu":
        with contextlib.suppress(
            OSError, subprocess.SubprocessError
        ):  # not installed, or a driver that does not answer
            listed = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=30).stdout
            slots = sum(line.startswith("GPU ") for line in listed.splitlines())  # the parts of a GPU are indented
    return Host(name="localhost", slots=slots or 2, devices=tuple(range(slots or 2)), line=1)


def is_alone(hosts: Sequence[Host]) -> bool:
    """Return True if this host is the only one. If there are others, a launch reaches this one by ssh, too."""
    return len(hosts) == 1 and is_here(hosts[0].name)


def on_visible_devices(host: Host, environ: Mapping[str, str]) -> Host:
    """Return this host with the devices in CUDA_VISIBLE_DEVICES, which a launch overwrites. Raises ConfigError for
    values that no launcher can keep."""
    shown = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not shown.strip() or environ.get("DS_ACCELERATOR") == "cpu":
        return host
    words = [word.strip() for word in shown.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {shown!a}, and `llmtrain launch`, which sets it for each rank, knows "
            "devices by number only: give the numbers that `nvidia-smi -L` shows, or start a single rank on a part of "
            "a GPU (MIG) with `llmtrain train`"
        )
    devices = sorted({int(word) for word in words})[: host.slots]
    return replace(host, slots=len(devices), devices=tuple(devices))


def is_here(name: str) -> bool:
    """Return True for this host's name, or a name all of whose addresses are this host's."""
    if name.lower().removesuffix(".") in ("localhost", socket.gethostname().lower()):
        return True
    addresses = _addresses(name)
    own_addresses = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return bool(addresses) and all(a in own_addresses or ipaddress.ip_address(a).is_loopback for a in addresses)


def _addresses(name: str) -> set[str]:
    """Return the IPv4 addresses, or if there are none the IPv6 ones: the ranks meet by the first."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None, family)}
        except (OSError, UnicodeError):
            continue
    return set()
