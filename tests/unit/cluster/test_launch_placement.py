"""What `llmtrain launch` would start: command, environment, ranks; the command line's own mistakes."""

from __future__ import annotations

import base64
import json
import os
import resource
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.variables import travelling
from llmtrain.cluster.launch import host as starter
from llmtrain.cluster.launch.placement import HOST, Placement, check, command, environment, threads
from llmtrain.commands.launch import main as launch
from tests.helpers.launching import REPO

RECIPE = """
deepspeed: {repo}/ds_configs/zero1_fp32.json
model: {{config: {{model_type: llama, vocab_size: 512}}}}
data: {{path: {folder}, sequence_length: 32}}
train: {{global_batch: 16384, micro_batch: 2, max_steps: 4}}
"""


def host(name: str, *devices: int) -> Host:
    return Host(name=name, slots=len(devices), devices=devices, line=1)


def placement(*hosts: Host, words: tuple[str, ...] = (), variables: dict[str, str] | None = None) -> Placement:
    return Placement(hosts=hosts, words=words, travel=travelling(variables or {}))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.format(repo=REPO, folder=data))
    return path


def test_a_thousand_hosts_are_planned_in_two_seconds(recipe: Path) -> None:
    hosts = [f"node-{number:04}" for number in range(1024)]
    Path("hosts").write_text("".join(f"{name} slots=8\n" for name in hosts))
    words = [sys.executable, "-m", "llmtrain", "launch", "--hostfile", "hosts", "--dry-run", "--", str(recipe)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(REPO), "WANDB_API_KEY": "correct-horse-battery", "NCCL_DEBUG": "INFO"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time: other work of the machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 2.0
    lines = done.stdout.splitlines()
    assert lines[0] == "1024 hosts, 8192 ranks"
    assert [line.split()[0] for line in lines[1:1025]] == hosts
    assert lines[1024].split() == ["node-1023", "ranks", "8184", "to", "8191", "devices", "0-7"]
    assert "NCCL_DEBUG" in done.stdout and "correct-horse" not in done.stdout
    private = next(line for line in lines if "mode 0600" in line)
    assert private.endswith(": WANDB_API_KEY")


def test_several_hosts_go_through_pdsh_and_arguments_are_quoted_for_its_shell() -> None:
    word = "a 'b' \"c\" $(touch x); %h"
    words = ("--config", "r.yaml", "--tracking.name", word)
    made = command(placement(host("a", 0, 1), host("b", 2, 3), words=words), "10.0.0.1", 7)
    assert made[:-1] == ["pdsh", "-S", "-f", "2", "-w", "a,b"]
    # What pdsh makes of it on the second host, and a shell reads.
    line = made[-1].replace("%n", "1").replace("%%", "%").replace("&& env", "&& printf '%s\\0'")
    read = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert read[1:4] == [sys.executable, "-u", "-m"] and read[4] == HOST
    given = starter._arguments(read[5:])
    assert json.loads(base64.urlsafe_b64decode(given.world_info)) == {"a": [0, 1], "b": [2, 3]}
    assert (given.node_rank, given.master_addr, given.master_port) == (1, "10.0.0.1", "7")
    assert given.words == ["llmtrain", "train", *words] and not given.verbose


def test_one_host_that_is_not_here_is_not_taken_for_this_machine() -> None:
    elsewhere = placement(host("far-away.invalid", 0))
    assert not elsewhere.alone and command(elsewhere, "10.0.0.9", 7)[0] == "pdsh"
    for name in ("localhost", socket.gethostname()):
        here = placement(host(name, 0, 1), words=("--tracking.name", "$(x) %h"))
        made = command(here, "127.0.0.1", 7)
        assert here.alone and made[0] == sys.executable and made[-1] == "$(x) %h"
        assert "--master_addr=127.0.0.1" in made


def test_secrets_stay_out_of_the_launchers_environment_unless_it_starts_the_ranks_itself() -> None:
    variables = {"WANDB_API_KEY": "correct-horse", "NCCL_DEBUG": "INFO"}
    several = environment(placement(host("a", 0), host("b", 0), variables=variables), {**variables, "HOME": "/root"})
    assert "WANDB_API_KEY" not in several and several["HOME"] == "/root" and several["PDSH_RCMD_TYPE"] == "ssh"
    for option in ("BatchMode=yes", "ServerAliveInterval=", "ConnectTimeout="):
        assert option in several["PDSH_SSH_ARGS_APPEND"]
    mine = environment(placement(host("a", 0), host("b", 0)), {"PDSH_SSH_ARGS_APPEND": "-p 2222"})
    assert shlex.split(mine["PDSH_SSH_ARGS_APPEND"])[:2] == ["-p", "2222"]
    alone = environment(placement(host("localhost", 0), variables=variables), {})
    assert alone["WANDB_API_KEY"] == "correct-horse"


def test_threads_are_shared_out_on_the_fullest_host() -> None:
    both = placement(host("a", 0, 1), host("b", 0, 1, 2, 3))
    assert threads(both, {"a": 64, "b": 64}) == 16
    assert threads(both, {"a": 2, "b": 2}) == 1


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'a\\nb'"):
        check(placement(host("a", 0), host("b", 0), words=("--tracking.name", "a\nb")))
    check(placement(host("localhost", 0), words=("--tracking.name", "a\nb")))


def test_more_hosts_than_a_command_can_name_are_refused() -> None:
    """Linux takes 128 KiB in one argument: the hosts of a small job would start, and those of a large one would not."""
    hosts = [host(f"node-{number:04}", *range(8)) for number in range(2600)]
    variables = {"NCCL_DEBUG": "INFO", "HF_HOME": 'a "b" $c'}
    words = ("--config", "r.yaml", "--tracking.name", "a name, 'quoted'")
    for count in (2, 100, 2300):
        check(placement(*hosts[:count], words=words, variables=variables))
    large = placement(*hosts, words=words, variables=variables)
    assert len(command(large, "10.0.0.1", 29500)[-1]) > 131071 - 512
    with pytest.raises(ConfigError, match=r"(?s)2600.*131071.*--launcher slurm"):
        check(large)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--dry-run -- run.yaml --train.global_batch 7", r"world size 2 \(the hosts' slots\)"),
        ("--hostfile hosts", "no run: write"),
        ("--hostfile hosts --min-hosts 3 --dry-run -- run.yaml", "--min-hosts"),
        ("--hostfile hosts --max-restarts -1 --dry-run -- run.yaml", "--max-restarts"),
        ("--hostfile hosts --launcher slurm --dry-run -- run.yaml", "--hostfile out"),
        ("--hostfile hosts --include c --dry-run -- run.yaml", "'c' is not in the hostfile"),
        ("--hostfile hosts --dry-run -- run.yaml --train.global_batch 7", r"world size 2 \(the hosts' slots\)"),
        ("--hostfile hosts --env-file hosts --dry-run -- run.yaml", "hosts"),
        ("--hostfile nowhere --dry-run -- run.yaml", "nowhere"),
    ],
)
def test_mistakes_on_the_command_line(recipe: Path, words: str, said: str) -> None:
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    with pytest.raises(ConfigError, match=said):
        launch(words.split())
