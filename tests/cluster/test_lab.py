"""The lab's hosts are separate machines to whoever is on them, and nothing of them is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.launching import REPO, gone
from tools.lab.lab import Lab, LabHost, why_not
from tools.lab.processes import living_in, namespace_of

HOLD = [sys.executable, "-m", "tools.lab", "up", "--hosts", "2", "--folder"]


def said(host_output: subprocess.CompletedProcess[str]) -> list[str]:
    assert host_output.returncode == 0, host_output.stderr
    return host_output.stdout.split()


def test_what_is_a_hosts_own_and_what_is_everybodys(lab3: Lab, tmp_path: Path) -> None:
    first, second, _ = lab3.hosts
    for own in ("/tmp/note", "/dev/shm/note", "/run/note", "/root/.bashrc"):
        assert first.run(["sh", "-c", f"echo true > {own}"]).returncode == 0
        assert first.run(["test", "-e", own]).returncode == 0
        assert second.run(["test", "-e", own]).returncode == 1
    assert (first.tmp / "note").exists()
    assert not Path("/run/note").exists()
    first.run(["touch", tmp_path / "note"])
    assert second.run(["test", "-e", tmp_path / "note"]).returncode == 0
    assert second.run(["test", "-e", REPO / "Makefile"]).returncode == 0


def test_reset_makes_everything_healthy_again(lab3: Lab) -> None:
    first, second, third = lab3.hosts
    first.shape(rate_mbit=1, delay_ms=200)
    second.run(["touch", "/tmp/left"])
    second.cut()
    third.kill()
    (first.home / ".ssh" / "known_hosts").unlink()
    (first.home / ".bashrc").write_text("echo noise\n")
    first.etc_hosts.write_text("127.0.0.1 localhost\n")
    first.popen(["sleep", "1000"])
    lab3.reset()
    for host in lab3.hosts:
        done = host.run(["pdsh", "-R", "ssh", "-w", "node-[1-3]", "echo ok"])
        assert sorted(done.stdout.splitlines()) == [f"node-{n}: ok" for n in (1, 2, 3)], done.stderr
        assert host.processes() == []
    assert not (second.tmp / "left").exists()


# Without a trace


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that holds a lab, as a colleague starts it, and its hosts' namespaces."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    process = subprocess.Popen(
        [*HOLD, str(tmp_path)],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    while "Ctrl-C" not in process.stdout.readline():
        assert process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True)
    yield process, sorted({namespace_of(each.pid) for each in below} - {namespace_of(os.getpid())})
    process.kill()
    process.wait()
    process.stdout.close()


def leave_no_trace(folder: Path, namespaces: list[str], helpers: list[psutil.Process]) -> None:
    """Within a few seconds: no process of a host, no helper, no device, no file."""
    deadline = time.monotonic() + 10
    while any(living_in(each) for each in namespaces) or not gone(helpers, 0.05) or list(folder.iterdir()):
        assert time.monotonic() < deadline, (helpers, list(folder.iterdir()))
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_holder_ends(
    holder: tuple[subprocess.Popen[str], list[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process, namespaces = holder
    helpers = psutil.Process(process.pid).children(recursive=True)
    assert len(namespaces) == 2
    assert all(living_in(each) for each in namespaces)
    process.send_signal(number)
    assert process.wait(timeout=20) in (130, 143, -signal.SIGKILL)
    leave_no_trace(tmp_path, namespaces, helpers)


def test_nothing_is_left_of_a_lab_that_breaks_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    finish = LabHost.finish_boot
    monkeypatch.setattr(LabHost, "finish_boot", lambda host: finish(host) if host.name == "node-1" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Lab(2, tmp_path)
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    leave_no_trace(tmp_path, [], left)
    monkeypatch.undo()
    with Lab(1, tmp_path) as lab:  # the next one is not disturbed
        assert said(lab.hosts[0].run(["ssh", "node-1", "hostname"])) == ["node-1"]
    assert not any(tmp_path.iterdir())


def test_a_terminal_gets_a_shell_on_node_1_and_its_end_takes_all_down(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    command = f"{' '.join(HOLD)} {tmp_path}"
    typed = "ssh node-2 hostname; head -1 $HOSTFILE; exit 0\n"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"], input=typed, capture_output=True, text=True, cwd=REPO, timeout=60
    )
    assert "node-2\nnode-1 slots=1\n" in done.stdout
    assert not any(tmp_path.iterdir())


def test_a_machine_that_cannot_have_a_lab_says_why() -> None:
    """Root in a container without privileges, for one."""
    if why_not() is not None:
        pytest.skip("this is one")
    code = "from tools.lab.lab import why_not; print(why_not())"
    bare = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", code]
    refused = subprocess.run(bare, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert refused.stdout.startswith("a lab needs namespaces"), refused
    assert "Operation not permitted" in refused.stdout


def test_install_asks_apt_for_what_is_missing_and_starts_no_sshd(tmp_path: Path) -> None:
    """In a mount namespace whose /usr/sbin is empty, with an apt-get that writes down what it is asked."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    tools, told = tmp_path / "bin", tmp_path / "told"
    tools.mkdir()
    for name in ("id", "rm", "chmod", "sh"):
        (tools / name).symlink_to(f"/bin/{name}")
    fake = f'#!/bin/sh\necho "$* $(/usr/sbin/policy-rc.d; echo $?)" >> {told}\n[ -e {tmp_path}/works ]\n'
    (tools / "apt-get").write_text(fake)
    (tools / "apt-get").chmod(0o755)
    hide = f"mount -t tmpfs none /usr/sbin; PATH={tools} tools/lab/install.sh; echo $?; ls /usr/sbin"

    def install() -> tuple[str, list[str]]:
        told.write_text("")
        done = subprocess.run(["unshare", "-m", "sh", "-c", hide], cwd=REPO, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr, told.read_text().splitlines()

    wanted = "install -y --no-install-recommends pdsh iproute2 openssh-server 101"
    output, asked = install()
    assert output.endswith("apt-get could not install them; tests/cluster will skip\n0\n")
    assert asked == [wanted, "update 101"]
    (tmp_path / "works").touch()
    output, asked = install()
    assert output.endswith("apt-get install\n0\n")
    assert asked == [wanted]
