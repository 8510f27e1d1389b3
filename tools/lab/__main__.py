"""python -m tools.lab up --hosts 3: a cluster to try things on; the other commands act on one that is up."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.lab.lab import Lab, connect, order, why_not
from tools.lab.processes import default_environment, entering

SHAPE_KEYS = ("rate_mbit", "delay_ms", "loss", "half_duplex")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.lab", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring hosts up; a shell on node-1, or until Ctrl-C where there is no terminal")
    up.add_argument("--hosts", type=int, default=3, metavar="N")
    up.add_argument("--slots", type=int, default=1, metavar="N", help="of each host in the hostfile")
    up.add_argument("--folder", type=Path, help="where the lab keeps its files; default: a new folder in /tmp")
    for name, help_text in (("cut", "unplug a host's cable"), ("heal", "plug it in again"), ("shape", "slow it down")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("lab", type=Path, help="the folder that `up` printed")
        command.add_argument("host")
    command.add_argument("--rate-mbit", type=float)
    command.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    command.add_argument("--loss", type=float, default=0.0, help="share of frames, 0 to 1")
    command.add_argument("--half-duplex", action="store_true")
    command.add_argument("--toward", metavar="HOST", help="on the way to this host only")
    return top


def up(hosts: int, slots: int, folder: Path) -> int:
    """Hold a lab; 0 when its shell or its Ctrl-C has ended it."""
    with Lab(hosts, folder) as lab:
        hostfile = lab.hostfile(slots)
        print(f"hosts     {', '.join(f'{host.name} {host.address}' for host in lab.hosts)}")
        print(f"hostfile  {hostfile}")
        print(f"cables    python -m tools.lab cut {lab.folder} node-2   (heal, shape: --help)", flush=True)
        if not sys.stdin.isatty():
            print("Ctrl-C takes it all down", flush=True)
            signal.pause()
        print("a shell on node-1; `ssh node-2` reaches the others; its end takes all down", flush=True)
        env = {**default_environment(), "HOSTFILE": str(hostfile)}
        subprocess.run(entering(lab.hosts[0].pid, ["bash"], os.getcwd()), env=env, check=False)
    return 0


def main() -> int:
    asked = parser().parse_args()
    if asked.command == "up":
        if (reason := why_not()) is not None:
            print(reason, file=sys.stderr)
            return 1
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            if asked.folder is not None:
                return up(asked.hosts, asked.slots, asked.folder)
            with tempfile.TemporaryDirectory(prefix="lab-") as folder:
                return up(asked.hosts, asked.slots, Path(folder))
        except KeyboardInterrupt:
            return 130
    how: dict[str, Any] = {"host": asked.host}
    if asked.command == "shape":
        how["toward"] = asked.toward
        shaped = asked.rate_mbit is not None or asked.delay_ms or asked.loss
        how |= {key: getattr(asked, key) for key in SHAPE_KEYS} if shaped else {}
    else:
        how["value"] = asked.command == "cut"
    try:
        with connect(asked.lab) as door:
            order(door, "shape" if asked.command == "shape" else "cut", **how)
    except (OSError, ValueError) as error:
        print(f"{asked.lab}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
