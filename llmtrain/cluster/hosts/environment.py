"""Which environment variables reach the ranks of other hosts: openly in DeepSpeed's command line, or privately.

DeepSpeed hands on four prefixes and `.deepspeed_env`, unescaped, in the argv of pdsh and ssh: W&B's and Hugging Face's
variables stay behind, a token is in `ps` on every host, and `$(...)` runs. Here an allow-list travels, escaped, and
secrets travel in a file of mode 0600 through ssh's standard input.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmtrain.base.errors import ConfigError
from llmtrain.base.redact import is_secret, redact_text
from llmtrain.cluster.hosts.envfile import NAME
from llmtrain.cluster.hosts.ssh import on_hosts

SECRETS_VARIABLE = "LLMTRAIN_SECRETS"
"""Names the file that `load_secrets` reads; set by the launcher."""

# What decides how a rank computes, logs and talks. MLFLOW, PYTHON, MV2, UCX and NCCL (on CUDA) are the prefixes that
# DeepSpeed hands on by itself, unescaped: here they are all taken, and the file of `deepspeed_env` comes after those.
PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "WANDB_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_"),
    *("TOKENIZERS_", "GLOO_", "FI_", "TORCH_", "PYTORCH_", "TP_", "CUDA_", "TRITON_", "CUBLAS_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "DS_", "DEEPSPEED_", "LLMTRAIN_"),
)
_PROXIES = tuple(f"{what}_proxy" for what in ("http", "https", "no", "all"))
_NAMES = frozenset((*_PROXIES, *(name.upper() for name in _PROXIES)))
# Of this host or this process only.
_STAY = frozenset(("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "WANDB_SERVICE", SECRETS_VARIABLE))
# Read before `load_secrets` can set them: by Python itself and by the dynamic linker.
_EARLY = ("PYTHON", "LD_", "PATH")
_MAX_OPEN_BYTES = 8 << 10
"""Longer values go the private way: the kernel takes 128 KiB for one command line, and the hosts' names share it."""


@dataclass(frozen=True, kw_only=True)
class Travel:
    """The variables that go to the hosts."""

    open: dict[str, str]
    """Through DeepSpeed's command line: everyone who is logged in on a host can read them."""
    private: dict[str, str]
    """Through `deliver`: secrets, and values that no command line can carry."""


def travelling(environ: Mapping[str, str], extra: Mapping[str, str] | None = None) -> Travel:
    """Which variables travel: those of `environ` that are on the allow-list, and all of `extra` (an --env-file).

    `extra` wins. Raises ConfigError naming those that cannot travel.
    """
    chosen = {n: v for n, v in environ.items() if n not in _STAY and (n.startswith(PREFIXES) or n in _NAMES)}
    chosen.update(extra or {})
    open_, private, stuck = {}, {}, []
    for name, value in chosen.items():
        if not NAME.fullmatch(name):
            stuck.append(f"{name!a}: no shell can set such a name: unset it")
        elif is_secret(name) or redact_text(value) != value or _unfit(value):
            if name.startswith(_EARLY):
                why = _unfit(value) or "it holds a secret"
                stuck.append(f"{name}: {why}, and it is read before what travels privately is there: change it")
            private[name] = value
        else:
            open_[name] = value
    if stuck:
        raise ConfigError("variables that cannot reach the other hosts:\n" + "\n".join(f"  {line}" for line in stuck))
    return Travel(open=open_, private=private)


def _unfit(value: str) -> str | None:
    """Why a line of DeepSpeed's environment file cannot carry `value`."""
    if re.search(r"[\r\n\0]", value):
        return "its value has more than one line"
    if len(value.encode("utf-8", "surrogateescape")) > _MAX_OPEN_BYTES:
        return f"its value is longer than {_MAX_OPEN_BYTES} bytes"
    if re.search("[\ud800-\udfff]", value):
        return "its value is not UTF-8"
    return None


def deepspeed_env(variables: Mapping[str, str]) -> str:
    """A file for DeepSpeed's DS_ENV_FILE from which these very values arrive, when it launches over pdsh.

    To be written by the process that starts DeepSpeed, in the same working directory. DeepSpeed strips a value and
    puts it between double quotes as it is; pdsh replaces %h, %n and %u; a shell reads it.
    """
    lines = []
    for name, value in variables.items():
        assert NAME.fullmatch(name) and not _unfit(value), name
        if name == "PYTHONPATH":
            value = f"{os.getcwd()}:{value}"  # what DeepSpeed does with the one that it finds itself
        escaped = re.sub(r'([\\"$`])', r"\\\1", value).replace("%", "%%")
        if value != value.strip():
            # DeepSpeed's quotes close and open around ours, so that its strip() meets no blank.
            escaped = f'""{escaped}""'
        lines.append(f"{name}={escaped}\n")
    return "".join(lines)


def for_pdsh(word: str) -> str:
    """What to give `deepspeed` as a script's argument when it launches over pdsh, so that `word` arrives.

    DeepSpeed puts words that have a blank between double quotes, escaping only those within (multinode_runner.py
    `parse_user_args`), and hands on all others as they are to pdsh and the host's shell.
    """
    if " " in word:
        quoted = re.sub(r"([\\$`])", r"\\\1", word)
    else:
        quoted = shlex.quote(word)
    return quoted.replace("%", "%%")


def path_problem(path: str) -> str | None:
    """Why `path` cannot be the working directory or the Python of a launch over pdsh: DeepSpeed quotes neither."""
    odd = re.search(r"[^\w@+=:,./-]", path)
    if odd is None:
        return None
    return f"{path!a}: DeepSpeed's launcher gives it to a shell unquoted, and {odd[0]!a} breaks it: rename the folder"


_FOLDER = "~/.llmtrain/secrets"
# mkdir and mv are atomic, so hosts that share a home may do this at the same time. What a killed launcher left is
# removed after two days: ranks read their file when they start.
_WRITE = (
    'umask 077; d="$HOME/.llmtrain/secrets"; mkdir -p "$d" && chmod 700 "$HOME/.llmtrain" "$d" || exit 1; '
    'find "$d" -type f -mtime +1 -delete 2>/dev/null; t=$(mktemp "$d/.new.XXXXXXXX") || exit 1; '
    'cat > "$t" && [ "$(wc -c < "$t")" -eq "$2" ] && mv -f "$t" "$d/$1" || { rm -f "$t"; exit 1; }'
)
_REMOVE = 'rm -f "$HOME/.llmtrain/secrets/$1"'


def deliver(
    hosts: Sequence[str], variables: Mapping[str, str], *, timeout_s: float = 30.0, port: int | None = None
) -> str:
    """Write `variables` to a file of mode 0600 in a folder of mode 0700 of the user on each host; its path there.

    They go through ssh's standard input, encrypted, and stand in no command line. The path starts with ~ and is the
    value for LLMTRAIN_SECRETS. Raises ConfigError naming the hosts that did not take it; then the others have none.
    """
    name = secrets.token_hex(16)
    text = "".join(f"{key}={value}\0" for key, value in variables.items())
    size = len(text.encode("utf-8", "surrogateescape"))
    command = ("/bin/sh", "-c", _WRITE, "sh", name, str(size))
    answers = on_hosts(hosts, command, input=text, timeout_s=timeout_s, port=port)
    failed = [a for a in answers.values() if a.code != 0]
    path = f"{_FOLDER}/{name}"
    if failed:
        remove([a.host for a in answers.values() if a.code == 0], path, port=port)
        lines = []
        for a in failed:
            why = (
                f"{a.trouble.text}: {a.trouble.remedy}" if a.trouble else f"{a.stderr.strip()}: make {_FOLDER} writable"
            )
            lines.append(f"  {a.host}: {why}")
        head = f"secrets could not be delivered to {len(failed)} of {len(answers)} hosts"
        raise ConfigError("\n".join([head, *lines]))
    return path


def remove(hosts: Sequence[str], path: str, *, timeout_s: float = 15.0, port: int | None = None) -> list[str]:
    """Remove what `deliver` wrote. The hosts on which it may still lie, because they do not answer."""
    name = path.rpartition("/")[2]
    assert re.fullmatch("[0-9a-f]{32}", name), path
    answers = on_hosts(hosts, ("/bin/sh", "-c", _REMOVE, "sh", name), timeout_s=timeout_s, port=port)
    return [answer.host for answer in answers.values() if answer.code != 0]


def load_secrets() -> list[str]:
    """Put what `deliver` wrote into this process's environment; the names. Nothing happens without LLMTRAIN_SECRETS.

    To be called before anything reads the environment. Raises ConfigError when the file is not there, or when others
    could have read or written it.
    """
    shown = os.environ.get(SECRETS_VARIABLE)
    if shown is None:
        return []
    try:
        handle = os.open(os.path.expanduser(shown), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{SECRETS_VARIABLE}={shown}: cannot be read on host {os.uname().nodename} ({error.strerror}). "
            "`llmtrain launch` writes it and removes it at its end: start the run with it again, or unset the variable"
        ) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            rule = f"must be a plain file of this user with mode 0600, not {stat.filemode(status.st_mode)}"
            raise ConfigError(f"{SECRETS_VARIABLE}={shown}: {rule} of user {status.st_uid}: remove it and launch again")
        with open(handle, "rb", closefd=False) as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if item]
    finally:
        os.close(handle)
    for name, _, value in pairs:
        os.environb[name] = value
    return [os.fsdecode(name) for name, _, _ in pairs]
