"""Lab: hosts on one machine that are slowed down, cut off and powered off by a test, and leave nothing behind.

    with Lab(3, folder=tmp_path) as lab:
        lab.hosts[0].run(["ssh", "node-2", "hostname"])

Needs root and Debian's pdsh, openssh-server and iproute2: why_not() says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.lab.host import SSHD, LabHost
from tools.lab.processes import REPO, python

ANSWER_S = 30.0
HIDDEN_ON_HOSTS = (Path("/tmp"), Path("/run"), Path("/dev/shm"))
# What a container without privileges refuses.
PROBE = """
from tools.lab import init, namespaces
namespaces.unshare_all()
namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
namespaces.mount("sysfs", "/sys", "sysfs")
init.make_device()
"""

__all__ = ["Lab", "LabHost", "why_not"]


class Lab:
    """Hosts node-1, node-2 ... with the addresses 10.77.0.1, 10.77.0.2 ..., all powered on.

    hosts: 1 to 250. folder: where the lab keeps its files; they go with it. The hosts see this folder and those in
    `share` even if they lie below /tmp, which is otherwise each host's own, as are /dev/shm, /run, /etc/hosts, ~/.ssh.
    Raises RuntimeError or OSError if a part does not come up; what was started is ended before.
    """

    def __init__(self, hosts: int, folder: Path | str, share: Sequence[Path | str] = ()) -> None:
        assert 1 <= hosts <= 250
        folder = Path(folder).resolve()
        self.used = False  # by a test: the fixture resets it before the next
        self.folder = Path(tempfile.mkdtemp(prefix="lab-", dir=folder))
        self._owner = os.pidfd_open(os.getpid())
        self._door: socket.socket | None = None
        self._switch: subprocess.Popen[str] | None = None
        seen = [folder, REPO, Path(sys.prefix), Path(sys.base_prefix), *(Path(each).resolve() for each in share)]
        shared = [str(path) for path in seen if any(path.is_relative_to(hidden) for hidden in HIDDEN_ON_HOSTS)]
        numbers = range(1, hosts + 1)
        self.hosts = [LabHost(number, self.folder, shared, self._owner, self._order) for number in numbers]
        try:
            self._make_keys()
            self._start_switch()
            self._boot()
        except BaseException:
            self.close()
            raise

    def _make_keys(self) -> None:
        keys = self.folder / "keys"
        keys.mkdir()
        for name in ("id_ed25519", *(host.name for host in self.hosts)):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {name}", "-f", str(keys / name)]
            subprocess.run(command, check=True, timeout=ANSWER_S)

    def _start_switch(self) -> None:
        arguments = (str(self.folder), str(self._owner))
        self._switch = python("tools.lab.switch", *arguments, stdout=subprocess.PIPE, pass_fds=[self._owner])
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch did not start: see its message above")
        self._door = connect(self.folder)

    def _boot(self) -> None:
        for host in self.hosts:
            host.write_files(self.folder / "keys", self.hosts)
        for host in self.hosts:
            host.begin_boot()
        for host in self.hosts:
            host.finish_boot()

    def _order(self, op: str, **arguments: Any) -> dict[str, Any]:
        """What the switch answers. Raises OSError if there is none, ValueError with its words if it refuses."""
        if self._door is None:
            raise ConnectionError("the switch does not run")
        return order(self._door, op, **arguments)

    @property
    def switch_pid(self) -> int:
        """The process whose CPU time is the price of the traffic."""
        assert self._switch is not None
        return self._switch.pid

    def hostfile(self, slots: int = 1) -> Path:
        """A hostfile with all hosts, in a folder that they see."""
        path = self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def reset(self) -> None:
        """All hosts as new: powered off and on, own files rewritten, cables whole and ideal. Byte counters go on."""
        for host in self.hosts:
            host.kill()
        self._order("reset")
        self._boot()

    def close(self) -> None:
        """End every process, device and file of the lab. Safe to call twice."""
        for host in self.hosts:
            host.kill()
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            assert self._switch.stdout is not None
            self._switch.stdout.close()
            self._switch = None
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(folder: Path) -> socket.socket:
    """The switch's socket in a lab's folder. Raises OSError."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.settimeout(ANSWER_S)
    at = os.open(folder, os.O_PATH)
    try:
        door.connect(f"/proc/self/fd/{at}/control")  # a socket's path has at most 107 bytes
    except OSError:
        door.close()
        raise
    finally:
        os.close(at)
    return door


def order(door: socket.socket, op: str, **arguments: Any) -> dict[str, Any]:
    """Ask the switch. Raises OSError if it does not answer, ValueError with its words if it refuses."""
    door.send(json.dumps({"op": op, **arguments}).encode())
    data = door.recv(1 << 20)
    if not data:
        raise ConnectionError("the switch has ended")
    reply = json.loads(data)
    if "error" in reply:
        raise ValueError(f"the lab's switch refuses {op} {arguments}: {reply['error']}")
    return reply


@cache
def why_not() -> str | None:
    """Why this machine cannot have a lab; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a lab needs Linux and root"
    if not os.path.exists("/dev/net/tun"):
        return "a lab needs /dev/net/tun"
    tools = {"pdsh": "pdsh", SSHD: "openssh-server", "ssh": "openssh-client", "ip": "iproute2"}
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if missing:
        return f"a lab needs Debian's {' '.join(missing)}: apt-get install -y {' '.join(missing)}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [sys.executable, "-E", "-S", "-c", PROBE]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=ANSWER_S)
        refused = "" if done.returncode == 0 else done.stderr.splitlines()[-1]
        return f"a lab needs namespaces and TAP devices of its own: {refused}" if refused else None
    return "a lab needs namespaces, and making some took over 30 s"
