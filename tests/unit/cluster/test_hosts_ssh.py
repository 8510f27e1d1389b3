"""Many hosts at once through ssh: what arrives, what each trouble is called, and the bounds.

An executable called ssh stands in for it: it runs the line that the host's shell would get, or says what OpenSSH 9.2
said when it met that trouble (tests/cluster/test_ssh.py and faults.py make them for real).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.cluster.hosts import ssh
from llmtrain.cluster.hosts.ssh import MAX_BYTES, Answer, Trouble, on_hosts

FAKE = r"""#!/bin/bash
[ "$1" = -G ] && { echo "identityfile $KEY"; exit 0; }
echo "$*" >> "$FAKE_FOLDER/asked"
while [ "$1" != -- ]; do shift; done
host=$2 line=$3
fail() { echo "$1" >&2; exit 255; }
case $host in
  unnamed) fail "ssh: Could not resolve hostname unnamed: Name or service not known";;
  refusing) fail "ssh: connect to host refusing port 22: Connection refused";;
  noroute) fail "ssh: connect to host noroute port 22: No route to host";;
  off) fail "ssh: connect to host off port 22: Connection timed out";;
  mute) fail "Connection timed out during banner exchange";;
  stranger) fail "Host key verification failed.";;
  changed) echo "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @" >&2
    fail "Host key verification failed.";;
  keyless) fail "root@keyless: Permission denied (publickey,password).";;
  locked) fail "root@locked: Permission denied (publickey).";;
  typing) fail "root@typing: Permission denied (password,keyboard-interactive).";;
  closing) fail "kex_exchange_identification: read: Connection reset by peer";;
  cut) bash -c "${line%%;*}'"; echo; fail "client_loop: send disconnect: Broken pipe";;
  nologin) echo "This account is currently not available."; exit 1;;
  banner) echo "Welcome to the cluster"; printf 'no newline';;
  flood) yes; exit;;
  asking) echo "Which environment? "; sleep 30;;
  killed) kill -9 $$;;
  asleep) sleep 30;;
  slow*) sleep 0.3;;
esac
exec bash -c "$line"
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private key `open` and one `closed` by a passphrase."""
    folder = tmp_path_factory.mktemp("keys")
    for name, words in (("open", ""), ("closed", "words")):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-a", "1", "-N", words, "-f", str(folder / name)]
        subprocess.run(make, check=True)
    return folder


@pytest.fixture(autouse=True)
def fake_ssh(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in; the lines in `asked` are its command lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("FAKE_FOLDER", str(folder))
    monkeypatch.setenv("KEY", str(keys / "open"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


def one(host: str, *command: str, timeout_s: float = 10, **how: Any) -> Answer:
    return on_hosts([host], command or ("true",), timeout_s=timeout_s, **how)[host]


def trouble(host: str, **how: Any) -> Trouble:
    """What is wrong with a host with which something must be."""
    answer = one(host, **how)
    assert answer.trouble is not None
    return answer.trouble


@pytest.mark.parametrize(
    ("host", "kind", "text", "remedy"),
    [
        ("unnamed", "resolve", "Name or service not known", "/etc/hosts"),
        ("refusing", "refused", "no sshd listens", "systemctl start ssh"),
        ("noroute", "unreachable", "No route to host", "ping -c 1 noroute"),
        ("off", "unreachable", "Connection timed out", "ping -c 1 off"),
        ("mute", "timeout", "its sshd does not answer", "systemctl restart ssh"),
        ("stranger", "host_key", "is not known here", "ssh-keyscan stranger >> ~/.ssh/known_hosts"),
        ("changed", "host_key", "another host key", "ssh-keygen -R changed"),
        ("keyless", "key", "refuses our key", "ssh-copy-id keyless"),
        ("typing", "prompt", "takes passwords only", "PubkeyAuthentication yes"),
        ("closing", "died", "Connection reset by peer", "journalctl -u ssh"),
        ("killed", "died", "was stopped here (signal 9)", "ask again"),
        ("cut", "died", "broke while the command ran (client_loop", "ssh cut uptime"),
        ("nologin", "noise", "ended with code 1 before our command: This account", "start files"),
    ],
)
def test_each_trouble_has_its_kind_and_its_remedy(host, kind, text, remedy):
    answer = one(host)
    assert answer.code is None and answer.trouble is not None
    assert answer.trouble.kind == kind
    assert text in answer.trouble.text and host in answer.trouble.text
    assert remedy in answer.trouble.remedy


def test_a_locked_key_and_no_key_are_told_from_a_refused_one(keys, monkeypatch):
    monkeypatch.setenv("KEY", str(keys / "closed"))
    locked = trouble("locked")
    assert locked.kind == "prompt" and f"ssh-add {keys / 'closed'}" in locked.remedy
    monkeypatch.setenv("KEY", str(keys / "nowhere"))
    missing = trouble("locked")
    assert missing.kind == "key" and "ssh-keygen" in missing.remedy


def test_another_port_stands_in_the_command_and_in_the_remedy(fake_ssh):
    assert "ssh-keyscan -p 2222 stranger" in trouble("stranger", port=2222).remedy
    assert "ssh-keygen -R '[changed]:2222'" in trouble("changed", port=2222).remedy
    assert "ssh-copy-id -p 2222 keyless" in trouble("keyless", port=2222).remedy
    assert all(" -p 2222 -- " in line for line in (fake_ssh / "asked").read_text().splitlines() if "stranger" in line)


def test_ssh_never_asks_and_the_host_comes_after_the_options(fake_ssh):
    one("a")
    (line,) = (fake_ssh / "asked").read_text().splitlines()
    assert "-o BatchMode=yes" in line and "-o ConnectTimeout=10" in line and " -- a exec /bin/sh" in line
    assert "-o ServerAliveInterval=5" in line and "-o ServerAliveCountMax=2" in line, "a cut link would not be noticed"


def test_every_byte_arrives_as_an_argument_and_on_standard_input():
    every = "".join(chr(i) for i in range(1, 128)) + bytes(range(128, 256)).decode("utf-8", "surrogateescape")
    payloads = ["$(touch canary)", "`touch canary`", "; touch canary", "a b", "", "'", '"', "\\", "-n", "%h", "é", "\n"]
    show = "import sys,os; [os.write(1, a + b'\\0') for a in map(os.fsencode, sys.argv[1:])]"
    answer = one("a", sys.executable, "-c", show, every, *payloads)
    assert (answer.code, answer.trouble) == (0, None)
    assert answer.stdout.split("\0")[:-1] == [every, *payloads]
    text = every + "\0" + "x" * 300_000
    assert one("a", "cat", input=text).stdout == text


def test_exit_codes_and_streams_are_kept_apart():
    answer = one("a", "sh", "-c", "echo out; echo err >&2; exit 255")
    assert (answer.code, answer.stdout, answer.stderr, answer.trouble) == (255, "out\n", "err\n", None)
    assert one("a", "no-such-program").code == 127


def test_noise_is_taken_off_and_named():
    answer = one("banner", "echo", "mine")
    assert (answer.code, answer.stdout) == (0, "mine\n")
    assert answer.trouble is not None and answer.trouble.kind == "noise"
    assert "newline" in answer.trouble.text and "case $- in" in answer.trouble.remedy


def test_output_is_bounded():
    answer = one("a", "sh", "-c", f"yes | head -c {3 * MAX_BYTES}; exit 7")
    assert answer.code == 7 and len(answer.stdout) <= MAX_BYTES
    assert answer.trouble is not None and answer.trouble.kind == "noise" and "1 MiB" in answer.trouble.text


@pytest.mark.parametrize(
    ("host", "kind"), [("asleep", "timeout"), ("flood", "noise"), ("asking", "noise"), ("a", "timeout")]
)
def test_time_is_bounded_and_nothing_is_left_behind(host, kind):
    before = psutil.Process().children(recursive=True)  # of other tests
    answer = one(host, "sh", "-c", "sleep 77", timeout_s=1.5)  # in half a second a busy machine may start nothing
    assert answer.trouble is not None and "1.5 s" in answer.trouble.text
    assert (answer.trouble.kind, answer.code) == (kind, None)
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_background_process_of_the_command_does_not_hold_the_answer(tmp_path):
    late = tmp_path / "late"
    assert one("a", "sh", "-c", f"(sleep 5; touch {late}) & echo done").stdout == "done\n"
    assert not late.exists()


def test_hosts_are_asked_together_but_not_all_at_once(fake_ssh, monkeypatch):
    hosts = [f"slow-{i}" for i in range(24)]
    peak = 0
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.02):
            names = [p.info["name"] for p in psutil.process_iter(["name", "ppid"]) if p.info["ppid"] == os.getpid()]
            peak = max(peak, names.count("ssh"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    monkeypatch.setattr(ssh, "FAN_OUT", 8)
    answers = on_hosts([*hosts, hosts[0]], ["true"], timeout_s=20)
    finished.set()
    watcher.join()
    assert list(answers) == hosts and all(a.code == 0 for a in answers.values())
    assert 2 <= peak <= 8


def test_ctrl_c_ends_every_ssh():
    program = (
        "from llmtrain.cluster.hosts.ssh import on_hosts\n"
        "on_hosts(['asleep', *(f'h{i}' for i in range(5))],"
        " ['sleep', '300'], timeout_s=300)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.PIPE)
    family = psutil.Process(process.pid)
    until = time.monotonic() + 20
    while len([c for c in family.children() if c.name() in ("ssh", "sh", "bash", "timeout")]) < 4:
        assert time.monotonic() < until, "the stand-ins did not start"
        time.sleep(0.05)
    children = family.children()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


def test_without_ssh_the_user_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="openssh-client"):
        one("a")
