"""Environment variables on their way to other hosts: which travel, what arrives, what nobody else may see."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.messages import load_secrets
from llmtrain.cluster.hosts import variables
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.hosts.variables import Travel, deliver, for_pdsh, travelling
from llmtrain.cluster.launch.placement import Placement, command, environment

SEED = 20261121
SECRET = "canary-9f3a7c11"
# ssh for pdsh and for us: a shell in a home of its own for each host, and a record of every command line.
FAKE = r"""#!/bin/bash
printf '%s\n' "$*" >> "$FAKE_FOLDER/asked"
while [[ $1 == -* && $1 != -- ]]; do case $1 in -o|-p|-l) shift 2;; *) shift;; esac; done
[ "$1" = -- ] && shift
host=$1; shift
[ "$host" = dead ] && { echo "ssh: connect to host dead port 22: Connection refused" >&2; exit 255; }
exec env -i PATH="$PATH" FAKE_FOLDER="$FAKE_FOLDER" HOME="$FAKE_FOLDER/home-$host" bash -c "$*"
"""
PAYLOADS = (
    *("$(touch canary)", "`touch canary`", "; touch canary;", "&& touch canary", "|touch canary", "$HOME", "${PATH}"),
    *("a b", "  a  ", "\t", "", "'", '"', "\\", '\\"', "a'b\"c`d$e", "%h%n%u%%", "100%", "~", "~/x", "*", "?", "[a]"),
    *("{a,b}", "!", "!!", "#", "a#b", " # c", "-n", "--", "=", "a=b", "é", "日本", "\u2028", "\xa0", "\x7f", "\x01"),
    *("x" * 3000, "=mlx5_0", "<canary", ">canary", "&", "a\\", '"$(touch canary)"', "';touch canary;'", "\x1b[0m"),
    *("\x0b", "\x0c", "\x1c", "\x85"),
)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: `asked` holds ssh's command lines, home-NAME is the home on host NAME."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE)
    (folder / "ssh").chmod(0o755)
    for name in ("a", "b"):
        (folder / f"home-{name}").mkdir()
    monkeypatch.setenv("FAKE_FOLDER", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_allow_list_decides_and_secrets_go_privately():
    environ = {
        "WANDB_PROJECT": "p",
        "HF_HOME": "/d",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "https_proxy": "http://p:1",
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": SECRET,
        "HTTP_PROXY": "http://me:pw@p:1",
        "WANDB_NOTES": "two\nlines",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/x",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/b",
        "WANDB_SERVICE": "1",
        "LLMTRAIN_SECRETS": "/old",
    }
    travel = travelling(environ, {"MY_SETTING": "1", "MY_PASSWORD": SECRET, "NCCL_DEBUG": "WARN"})
    assert travel.open == {
        "WANDB_PROJECT": "p",
        "HF_HOME": "/d",
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "4",
        "https_proxy": "http://p:1",
        "MY_SETTING": "1",
    }
    assert set(travel.private) == {"WANDB_API_KEY", "HF_TOKEN", "HTTP_PROXY", "WANDB_NOTES", "MY_PASSWORD"}


def test_what_cannot_travel_is_refused_by_name():
    with pytest.raises(ConfigError) as refused:
        travelling({"PYTHONSTARTUP": "a\nb", "WANDB_A-B": "1", "PYTHON_API_KEY": SECRET})
    text = str(refused.value)
    assert all(f"{name}: " in text for name in ("PYTHONSTARTUP", "'WANDB_A-B'", "PYTHON_API_KEY"))
    assert SECRET not in text


def launched(folder: Path, variables: dict[str, str], words: list[str]) -> tuple[dict[str, str], list[str]]:
    """What a process gets through the real pdsh and a host's shell."""
    show = folder / "show.sh"
    show.write_text(
        f'#!/bin/bash\n{shutil.which("env")} -0 > "$FAKE_FOLDER/env"\nprintf "%s\\0" "$@" > "$FAKE_FOLDER/argv"\n'
    )
    show.chmod(0o755)
    given = Placement(
        hosts=(Host(name="a", slots=1, devices=(0,), line=1),),
        words=tuple(words),
        travel=Travel(open=variables, private={}),
    )
    argv = command(given, "a", 1)
    python = for_pdsh(sys.executable)
    assert argv[-1].count(f" {python} -u -m ") == 1
    argv[-1] = argv[-1].replace(f" {python} -u -m ", f" {for_pdsh(str(show))} -u -m ")
    subprocess.run(argv, env=environment(given, os.environ), check=True, timeout=20)
    pairs = (
        item.partition("=") for item in (folder / "env").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    )
    got = (folder / "argv").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
    return {name: value for name, _, value in pairs}, got[got.index("train") + 1 :]


@pytest.mark.skipif(not shutil.which("pdsh"), reason="pdsh is not installed: apt-get install pdsh")
def test_every_byte_arrives_through_pdsh(hosts):
    every = [bytes([b]).decode("utf-8", "surrogateescape") for b in range(1, 256)]
    mixed = [a + b for a in PAYLOADS[:12] for b in PAYLOADS[12:30]]
    values = {
        f"WANDB_V{i}": value for i, value in enumerate((*every, *("x" + c + "y" for c in every), *PAYLOADS, *mixed))
    }
    travel = travelling(values)
    assert len(travel.open) > 500 and all(re.search("[\r\n\udc80-\udcff]", v) for v in travel.private.values())
    for number in range(0, len(travel.open), 300):  # the kernel's limit for one command line
        some = dict(list(travel.open.items())[number : number + 300])
        words = [v for v in [*PAYLOADS, *every, *mixed] if len(v) < 100][number // 2 : number // 2 + 300]
        got, argv = launched(hosts, some, words)
        assert {name: got.get(name) for name in some} == some
        assert argv == words
    path = deliver(["a", "b"], travel.private)
    for host in ("a", "b"):
        loaded = load_in(hosts / f"home-{host}", path)
        assert {n: loaded.get(n) for n in travel.private} == travel.private
    assert not list(hosts.parent.rglob("canary")), "something ran"


def load_in(home: Path, path: str) -> dict[str, str]:
    """The environment after `load_secrets` in a process that has this home."""
    code = (
        "import os; from llmtrain.base.rank.messages import load_secrets; load_secrets(); "
        "os.write(1, b'\\0'.join(name + b'=' + value for name, value in os.environb.items()))"
    )
    environ = {"HOME": str(home), "LLMTRAIN_SECRETS": path, "PATH": os.environ["PATH"]}
    shown = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True).stdout
    items = (i.partition("=") for i in shown.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, _, value in items}


def test_secrets_arrive_in_a_file_that_only_the_user_can_read(hosts):
    path = deliver(["a", "b"], {"WANDB_API_KEY": SECRET, "HF_TOKEN": "two\nlines"})
    for host in ("a", "b"):
        folder = hosts / f"home-{host}/.llmtrain/secrets"
        (file,) = folder.iterdir()
        assert path == f"~/.llmtrain/secrets/{file.name}"
        assert [stat.S_IMODE(p.stat().st_mode) for p in (folder.parent, folder, file)] == [0o700, 0o700, 0o600]
        loaded = load_in(hosts / f"home-{host}", path)
        assert (loaded["WANDB_API_KEY"], loaded["HF_TOKEN"]) == (SECRET, "two\nlines")
    assert SECRET not in (hosts / "asked").read_text(), "a secret in a command line"
    assert variables.remove(["a", "b", "dead"], path) == ["dead"]
    assert not list((hosts / "home-a/.llmtrain/secrets").iterdir())


def test_hosts_that_share_a_home_do_not_spoil_each_others_file(hosts):
    for name in ("c", "d", "e", "f"):
        (hosts / f"home-{name}").symlink_to(hosts / "home-a")
    path = deliver(["a", "c", "d", "e", "f"], {"HF_TOKEN": "x" * 100_000})
    assert load_in(hosts / "home-a", path)["HF_TOKEN"] == "x" * 100_000
    assert len(list((hosts / "home-a/.llmtrain/secrets").iterdir())) == 1


def test_what_a_killed_launch_left_is_removed_by_the_next(hosts):
    old = hosts / "home-a" / deliver(["a"], {"HF_TOKEN": SECRET}).removeprefix("~/")
    os.utime(old, (time.time() - 3 * 86400,) * 2)
    new = hosts / "home-a" / deliver(["a"], {"HF_TOKEN": SECRET}).removeprefix("~/")
    assert new.exists() and not old.exists()


def test_a_host_that_does_not_take_secrets_is_named_and_none_keeps_them(hosts):
    (hosts / "home-b/.llmtrain").write_text("in the way")
    with pytest.raises(ConfigError) as refused:
        deliver(["a", "b", "dead"], {"WANDB_API_KEY": SECRET})
    text = str(refused.value)
    assert all(words in text for words in ("2 of 3 hosts", "dead: ", "no sshd", "b: mkdir")) and SECRET not in text
    assert not list((hosts / "home-a/.llmtrain/secrets").iterdir())


def test_a_secrets_file_that_others_could_touch_is_refused(tmp_path, monkeypatch, capsys):
    file = tmp_path / "s"
    file.write_bytes(b"LLMTRAIN_CANARY=1\0")
    monkeypatch.delenv("LLMTRAIN_CANARY", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for path, mode, told in (
        (file, 0o644, "mode 0600, not -rw-r--r--"),
        (tmp_path / "link", 0o600, "Too many levels of symbolic links"),
        (tmp_path / "gone", 0o600, "No such file"),
        (tmp_path, 0o600, "plain file"),
    ):
        file.chmod(mode)
        if path.name == "link":
            path.symlink_to(file)
        monkeypatch.setenv("LLMTRAIN_SECRETS", str(path))
        assert cli.main(["train", "--config", "nowhere.yaml"]) == 2
        errors = capsys.readouterr().err
        assert told in errors and "LLMTRAIN_SECRETS=" in errors and "launch" in errors
        assert "LLMTRAIN_CANARY" not in os.environ
    monkeypatch.delenv("LLMTRAIN_SECRETS")
    assert load_secrets() == []
