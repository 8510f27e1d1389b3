"""Folders for swap files, on disks of a host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from llmtrain.base.errors import ConfigError

_OF_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OF_NETWORKS = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs", "wekafs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone"),
}


def check_folder(key: str, folder: Path) -> None:
    """Raises ConfigError: the folder is missing, cannot be written, or is not on a disk of this host."""
    reason = _reason_against(folder)
    if reason:
        host = os.uname().nodename
        rule = "the ranks of a host keep the optimizer's state in files there, on a disk of the host"
        remedy = "name a folder on a local disk that the run may write, with the same path on each host"
        raise ConfigError(f"{key} = {str(folder)!r}: {reason} (on {host})\n    rule:   {rule}\n    remedy: {remedy}")


def _reason_against(folder: Path) -> str:
    if not folder.is_dir():
        return "it is no folder" if folder.exists() else "there is no such folder"
    kind = file_system(folder)
    if kind in _OF_MEMORY:
        return f"it lies in memory ({kind}), which an offload is to spare"
    if kind in _OF_NETWORKS:
        return f"it lies on a network file system ({kind})"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return ""


def file_system(folder: Path) -> str:
    """The type of a folder's file system; empty: unknown."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
