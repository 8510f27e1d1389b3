"""One host of the lab: run commands on it, cut its cable, shape it, stop its sshd, power it off and on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.lab.processes import REPO, child_of, default_environment, entering, living_in, namespace_of, python

START_S = 30.0
SSHD = "/usr/sbin/sshd"
Order = Callable[..., dict[str, Any]]


class LabHost:
    """Made by Lab. Paths as seen from outside: `home` (its home folder: .ssh, .bashrc ...), `tmp` (its /tmp) and
    `etc_hosts` (write it in place) are the host's own; the rest of the file system is everybody's."""

    def __init__(self, number: int, root: Path, shared: Sequence[str], owner: int, order: Order) -> None:
        self.name = f"node-{number}"
        self.address = f"10.77.0.{number}"
        self.mac = f"02:00:0a:4d:00:{number:02x}"
        self._root = root / self.name
        self.home = self._root / "home"
        self.tmp = self._root / "tmp"
        self.etc_hosts = self._root / "hosts"
        self._shared = list(shared)
        self._owner = owner
        self.order = order
        self._outer: subprocess.Popen[str] | None = None
        self._init = 0
        self._namespace = ""

    # Power

    @property
    def is_on(self) -> bool:
        """Whether the host runs."""
        return self._outer is not None and self._outer.poll() is None

    def begin_boot(self) -> None:
        """The first half of boot(), which does not wait."""
        spec = {
            "name": self.name,
            "address": f"{self.address}/24",
            "mac": self.mac,
            "root": str(self._root),
            "home": os.path.expanduser("~root"),
            "share": self._shared,
            "control": str(self._root.parent),
            "owner": self._owner,
            "sshd": self._sshd_command(22, None),
        }
        self._outer = python("tools.lab.init", json.dumps(spec), stdout=subprocess.PIPE, pass_fds=[self._owner])

    def finish_boot(self) -> None:
        """The second half: waits until the host is set up and its sshd listens. Raises RuntimeError."""
        assert self._outer is not None and self._outer.stdout is not None
        if self._outer.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} did not start: see its message above")
        self._init = child_of(self._outer.pid)
        self._namespace = namespace_of(self._init)
        self._wait_for_sshd()

    def boot(self) -> None:
        """Power on, with the files and the cable as they were. Raises RuntimeError if it does not come up."""
        assert not self.is_on, f"{self.name} runs"
        self.begin_boot()
        self.finish_boot()

    def kill(self) -> None:
        """Power off: silent on the network at once, then all its processes are gone, /dev/shm with them."""
        if self._outer is None:
            return
        with contextlib.suppress(OSError):  # a switch that has died keeps nobody from dying
            self.order("unplug", host=self.name)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(child_of(self._outer.pid), signal.SIGKILL)
        if self._init == 0:
            self._outer.kill()
        self._outer.wait(timeout=START_S)
        if self._outer.stdout is not None:
            self._outer.stdout.close()
        self._outer, self._init, self._namespace = None, 0, ""

    @property
    def pid(self) -> int:
        """The id outside of the host's first process; 0 while it is off."""
        return self._init

    # Commands

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command in the host. env: the caller's, with this interpreter's folder first in PATH. Signals reach
        the command, its exit code is the Popen's (127: no such command), SIGKILL ends it but not its children."""
        if self._init == 0:
            raise RuntimeError(f"{self.name} is off; boot() it first")
        command = entering(self._init, [str(word) for word in argv], str(cwd or os.getcwd()))
        environment = default_environment() if env is None else dict(env)
        return subprocess.Popen(command, cwd=REPO, env=environment, text=True, **options)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        input: str | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host to its end, stdout and stderr captured. Raises subprocess.TimeoutExpired."""
        pipe = subprocess.PIPE
        with self.popen(argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                stdout, stderr = process.communicate(input or "", timeout=timeout_s)
            except BaseException:
                process.kill()
                process.wait()
                raise
        return subprocess.CompletedProcess([str(word) for word in argv], process.returncode, stdout, stderr)

    def processes(self) -> list[psutil.Process]:
        """All processes of the host with their ids outside, but not its first process and not sshd; no zombies."""
        if not self._namespace:
            return []
        found = []
        for process in living_in(self._namespace):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != self._init and process.name() != "sshd":
                    found.append(process)
        return found

    # Cable

    def cut(self) -> None:
        """Unplug the cable: frames are lost in silence; the host does not see it."""
        self.order("cut", host=self.name, value=True)

    def heal(self) -> None:
        """Plug the cable in again. A shape stays."""
        self.order("cut", host=self.name, value=False)

    def firewall(self, *ports: int) -> None:
        """Others' TCP connections begin at these ports only; at any other their frames are lost in silence. No port:
        at all of them, as before. Those that stand go on."""
        self.order("firewall", host=self.name, ports=list(ports) or None)

    def shape(
        self,
        rate_mbit: float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        toward: LabHost | None = None,
        half_duplex: bool = False,
    ) -> None:
        """Rate of each direction (of both together if half_duplex), delay of each direction, share of frames lost. For
        the host's cable, or for its way to one other host only. A call replaces the last one; shape() takes it away."""
        how: dict[str, Any] = {}
        if rate_mbit is not None or delay_ms or loss:
            how = {"rate_mbit": rate_mbit, "delay_ms": delay_ms, "loss": loss, "half_duplex": half_duplex}
        self.order("shape", host=self.name, toward=None if toward is None else toward.name, **how)

    def bytes(self) -> tuple[int, int]:
        """(sent, received) since the lab started: what the switch took from the host and gave to it, with headers."""
        sent, received = self.order("bytes")[self.name]
        return sent, received

    # sshd

    def start_sshd(self, port: int = 22, banner: str | None = None, **settings: str) -> None:
        """An sshd with settings of sshd_config(5), PasswordAuthentication="yes". Raises RuntimeError if it refuses."""
        done = self.run(self._sshd_command(port, banner, **settings), cwd="/")
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: sshd: {done.stderr}{self._sshd_log()}")
        self._wait_for_sshd()

    def _sshd_command(self, port: int, banner: str | None, **settings: str) -> list[str]:
        """What starts an sshd in the background, with its configuration written."""
        lines = {
            "Port": str(port),
            "HostKey": str(self._root / "ssh_host_ed25519_key"),
            "PidFile": "/run/sshd.pid",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UseDNS": "no",
            "MaxStartups": "200",
            "MaxSessions": "200",
            **settings,
        }
        if banner is not None:
            (self._root / "banner").write_text(banner)
            lines["Banner"] = str(self._root / "banner")
        config = self._root / "sshd_config"
        config.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        return [SSHD, "-f", str(config), "-E", str(self._root / "sshd.log")]

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + START_S
        while self._listener() == 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: sshd does not listen: {self._sshd_log()}")
            time.sleep(0.01)

    def _sshd_log(self) -> str:
        return (self._root / "sshd.log").read_text()

    def stop_sshd(self, sessions: bool = False) -> None:
        """No more logins: `refused` from now on. Those that are in stay, unless sessions=True ends them too."""
        listener = self._listener()
        for process in living_in(self._namespace):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "sshd" and (sessions or process.pid == listener):
                    process.kill()
                    process.wait(timeout=START_S)

    def _listener(self) -> int:
        """The id outside of the sshd that listens; 0 if none does."""
        pid_file = Path(f"/proc/{self._init}/root/run/sshd.pid")
        try:
            inside = int(pid_file.read_text())
        except (OSError, ValueError):
            return 0
        for process in living_in(self._namespace):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                if ids_of(process.pid)[-1] == inside and process.name() == "sshd":
                    return process.pid
        return 0

    # Files

    def write_files(self, keys: Path, hosts: Sequence[LabHost]) -> None:
        """The healthy state of the host's own files: an empty /tmp, keys that work, all names known."""
        for folder in (self.home, self.tmp):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.tmp.chmod(0o1777)
        self.home.chmod(0o700)
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o700)
        for name in ("id_ed25519", "id_ed25519.pub"):
            shutil.copy(keys / name, ssh / name)
        shutil.copy(keys / "id_ed25519.pub", ssh / "authorized_keys")
        known = ""
        for host in hosts:
            key = (keys / f"{host.name}.pub").read_text().split()[:2]
            known += f"{host.name},{host.address} {' '.join(key)}\n"
        (ssh / "known_hosts").write_text(known)
        shutil.copy(keys / self.name, self._root / "ssh_host_ed25519_key")
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
        self.etc_hosts.write_text("\n".join(lines) + "\n")


def ids_of(pid: int) -> list[int]:
    """A process's ids, from the outermost namespace to its own. Raises OSError if it has gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(word) for word in status.split("NSpid:")[1].split("\n")[0].split()]
