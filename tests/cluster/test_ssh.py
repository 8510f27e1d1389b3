"""Troubles of ssh, made for real between hosts: told apart, with a remedy that fixes them. Others: faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from tools.lab.lab import Lab, LabHost

ASK = """
import dataclasses, json, sys
from llmtrain.cluster.hosts.ssh import on_hosts
how = json.loads(sys.stdin.read())
print(json.dumps({name: dataclasses.asdict(a) for name, a in on_hosts(**how).items()}))
"""


def ask(lab: Lab, *hosts: str, command: tuple[str, ...] = ("hostname",), **how: Any) -> dict[str, dict[str, Any]]:
    """`on_hosts` as called on node-1; the answers as dicts."""
    how = {"hosts": hosts or [h.name for h in lab.hosts], "command": command, "timeout_s": 10, **how}
    done = lab.hosts[0].run([sys.executable, "-c", ASK], input=json.dumps(how))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trouble(lab: Lab, host: str, **how: Any) -> tuple[str, str, str]:
    """(kind, text, remedy) of one host that must have one."""
    answer = ask(lab, host, **how)[host]
    assert answer["trouble"] is not None, answer
    return answer["trouble"]["kind"], answer["trouble"]["text"], answer["trouble"]["remedy"]


def healthy(lab: Lab) -> bool:
    answers = ask(lab)
    return all(a["trouble"] is None and a["stdout"] == f"{name}\n" for name, a in answers.items())


def pasted(host: LabHost, remedy: str) -> subprocess.CompletedProcess[str]:
    """The remedy, as far as it is a command, typed on a host."""
    return host.run(["bash", "-c", remedy.partition("     (")[0]])


def test_healthy_hosts_answer_together(lab3: Lab) -> None:
    assert healthy(lab3)
    answers = ask(lab3, command=("sh", "-c", "cat; exit 3"), input="x" * 200_000)
    assert [(a["code"], a["stdout"]) for a in answers.values()] == [(3, "x" * 200_000)] * 3


def test_a_key_that_asks_for_its_passphrase(lab3: Lab) -> None:
    key = lab3.hosts[0].home / ".ssh/id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-p", "-a", "1", "-P", "", "-N", "words", "-f", str(key)], check=True)
    kind, text, remedy = trouble(lab3, "node-2")
    assert kind == "prompt" and "passphrase" in text and "ssh-add /root/.ssh/id_ed25519" in remedy


def test_host_keys_that_changed_or_are_unknown_and_the_remedies_work(lab3: Lab) -> None:
    known = lab3.hosts[0].home / ".ssh/known_hosts"
    lines = known.read_text().splitlines()
    keys = {line.split()[0].split(",")[0]: line.split(maxsplit=1)[1] for line in lines}
    known.write_text(f"node-1 {keys['node-1']}\nnode-2 {keys['node-3']}\n")
    answers = ask(lab3)
    changed, unknown = answers["node-2"]["trouble"], answers["node-3"]["trouble"]
    assert changed["kind"] == unknown["kind"] == "host_key"
    assert changed["text"] != unknown["text"]
    for remedy in (changed["remedy"].removeprefix("if the host was set up again: "), unknown["remedy"]):
        assert pasted(lab3.hosts[0], remedy).returncode == 0
    assert healthy(lab3)


def test_noise_of_start_files_is_named_and_taken_off(lab3: Lab) -> None:
    bashrc = lab3.hosts[1].home / ".bashrc"
    bashrc.write_text("echo Welcome to node-2\n")
    answer = ask(lab3, "node-2")["node-2"]
    assert (answer["code"], answer["stdout"]) == (0, "node-2\n")
    assert answer["trouble"]["kind"] == "noise" and "Welcome to node-2" in answer["trouble"]["text"]
    quiet = answer["trouble"]["remedy"].split("first line can be: ")[1].partition("     ")[0]
    bashrc.write_text(f"{quiet}\necho Welcome to node-2\n")
    assert healthy(lab3)
    bashrc.write_text("echo no jobs here; exit 4\n")
    kind, text, _ = trouble(lab3, "node-2")
    assert kind == "noise" and "code 4" in text and "no jobs here" in text
    bashrc.unlink()
    (lab3.hosts[1].home / ".ssh/rc").write_text("echo from rc\n")
    assert trouble(lab3, "node-2")[0] == "noise"


def test_a_banner_before_the_login_is_no_trouble(lab3: Lab) -> None:
    lab3.hosts[1].stop_sshd()
    lab3.hosts[1].start_sshd(banner="Authorised use only\n" * 20)
    assert healthy(lab3)


def test_a_connection_that_dies_under_the_command(lab3: Lab) -> None:
    asked = lab3.hosts[0].popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert asked.stdin is not None
    asked.stdin.write(json.dumps({"hosts": ["node-2", "node-3"], "command": ["sleep", "50"], "timeout_s": 40}))
    asked.stdin.close()
    asked.stdin = None
    until = time.monotonic() + 20
    while not all(any(p.name() == "sleep" for p in host.processes()) for host in lab3.hosts[1:]):
        assert time.monotonic() < until
        time.sleep(0.1)
    lab3.hosts[1].stop_sshd(sessions=True)
    lab3.hosts[2].cut()
    out, err = asked.communicate(timeout=60)
    answers = json.loads(out)
    assert [a["trouble"]["kind"] for a in answers.values()] == ["died", "died"], err
    assert "node-2" in answers["node-2"]["trouble"]["text"]


def test_a_command_that_overruns_is_ended_on_its_host_too(lab3: Lab) -> None:
    kind, text, _ = trouble(lab3, "node-2", command=("sleep", "100"), timeout_s=2)
    assert kind == "timeout" and " 2 s" in text
    until = time.monotonic() + 10
    while any(p.name() == "sleep" for p in lab3.hosts[1].processes()):
        assert time.monotonic() < until, "the command still runs on its host"
        time.sleep(0.1)


def test_an_sshd_that_takes_connections_and_does_not_speak(lab3: Lab) -> None:
    lab3.hosts[1].stop_sshd()
    serve = "import socket,time; s=socket.create_server(('', 22)); print('on', flush=True); time.sleep(60)"
    server = lab3.hosts[1].popen([sys.executable, "-c", serve], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "on\n"
    kind, text, _ = trouble(lab3, "node-2", timeout_s=4)
    server.kill()
    server.wait()
    server.stdout.close()
    assert kind == "timeout" and "node-2" in text
