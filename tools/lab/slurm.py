"""Slurm on a lab's hosts: slurmctld on the first one, munged and slurmd on each. Their state goes with the hosts.

Needs Debian's slurmctld, slurmd, slurm-client and munge: why_not_slurm() says what is missing.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tools.lab.host import LabHost
from tools.lab.lab import Lab
from tools.lab.processes import default_environment

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
UP_S = 30.0

# No cgroups and no accounting: a container has neither. Users are root, as everywhere in the lab.
CONF = """
ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/run/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdSpoolDir=/run/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/tmp/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=node-[1-{hosts}] CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def why_not_slurm() -> str | None:
    """Which packages this machine lacks for it; None if it has all."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None]
    return f"Slurm needs Debian's {' '.join(missing)}: apt-get install -y {' '.join(missing)}" if missing else None


class Slurm:
    """Started on all hosts of a lab; it ends with them (Lab.reset, Lab.close). Raises RuntimeError if it does not."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "slurm"
        self.folder.mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(CONF.format(first=lab.hosts[0].name, hosts=len(lab.hosts)))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        for host in lab.hosts:
            self.start_node(host)
        self.ask("mkdir", "-p", "/run/slurmctld")
        self.ask("slurmctld")
        until = time.monotonic() + UP_S
        while self.states() != {host.name: "idle" for host in lab.hosts}:
            if time.monotonic() > until:
                raise RuntimeError(f"Slurm: {self.states()}\n{self.log()}")
            time.sleep(0.2)

    def start_node(self, host: LabHost) -> None:
        """munged and slurmd of a host that has just been powered on."""
        self.ask("mkdir", "-p", "/run/munge", "/run/slurmd", on=host)
        files = [f"--{kind}-file=/run/munge/{kind}" for kind in ("log", "pid", "seed")]
        self.ask("munged", f"--key-file={self.folder}/munge.key", "--force", *files, on=host)
        self.ask("slurmd", on=host)

    def environment(self) -> dict[str, str]:
        """For Slurm's commands and daemons."""
        env = default_environment()
        return {**env, "PATH": f"{env['PATH']}:/usr/sbin", "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(
        self, *words: str, on: LabHost | None = None, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """What a command prints on a host, or on the first one. Raises RuntimeError with its words if it fails."""
        done = (on or self.lab.hosts[0]).run(words, env={**self.environment(), **(env or {})}, cwd=cwd)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: code {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """State of each host, as sinfo has it; empty while slurmctld does not answer."""
        done = self.lab.hosts[0].run(["sinfo", "-hNo", "%N %t"], env=self.environment())
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def log(self) -> str:
        """The ends of its daemons' logs."""
        found = [*(host.tmp / f"{name}.log" for host in self.lab.hosts for name in ("slurmctld", "slurmd"))]
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in found if path.exists())
