"""Environment variables: the user's --env-file, variables for ranks on other hosts, secrets.

`deepspeed` passes on four prefixes and `.deepspeed_env`, unescaped, in the command lines of pdsh and ssh: variables of
Hugging Face and trackers are left out, a token shows in `ps` on every host, and `$(...)` runs. Here an allow-list is
sent, quoted; secrets are sent through ssh's standard input to a file of mode 0600.

An --env-file is a strict part of a POSIX shell's grammar, so that `. FILE` gives the same values. Text that a shell
would expand is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.base import units
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.messages import SECRETS
from llmtrain.base.redact import is_secret, redact_text
from llmtrain.cluster.hosts.ssh import on_hosts

# Variables that decide how a rank computes, logs and communicates, including all that DeepSpeed passes on.
PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "WANDB_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_"),
    *("TOKENIZERS_", "GLOO_", "FI_", "TORCH_", "PYTORCH_", "TP_", "CUDA_", "TRITON_", "CUBLAS_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "DS_", "DEEPSPEED_", "LLMTRAIN_"),
)
_PROXIES = tuple(f"{what}_proxy" for what in ("http", "https", "no", "all"))
_NAMES = frozenset((*_PROXIES, *(name.upper() for name in _PROXIES)))
# Valid only on this host or in this process.
_STAY = frozenset(("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "WANDB_SERVICE", SECRETS))
# Read before `load_secrets` can set them: by Python itself and by the dynamic linker.
_EARLY = ("PYTHON", "LD_", "PATH")
_MAX_OPEN_BYTES = 8 << 10
"""Longer values are sent in the private file: the kernel limits a command line to 128 KiB, which the hosts' names
share."""


@dataclass(frozen=True, kw_only=True)
class Travel:
    open: dict[str, str]
    """Variables on a host's command line, which all users of the host can read."""
    private: dict[str, str]
    """Variables for `deliver`: secrets, and values that a command line cannot carry."""


def travelling(environ: Mapping[str, str], extra: Mapping[str, str] | None = None) -> Travel:
    """Choose the variables to send: those of the allow-list, and all of `extra`, which has priority. Raises
    ConfigError."""
    chosen = {n: v for n, v in environ.items() if n not in _STAY and (n.startswith(PREFIXES) or n in _NAMES)}
    chosen.update(extra or {})
    open_, private, stuck = {}, {}, []
    for name, value in chosen.items():
        if not NAME.fullmatch(name):
            stuck.append(f"{name!a}: no shell can set this name: unset it")
        elif is_secret(name) or redact_text(value) != value or _unfit(value):
            if name.startswith(_EARLY):
                why = _unfit(value) or "it holds a secret"
                stuck.append(f"{name}: {why}, and it is read before private variables are there: change it")
            private[name] = value
        else:
            open_[name] = value
    if stuck:
        raise ConfigError("variables that cannot reach the other hosts:\n" + "\n".join(f"  {line}" for line in stuck))
    return Travel(open=open_, private=private)


def _unfit(value: str) -> str | None:
    """Return why a command line cannot carry `value`, or None."""
    if re.search(r"[\r\n\0]", value):
        return "its value has more than one line"
    if len(value.encode("utf-8", "surrogateescape")) > _MAX_OPEN_BYTES:
        return f"its value is longer than {_MAX_OPEN_BYTES} bytes"
    if re.search("[\ud800-\udfff]", value):
        return "its value is not UTF-8"
    return None


def assignments(variables: Mapping[str, str]) -> list[str]:
    """Return NAME=VALUE words, quoted by `for_pdsh`, with a PYTHONPATH that begins with the working directory."""
    path = ":".join(filter(None, (os.getcwd(), variables.get("PYTHONPATH"))))
    return [for_pdsh(f"{name}={value}") for name, value in {**variables, "PYTHONPATH": path}.items()]


def for_pdsh(word: str) -> str:
    """Quote a word for a host's shell; % is doubled, since pdsh replaces %h, %n and %u."""
    return shlex.quote(word).replace("%", "%%")


_FOLDER = "~/.llmtrain/secrets"
# mkdir and mv are atomic, so hosts that share a home may do this at the same time. What a killed launcher left is
# removed after two days: ranks read their file when they start.
_WRITE = (
    'umask 077; d="$HOME/.llmtrain/secrets"; mkdir -p "$d" && chmod 700 "$HOME/.llmtrain" "$d" || exit 1; '
    'find "$d" -type f -mtime +1 -delete 2>/dev/null; t=$(mktemp "$d/.new.XXXXXXXX") || exit 1; '
    'cat > "$t" && [ "$(wc -c < "$t")" -eq "$2" ] && mv -f "$t" "$d/$1" || { rm -f "$t"; exit 1; }'
)
_REMOVE = 'rm -f "$HOME/.llmtrain/secrets/$1"'


def deliver(hosts: Sequence[str], variables: Mapping[str, str]) -> str:
    """Write `variables` to a file of mode 0600 on each host, through ssh's standard input. Returns its path, from ~,
    for LLMTRAIN_SECRETS. Raises ConfigError if a host does not take the file; then no host keeps it."""
    name = secrets.token_hex(16)
    text = "".join(f"{key}={value}\0" for key, value in variables.items())
    size = len(text.encode("utf-8", "surrogateescape"))
    command = ("/bin/sh", "-c", _WRITE, "sh", name, str(size))
    answers = on_hosts(hosts, command, input=text, timeout_s=30.0)
    failed = [a for a in answers.values() if a.code != 0]
    path = f"{_FOLDER}/{name}"
    if failed:
        remove([a.host for a in answers.values() if a.code == 0], path)
        lines = []
        for a in failed:
            why = (
                f"{a.trouble.text}: {a.trouble.remedy}" if a.trouble else f"{a.stderr.strip()}: make {_FOLDER} writable"
            )
            lines.append(f"  {a.host}: {why}")
        head = f"secrets could not be delivered to {len(failed)} of {len(answers)} hosts"
        raise ConfigError("\n".join([head, *lines]))
    return path


def remove(hosts: Sequence[str], path: str) -> list[str]:
    """Remove the files that `deliver` has written. Returns the hosts that may still have one."""
    name = path.rpartition("/")[2]
    assert re.fullmatch("[0-9a-f]{32}", name), path
    answers = on_hosts(hosts, ("/bin/sh", "-c", _REMOVE, "sh", name), timeout_s=15.0)
    return [answer.host for answer in answers.values() if answer.code != 0]


MAX_BYTES = 1 << 20
DEEPSPEED_ENV = ".deepspeed_env"

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Set by the launcher for each rank or host, or read-only in a shell.
_NOT_TO_SET = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"), "the launcher"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES",), "the launcher, from the hostfile and --include,"),
    **dict.fromkeys(("LLMTRAIN_SECRETS", "LLMTRAIN_SUPERVISED"), "llmtrain launch"),
    **dict.fromkeys(("HOME", "UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"), "each host"),
}
_PLAIN = r"[A-Za-z0-9_@%+:,./^=-]*"
_SINGLE = r"'[^']*'"
_DOUBLE = r'"(?:[^"\\$`]|\\.)*"'
_VALUE = re.compile(rf"({_SINGLE}|{_DOUBLE}|{_PLAIN})(?:[ \t]+#.*|[ \t]*)")
_ESCAPED = re.compile(r'\\([\\"$`])')


class EnvFileError(ConfigError):
    """A file of environment variables is wrong. `problems`: one line for each. Values are not shown, since they may be
    secret."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = units.counted(len(problems), "problem")
        super().__init__("\n".join([f"{path}: {count}", *(f"  {problem}" for problem in problems[:100])]))


def read_env_file(path: str | Path) -> dict[str, str]:
    """Return the variables of a file, in its order. Raises EnvFileError with all problems.

    A line is blank, a comment (#), or `NAME=VALUE` with or without `export` before it. VALUE is plain, in 'single
    quotes', or in "double quotes", where `"`, `\\`, `$` and a backtick need a backslash.
    """
    lines, problems = _lines(Path(path))
    variables: dict[str, str] = {}
    first: dict[str, int] = {}
    for number, line in lines:
        text = line.strip(" \t")
        if not text or text.startswith("#"):
            continue
        name, value, problem = _assignment(text)
        if problem is None and first.setdefault(name, number) != number:
            problem = f"{name} is set in line {first[name]} already: keep one of the two"
        if problem is None:
            variables[name] = value
        else:
            problems.append((number, problem))
    if problems:
        raise EnvFileError(str(path), [f"line {n}: {problem}" if n else problem for n, problem in sorted(problems)])
    return variables


def _lines(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return (number, text) of the valid lines, and (number, problem) of the others. Number 0 stands for the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        return [], [(0, f"cannot be read ({error.strerror}): give the path of a file with lines NAME=VALUE")]
    if len(raw) > MAX_BYTES:
        return [], [(0, "larger than 1 MiB: this is not a file of environment variables")]
    good: list[tuple[int, str]] = []
    bad: list[tuple[int, str]] = []
    pieces = re.split(rb"\r\n|\r|\n", raw)
    if not pieces[-1]:
        pieces.pop()  # the last line of a text file ends with a newline, after which there is no line
    for number, line in enumerate(pieces, start=1):
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            bad.append((1, "a byte order mark before the first character: save the file as UTF-8 without BOM"))
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad.append((number, f"byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8"))
            continue
        control = next((c for c in text if c != "\t" and (c < " " or "\x7f" <= c < "\xa0")), None)
        if control is None:
            good.append((number, text))
        else:
            bad.append((number, f"control character {control!a} in column {text.index(control) + 1}: remove it"))
    return good, bad


def _assignment(text: str) -> tuple[str, str, str | None]:
    body = re.sub(r"^export[ \t]+", "", text)
    name, equals, rest = body.partition("=")
    if not equals:
        return "", "", "not NAME=VALUE: a line must be that, a comment that starts with #, or blank"
    if not NAME.fullmatch(name):
        shown = redact_text(name[:80])
        rule = "a name is letters, digits and _, not starting with a digit, and nothing is between it and ="
        return "", "", f"{shown!a} cannot be a name: {rule}"
    if name in _NOT_TO_SET:
        return name, "", f"{name} is set by {_NOT_TO_SET[name]} and cannot be set here: remove the line"
    matched = _VALUE.fullmatch(rest)
    if matched is None:
        return name, "", _why_not(name, rest)
    value = matched[1]
    if value.startswith("'"):
        return name, value[1:-1], None
    if value.startswith('"'):
        return name, _ESCAPED.sub(r"\1", value[1:-1]), None
    return name, value, None


def _why_not(name: str, rest: str) -> str:
    quote = rest[:1]
    if quote in ("'", '"'):
        if quote == '"' and re.match(r'"(?:[^"\\$`]|\\.)*[$`]', rest):
            return f"{name}: a shell would expand $ and `, but launch does not: write {name}='...', or \\ before them"
        closed = re.match(_SINGLE if quote == "'" else _DOUBLE, rest)
        if closed is None:
            return f"{name}: the quote {quote} is not closed on its line: close it"
        return f"{name}: text after the closing quote: put quotes around the complete value"
    odd = next(c for c in re.sub(_PLAIN, "", rest, count=1) or rest if not re.fullmatch(_PLAIN, c))
    return f"{name}: {odd!a} needs quotes: write {name}='...'"


def deepspeed_env_problems(environ: Mapping[str, str] | None = None, folder: str | Path = ".") -> list[str]:
    """Return the problems of the files in ~ and `folder` that DeepSpeed reads before a launch over pdsh: each line goes
    into every host's command line, where `ps` shows it and a shell expands it."""
    environ = os.environ if environ is None else environ
    name = environ.get("DS_ENV_FILE", DEEPSPEED_ENV)
    problems: list[str] = []
    for path in dict.fromkeys((Path(os.path.expanduser("~")) / name, Path(folder) / name)):
        if path.is_file():
            lines, bad = _lines(path)
            wrong = bad + [(number, why) for number, line in lines for why in [_deepspeed_line(line)] if why]
            problems += [f"{path} line {n}: {why}" if n else f"{path}: {why}" for n, why in sorted(wrong)]
    return problems


def _deepspeed_line(line: str) -> str | None:
    key, equals, value = line.partition("=")
    key = key.strip()
    if not equals:
        what = "a comment" if key.startswith("#") else "text without =" if key else "a blank line"
        return f"{what} ends DeepSpeed's launcher with a ValueError: remove it"
    if key.startswith("#"):
        return (
            "DeepSpeed takes a comment with = for a variable, and the host's shell then ignores the command: remove it"
        )
    if not NAME.fullmatch(key):
        return (
            f"{redact_text(key[:80])!a} is no name, and the host's shell would run it: write NAME=VALUE, without export"
        )
    if is_secret(key) or redact_text(value) != value:
        return (
            f"{key} is a secret, and `ps` shows it on every host: move it to the file of `llmtrain launch --env-file`"
        )
    if re.search(r'[$`"\\]', value):
        return f"{key}: the host's shell expands $, `, \" and \\: move it to the file of `llmtrain launch --env-file`"
    return None
