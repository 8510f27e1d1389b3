"""`llmtrain doctor` on a hostfile that names this machine: alone it needs no sshd, beside others it does."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.features import Expected
from llmtrain.features.doctor.checks import Needs
from llmtrain.features.doctor.fabric import Pair, too_slow
from tests.helpers.launching import REPO, free_port, write_recipe

NO_SSHD = """#!/bin/sh
[ "$1" = -G ] && exit 0
echo "$*" >> "$FAKE_FOLDER/asked"
echo "ssh: connect to host localhost port 22: Connection refused" >&2
exit 255
"""


OTHER_HOST = """#!/bin/sh
# A host whose shell sets nothing: the command is the last word.
[ "$1" = -G ] && exit 0
for word in "$@"; do :; done
exec env -i HOME="$HOME" PATH="$PATH" sh -c "$word"
"""


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """doctor(hostfile, ...) -> (report, exit code) on a machine without an sshd."""
    (tmp_path / "ssh").write_text(NO_SSHD)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def go(hostfile: str, *words: str) -> tuple[dict[str, Any], int]:
        (tmp_path / "hosts").write_text(hostfile)
        code = cli.main(["doctor", "--hostfile", "hosts", "--json", "--master-port", str(free_port()), *words])
        return json.loads(capsys.readouterr().out), code

    return go


def red(report: dict[str, Any]) -> set[str]:
    """The checks with a red cell, without those in which a busy test machine may be at fault itself."""
    return {f["check"] for f in report["findings"] if f["level"] == "red"} - {"memory", "disk", "shm"}


def test_the_ops_of_a_host_are_where_its_ranks_look(
    doctor: Any, tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TORCH_EXTENSIONS_DIR goes with a launch. A lock in the login shell's own folder was red."""
    (tmp_path / "ssh").write_text(OTHER_HOST)
    for folder in ("ours", ".cache/torch_extensions"):
        lock = tmp_path / folder / "cpu_adam/lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 3600, time.time() - 3600))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ours"))
    offload = ("--deepspeed", str(REPO / "ds_configs/zero3_offload.json"))
    words = ("--quick", "--config", str(write_recipe(tmp_path, small_data)), "--", *offload)
    report, _ = doctor("localhost slots=1\nnode-2 slots=1\n", *words)
    told = [found["what"] for found in report["findings"] if found["check"] == "ops" and "the lock" in found["what"]]
    locks = {re.findall(r"the lock (\S+)", what)[0] for what in told}
    assert locks == {str(tmp_path / "ours/cpu_adam/lock")}, report["findings"]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_a_single_machine_needs_no_sshd(doctor: Any, tmp_path: Path, small_data: str, name: str) -> None:
    recipe = write_recipe(tmp_path, small_data)
    (tmp_path / ".deepspeed_env").write_text("# DeepSpeed reads this file for other hosts only\n")
    report, code = doctor(f"{name} slots=2\n", "--config", str(recipe), "--build-ops")
    assert red(report) == set() and code == (0 if report["ok"] else 1), report["findings"]
    (host,) = report["hosts"]
    assert host["facts"]["python"]["executable"] == sys.executable
    assert (host["cells"]["ssh"], host["cells"]["python"], host["cells"]["config"]) == ("unknown", "ok", "ok")
    assert not (tmp_path / "asked").exists()
    assert not [finding["fix"] for finding in report["findings"] if "ssh" in finding["fix"]]


def test_beside_other_hosts_this_machine_is_asked_as_deepspeed_will(doctor: Any, tmp_path: Path) -> None:
    report, code = doctor("localhost slots=1\nnode-9 slots=1\n", "--quick")
    assert code == 1 and red(report) == {"ssh"}
    said = {(finding["host"], "through ssh" in finding["what"]) for finding in report["findings"]}
    assert ("localhost", True) in said and ("node-9", False) in said and ("node-9", True) not in said
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


def test_a_shard_that_is_gone_is_named_here_too(doctor: Any, tmp_path: Path, small_data: str) -> None:
    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    recipe = write_recipe(tmp_path, str(data))
    (data / "validation-00000.bin").unlink()
    report, code = doctor("localhost slots=2\n", "--quick", str(recipe))
    said = {finding["what"] for finding in report["findings"] if finding["check"] == "files"}
    assert code == 1 and said == {f"data.path: {data} lacks validation-00000.bin"}


def test_a_link_is_judged_by_what_the_run_sends(
    tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a feature expects of a rank, of which each host has two."""
    hosts, asked = tmp_path / "hosts", list[Needs]()
    hosts.write_text("a slots=2\nb slots=2\n")
    recipe = str(write_recipe(tmp_path, small_data))

    def preflight(_: Any, run: Needs, **__: Any) -> None:
        asked.append(run)
        raise SystemExit

    monkeypatch.setattr("llmtrain.features.doctor.command.preflight", preflight)
    for known in (None, Expected(tensors=1, sent_to_other_hosts=2.75e9, step_s={}, memory={})):
        monkeypatch.setattr("llmtrain.features.doctor.command.expected", lambda *_, known=known, **__: known)
        with pytest.raises(SystemExit):
            cli.main(["doctor", "--hostfile", str(hosts), recipe])
    assert [run.sent_bytes for run in asked] == [None, 5.5e9]
    slow, fast = (Pair(first="a", second="b", up=rate, down=rate) for rate in (20e6, 100e9))
    (red,) = too_slow([fast, slow], 5.5e9, 300.0)
    assert red.level == "red" and "20 Mbit/s" in red.what and "36m40s" in red.what, red.what
    (yellow,) = too_slow([fast, slow], 1e8, 300.0)
    assert yellow.level == "yellow" and "40.0s" in yellow.what, yellow.what
    assert not too_slow([fast], 5.5e9, 300.0) and not too_slow([slow], 1e6, 300.0)
    (alone,) = too_slow([slow], None, 0.0)
    assert alone.level == "yellow" and "4 GB" in alone.what and "26m40s" in alone.what
