"""Which names of a hostfile are this machine: with a hostfile that names nothing else, no ssh is used at all."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil

from llmtrain.base.errors import ConfigError
from llmtrain.cluster.hosts.hostfile import Host


def is_alone(hosts: Sequence[Host]) -> bool:
    """This machine is the only host.

    With others beside it, DeepSpeed's launcher (pdsh) reaches this machine through ssh too.
    """
    return len(hosts) == 1 and is_here(hosts[0].name)


def on_visible_devices(host: Host, environ: Mapping[str, str]) -> Host:
    """This machine with the devices that CUDA_VISIBLE_DEVICES leaves it: DeepSpeed's launcher overwrites the variable.

    `host`: as the hostfile has it, with devices from 0 on. Raises ConfigError for what no launcher can keep.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not shown.strip() or environ.get("DS_ACCELERATOR") == "cpu":
        return host
    words = [word.strip() for word in shown.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {shown!a}, and DeepSpeed's launcher, which sets it anew for each rank, knows "
            "devices by number only: give the numbers that `nvidia-smi -L` shows, or start a single rank on a part of "
            "a GPU (MIG) with `llmtrain train`"
        )
    devices = sorted({int(word) for word in words})[: host.slots]
    return replace(host, slots=len(devices), devices=tuple(devices))


def refuse_missing_hostfile() -> None:
    """`deepspeed --hostfile FILE` with a file that is not there warns, and trains on this host alone; the rank that it
    has started finds the command among its ancestors. Raises ConfigError."""
    parent = psutil.Process().parent()
    for _ in range(4):
        try:
            if parent is None:
                return
            words, folder, parent = parent.cmdline(), parent.cwd(), parent.parent()
        except (psutil.Error, OSError):  # of another user, or gone
            return
        if not any(os.path.basename(word) in ("deepspeed", "ds", "deepspeed.launcher.runner") for word in words[:4]):
            continue
        flags = [at for at, word in enumerate(words) if word.partition("=")[0] in ("--hostfile", "-H")]
        for at in flags[:1]:
            path = words[at].partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
            if path and not os.path.exists(os.path.join(folder, path)):
                raise ConfigError(
                    f"--hostfile {path}: no such file (looked from {folder}), so deepspeed has started this host "
                    "alone. Correct the path, or leave --hostfile out to train on this host"
                )


def is_here(name: str) -> bool:
    """Whether `name`, of a hostfile, is the machine that this runs on: its name, or one whose addresses are all its."""
    if name.lower().removesuffix(".") in ("localhost", socket.gethostname().lower()):
        return True
    addresses = _addresses(name)
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return bool(addresses) and all(a in own or ipaddress.ip_address(a).is_loopback for a in addresses)


def _addresses(name: str) -> set[str]:
    """IPv4 addresses, or where there are none those of IPv6: the ranks meet by the first."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None, family)}
        except (OSError, UnicodeError):
            continue
    return set()
