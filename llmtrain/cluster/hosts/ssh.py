"""Runs one command on many hosts at once through ssh, with limits for time, output and processes, and with the reason
of each failure.

DeepSpeed's own check asks one host, hides ssh's messages and reports each failure as "not reachable". ssh's messages
are always English, since it never loads LC_MESSAGES.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError

Kind = Literal["resolve", "refused", "unreachable", "timeout", "host_key", "key", "prompt", "noise", "died"]

SSH_FAILED = 255
"""Exit code of ssh for its own failures."""

NO_PDSH = ("no program `pdsh` on PATH, with which DeepSpeed starts other hosts", "apt-get install pdsh")


@dataclass(frozen=True)
class Trouble:
    """Why a host cannot be used."""

    kind: Kind
    """resolve: the name has no address. refused: nothing listens. unreachable: no route, or no answer to connecting.
    timeout: connected, but not ready within the limit. host_key: unknown or changed. key: our key is refused. prompt:
    ssh would ask for a password or a passphrase. noise: start files print text. died: the connection broke."""
    text: str
    """One sentence, with ssh's message."""
    remedy: str
    """A command, or another remedy."""


_PATTERNS: tuple[tuple[Kind, str], ...] = (
    ("host_key", r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed|REVOKED|No .* host key is known for"),
    ("resolve", r"Could not resolve hostname"),
    ("refused", r"Connection refused"),
    ("timeout", r"timed out during (banner exchange|key exchange)|Connection to .* timed out"),
    ("unreachable", r"No route to host|Network is unreachable|Host is down|(Connection|Operation) timed out"),
    ("key", r"Permission denied|Too many authentication failures"),
)


def from_ssh(host: str, code: int | None, stderr: str, noise: str, *, began: bool, port: int | None) -> Trouble:
    """Explain why ssh ended without the closing mark. `began`: the host had started our command."""
    last = _last_line(stderr)
    if began:
        why = f"the connection to {host} broke while the command ran ({last or f'ssh ended with code {code}'})"
        return Trouble("died", why, f"look for a reboot or a cut link: ssh {host} uptime")
    if code is None or code < 0:
        return Trouble("died", f"ssh to {host} was stopped here ({last or f'signal {-(code or 0)}'})", "ask again")
    if code != SSH_FAILED:
        # Another code than 255 is the login shell's: it ended before it came to our command.
        noise_line = _last_line(noise) or last
        why = f"the login shell of {host} ended with code {code} before our command" + (
            f": {noise_line}" if noise_line else ""
        )
        return Trouble("noise", why, _QUIET_SHELL.format(host=host))
    kind: Kind = next((kind for kind, pattern in _PATTERNS if re.search(pattern, stderr)), "died")
    if kind == "host_key":
        return _host_key(host, stderr, port)
    if kind == "key":
        return _denied(host, stderr, port)
    return Trouble(kind, _TEXTS[kind].format(host=host, error=last), _REMEDIES[kind].format(host=host, port=port or 22))


_QUIET_SHELL = (
    "make the start files (~/.bashrc, ~/.ssh/rc) do nothing when there is no terminal; their first line can be: "
    "case $- in *i*) ;; *) return;; esac     see what they print: ssh {host} true"
)
_TEXTS: dict[Kind, str] = {
    "resolve": "{host} has no address ({error})",
    "refused": "{host} is up, but no sshd listens there ({error})",
    "unreachable": "{host} does not answer ({error})",
    "timeout": "{host} takes connections, but its sshd does not answer ({error})",
    "died": "ssh to {host} broke off ({error})",
}
_REMEDIES: dict[Kind, str] = {
    "resolve": "correct the name in the hostfile, or give it an address: echo 'ADDRESS {host}' >> /etc/hosts",
    "refused": "on {host}: systemctl start ssh     (or its sshd has another port than {port}: `Port` in ~/.ssh/config)",
    "unreachable": "see whether it is powered on and its link is up: ping -c 1 {host}",
    "timeout": "{host} is overloaded or its sshd hangs; on its console: systemctl restart ssh",
    "died": "ask sshd why; on {host}: journalctl -u ssh -n 20",
}


def _host_key(host: str, stderr: str, port: int | None) -> Trouble:
    entry = host if port in (None, 22) else f"[{host}]:{port}"
    scan = f"ssh-keyscan {'' if port in (None, 22) else f'-p {port} '}{host} >> ~/.ssh/known_hosts"
    if "HAS CHANGED" in stderr:
        why = f"{host} shows another host key than the one that ~/.ssh/known_hosts has"
        return Trouble("host_key", why, f"if the host was set up again: ssh-keygen -R {shlex.quote(entry)} && {scan}")
    if "REVOKED" in stderr:
        return Trouble("host_key", f"the host key of {host} is marked as revoked", "ask who keeps the known hosts")
    return Trouble(
        "host_key", f"the host key of {host} is not known here", f"{scan}     (then compare its fingerprint)"
    )


def _denied(host: str, stderr: str, port: int | None) -> Trouble:
    """Explain "Permission denied": the host accepts no keys, or our keys are at fault."""
    message = _last_line(stderr)
    offered = re.search(r"Permission denied \(([\w,-]+)\)", stderr)
    if offered and "publickey" not in offered[1] and re.search("password|keyboard", offered[1]):
        why = f"{host} takes passwords only ({message}), and nobody can type one"
        return Trouble(
            "prompt", why, f"on {host}: set PubkeyAuthentication yes in /etc/ssh/sshd_config, and reload sshd"
        )
    copy = f"ssh-copy-id {'' if port in (None, 22) else f'-p {port} '}{host}"
    keys = _keys(host)
    if not keys and not _agent_has_keys():
        return Trouble("key", f"there is no key here to show to {host} ({message})", f"ssh-keygen -t ed25519 && {copy}")
    locked = [key for key in keys if _quick(["ssh-keygen", "-y", "-P", "", "-f", str(key)]).returncode != 0]
    if locked and len(locked) == len(keys) and not _agent_has_keys():
        why = f"the key {locked[0]} asks for its passphrase, and no agent holds it ({message})"
        return Trouble("prompt", why, f"eval $(ssh-agent) && ssh-add {shlex.quote(str(locked[0]))}")
    return Trouble("key", f"{host} refuses our key ({message})", copy)


def _keys(host: str) -> list[Path]:
    shown = _quick(["ssh", "-G", "--", host]).stdout
    files = [line.partition(" ")[2] for line in shown.splitlines() if line.startswith("identityfile ")]
    return [path for path in (Path(os.path.expanduser(file)) for file in files) if path.is_file()]


def _agent_has_keys() -> bool:
    return _quick(["ssh-add", "-l"]).returncode == 0


def _quick(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(argv, 1, "", "")


def timed_out(host: str, timeout_s: float, noise: str, *, reached: bool) -> Trouble:
    """Explain why a host took too long. `reached`: the command had begun."""
    if reached:
        why = f"{host} ran the command and was not done after {timeout_s:g} s"
        return Trouble("timeout", why, f"see what it is busy with: ssh {host} uptime")
    why = f"{host} was not ready to run a command after {timeout_s:g} s"
    if noise:
        # The login shell began, and asks or waits for something.
        return Trouble("noise", f"{why}; its start files print: {_last_line(noise)}", _QUIET_SHELL.format(host=host))
    return Trouble("timeout", why, f"see where it waits: ssh -v {host} true")


def noisy(host: str, noise: str, dropped: bool) -> Trouble:
    """Explain text before the command's output, or output that was dropped."""
    if dropped and not noise:
        return Trouble("noise", f"{host} printed more than 1 MiB", f"see what it prints: ssh {host} true")
    why = f"start files on {host} print on standard output: {_last_line(noise)}"
    return Trouble("noise", why, _QUIET_SHELL.format(host=host))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return untrusted.shown(lines[-1], 200) if lines else ""


FAN_OUT = 64
"""Hosts asked at the same time, each with a thread and an ssh process."""
MAX_BYTES = 1 << 20
"""Bytes to keep of each stream of each host; the rest is read and dropped."""
CONNECT_TIMEOUT_S = 10
_GRACE_S = 0.5

__all__ = ["Answer", "Trouble", "on_hosts"]


@dataclass(frozen=True)
class Answer:
    host: str
    code: int | None
    """The command's exit code; None if it did not run to its end, for the reason in `trouble`."""
    stdout: str
    """The command's output, without that of start files. Bytes that are not UTF-8 are surrogates."""
    stderr: str
    """Standard error of ssh and the command together."""
    elapsed_s: float
    trouble: Trouble | None
    """Why the command did not run or end, or None. Only `noise` comes with a code: the command ran, but start files on
    the host print to standard output, which breaks programs that read ssh's output (as DeepSpeed does)."""


@dataclass(frozen=True)
class _Request:
    """The request to every host."""

    program: str
    """Path of ssh; empty: the command runs on this host."""
    command: Sequence[str]
    text: str
    """The command's standard input."""
    timeout_s: float
    port: int | None


def on_hosts(
    hosts: Sequence[str],
    command: Sequence[str],
    *,
    input: str = "",  # as subprocess names it
    timeout_s: float,
    port: int | None = None,
    here: bool = False,
) -> dict[str, Answer]:
    """Run `command` on each host, with `input` as its standard input; no shell expands a word. `here`: run it on this
    host without ssh (see hostfile.is_alone). Each host is stopped after `timeout_s`; all together take at most
    ceil(hosts / FAN_OUT) * (timeout_s + 1). Raises ConfigError if there is no ssh program."""
    program = "" if here else shutil.which("ssh")
    if program is None:
        raise ConfigError("no program `ssh` on PATH: install it (Debian: apt-get install openssh-client)")
    names = list(dict.fromkeys(hosts))
    wake, stop = os.pipe()  # closing `stop` wakes every thread that waits for its ssh
    try:
        with ThreadPoolExecutor(max(1, min(FAN_OUT, len(names))), "ssh") as pool:
            try:
                request = _Request(program, command, input, timeout_s, port)
                asked = [pool.submit(_ask, request, name, wake) for name in names]
                # A Ctrl-C just before an endless wait begins would not end it: Python looks for signals between waits.
                while wait(asked, timeout=_GRACE_S).not_done:
                    pass
                return {name: one.result() for name, one in zip(names, asked, strict=True)}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                os.close(stop)
                stop = -1
                raise
    finally:
        if stop >= 0:
            os.close(stop)
        os.close(wake)


def _ask(request: _Request, host: str, wake: int) -> Answer:
    """Run the command on one host. A fault of the host or network is in the answer, not raised."""
    timeout_s, port = request.timeout_s, request.port
    mark = f"llmtrain-{secrets.token_hex(8)}"
    started = time.monotonic()
    line = remote_line(request.command, mark, timeout_s)
    argv = ["/bin/sh", "-c", line]
    if request.program:
        argv = [request.program, *options(timeout_s, port), "--", host, line]
    talk = _Talk(mark)
    with _standard_input(request.text) as source, _process(argv, source) as process:
        talk.listen(process, started + timeout_s, wake)
        code = process.poll()
    elapsed_s = time.monotonic() - started
    stdout, remote_code = talk.payload()
    stderr = talk.text(talk.err)
    trouble: Trouble | None = None
    if talk.overrun:
        trouble = timed_out(host, timeout_s, talk.noise(), reached=talk.began)
    elif remote_code is None:
        trouble = from_ssh(host, code, stderr, talk.noise(), began=talk.began, port=port)
    elif talk.noise() or talk.dropped:
        trouble = noisy(host, talk.noise(), talk.dropped)
    return Answer(host, remote_code, stdout, stderr, elapsed_s, trouble)


def options(timeout_s: float, port: int | None = None) -> list[str]:
    connect_s = max(1, min(CONNECT_TIMEOUT_S, int(timeout_s)))
    settings = {
        "BatchMode": "yes",  # never asks
        "ConnectTimeout": connect_s,
        "ServerAliveInterval": 5,  # a link that is cut is noticed within 15 s
        "ServerAliveCountMax": 2,
        "ControlPath": "none",  # an older connection would hide a fault, and its master would outlive this process
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "LogLevel": "ERROR",  # no banners, no "Permanently added"
    }
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return words if port is None else [*words, "-p", str(port)]


def remote_line(command: Sequence[str], mark: str, timeout_s: float) -> str:
    """Return a command line for any login shell: `command` between two marks, with a time limit on the host."""
    limit_s = math.ceil(timeout_s) + 1
    words = " ".join(shlex.quote(word) for word in command)
    script = f"echo {mark}; timeout -k 2 {limit_s} {words}; code=$?; echo; echo {mark} $code"
    return f"exec /bin/sh -c {shlex.quote(script)}"


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[int]:
    """Yield the descriptor of a file in memory with `text`, which may be secret."""
    handle = os.memfd_create("input")
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        os.lseek(handle, 0, os.SEEK_SET)
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _process(argv: list[str], source: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start ssh in its own session, so that it has no terminal to ask on and one signal also ends its ProxyCommand."""
    process = subprocess.Popen(
        argv, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        process.stderr.close()


class _Talk:
    """Collects the output of one ssh, and finds the command's part in it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._end = re.compile(rb"\n" + self._mark + rb" (\d+)\r?\n")
        self.out = bytearray()
        self.err = bytearray()
        self.tail = bytearray()  # end of standard output, if more came than is kept
        self.overrun = False
        self.dropped = False

    def listen(self, process: subprocess.Popen[bytes], until: float, wake: int) -> None:
        """Read until the closing mark, the end of ssh, the time `until`, or the signal to stop (`wake`)."""
        assert process.stdout is not None and process.stderr is not None
        gone = os.pidfd_open(process.pid)
        for pipe in (process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        try:
            with selectors.DefaultSelector() as waiting:
                for file in (process.stdout.fileno(), process.stderr.fileno(), gone, wake):
                    waiting.register(file, selectors.EVENT_READ)
                while not self._closing_mark():
                    left_s = until - time.monotonic()
                    ready = {key.fd for key, _ in waiting.select(max(0.0, left_s))}
                    if wake in ready:
                        return
                    for file, stream in ((process.stdout.fileno(), self.out), (process.stderr.fileno(), self.err)):
                        if file in ready and not self._read_pipe(file, stream):
                            waiting.unregister(file)
                    if gone in ready:
                        # Its last output may still be in the pipes.
                        self._read_pipe(process.stdout.fileno(), self.out, to_end=True)
                        self._read_pipe(process.stderr.fileno(), self.err, to_end=True)
                        process.wait()
                        return
                    if left_s <= 0 and not self._closing_mark():
                        self.overrun = True
                        return
        finally:
            os.close(gone)

    def _read_pipe(self, file: int, stream: bytearray, to_end: bool = False) -> bool:
        """Read what is in a pipe. Returns False at its end."""
        while True:
            try:
                chunk = os.read(file, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            room = MAX_BYTES - len(stream)
            stream += chunk[:room]
            if len(chunk) > room:
                self.dropped = True
                if stream is self.out:
                    self.tail = ((self.tail or stream[-200:]) + chunk[room:])[-200:]
            if not to_end:
                return True

    @property
    def began(self) -> bool:
        return self._mark in self.out

    def _closing_mark(self) -> re.Match[bytes] | None:
        return self._end.search(self.tail or self.out, 0 if self.tail else max(0, len(self.out) - (1 << 17)))

    def payload(self) -> tuple[str, int | None]:
        """Return (the command's output, its exit code; None if it has not ended)."""
        _, mark, rest = bytes(self.out).partition(self._mark + b"\n")
        if not mark:
            return "", None
        ended = self._end.search(self.tail or self.out)
        inside = self._end.split(rest, maxsplit=1)[0]
        return self.text(inside), int(ended[1]) if ended else None

    def noise(self) -> str:
        """Return the output before our command, or all output if the command never began."""
        return self.text(bytes(self.out).partition(self._mark + b"\n")[0]).strip()

    @staticmethod
    def text(raw: bytes | bytearray) -> str:
        return raw.decode("utf-8", "surrogateescape")
