"""python -m tools.lab.init SPEC: the first process of a host. SPEC is JSON:

name, address (with prefix length), mac, root (the host's own folder), home, share (paths that every host sees),
control (the folder of the switch's socket), owner (a pidfd: when that process has ended, so has the host), sshd (the
command that starts one). It makes the namespaces, plugs the host in, sets it up, prints "ready", and reaps.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.lab.namespaces import MS_PRIVATE, MS_REC, bind, die_with_parent, mount, unshare_all

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000

# In the home folder these are the host's own: keys, and what a shell or DeepSpeed reads at start.
OWN_IN_HOME = (".ssh", ".deepspeed_env", ".bashrc", ".bash_profile", ".bash_login", ".profile")


def main() -> None:
    spec = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C is the owner's
        signal.signal(number, signal.SIG_IGN)
    unshare_all()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    die_with_parent()
    try:
        set_up(spec)
    except BaseException as error:
        print(f"{spec['name']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    print("ready", flush=True)
    reap(spec["owner"])


def set_up(spec: dict[str, Any]) -> None:
    """Host name, own folders, eth0 plugged into the switch. The order matters: the switch's socket may lie in /tmp."""
    socket.sethostname(spec["name"])
    device = make_device()
    plug(spec, device)
    os.close(device)  # the switch alone holds it: a host without a switch has no network
    own_folders(spec)
    orders = f"""link set lo up
link set eth0 address {spec["mac"]}
address add {spec["address"]} dev eth0
link set eth0 up
"""
    Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text("1")  # else its chatter is in the byte counters
    subprocess.run(["ip", "-batch", "-"], input=orders, text=True, check=True, timeout=30)
    subprocess.run(spec["sshd"], check=True, timeout=30)


def make_device() -> int:
    """A TAP device called eth0 in this network namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    return device


def plug(spec: dict[str, Any], device: int) -> None:
    """Hand the device to the switch. Raises RuntimeError with the switch's words."""
    order = json.dumps({"op": "plug", "host": spec["name"], "mac": spec["mac"]}).encode()
    os.chdir(spec["control"])  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(30)
        door.connect("control")
        door.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
        reply = json.loads(door.recv(65536))
    os.chdir("/")
    if "error" in reply:
        raise RuntimeError(reply["error"])


def own_folders(spec: dict[str, Any]) -> None:
    """Own /proc, /sys, /run, /dev/shm, /tmp, /etc/hosts, and own keys and shell files in the home folder."""
    root, home = Path(spec["root"]), Path(spec["home"])
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    # Opened before anything hides them: what is shared may lie below /tmp, or below the home folder.
    shared = [(path, os.open(path, os.O_PATH)) for path in sorted(spec["share"], key=len)]
    own = {name: os.open(root / name, os.O_PATH) for name in ("tmp", "home", "hosts")}
    cgroup = os.open("/sys/fs/cgroup", os.O_PATH)
    in_home = [(entry, os.open(entry, os.O_PATH)) for entry in home.iterdir() if is_shared(entry)]
    mount("proc", "/proc", "proc")
    mount("sysfs", "/sys", "sysfs")
    bind(f"/proc/self/fd/{cgroup}", "/sys/fs/cgroup")
    mount("tmpfs", "/run", "tmpfs", data="mode=755")
    os.mkdir("/run/sshd", 0o755)
    mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    bind(f"/proc/self/fd/{own['hosts']}", "/etc/hosts")
    bind(f"/proc/self/fd/{own['home']}", home)
    bind(f"/proc/self/fd/{own['tmp']}", "/tmp")
    for path, fd in [*in_home, *shared]:
        show(fd, Path(path))


def is_shared(entry: Path) -> bool:
    """Whether something in the home folder is the same on all hosts."""
    return entry.name not in OWN_IN_HOME and (entry.is_dir() or entry.is_file())


def show(fd: int, path: Path) -> None:
    """An opened file or folder at its old path, which another mount may have hidden."""
    source = Path(f"/proc/self/fd/{fd}")
    if not os.path.lexists(path):
        if source.is_dir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.touch()
    bind(str(source), path)


def reap(owner: int) -> None:
    """What the first process of a system does: wait for orphans. Ends with the owner, and the whole host with it."""
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        readable, _, _ = select.select([owner, wakes], [], [])
        if owner in readable:
            os._exit(0)
        os.read(wakes, 4096)


if __name__ == "__main__":
    main()
