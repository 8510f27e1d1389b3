"""Chooses the network interface for collectives, if the user has not chosen one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

from llmtrain.base.errors import ConfigError, number_in

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: the route to it leads out of this host


def choose_interfaces(backend: str) -> str | None:
    """If unset, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that reaches MASTER_ADDR, and NCCL's
    also to equal cards (`_alike`): by itself NCCL would take bridges and tunnels, and hang. Loopback only if
    MASTER_ADDR or all ranks are local. Returns gloo's interface or None. Raises ConfigError if the user's interface or
    MASTER_ADDR is unknown."""
    interfaces = _addresses()
    _check(GLOO, interfaces)
    if backend == "nccl":
        _check(NCCL, interfaces)
    if os.environ.get(GLOO) and os.environ.get(NCCL):
        return os.environ[GLOO]
    chosen = interface_towards(os.environ["MASTER_ADDR"], interfaces)
    if chosen is not None:
        if not os.environ.get(GLOO):
            os.environ[GLOO] = chosen
        if not os.environ.get(NCCL):
            names = ",".join([chosen, *_alike(chosen, interfaces)])
            os.environ[NCCL] = f"={names}"  # without = NCCL takes a name as a prefix
    return os.environ.get(GLOO)


def _alike(chosen: str, interfaces: Iterable[str]) -> list[str]:
    """Return further interfaces for NCCL's data: cards of equal speed that are up and have an address. Empty with
    InfiniBand or RoCE, which carries the data, or if the speed is unknown (a virtual machine's cards may lead
    elsewhere)."""
    speed = _speed(chosen)
    if speed <= 0 or any(_INFINIBAND.glob("*")):
        return []
    cards = (name for name in interfaces if name != chosen and (_NET / name / "device").exists())
    return [name for name in cards if _speed(name) == speed]


def _speed(name: str) -> int:
    """Return the Mbit/s of a card that is up; -1 if unknown."""
    try:
        up = (_NET / name / "operstate").read_text().strip() == "up"
        return int((_NET / name / "speed").read_text()) if up else -1
    except (OSError, ValueError):
        return -1


def interface_towards(master: str, interfaces: dict[str, list[str]]) -> str | None:
    """Return the interface that reaches `master`, or None. `interfaces`: name -> addresses. Raises ConfigError."""
    address = _own_address(master)
    if address is None:
        return None
    loopback = _is_loopback(address)
    world = number_in("WORLD_SIZE", 1)
    several = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world) < world
    if loopback and several and not _says_loopback(master):
        # Debian's /etc/hosts gives a host's own name 127.0.1.1; the other hosts know it by another address.
        outside = _own_address(_ELSEWHERE)
        others = [name for name, addresses in interfaces.items() if not any(map(_is_loopback, addresses))]
        if outside is None:
            return others[0] if len(others) == 1 else None
        address, loopback = outside, False
    for name, addresses in interfaces.items():
        if address in addresses or (loopback and any(map(_is_loopback, addresses))):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _own_address(target: str) -> str | None:
    """Return the address from which this host would send to `target`; None without a route. Raises ConfigError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {target}, a name that {socket.gethostname()} does not know ({error.strerror or error}). "
            "Put it into /etc/hosts there, or give `deepspeed --master_addr` the address itself."
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)
        except OSError:
            return None
        return str(probe.getsockname()[0]).partition("%")[0]


def _says_loopback(master: str) -> bool:
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _addresses() -> dict[str, list[str]]:
    by_name = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [a.address.partition("%")[0] for a in entries if a.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses:
            by_name[name] = addresses
    return by_name


def _check(variable: str, interfaces: dict[str, list[str]]) -> None:
    value = os.environ.get(variable)
    if value and named_interfaces(variable, value, interfaces) is None:
        raise ConfigError(
            f"{variable} is {value!r}, but {socket.gethostname()} has no interface of that name with an address. "
            f"It has {', '.join(interfaces)}. Unset the variable (to use that towards MASTER_ADDR), or name one."
        )


def named_interfaces(variable: str, value: str, interfaces: Collection[str]) -> list[str] | None:
    """Return those of `interfaces` (in the kernel's order) that the variable names; None if the backend would fail.
    gloo needs every name to exist (torch/csrc/distributed/c10d/init.cpp). NCCL takes prefixes, `=` before complete
    names, `^` before excluded ones, NAME:PORT as NAME (src/misc/socket.cc, ncclFindInterfaces)."""
    if variable == GLOO:
        words = [word for word in value.split(",") if word]
        return words if words and all(word in interfaces for word in words) else None
    others, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    words = [word.partition(":")[0] for word in value.split(",") if word]
    named = [n for n in interfaces if others != any(n == word if exact else n.startswith(word) for word in words)]
    return named or None
