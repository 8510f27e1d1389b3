"""Faults of a cluster that doctor must name: how each is made in the lab, and where it has to be found."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.lab.lab import Lab, LabHost

SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))


@dataclass(frozen=True)
class Place:
    """What a fault needs to know."""

    lab: Lab
    folder: Path
    """Seen by all hosts."""
    recipe: Path
    run_dir: Path
    clone: Path
    """The repository in which doctor is started, and whose llmtrain it is."""

    @property
    def hosts(self) -> list[LabHost]:
        return self.lab.hosts


@dataclass(frozen=True)
class Fault:
    """One fault, alone in a healthy lab."""

    make: Callable[[Place], None]
    host: str
    """Whose cell must not be in order."""
    check: str
    says: str
    """A pattern in what is said of it."""
    level: str = "red"
    words: tuple[str, ...] = ("--quick",)
    """Of doctor's command line."""
    slots: int = 1
    also: tuple[str, ...] = field(default=())
    """Other cells that this fault makes red or yellow too."""


def shell(host: LabHost, script: str) -> None:
    """Run as root in the host; it must succeed."""
    done = host.run(["sh", "-ec", script], cwd="/")
    assert done.returncode == 0, done.stderr


def replaced(place: Place, host: LabHost, path: Path, text: str) -> None:
    """The host alone sees another text in a file."""
    other = place.folder / f"other-{host.name}-{time.time_ns()}"
    other.write_text(text)
    shell(host, f"mount --bind {other} {path}")


def bashrc(host: LabHost, text: str) -> None:
    """What ssh's shell reads before a command."""
    (host.home / ".bashrc").write_text(text + "\n")


def _unknown_name(place: Place) -> None:
    etc_hosts = place.hosts[1].etc_hosts
    etc_hosts.write_text("".join(f"{line}\n" for line in etc_hosts.read_text().splitlines() if "node-3" not in line))


def _stale_address(place: Place) -> None:
    etc_hosts = place.hosts[1].etc_hosts
    etc_hosts.write_text(etc_hosts.read_text().replace("10.77.0.3", "10.77.0.9"))


def _host_key(place: Place) -> None:
    known = place.hosts[0].home / ".ssh/known_hosts"
    lines = {line.split(",")[0]: line for line in known.read_text().splitlines()}
    lines["node-3"] = "node-3,10.77.0.3 " + lines["node-2"].partition(" ")[2]
    known.write_text("\n".join(lines.values()) + "\n")


def _prompt(place: Place) -> None:
    place.hosts[2].stop_sshd()
    place.hosts[2].start_sshd(PubkeyAuthentication="no", PasswordAuthentication="yes")


def _other_version(place: Place) -> None:
    metadata = next(SITE.glob("torch-*.dist-info")) / "METADATA"
    text = metadata.read_text()
    at = text.index("\nVersion: ") + 1
    replaced(place, place.hosts[2], metadata, text[:at] + "Version: 2.9.1" + text[text.index("\n", at) :])


def fake_gpus(place: Place, host: LabHost, count: int, driver: str) -> None:
    """An nvidia-smi that knows this many devices."""
    folder = place.folder / f"bin-{host.name}"
    folder.mkdir(exist_ok=True)
    lines = "".join(f"echo '{index}, NVIDIA H200, {driver}'\n" for index in range(count))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (folder / "nvidia-smi").chmod(0o755)
    bashrc(host, f"export PATH={folder}:$PATH")


def _driver(place: Place) -> None:
    for host in place.hosts:
        fake_gpus(place, host, 1, "550.54.15" if host is place.hosts[2] else "570.86.10")


def _devices(place: Place) -> None:
    for host in place.hosts:
        fake_gpus(place, host, 1 if host is place.hosts[1] else 2, "570.86.10")


def _commit(place: Place) -> None:
    git = place.hosts[0].run(["git", "-c", "safe.directory=*", "-C", place.clone, "rev-parse", "HEAD~1"])
    replaced(place, place.hosts[2], place.clone / ".git/HEAD", git.stdout)


def _config(place: Place) -> None:
    replaced(place, place.hosts[1], place.recipe, place.recipe.read_text() + "\n# another learning rate\n")


def _clock(place: Place) -> None:
    pth = next(SITE.glob("distutils-precedence.pth"))
    replaced(place, place.hosts[2], pth, "import time; time.time = lambda now=time.time: now() + 90\n")


def _memory(place: Place) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    text = "\n".join("MemAvailable:     200000 kB" if line.startswith("MemAvailable") else line for line in lines)
    replaced(place, place.hosts[2], Path("/proc/meminfo"), text + "\n")


def _lock(place: Place) -> None:
    lock = place.folder / "extensions/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    bashrc(place.hosts[1], f"export TORCH_EXTENSIONS_DIR={place.folder}/extensions")


def _port(place: Place) -> None:
    program = "import socket,time; s=socket.socket(); s.bind(('',29500)); s.listen(); time.sleep(600)"
    place.hosts[0].popen([sys.executable, "-c", program])
    wait = "import socket,time\nwhile socket.socket().connect_ex(('127.0.0.1',29500)): time.sleep(0.05)"
    assert place.hosts[0].run([sys.executable, "-c", wait]).returncode == 0


def _loopback_name(place: Place) -> None:
    etc_hosts = place.hosts[1].etc_hosts
    etc_hosts.write_text("127.0.1.1 node-2\n" + etc_hosts.read_text().replace("10.77.0.2 node-2", "10.77.0.2 node-2x"))


def _same_machine(place: Place) -> None:
    for host in place.hosts:
        host.etc_hosts.write_text(host.etc_hosts.read_text().replace("10.77.0.3", "10.77.0.2"))
    known = place.hosts[0].home / ".ssh/known_hosts"
    line = next(line for line in known.read_text().splitlines() if line.startswith("node-2"))
    known.write_text(known.read_text().replace("node-3,10.77.0.3", "other") + f"node-3 {line.partition(' ')[2]}\n")


def _slow_host(place: Place) -> None:
    place.hosts[1].shape(rate_mbit=20)


def _slow_pair(place: Place) -> None:
    place.hosts[1].shape(rate_mbit=20, toward=place.hosts[2])


def _half_duplex(place: Place) -> None:
    place.hosts[2].shape(rate_mbit=40, half_duplex=True)


def _late_host(place: Place) -> None:
    place.hosts[2].shape(rate_mbit=400, delay_ms=20)


def mounted(index: int, script: str) -> Callable[[Place], None]:
    """A fault of a host's file systems; {run} is the run's folder."""
    return lambda place: shell(place.hosts[index], script.format(run=place.run_dir))


def profile(index: int, text: str) -> Callable[[Place], None]:
    return lambda place: bashrc(place.hosts[index], text)


LINK_CUT = "does not answer|not ready"
FAULTS: dict[str, Fault] = {
    "a name that one host does not know": Fault(_unknown_name, "node-2", "name", "does not know the name node-3"),
    "a stale address": Fault(_stale_address, "node-2", "name", "node-3 to 10.77.0.9, but node-3 has 10.77.0.3"),
    "two names for one machine": Fault(_same_machine, "node-3", "name", "same machine as node-2"),
    "no sshd": Fault(lambda place: place.hosts[2].stop_sshd(), "node-3", "ssh", "no sshd listens"),
    "the link cut": Fault(lambda place: place.hosts[2].cut(), "node-3", "ssh", LINK_CUT),
    "our key refused": Fault(
        lambda place: (place.hosts[2].home / ".ssh/authorized_keys").unlink(), "node-3", "ssh", "refuses our key"
    ),
    "another host key": Fault(_host_key, "node-3", "ssh", "shows another host key"),
    "a password prompt": Fault(_prompt, "node-3", "ssh", "takes passwords only"),
    "a start file that prints": Fault(profile(1, "echo Welcome to the cluster"), "node-2", "ssh", "print on standard"),
    "no Python at the path": Fault(
        mounted(2, f"mount -t tmpfs none {Path(sys.executable).parent}"),
        "node-3",
        "python",
        "no Python at",
        also=("versions", "ops"),
    ),
    "another version of torch": Fault(_other_version, "node-3", "versions", r"torch 2\.9\.1; the others have"),
    "another driver": Fault(_driver, "node-3", "versions", r"driver 550\.54\.15; the others have 570"),
    "another commit": Fault(_commit, "node-3", "code", "git commit .*; the others have"),
    "another configuration": Fault(_config, "node-2", "config", "another checksum"),
    "fewer devices than slots": Fault(_devices, "node-2", "slots", "slots=2, but 1 device seen", slots=2),
    "another environment": Fault(
        profile(1, "export NCCL_IB_DISABLE=1"), "node-2", "env", "NCCL_IB_DISABLE is '1'", "yellow"
    ),
    "a clock ahead": Fault(_clock, "node-3", "clock", "ahead of"),
    "a full disk": Fault(
        mounted(2, "mount -t tmpfs -o size=64m none {run}"), "node-3", "disk", "64 MiB free", also=("shared",)
    ),
    "no memory": Fault(_memory, "node-3", "memory", "195.3 MiB of"),
    "a small /dev/shm": Fault(mounted(1, "mount -o remount,size=64m /dev/shm"), "node-2", "shm", "64 MiB free"),
    "few open files": Fault(profile(2, "ulimit -n 256"), "node-3", "limits", "open files is 256"),
    "a folder not mounted": Fault(mounted(2, "mount -t tmpfs none {run}"), "node-3", "shared", "not mounted"),
    "a run folder that is read-only": Fault(
        mounted(1, "mount --bind {run} {run}; mount -o remount,ro,bind {run}"), "node-2", "run dir", "Read-only"
    ),
    "a stale lock of an op": Fault(_lock, "node-2", "ops", "a dead build left the lock", level="yellow"),
    "a port in use": Fault(_port, "node-1", "port", "29500 is not free"),
    "gloo on loopback": Fault(
        profile(1, "export GLOO_SOCKET_IFNAME=lo"), "node-2", "interface", "take lo; the other hosts reach it by eth0"
    ),
    "an interface that is not there": Fault(
        profile(2, "export NCCL_SOCKET_IFNAME=ib0"), "node-3", "interface", "'ib0', but it has lo, eth0"
    ),
    "a host name on loopback": Fault(_loopback_name, "node-2", "interface", "gloo alone would take lo", "yellow"),
    "a slow host": Fault(_slow_host, "node-2", "fabric", "a slow host", words=()),
    "a slow pair": Fault(_slow_pair, "node-2", "fabric", "a slow pair, node-2 and node-3", words=()),
    "a half-duplex link": Fault(_half_duplex, "node-3", "fabric", "half-duplex", words=()),
    "a late host": Fault(_late_host, "node-3", "fabric", "round trips of", words=()),
}
