"""doctor without a cluster: facts and measurements -> findings, the schedule of pairs, a table of 1,024 hosts."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llmtrain.base.child import read_marked
from llmtrain.base.rank import op_builds
from llmtrain.cluster import gpus
from llmtrain.cluster.hosts.hostfile import Host, read_hostfile
from llmtrain.cluster.hosts.ssh import Answer, Trouble
from llmtrain.cluster.launch import launchers
from llmtrain.features.doctor import checks, differences, fabric, preflight, probe, survey
from llmtrain.features.doctor import command as doctor
from llmtrain.features.doctor.checks import CHECKS, Finding, Folder, Survey
from llmtrain.features.doctor.fabric import (
    ALL_PAIRS_TO,
    SAMPLE,
    Pair,
    better,
    bits,
    groups,
    judge,
    rounds,
    without_doubt,
)
from llmtrain.features.doctor.preflight import WITHOUT_TERMINAL, Report, print_report

NAMES = ["node-1", "node-2", "node-3"]


def host_facts(number: int) -> dict[str, Any]:
    addresses = {f"node-{n}": f"10.0.0.{n}" for n in (1, 2, 3)}
    return {
        "python": {"executable": "/venv/bin/python", "version": "3.11.7", "machine": "x86_64"},
        "packages": {
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "transformers": "5.23.0",
            "cuda": "13.0",
            "nccl": "2.28",
        },
        "devices": {"count": 8, "nodes": 8, "names": ["NVIDIA H200"] * 8, "driver": "580.95.05", "cores": 96},
        "code": {"folder": True, "commit": "a" * 40, "changed": 0, "files": 100, "sum": "b" * 64},
        "config": {"/run.yaml": "c" * 64},
        "folders": {
            "/data": {"there": True, "lacks": 0, "missing": [], "locked": [], "marks": ["a", "b", "c"]},
            "/work/org/base": {"there": False, "lacks": 0, "missing": [], "locked": [], "marks": []},
        },
        "environment": {"NCCL_DEBUG": "WARN"},
        "disk": {"the run": {"path": "/run", "free": 1 << 40, "inodes": 10**6, "error": None}},
        "memory": {"total": 1 << 40, "free": 1 << 39},
        "shm": {"mounted": True, "total": 1 << 39, "free": 1 << 39, "left": {}},
        "limits": {"nofile": 65536, "memlock": None, "nproc": None, "root": False, "infiniband": True},
        "nonce": {},
        "ops": {"folder": "/x", "built": ["cpu_adam"], "locks": {}, "compiler": "c++", "ninja": "ninja"},
        "port": {"free": True} if number == 1 else {},
        "interfaces": {
            "lo": {"addresses": ["127.0.0.1"], "up": True, "speed": None},
            "eth0": {"addresses": [f"10.0.0.{number}"], "up": True, "speed": 10000},
            "docker0": {"addresses": ["172.17.0.1"] if number == 2 else [], "up": True, "speed": None},
        },
        "names": {"addresses": addresses, "hostname": f"node-{number}", "own": f"10.0.0.{number}"},
        "errors": {},
    }


def healthy(**changes: Any) -> Survey:
    hosts = tuple(Host(name=name, slots=8, devices=tuple(range(8)), line=i) for i, name in enumerate(NAMES, 1))
    about: dict[str, Any] = {
        "hosts": hosts,
        "python": "/venv/bin/python",
        "folder": "/work",
        "run_dir": "/run",
        "port": 29500,
        "folders": (
            Folder(key="data.path", path="/data", files=tuple(f"{index}.bin" for index in range(7))),
            Folder(key="model.pretrained", path="/work/org/base", on_hub=True),
        ),
        "ops": ("cpu_adam",),
        "facts": {name: host_facts(number) for number, name in enumerate(NAMES, 1)},
        "skew_s": dict.fromkeys(NAMES, (-0.3, 0.4)),
        "nonce": {"node-2": True, "node-3": True},
    }
    return Survey(**{**about, **changes})


def findings(given: Survey) -> list[Finding]:
    return [*checks.each_host(given), *differences.all_hosts(given)]


def test_hosts_that_are_alike_raise_no_alarm() -> None:
    assert findings(healthy()) == []


@pytest.mark.parametrize(
    ("path", "value", "check", "level", "says"),
    [
        ("python.executable", "/usr/bin/python3", "python", "red", "/venv/bin/python"),
        ("python.version", "3.10.2", "versions", "red", r"Python 3\.10\.2.*3\.11\.7"),
        ("packages.nccl", "2.21", "versions", "red", r"nccl 2\.21.*2\.28"),
        ("packages.deepspeed", None, "versions", "red", r"deepspeed.*0\.19\.8"),
        ("devices.driver", "550.1", "versions", "red", "driver 550.1"),
        ("devices.count", 7, "slots", "red", r"slots=8.*\b7 .*\b8 in /dev"),
        ("devices.names", ["NVIDIA A100"] * 8, "slots", "yellow", "NVIDIA A100.*NVIDIA H200"),
        ("environment.CUDA_VISIBLE_DEVICES", "0,1", "slots", "red", r"CUDA_VISIBLE_DEVICES.*\b2 .*\b8 .*slots=8"),
        ("code.folder", False, "code", "red", r"/work\b"),
        ("code.commit", "d" * 40, "code", "red", "dddddddddddd.*aaaaaaaaaaaa"),
        ("code.sum", "e" * 64, "code", "red", "llmtrain"),
        ("config./run.yaml", "cannot be read (No such file or directory)", "config", "red", "/run.yaml.*No such file"),
        ("config./run.yaml", "f" * 64, "config", "red", "/run.yaml.*checksum"),
        ("folders./data.there", False, "files", "red", "^data.path: /data "),
        ("folders./data.locked", ["0.bin"], "files", "red", r"^data.path: /data: 0\.bin "),
        ("folders./data.marks", ["a", "x", "c"], "files", "red", r"^data.path: /data .*: 3\.bin$"),
        ("folders./work/org/base.there", True, "files", "red", "org/base"),
        ("environment.NCCL_ALGO", "Ring", "env", "yellow", "NCCL_ALGO.*'Ring'"),
        ("environment.NCCL_DEBUG", "INFO", "env", "yellow", "NCCL_DEBUG.*'INFO'.*'WARN'"),
        ("disk.the run.free", 1 << 20, "disk", "red", "1 MiB .*/run"),
        ("disk.the run.free", 3 << 30, "disk", "yellow", "3 GiB .*/run"),
        ("disk.the run.inodes", 12, "disk", "red", r"\b12 .*/run"),
        (
            "disk.the run.error",
            "Permission denied",
            "run dir",
            "red",
            "/run .*Permission denied",
        ),
        ("memory.free", 1 << 30, "memory", "red", "1 GiB of 1 TiB .*slots=8"),
        ("shm.free", 64 << 20, "shm", "red", "64 MiB .*512 GiB.*slots=8 .*1 GiB"),
        ("shm.left", {"/dev/shm/x": 12 << 30}, "shm", "yellow", "12 GiB of /dev/shm"),
        ("limits.nofile", 256, "limits", "red", r"files.* 256 .*\b1024"),
        ("limits.memlock", 65536, "limits", "red", "memory.* 65536 .*unlimited"),
        ("limits.nproc", 1024, "limits", "red", "processes.* 1024"),
        ("ops.built", [], "ops", "yellow", "cpu_adam"),
        ("ops.locks", {"/x/cpu_adam/lock": 7200.0}, "ops", "red", "/x/cpu_adam/lock .*2h00m"),
        ("ops.locks", {"/x/py311/other/lock": 7200.0}, "ops", "yellow", "/x/py311/other/lock"),
        ("names.addresses.node-3", None, "name", "red", "node-3"),
        ("names.addresses.node-3", "10.0.0.99", "name", "red", r"node-3 .*10\.0\.0\.99.*10\.0\.0\.3"),
        ("names.own", "127.0.1.1", "interface", "yellow", r"gloo.*\blo\b"),
        ("environment.GLOO_SOCKET_IFNAME", "lo", "interface", "red", r"gloo.*\blo\b.*eth0"),
        ("environment.GLOO_SOCKET_IFNAME", "docker0", "interface", "yellow", "gloo.*docker0"),
        ("environment.NCCL_SOCKET_IFNAME", "ib", "interface", "red", "NCCL_SOCKET_IFNAME.*'ib'.*lo, eth0"),
        ("errors.memory", "no answer within 12 s", "memory", "red", "no answer within 12 s"),
    ],
)
def test_one_host_that_differs_is_named(path: str, value: Any, check: str, level: str, says: str) -> None:
    given = healthy()
    place = given.facts["node-2"]
    *folders, last = (
        path.split(".", 2) if path.startswith(("disk", "folders", "names.addresses")) else path.split(".", 1)
    )
    for folder in folders:
        place = place[folder]
    place[last] = value
    (found,) = findings(given)
    assert (found.host, found.check, found.level) == ("node-2", check, level)
    assert re.search(says, found.what), found.what
    assert found.fix and "node-1" not in found.fix


def test_what_is_not_facts() -> None:
    refused = healthy(troubles={"node-3": Trouble("refused", "node-3 is up, but", "systemctl start ssh")})
    assert [(f.host, f.check, f.fix) for f in findings(refused)] == [("node-3", "ssh", "systemctl start ssh")]
    skewed = healthy(skew_s={"node-1": (-0.2, 0.3), "node-2": (-95.0, -94.2), "node-3": (-20.0, 21.0)})
    (late,) = findings(skewed)  # of node-3 nothing is certain: it took long to answer
    assert (late.host, late.check) == ("node-2", "clock") and "1m34s" in late.what and "behind" in late.what
    (missing,) = findings(healthy(nonce={"node-2": True, "node-3": False}))
    assert (missing.host, missing.check, missing.level) == ("node-3", "shared", "red")
    apart = findings(healthy(nonce={"node-2": False, "node-3": False}))
    assert {(f.host, f.check, f.level) for f in apart} == {(name, "shared", "red") for name in ("node-2", "node-3")}
    taken = healthy()
    taken.facts["node-1"]["port"] = {"error": "Address already in use", "users": ""}
    assert [(f.host, f.check) for f in findings(taken)] == [("node-1", "port")]


def test_a_measurement_takes_no_port_that_a_launch_may_have_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(host: str, text: str, *_: Any, **__: Any) -> Answer:
        asked.append(text)
        return Answer(host, 0, "", "", 0.0, None)

    monkeypatch.setattr(fabric, "ask_python", ask)
    launches = range(*map(int, re.findall(r"range\((\d+), (\d+)\)", launchers._FACTS)[0]))
    for _ in range(50):
        fabric.measure_pairs(healthy(), [[("node-1", "node-2")]], 0.1)
    ports = {int(port) for text in asked for port in re.findall(r'"ports": \[(\d+), (\d+), (\d+)\]', text)[0]}
    assert len(ports) > 50 and not ports & set(launches) and max(ports) < 32768


def test_two_names_of_one_machine() -> None:
    given = healthy()
    given.facts["node-3"].update(copy.deepcopy(given.facts["node-2"]))
    for facts in given.facts.values():
        facts["names"]["addresses"]["node-3"] = "10.0.0.2"
    assert [(f.host, f.check) for f in findings(given)] == [("node-3", "name")]


def measured(hosts: int, seed: int = 0) -> list[Pair]:
    """A fabric of 10 Gbit/s whose measurements scatter by 20 %."""
    draw = random.Random(seed)
    found = []
    for first in range(hosts):
        for second in range(first + 1, hosts):
            rate = [10e9 * draw.uniform(0.8, 1.2) for _ in range(2)]
            names = {"first": f"node-{first}", "second": f"node-{second}"}
            both = [each * draw.uniform(0.85, 1.0) for each in rate]
            found.append(
                Pair(
                    **names,
                    trip_s=2e-4 * draw.uniform(0.8, 1.5),
                    up=rate[0],
                    down=rate[1],
                    both_up=both[0],
                    both_down=both[1],
                )
            )
    return found


def changed(pairs: list[Pair], hosts: set[str], most: int = 2, **factors: float) -> list[Pair]:
    """Pairs of which both ends, or one if `most` is 1, are among the hosts, with their values multiplied."""
    return [
        Pair(**{**vars(p), **{name: getattr(p, name) * factor for name, factor in factors.items()}})
        if len({p.first, p.second} & hosts) >= most
        else p
        for p in pairs
    ]


SLOWER = dict.fromkeys(("up", "down", "both_up", "both_down"), 0.1)
HALVED = dict.fromkeys(("both_up", "both_down"), 0.5)


@pytest.mark.parametrize("hosts", [3, 4, 16])
def test_the_network_is_judged_against_the_others(hosts: int) -> None:
    for seed in range(20):
        pairs = measured(hosts, seed)
        assert judge(pairs) == []
        (slow,) = judge(slower := changed(pairs, {"node-1"}, most=1, **SLOWER))
        best = max(pair.rate for pair in slower if "node-1" in (pair.first, pair.second))
        assert slow.host == "node-1" and bits(best) in slow.what
        (pair,) = judge(changed(pairs, {"node-0", "node-2"}, **SLOWER))
        (one_way,) = judge(changed(pairs, {"node-0", "node-2"}, down=0.1, both_down=0.1))
        assert all(finding.host == "node-0" and "node-2" in finding.what for finding in (pair, one_way))
        (half,) = judge(changed(pairs, {"node-2"}, most=1, **HALVED))
        assert judge(changed(pairs, {"node-2"}, most=1, **HALVED, idle=0.05)) == []  # the processors' fault
        assert half.host == "node-2" and "duplex" in half.what and "slow" not in half.what
        (late,) = judge(changed(pairs, {"node-1"}, most=1, trip_s=40.0))
        assert late.host == "node-1" and " ms" in late.what and "bit/s" not in late.what
        (far,) = judge(changed(pairs, {"node-0", "node-1"}, trip_s=40.0))
        assert far.host == "node-0" and "node-1" in far.what and " ms" in far.what and "bit/s" not in far.what


def test_a_pair_that_cannot_be_measured_is_red() -> None:
    (broken,) = judge([Pair(first="a", second="b", error="timed out"), *measured(3)])
    assert (broken.host, broken.level) == ("a", "red") and re.search(r"\bb: timed out$", broken.what)


def test_a_busy_moment_is_forgiven() -> None:
    busy = changed(measured(3), {"node-1"}, most=1, **SLOWER)
    assert judge(busy) and judge(better(busy, measured(3, seed=1))) == []
    still = better(busy, changed(measured(3, seed=1), {"node-1"}, most=1, **SLOWER))
    assert [f.host for f in judge(still)] == ["node-1"]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 64])
def test_every_pair_once_and_no_host_twice_in_a_round(count: int) -> None:
    hosts = [f"n{i}" for i in range(count)]
    plan = rounds(hosts)
    for each in plan:
        names = [name for pair in each for name in pair]
        assert len(names) == len(set(names))
    pairs = [frozenset(pair) for each in plan for pair in each]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert len(plan) <= count


def test_more_than_64_hosts_are_sampled() -> None:
    hosts = [f"n{i}" for i in range(1000)]
    found = groups(hosts)
    assert sorted(name for group in found for name in group) == sorted(hosts)
    assert max(map(len, found)) <= ALL_PAIRS_TO
    met = [pair for group in found for each in rounds(group, SAMPLE) for pair in each]
    taking_part = {name: sum(name in pair for pair in met) for name in hosts}
    assert min(taking_part.values()) >= SAMPLE - 1 and max(taking_part.values()) <= SAMPLE


def test_a_thousand_hosts_stay_readable(tmp_path: Path) -> None:
    """The file is read, the hosts compared and the table printed; equal hosts share a line."""
    path = tmp_path / "hosts"
    path.write_text("".join(f"node-{n:04d} slots=8\n" for n in range(1, 1025)))
    started = time.process_time()
    hosts = read_hostfile(path)
    facts = {}
    addresses = {host.name: f"10.1.{n >> 8}.{n & 255}" for n, host in enumerate(hosts)}
    for host in hosts:
        one = host_facts(1)
        one["interfaces"]["eth0"]["addresses"] = [addresses[host.name]]
        one["names"].update(addresses=addresses, hostname=host.name, own=addresses[host.name])
        facts[host.name] = one
    for name in ("node-0007", "node-0500", "node-0501"):
        facts[name]["shm"]["free"] = 1 << 20
    given = healthy(hosts=hosts, facts=facts, skew_s={}, nonce={})
    made = Report(survey=given, findings=tuple(findings(given)), checked=frozenset(CHECKS) - {"fabric"}, elapsed_s=9.0)
    console = Console(width=WITHOUT_TERMINAL, record=True, file=io.StringIO())
    print_report(made, console)
    elapsed_s = time.process_time() - started
    text = console.export_text()
    assert len(text.splitlines()) < 14, text
    assert re.search(r"^ *red +shm: node-\[0007,0500-0501\]: .*1 MiB", text, re.M), text
    assert re.search(r"^ node-\[0002-0006,", text, re.M) and "1020" in text, text
    assert text.count("fix:") == 1 and "mount -o remount" in text and re.search(r"\b1024 hosts\b.*\b3\b", text)
    assert elapsed_s < 20, elapsed_s  # a million addresses are compared: 2 s on a machine that has nothing else to do


def test_a_narrow_terminal_shows_what_is_not_in_order() -> None:
    given = healthy()
    given.facts["node-2"]["shm"]["free"] = 1 << 20
    made = Report(survey=given, findings=tuple(findings(given)), checked=frozenset(CHECKS), elapsed_s=1.0)
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(made, console)
    text = console.export_text()
    assert re.search(r"^ node-2 +FAIL *$", text, re.M) and re.search(r"^ node-1 +ok *$", text, re.M), text
    assert "name, ssh, python" in text  # the checks that found nothing


def probed(folder: Path, environment: dict[str, str], **asked: Any) -> tuple[dict[str, Any], str]:
    """(the probe's facts, all that it prints), as on a host: through standard input, without our packages."""
    questions = {
        "packages": [],
        "folder": str(folder),
        "package": str(folder),
        "files": [],
        "variables": [],
        "folders": {},
        "hosts": ["localhost"],
        "first": "localhost",
        "host": "localhost",
        "port": 0,
        "nonce": "x",
        "nonce_path": "/nope",
        "nonce_writer": None,
        **asked,
    }
    text = survey.program(Path(probe.__file__), questions, Path(gpus.__file__), Path(op_builds.__file__))
    text = text.replace('INFINIBAND = "/sys/class/infiniband"', f'INFINIBAND = "{folder}/infiniband"')
    done = subprocess.run(
        [sys.executable, "-S", "-"],
        input=text,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        text=True,
        capture_output=True,
        timeout=60,
    )
    facts = read_marked(done.stdout, probe.MARK)
    assert facts is not None and facts["errors"] == {}, done.stderr
    return facts, done.stdout


def test_the_probe_answers_from_a_bare_python(tmp_path: Path) -> None:
    """No package of ours is imported; a secret's value stays there."""
    names = [f"{index:03d}.bin" for index in range(200)]
    (tmp_path / "data").mkdir()
    for name in names[:-1]:
        (tmp_path / "data" / name).write_bytes(bytes(5 << 20) if name == "000.bin" else name.encode())
    folders = {"folders_read": {str(tmp_path / "data"): names, "/nope": []}}
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the folder was imported')")
    found, printed = probed(
        tmp_path,
        {"WANDB_API_KEY": "hunter2hunter2", "WANDB_MODE": "x"},
        packages=["rich", "no-such-package"],
        files=["/nope"],
        variables=["WANDB_"],
        folders={"the run": str(tmp_path / "not/yet")},
        hosts=["localhost", "no.invalid"],
        **folders,
    )
    assert found["folders"]["/nope"]["there"] is False
    data = found["folders"][str(tmp_path / "data")]
    assert (data["there"], data["lacks"], data["missing"], len(data["marks"])) == (True, 1, ["199.bin"], 64)
    with (tmp_path / "data" / "000.bin").open("r+b") as file:  # a large file of the same size with another end
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    (tmp_path / "data" / "150.bin").write_bytes(b"150.bi")  # another size
    again = probe.look_folders(folders)[str(tmp_path / "data")]
    assert [at for at, mark in enumerate(again["marks"]) if mark != data["marks"][at]] == [0, 150 * 64 // 200]
    assert found["environment"]["WANDB_MODE"] == "x" and found["environment"]["WANDB_API_KEY"].startswith("secret ")
    assert "hunter2" not in printed
    assert found["config"] == {"/nope": "cannot be read (No such file or directory)"}
    assert found["names"]["addresses"]["localhost"] == "127.0.0.1" and found["names"]["addresses"]["no.invalid"] is None
    assert "127.0.0.1" in found["interfaces"]["lo"]["addresses"]
    assert found["disk"]["the run"]["error"] is None and {each.name for each in tmp_path.iterdir()} == {
        "data",
        "json.py",
    }
    assert json.dumps(found)


def test_json_has_every_cell() -> None:
    given = healthy(nonce={"node-2": True, "node-3": False})
    found = tuple(findings(given))
    made = Report(survey=given, findings=found, checked=frozenset(CHECKS) - {"fabric"}, elapsed_s=1.0)
    told = json.loads(json.dumps(made.as_json()))
    assert not told["ok"] and told["findings"][0]["fix"]
    cells = {host["name"]: host["cells"] for host in told["hosts"]}
    assert cells["node-3"]["shared"] == "red" and cells["node-2"]["shared"] == "ok"
    assert cells["node-1"]["fabric"] == "unknown" and set(cells["node-1"]) == set(CHECKS)
    assert [host["interface"] for host in told["hosts"]] == ["eth0"] * 3
    assert made.address == "10.0.0.1"


def test_doctor_misses_pdsh_before_launch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """doctor said "all in order", and `launch` on the same hosts that there is no pdsh."""
    (tmp_path / "hosts").write_text("".join(f"{name} slots=8\n" for name in NAMES))
    made = Report(survey=healthy(), findings=(), checked=frozenset(CHECKS) - {"fabric"}, elapsed_s=1.0)
    monkeypatch.setattr(doctor, "preflight", lambda *_, **__: made)
    monkeypatch.setattr(preflight, "deepspeed_env_problems", list)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["--hostfile", str(tmp_path / "hosts"), "--quick"]
    assert doctor.main(words) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "`pdsh`" in told and "apt-get install pdsh" in told
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # srun may start them
    assert doctor.main(words) == 0 and "--launcher slurm" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(preflight.shutil, "which", lambda name: "/usr/bin/pdsh")
    assert doctor.main(words) == 0 and "pdsh" not in capsys.readouterr().out


def test_an_all_reduce_speaks_for_the_hosts_that_took_part_in_it_alone() -> None:
    """Of more than 64 hosts so many take part: a blocked pair beside them may be what stops the run."""
    blocked = [Pair(first="a", second=second, up=0, down=0, error="refused") for second in ("b", "c")]
    found = without_doubt(judge(blocked), ["a", "b", "d"])
    assert [each.level for each in found] == ["yellow", "red"]
