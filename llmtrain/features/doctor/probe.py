"""The facts of a host as one JSON object. Piped into a host's Python over ssh, so nothing need be installed there.

Standard library only, and Python 3.8 on. `program` of survey.py puts the imported module and cluster/gpus.py before
this file, and appends the call of `main`.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from llmtrain.base.disks import disk_speed, why_no_disk
from llmtrain.base.rank.op_builds import is_held, users_of

MARK = "llmtrain-facts "
INFINIBAND = "/sys/class/infiniband"
LIMIT_S = 12.0
"""Limit of all questions together: one that a dead file server holds up is left out and reported."""
SAMPLED = 64
"""Files of a folder to read; the others count by size."""
WHOLE, BLOCK = 4 << 20, 64 << 10
"""Files up to WHOLE bytes are read completely; of larger ones, blocks of BLOCK bytes."""
Facts = dict  # Python 3.8 knows no dict[str, ...] at run time


def run(argv: list[str], timeout_s: float = 8.0) -> str | None:
    """Return a command's standard output; None if it is missing or fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def look_python(ask: Facts) -> Facts:
    return {"executable": sys.executable, "version": platform.python_version(), "machine": platform.machine()}


def look_packages(ask: Facts) -> Facts:
    """Return versions without importing: torch alone takes seconds to import."""
    from importlib import metadata
    from importlib.util import find_spec

    versions: Facts = {}
    for name in ask["packages"]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    spec = find_spec("torch")
    where = os.path.dirname(spec.origin) if spec and spec.origin else ""
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", read(os.path.join(where, "version.py")), re.M) if where else None
    versions["cuda"] = cuda.group(1) if cuda else None
    versions["nccl"] = None
    for package in metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.startswith("nvidia-nccl"):
            versions["nccl"] = package.version
    return versions


def look_devices(ask: Facts) -> Facts:
    shown = run(["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"])
    rows = [[word.strip() for word in line.split(",")] for line in (shown or "").splitlines() if line.count(",") >= 2]
    nodes = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    return {
        "count": len(rows) if shown is not None else len(nodes),
        "nodes": len(nodes),
        "names": [row[1] for row in rows],
        "driver": rows[0][2] if rows else None,
        "cores": len(os.sched_getaffinity(0)),
    }


def look_code(ask: Facts) -> Facts:
    """Return the working folder's commit, and a checksum of the package's own files."""
    folder, package = ask["folder"], ask["package"]
    git = ["git", "-c", "safe.directory=*", "-C", folder]
    commit, status = run([*git, "rev-parse", "HEAD"]), run([*git, "status", "--porcelain", "-uno"])
    total = hashlib.sha256()
    files = sorted(glob.glob(os.path.join(package, "**", "*.py"), recursive=True))
    for path in files:
        with open(path, "rb") as file:
            total.update(os.path.relpath(path, package).encode() + b"\0" + hashlib.sha256(file.read()).digest())
    return {
        "folder": os.path.isdir(folder),
        "commit": commit.strip() if commit else None,
        "changed": len(status.splitlines()) if status is not None else None,
        "files": len(files),
        "sum": total.hexdigest(),
    }


def look_config(ask: Facts) -> Facts:
    checksums = {}
    for path in ask["files"]:
        try:
            with open(path, "rb") as file:
                checksums[path] = hashlib.sha256(file.read()).hexdigest()
        except OSError as error:
            checksums[path] = f"cannot be read ({error.strerror})"
    return checksums


def look_folders(ask: Facts) -> Facts:
    """Return facts of each folder that the run reads, with samples of its files."""
    folders = {}
    for path, names in ask.get("folders_read", {}).items():
        paths = [os.path.join(path, name) for name in names]
        few = range(0, len(names), max(1, len(names) // SAMPLED))
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # a file server answers several at a time
            sizes = list(pool.map(size_of, paths))
            some = [at for at in few if sizes[at] is not None]
            samples = dict(enumerate(pool.map(sample, [paths[at] for at in some])))
        contents = {some[index]: content for index, content in samples.items()}
        marks = [hashlib.sha256() for _ in range(min(SAMPLED, len(names)))]
        for at, size in enumerate(sizes):
            marks[at * len(marks) // len(names)].update(f"{size} {contents.get(at, '')}\n".encode())
        folders[path] = {
            "there": os.path.lexists(path),
            "lacks": sizes.count(None),
            "missing": [names[at] for at, size in enumerate(sizes) if size is None][:SAMPLED],
            "locked": [names[at] for at, content in contents.items() if not content],
            "marks": [mark.hexdigest()[:8] for mark in marks],
        }
    return folders


def size_of(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def sample(path: str) -> str:
    """Hash a small file, or the first, middle and last block of a larger one; "" for an unreadable file."""
    total = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for place in [0] if size <= WHOLE else [0, (size - BLOCK) // 2, size - BLOCK]:
                file.seek(place)
                total.update(file.read(WHOLE if size <= WHOLE else BLOCK))
    except OSError:
        return ""
    return total.hexdigest()


def look_environment(ask: Facts) -> Facts:
    """Return the environment that ssh's shell gives to a command. Of secrets only a hash leaves the host."""
    variables = {}
    for name, value in os.environ.items():
        if name.startswith(tuple(ask["variables"])):
            hidden = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL"))
            mark = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
            variables[name] = f"secret {mark}" if hidden else value
    return variables


def nearest(path: str) -> str:
    """Return the folder, or its nearest existing parent."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def look_disk(ask: Facts) -> Facts:
    disks = {}
    for name, path in ask["folders"].items():
        folder = nearest(path)
        space = os.statvfs(folder)
        disks[name] = {
            "path": path,
            "free": space.f_bavail * space.f_frsize,
            "inodes": space.f_favail if space.f_files else None,
            "error": try_to_write(folder),
        }
    return disks


def look_disks(ask: Facts) -> Facts:
    """Return facts of folders on disks that a run writes and reads in each step."""
    disks = {}
    for key, path in ask.get("disks", {}).items():
        disks[key] = {"path": path, "reason": why_no_disk(path)}
        with contextlib.suppress(OSError):
            disks[key]["speeds"] = disk_speed(path)
    return disks


def try_to_write(folder: str) -> str | None:
    name = os.path.join(folder, f".llmtrain-doctor-{os.getpid()}-{time.time_ns()}")
    try:
        with open(name, "xb") as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return error.strerror
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return None


def look_memory(ask: Facts) -> Facts:
    """Return bytes of memory, total and free for programs; a container's lower limit counts."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M))
    total, free = int(fields["MemTotal"]) << 10, int(fields["MemAvailable"]) << 10
    limit, used = read("/sys/fs/cgroup/memory.max").strip(), read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total, free = int(limit), min(free, int(limit) - int(used))
    return {"total": total, "free": free}


def look_shm(ask: Facts) -> Facts:
    space = os.statvfs("/dev/shm")
    buffers = {}
    for path in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
        with contextlib.suppress(FileNotFoundError):  # a run that ends removes its own
            status = os.stat(path)
            if status.st_uid == os.getuid():
                buffers[path] = status.st_size
    used = "".join(read(path) for path in glob.glob("/proc/[0-9]*/maps")).split("\n") if buffers else []
    mapped = {line.split(None, 5)[-1] for line in used if "/dev/shm/" in line}
    return {
        "mounted": os.path.ismount("/dev/shm"),
        "total": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "left": {path: size for path, size in buffers.items() if path not in mapped},
    }


def look_limits(ask: Facts) -> Facts:
    """Return soft limits; None: no limit."""
    limits = {}
    for name in ("NOFILE", "MEMLOCK", "NPROC"):
        soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0]
        limits[name.lower()] = None if soft == resource.RLIM_INFINITY else soft
    limits["root"] = os.geteuid() == 0
    limits["infiniband"] = bool(glob.glob(INFINIBAND + "/*"))
    return limits


def look_infiniband(ask: Facts) -> Facts:
    """Return the ports of the host's cards, RoCE too: {"mlx5_0/1": {"state": "ACTIVE", ...}}."""
    ports = {}
    for folder in sorted(glob.glob(INFINIBAND + "/*/ports/*")):
        names = ("state", "phys_state", "rate", "link_layer")
        words = {name: read(os.path.join(folder, name)).strip() for name in names}
        rate = re.match(r"[\d.]+", words["rate"])
        card, _, port = folder.split("/")[-3:]
        ports[card + "/" + port] = {
            "state": words["state"].rpartition(": ")[2],
            "physical": words["phys_state"].rpartition(": ")[2],
            "rate_gbit": float(rate.group()) if rate else 0.0,
            "layer": words["link_layer"],
        }
    return ports


def look_nonce(ask: Facts) -> Facts:
    if ask.get("nonce_writer") != ask["host"]:
        return {}
    try:
        with open(ask["nonce_path"], "w") as file:
            file.write(ask["nonce"])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return {"error": error.strerror}
    return {"written": True}


def look_ops(ask: Facts) -> Facts:
    """Return DeepSpeed's compiled ops, and locks that no process here holds."""
    root = (
        ask.get("extensions")
        or os.environ.get("TORCH_EXTENSIONS_DIR")
        or os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch_extensions"))
    )
    built, locks = set(), {}
    for path in [*glob.glob(os.path.join(root, "*", "*.so")), *glob.glob(os.path.join(root, "*", "*", "*.so"))]:
        built.add(os.path.basename(path)[:-3])
    for path in [*glob.glob(os.path.join(root, "*", "lock")), *glob.glob(os.path.join(root, "*", "*", "lock"))]:
        with contextlib.suppress(FileNotFoundError):  # a build that ends removes its lock
            if not users_of(path) and not is_held(os.path.dirname(os.path.dirname(path))):
                locks[path] = time.time() - os.stat(path).st_mtime
    from importlib.util import find_spec
    from shutil import which

    spec = find_spec("deepspeed")
    if spec and spec.origin:
        shown = read(os.path.join(os.path.dirname(spec.origin), "git_version_info_installed.py"))
        built.update(re.findall(r"'(\w+)': True", shown))
    beside = os.path.join(os.path.dirname(sys.executable), "ninja")
    return {
        "folder": root,
        "built": sorted(built),
        "locks": locks,
        "compiler": which(os.environ.get("CXX") or "c++"),
        "ninja": which("ninja") or (beside if os.access(beside, os.X_OK) else None),
    }


def look_port(ask: Facts) -> Facts:
    """Try the rendezvous port on the first host, where the store will listen."""
    if ask["host"] != ask["first"] or not ask.get("port"):
        return {}
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            listener.bind(("", ask["port"]))
        except OSError as error:
            return {"error": error.strerror, "users": run(["ss", "-Hltnp", f"sport = :{ask['port']}"]) or ""}
    return {"free": True}


def look_interfaces(ask: Facts) -> Facts:
    """Return each interface's IPv4 addresses, state (up or not), and speed in Mbit/s from its driver."""
    cards: Facts = {name: {"addresses": []} for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        space = array.array("B", bytes(40 * 256))
        filled = fcntl.ioctl(asking, 0x8912, struct.pack("iL", len(space), space.buffer_info()[0]))  # SIOCGIFCONF
        used = struct.unpack("iL", filled)[0]
        for at in range(0, used, 40):
            name = space[at : at + 16].tobytes().split(b"\0")[0].decode().split(":")[0]
            cards.setdefault(name, {"addresses": []})["addresses"].append(socket.inet_ntoa(space[at + 20 : at + 24]))
        for name, about in cards.items():
            flags = fcntl.ioctl(asking, 0x8913, struct.pack("16sH14x", name.encode()[:15], 0))  # SIOCGIFFLAGS
            about["up"] = bool(struct.unpack("16sH14x", flags)[1] & 1)
            speed = read(f"/sys/class/net/{name}/speed").strip()
            about["speed"] = int(speed) if speed.isdigit() else None
    return cards


def address(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def look_names(ask: Facts) -> Facts:
    """Return the IPv4 address of each host's name on this host. In parallel: a name server may take seconds to fail."""
    addresses, waiting = {}, list(ask["hosts"])

    def work() -> None:
        while waiting:
            try:
                name = waiting.pop()
            except IndexError:
                return
            addresses[name] = address(name)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(32, len(waiting)))]
    for worker in workers:
        worker.start()
    until = time.monotonic() + LIMIT_S - 3
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    hostname = socket.gethostname()
    by_name = {name: addresses.get(name) for name in ask["hosts"]}
    return {"addresses": by_name, "hostname": hostname, "own": address(hostname)}


def main(ask: Facts) -> None:
    """Answer all questions that can be answered in time, then print one line."""
    began = time.time()
    out: Facts = {}
    errors: Facts = {}
    looks = {name[5:]: look for name, look in globals().items() if name.startswith("look_")}

    def one(name: str, look: Any) -> None:
        try:
            out[name] = look(ask)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    threads = {name: threading.Thread(target=one, args=(name, look), daemon=True) for name, look in looks.items()}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + LIMIT_S
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            errors.setdefault(name, f"no answer within {LIMIT_S:g} s: does a file server or a name server hang?")
    answer = {**out, "errors": dict(errors), "began": began, "ended": time.time()}
    sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in a dead file system
