"""The secrets file that a launcher writes for its ranks, and the refusal of a hostfile that does not exist."""

from __future__ import annotations

import os
import stat

import psutil

from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.messages import SECRETS


def load_secrets() -> list[str]:
    """Put the secrets of `deliver` into this process's environment, before they are read; returns their names. Raises
    ConfigError: the file of LLMTRAIN_SECRETS is missing, or open to other users."""
    shown = os.environ.get(SECRETS)
    if shown is None:
        return []
    try:
        handle = os.open(os.path.expanduser(shown), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{SECRETS}={shown}: cannot be read on host {os.uname().nodename} ({error.strerror}). "
            "`llmtrain launch` writes it and removes it at its end: start the run with it again, or unset the variable"
        ) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            rule = f"must be a plain file of this user with mode 0600, not {stat.filemode(status.st_mode)}"
            raise ConfigError(f"{SECRETS}={shown}: {rule} of user {status.st_uid}: remove it and launch again")
        with open(handle, "rb", closefd=False) as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    finally:
        os.close(handle)
    for name, _, value in pairs:
        os.environb[name] = value
    return [os.fsdecode(name) for name, _, _ in pairs]


def refuse_missing_hostfile() -> None:
    """Refuse a run that `deepspeed --hostfile FILE` has started on this host alone because FILE does not exist.

    DeepSpeed only warns. Raises ConfigError.
    """
    parent = psutil.Process().parent()
    for _ in range(4):
        try:
            if parent is None:
                return
            words, folder, parent = parent.cmdline(), parent.cwd(), parent.parent()
        except (psutil.Error, OSError):  # another user's, or gone
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
