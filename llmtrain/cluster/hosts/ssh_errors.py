"""Reasons why a host did not answer, by ssh's exit code and messages, each with a remedy to paste.

ssh's messages are English whatever the locale is: it translates nothing and never loads LC_MESSAGES.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.base import untrusted

Kind = Literal["resolve", "refused", "unreachable", "timeout", "host_key", "key", "prompt", "noise", "died"]

SSH_FAILED = 255
"""ssh's own exit code for everything that is not the command's."""


@dataclass(frozen=True)
class Trouble:
    """A reason why a host cannot be used."""

    kind: Kind
    """resolve: the name has no address. refused: nothing listens. unreachable: no route, or no reply to connecting.
    timeout: connected, and not ready within the limit. host_key: unknown or changed. key: ours is refused. prompt: ssh
    would have to ask for a password or a passphrase. noise: start files print. died: the connection broke."""
    text: str
    """One sentence, with ssh's message."""
    remedy: str
    """A command, or what to do."""


_PATTERNS: tuple[tuple[Kind, str], ...] = (
    ("host_key", r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed|REVOKED|No .* host key is known for"),
    ("resolve", r"Could not resolve hostname"),
    ("refused", r"Connection refused"),
    ("timeout", r"timed out during (banner exchange|key exchange)|Connection to .* timed out"),
    ("unreachable", r"No route to host|Network is unreachable|Host is down|(Connection|Operation) timed out"),
    ("key", r"Permission denied|Too many authentication failures"),
)


def from_ssh(host: str, code: int | None, stderr: str, noise: str, *, began: bool, port: int | None) -> Trouble:
    """The reason why ssh to `host` ended without the closing mark. `began`: the host had started our command."""
    last = _last_line(stderr)
    if began:
        why = f"the connection to {host} broke while the command ran ({last or f'ssh ended with code {code}'})"
        return Trouble("died", why, f"look for a reboot or a cut link: ssh {host} uptime")
    if code is None or code < 0:
        return Trouble("died", f"ssh to {host} was stopped here ({last or f'signal {-(code or 0)}'})", "ask again")
    if code != SSH_FAILED:
        # Another code than 255 is the login shell's: it ended before it came to our command.
        said = _last_line(noise) or last
        why = f"the login shell of {host} ended with code {code} before our command" + (f": {said}" if said else "")
        return Trouble("noise", why, _QUIET_SHELL.format(host=host))
    kind: Kind = next((kind for kind, pattern in _PATTERNS if re.search(pattern, stderr)), "died")
    if kind == "host_key":
        return _host_key(host, stderr, port)
    if kind == "key":
        return _denied(host, stderr, port)
    return Trouble(kind, _TEXTS[kind].format(host=host, said=last), _REMEDIES[kind].format(host=host, port=port or 22))


_QUIET_SHELL = (
    "make the start files (~/.bashrc, ~/.ssh/rc) do nothing when there is no terminal; their first line can be: "
    "case $- in *i*) ;; *) return;; esac     see what they print: ssh {host} true"
)
_TEXTS: dict[Kind, str] = {
    "resolve": "{host} has no address ({said})",
    "refused": "{host} is up, but no sshd listens there ({said})",
    "unreachable": "{host} does not answer ({said})",
    "timeout": "{host} takes connections, but its sshd does not answer ({said})",
    "died": "ssh to {host} broke off ({said})",
}
_REMEDIES: dict[Kind, str] = {
    "resolve": "correct the name in the hostfile, or give it an address: echo 'ADDRESS {host}' >> /etc/hosts",
    "refused": "on {host}: systemctl start ssh     (or its sshd has another port than {port}: `Port` in ~/.ssh/config)",
    "unreachable": "see whether it is powered on and its link is up: ping -c 1 {host}",
    "timeout": "{host} is overloaded or its sshd hangs; on its console: systemctl restart ssh",
    "died": "ask sshd why; on {host}: journalctl -u ssh -n 20",
}


def _host_key(host: str, stderr: str, port: int | None) -> Trouble:
    known = host if port in (None, 22) else f"[{host}]:{port}"
    scan = f"ssh-keyscan {'' if port in (None, 22) else f'-p {port} '}{host} >> ~/.ssh/known_hosts"
    if "HAS CHANGED" in stderr:
        why = f"{host} shows another host key than the one that ~/.ssh/known_hosts has"
        return Trouble("host_key", why, f"if the host was set up anew: ssh-keygen -R {shlex.quote(known)} && {scan}")
    if "REVOKED" in stderr:
        return Trouble("host_key", f"the host key of {host} is marked as revoked", "ask who keeps the known hosts")
    return Trouble(
        "host_key", f"the host key of {host} is not known here", f"{scan}     (then compare its fingerprint)"
    )


def _denied(host: str, stderr: str, port: int | None) -> Trouble:
    """Permission denied: by a host that takes no keys, or because of the keys that are here."""
    said = _last_line(stderr)
    offered = re.search(r"Permission denied \(([\w,-]+)\)", stderr)
    if offered and "publickey" not in offered[1] and re.search("password|keyboard", offered[1]):
        why = f"{host} takes passwords only ({said}), and nobody can type one"
        return Trouble(
            "prompt", why, f"on {host}: set PubkeyAuthentication yes in /etc/ssh/sshd_config, and reload sshd"
        )
    copy = f"ssh-copy-id {'' if port in (None, 22) else f'-p {port} '}{host}"
    keys = _keys(host)
    if not keys and not _agent_has_keys():
        return Trouble("key", f"there is no key here to show to {host} ({said})", f"ssh-keygen -t ed25519 && {copy}")
    locked = [key for key in keys if _asks_passphrase(key)]
    if locked and len(locked) == len(keys) and not _agent_has_keys():
        why = f"the key {locked[0]} asks for its passphrase, and no agent holds it ({said})"
        return Trouble("prompt", why, f"eval $(ssh-agent) && ssh-add {shlex.quote(str(locked[0]))}")
    return Trouble("key", f"{host} refuses our key ({said})", copy)


def _keys(host: str) -> list[Path]:
    """The private keys that ssh would show to this host."""
    shown = _quick(["ssh", "-G", "--", host]).stdout
    files = [line.partition(" ")[2] for line in shown.splitlines() if line.startswith("identityfile ")]
    return [path for path in (Path(os.path.expanduser(file)) for file in files) if path.is_file()]


def _asks_passphrase(key: Path) -> bool:
    return _quick(["ssh-keygen", "-y", "-P", "", "-f", str(key)]).returncode != 0


def _agent_has_keys() -> bool:
    return _quick(["ssh-add", "-l"]).returncode == 0


def _quick(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of OpenSSH that uses no network."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(argv, 1, "", "")


def timed_out(host: str, timeout_s: float, noise: str, *, reached: bool) -> Trouble:
    """The limit passed: while the command ran (`reached`), or before it began."""
    if reached:
        why = f"{host} ran the command and was not done after {timeout_s:g} s"
        return Trouble("timeout", why, f"see what it is busy with: ssh {host} uptime")
    why = f"{host} was not ready to run a command after {timeout_s:g} s"
    if noise:
        # It got as far as the login shell, which asks something or waits for it.
        return Trouble("noise", f"{why}; its start files print: {_last_line(noise)}", _QUIET_SHELL.format(host=host))
    return Trouble("timeout", why, f"see where it waits: ssh -v {host} true")


def noisy(host: str, noise: str, dropped: bool) -> Trouble:
    """The command ran, but other text came before it."""
    if dropped and not noise:
        return Trouble("noise", f"{host} printed more than 1 MiB", f"see what it prints: ssh {host} true")
    why = f"start files on {host} print on standard output: {_last_line(noise)}"
    return Trouble("noise", why, _QUIET_SHELL.format(host=host))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return untrusted.shown(lines[-1], 200) if lines else ""
