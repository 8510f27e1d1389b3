"""Tests disks for files that ranks write and read at each step. Python 3.8 on, standard library only: doctor sends this
file to hosts."""

from __future__ import annotations

import mmap
import os
import tempfile
import time

_OF_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_OF_NETWORKS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs", "wekafs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone"),
)
_BLOCK, _BLOCKS = 4 << 20, 32
_LIMIT_S = 2.0


def why_no_disk(folder: str) -> str:
    """Return why a folder is no place for such files; empty if it is one."""
    if not os.path.isdir(folder):
        return "it is not a folder" if os.path.exists(folder) else "there is no such folder"
    kind = file_system(folder)
    if kind in _OF_MEMORY:
        return f"it is in memory ({kind}), which an offload should save"
    if kind in _OF_NETWORKS:
        return f"it is on a network file system ({kind})"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return ""


def file_system(folder: str) -> str:
    """Return the type of a folder's file system; empty if unknown."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""


def disk_speed(folder: str) -> dict[str, float]:
    """Measure one writer and one reader with direct I/O, each for at most 2 s. Returns {"write" or "read": bytes per
    second}. Raises OSError if the file system has no direct I/O, or the disk is full."""
    handle = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, _BLOCK) as block:
            block.write(os.urandom(_BLOCK))
            speeds, written = {}, 0
            for name in ("write", "read"):
                began, done = time.monotonic(), 0
                for number in range(written or _BLOCKS):
                    if time.monotonic() - began > _LIMIT_S:
                        break
                    place = number * _BLOCK
                    done += os.pwritev(handle, [block], place) if name == "write" else os.preadv(handle, [block], place)
                written = written or done // _BLOCK
                speeds[name] = done / (time.monotonic() - began)
        return speeds
    finally:
        os.close(handle)
