"""Files of environment variables: ours, and DeepSpeed's `.deepspeed_env`.

Ours is a strict part of what a POSIX shell reads: `. FILE` gives the same values. Nothing is expanded and nothing runs:
what a shell would expand is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llmtrain.base import units
from llmtrain.base.errors import ConfigError
from llmtrain.base.redact import is_secret, redact_text

MAX_BYTES = 1 << 20
DEEPSPEED_ENV = ".deepspeed_env"

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the launcher decides for each rank or host, and what a shell does not let anyone set.
_NOT_TO_SET = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"), "the launcher"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES",), "the launcher, from the hostfile and --include,"),
    **dict.fromkeys(("LLMTRAIN_SECRETS", "LLMTRAIN_SUPERVISED", "DS_ENV_FILE"), "llmtrain launch"),
    **dict.fromkeys(("HOME", "UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"), "each host"),
}
_PLAIN = r"[A-Za-z0-9_@%+:,./^=-]*"
_SINGLE = r"'[^']*'"
_DOUBLE = r'"(?:[^"\\$`]|\\.)*"'
_VALUE = re.compile(rf"({_SINGLE}|{_DOUBLE}|{_PLAIN})(?:[ \t]+#.*|[ \t]*)")
_ESCAPED = re.compile(r'\\([\\"$`])')


class EnvFileError(ConfigError):
    """A file of environment variables is wrong. `problems`: one line for each. Values are not shown: secrets."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = units.counted(len(problems), "problem")
        super().__init__("\n".join([f"{path}: {count}", *(f"  {problem}" for problem in problems[:100])]))


def read_env_file(path: str | Path) -> dict[str, str]:
    """The variables of a file, in its order. Raises EnvFileError with all problems.

    A line is blank, a comment (#), or `NAME=VALUE` with or without `export` before it. VALUE is plain, in 'single
    quotes' or in "double quotes", where a backslash stands before `"`, `\\`, `$` and a backtick.
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
    """(number, text) of the lines that are text; (number, problem) of the others. Number 0: the file."""
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
        pieces.pop()  # the last line of a text file ends with a newline: what comes after it is no line
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
    """(name, value, None), or (name, "", problem)."""
    body = re.sub(r"^export[ \t]+", "", text)
    name, equals, rest = body.partition("=")
    if not equals:
        return "", "", "no NAME=VALUE: a line is that, a comment that starts with #, or blank"
    if not NAME.fullmatch(name):
        shown = redact_text(name[:80])
        rule = "a name is letters, digits and _, not starting with a digit, and nothing stands between it and ="
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
    """Why `rest` is no value, without showing it."""
    quote = rest[:1]
    if quote in ("'", '"'):
        if quote == '"' and re.match(r'"(?:[^"\\$`]|\\.)*[$`]', rest):
            return f"{name}: a shell would expand $ and `, and nothing does here: write {name}='...', or \\ before them"
        closed = re.match(_SINGLE if quote == "'" else _DOUBLE, rest)
        if closed is None:
            return f"{name}: the quote {quote} is not closed on its line: close it"
        return f"{name}: text after the closing quote: put quotes around the whole value"
    odd = next(c for c in re.sub(_PLAIN, "", rest, count=1) or rest if not re.fullmatch(_PLAIN, c))
    return f"{name}: {odd!a} needs quotes: write {name}='...'"


def deepspeed_env_problems(environ: Mapping[str, str] | None = None, folder: str | Path = ".") -> list[str]:
    """What is wrong with the files that DeepSpeed reads for itself before a launch over pdsh: ~ and then `folder`.

    Its reader takes every line for NAME=VALUE (deepspeed/launcher/runner.py `main`) and puts them into the command line
    of every host, where `ps` shows them and a shell expands them.
    """
    environ = os.environ if environ is None else environ
    name = environ.get("DS_ENV_FILE", DEEPSPEED_ENV)
    problems: list[str] = []
    for path in dict.fromkeys((Path(os.path.expanduser("~")) / name, Path(folder) / name)):
        if path.is_file():
            lines, bad = _lines(path)
            found = bad + [(number, why) for number, line in lines for why in [_deepspeed_line(line)] if why]
            problems += [f"{path} line {n}: {why}" if n else f"{path}: {why}" for n, why in sorted(found)]
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
