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

from tests.helpers.launching import REPO, environment, gone, rows, write_recipe
from tools.lab.lab import Lab, LabHost, why_not
from tools.lab.processes import living_in, namespace_of

HOLD = [sys.executable, "-m", "tools.lab", "up", "--hosts", "2", "--folder"]


def said(host_output: subprocess.CompletedProcess[str]) -> list[str]:
    assert host_output.returncode == 0, host_output.stderr
    return host_output.stdout.split()


def test_each_host_has_a_name_an_address_and_reaches_all(lab3: Lab) -> None:
    for number, host in enumerate(lab3.hosts, start=1):
        assert (host.name, host.address) == (f"node-{number}", f"10.77.0.{number}")
        assert said(host.run(["hostname"])) == [host.name]
        assert host.address in host.run(["ip", "-o", "-4", "address", "show", "eth0"]).stdout
        everyone = host.run(["pdsh", "-R", "ssh", "-w", "node-[1-3]", "hostname"])
        assert sorted(everyone.stdout.splitlines()) == [f"node-{n}: node-{n}" for n in (1, 2, 3)], everyone.stderr


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


def test_processes_of_a_host_are_seen_there_and_from_outside(lab3: Lab) -> None:
    first, second, _ = lab3.hosts
    assert first.processes() == []
    direct = first.popen(["sleep", "1000"])
    over_ssh = second.popen(["ssh", "node-1", "exec", "sleep", "1001"])
    deadline = time.monotonic() + 20
    while len(first.processes()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sleeping = sorted(process.cmdline()[1] for process in first.processes())
    assert sleeping == ["1000", "1001"]
    assert "1000" in first.run(["ps", "-eo", "args"]).stdout
    assert "1000" not in second.run(["ps", "-eo", "args"]).stdout
    direct.terminate()
    assert direct.wait(timeout=20) == -signal.SIGTERM
    [other] = first.processes()
    other.kill()
    assert gone([other], 20)
    assert over_ssh.wait(timeout=20) != 0


def test_run_gives_the_commands_code_output_and_environment(lab3: Lab, tmp_path: Path) -> None:
    host = lab3.hosts[0]
    done = host.run(["sh", "-c", "cat; pwd; echo $A >&2; exit 3"], env={"A": "b c"}, cwd=tmp_path, input="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, f"in\n{tmp_path}\n", "b c\n")
    assert host.run(["no-such-command"]).returncode == 127
    assert said(host.run(["sh", "-c", "command -v python"])) == [str(Path(sys.executable).parent / "python")]
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "50"], timeout_s=0.5)
    assert gone(host.processes(), 10)


def test_sshd_stops_starts_and_takes_settings(lab3: Lab) -> None:
    first, second, _ = lab3.hosts
    session = first.popen(["ssh", "node-2", "sleep", "1000"])
    deadline = time.monotonic() + 20
    while not second.processes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.stop_sshd()
    assert "refused" in first.run(["ssh", "node-2", "true"]).stderr
    assert session.poll() is None
    second.stop_sshd(sessions=True)
    assert session.wait(timeout=20) == 255
    second.start_sshd(port=2222, banner="Authorised use only\n")
    done = first.run(["ssh", "-p", "2222", "-o", "StrictHostKeyChecking=no", "node-2", "hostname"])
    assert said(done) == ["node-2"]
    assert "Authorised use only" in done.stderr
    with pytest.raises(RuntimeError, match="NoSuchSetting"):
        lab3.hosts[2].start_sshd(NoSuchSetting="yes")


def test_power_off_ends_all_at_once_and_boot_brings_a_clean_host(lab3: Lab) -> None:
    first, second, _ = lab3.hosts
    job = second.popen(["sh", "-c", "sleep 1000 & sleep 1001"])
    over_ssh = first.popen(
        ["ssh", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2", "node-2", "sleep 1002"]
    )
    deadline = time.monotonic() + 20
    while len(second.processes()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    theirs = second.processes()
    second.run(["touch", "/dev/shm/segment"])
    second.kill()
    assert gone(theirs, 1)
    assert job.wait(timeout=5) == -signal.SIGKILL
    assert not second.is_on
    # A machine without power says nothing, not even goodbye: the client must find out by itself.
    assert over_ssh.wait(timeout=30) == 255
    failed = first.run(["ssh", "-o", "ConnectTimeout=2", "node-2", "true"])
    assert failed.returncode == 255
    assert "refused" not in failed.stderr
    with pytest.raises(RuntimeError, match="off"):
        second.run(["true"])
    second.boot()
    assert said(first.run(["ssh", "node-2", "hostname"])) == ["node-2"]
    assert second.run(["test", "-e", "/dev/shm/segment"]).returncode == 1
    assert second.processes() == []


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


# The real launcher


@pytest.mark.slow  # test_watch_hosts.py starts it by hand on three hosts, test_restart.py ends a run well
def test_deepspeed_trains_on_two_hosts(lab3: Lab, tmp_path: Path, small_data: str) -> None:
    """`deepspeed --hostfile` over pdsh and ssh, one rank a host, ends with a checkpoint of both and no process."""
    first, second, _ = lab3.hosts
    recipe = write_recipe(tmp_path, small_data)
    command = ["deepspeed", "--hostfile", str(lab3.hostfile()), "--include", "node-1@node-2"]
    command += ["--master_addr", first.address, str(REPO / "launch/train.py"), "--config", str(recipe)]
    before = second.bytes()
    done = first.run(
        [*command, "--train.max_steps", "4", "--checkpoint.every_steps", "4"],
        env=environment(GLOO_SOCKET_IFNAME="eth0"),
        cwd=recipe.parent,
        timeout_s=400,  # a guard against a hang, not a claim
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = recipe.parent / "run"
    assert [row["step"] for row in rows(run) if "loss" in row][-1] == 4
    checkpoint = run / "checkpoints" / "step-00000004"
    assert {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"} <= {
        p.name for p in checkpoint.iterdir()
    }
    assert second.bytes()[0] - before[0] > 100_000  # the gradients went through the switch
    assert gone(first.processes() + second.processes(), 15)
