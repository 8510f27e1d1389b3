"""doctor's look at GPUs, NVLinks and InfiniBand ports, and the all-reduce over all of them. No GPU is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cluster import gpus
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.features.doctor import all_reduce, checks, fabric
from llmtrain.features.doctor.checks import Finding, Survey
from tests.features.doctor.test_doctor_checks import healthy, probed
from tests.helpers import gpu_texts as texts
from tests.helpers.launching import free_port

LINKS = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
LINKS += "GPU 1: NVIDIA H200 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: {}\n"


def with_gpus(slots: int = 2, links: str = "26.562 GB/s", xids: tuple[str, ...] = (), **changed: str) -> Survey:
    """Three hosts of two GPUs, of which the second GPU of the second host differs."""
    given = healthy(
        hosts=tuple(Host(name=f"node-{n}", slots=slots, devices=tuple(range(slots)), line=n) for n in (1, 2, 3))
    )
    for name, facts in given.facts.items():
        odd = name == "node-2"
        report = gpus.read_report(texts.report(**(changed if odd else {})))
        facts["gpus"] = {
            "report": [{"bus": bus, **gpu} for bus, gpu in report.items()],
            "links": gpus.read_links(LINKS.format(links if odd else "26.562 GB/s")),
            "xids": list(xids) if odd else [],
        }
    return given


def found(given: Survey) -> list[Finding]:
    return checks.all_gpus(given)


def test_gpus_in_order_raise_no_alarm() -> None:
    assert found(with_gpus()) == [] and found(healthy()) == []


def test_an_nvidia_smi_without_an_answer_is_red() -> None:
    """It hangs where a GPU has fallen off the bus; a machine that has the program and no GPU is left alone."""
    given = with_gpus()
    given.facts["node-2"]["gpus"] = {"report": [], "links": [], "xids": []}
    (finding,) = found(given)
    assert (finding.host, finding.level) == ("node-2", "red") and "nvidia-smi" in finding.what
    given.facts["node-2"]["devices"]["nodes"] = 0
    assert found(given) == []


@pytest.mark.parametrize(
    ("changed", "level", "says", "fix"),
    [
        ({"DRAM_Uncorrectable": "2"}, "red", "2 uncorrectable ECC", "--exclude node-2:1"),
        ({"Remapping_Failure": "Yes"}, "red", "could not be replaced", "nvidia-smi --gpu-reset -i 1"),
        ({"State": "In Progress"}, "red", "state In Progress", "fabricmanager"),
        ({"Status": "Insufficient Resources"}, "red", "status Insufficient Resources", "fabricmanager"),
        ({"Current": "Enabled"}, "red", "MIG is on", "-mig 0"),
        ({"Used": "60000 MiB"}, "yellow", "58.59 GiB of 140.4 GiB", "nvidia-smi"),
        ({"Used": "90000 MiB"}, "red", "87.89 GiB of 140.4 GiB", "nvidia-smi"),
    ],
)
def test_a_gpu_that_is_not_in_order_is_named(changed: dict[str, str], level: str, says: str, fix: str) -> None:
    (finding,) = found(with_gpus(**changed))
    assert (finding.host, finding.check, finding.level) == ("node-2", "gpus", level)
    assert finding.what.startswith("GPU 1 (00000000:2A:00.0): ") and says in finding.what and fix in finding.fix
    assert found(with_gpus(slots=1, **changed)) == [], "the hostfile gives that GPU to no rank"


def test_mig_leaves_one_rank_a_single_instance() -> None:
    given = with_gpus(slots=1)
    given.facts["node-2"]["gpus"]["report"][0]["MIG Mode"] = {"Current": "Enabled"}
    assert [(f.level, f.check) for f in found(given)] == [("yellow", "gpus")]


def test_processes_on_a_gpu_are_named() -> None:
    text = texts.report().replace("    Processes                             : None\n", "", 1)
    listed = """    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4711
            Type                          : C
            Name                          : python
            Used GPU Memory               : 520 MiB
        Process ID                        : 900
            Type                          : G
            Name                          : Xorg
            Used GPU Memory               : 20 MiB
"""
    first, second = gpus.read_report(text.replace("GPU 00000000:2A", listed + "GPU 00000000:2A")).values()
    assert first["Processes"]["Process ID"] == ["4711", "900"] and second["Processes"] == "None"
    given = with_gpus()
    given.facts["node-2"]["gpus"]["report"][0] = {"bus": "x", **first}
    (finding,) = found(given)
    assert finding.level == "yellow" and "4711" in finding.what and "900" not in finding.what


def test_a_link_that_is_down_and_the_kernels_log() -> None:
    (link,) = found(with_gpus(links="<inactive>"))
    assert (link.host, link.level) == ("node-2", "red") and "GPU 1: 1 NVLink" in link.what
    (log,) = found(with_gpus(xids=(texts.xid(31), texts.xid(79), texts.xid(79))))
    assert (log.host, log.level) == ("node-2", "yellow")
    assert re.search("Xid 79 .*0000:18:00.*Xid 31", log.what)


def port(state: str = "ACTIVE", rate: float = 400.0, physical: str = "LinkUp") -> dict[str, Any]:
    return {"state": state, "rate_gbit": rate, "physical": physical, "layer": "InfiniBand"}


@pytest.mark.parametrize(
    ("ports", "level", "says"),
    [
        ({"mlx5_0/1": port(), "mlx5_1/1": port("INIT")}, "yellow", "mlx5_1/1 .*INIT"),
        (
            {"mlx5_0/1": port(), "mlx5_1/1": port(rate=100.0)},
            "yellow",
            "mlx5_1/1 .*100 Gbit/s.*400",
        ),
        ({"mlx5_0/1": port("DOWN", physical="Polling")}, "red", r"\b1 InfiniBand"),
        ({"mlx5_0/1": port(), "mlx5_1/1": port("DOWN", physical="Disabled")}, "", ""),
    ],
)
def test_infiniband_ports(ports: dict[str, Any], level: str, says: str) -> None:
    given = with_gpus()
    for name, facts in given.facts.items():
        facts["infiniband"] = ports if name == "node-2" else {"mlx5_0/1": port(), "mlx5_1/1": port()}
    findings = found(given)
    assert [(f.host, f.check, f.level) for f in findings] == ([("node-2", "interface", level)] if level else [])
    assert all(re.search(says, f.what) for f in findings)


def test_the_probe_asks_nvidia_smi_and_sysfs(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(
        '#!/bin/sh\ncase "$1" in -q) cat report;; nvlink) cat links;; *) exit 1;; esac\n'
    )
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "report").write_text(texts.report(DRAM_Uncorrectable="2"))
    (tmp_path / "links").write_text(LINKS.format("<inactive>"))
    folder = tmp_path / "infiniband/mlx5_0/ports/1"
    folder.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}.items():
        (folder / name).write_text(text + "\n")
    (folder / "link_layer").write_text("InfiniBand\n")
    facts, _ = probed(tmp_path, {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    assert [each["bus"] for each in facts["gpus"]["report"]] == ["00000000:18:00.0", "00000000:2A:00.0"]
    assert [gpus.memory_fault(each) != "" for each in facts["gpus"]["report"]] == [False, True]
    assert facts["gpus"]["links"] == [[2, 2], [1, 2]]
    assert facts["infiniband"] == {"mlx5_0/1": port()}


def test_a_machine_without_gpus_is_asked_nothing_more(tmp_path: Path) -> None:
    facts, _ = probed(tmp_path, {})
    assert facts["gpus"] == {} and facts["infiniband"] == {}


def test_every_gpu_of_a_host_takes_part() -> None:
    given = with_gpus()
    here = fabric._here(given, ["node-1", "node-2", "node-3"])
    assert here["node-2"] == [(2, 0), (3, 1)] and fabric.has_peers(given)
    assert fabric._rounds(here) == [[(0, 1), (2, 3), (4, 5)]]
    eight = with_gpus(slots=8)
    (first, *_) = rounds = fabric._rounds(fabric._here(eight, ["node-1", "node-2"]))
    assert len(rounds) == 7 and len(first) == 8 and {n for pair in first for n in pair} == set(range(16))
    for facts in given.facts.values():
        facts["packages"]["cuda"] = None  # a build of torch without it
    assert fabric._here(given, ["node-1", "node-2"]) == {"node-1": [(0, 0)], "node-2": [(1, 0)]}


def test_a_single_host_is_measured_when_it_has_several_gpus() -> None:
    alone = with_gpus(slots=8)
    alone = Survey(**{**vars(alone), "hosts": alone.hosts[:1], "facts": {"node-1": alone.facts["node-1"]}})
    assert fabric.has_peers(alone)
    alone.facts["node-1"]["devices"]["count"] = 0
    assert not fabric.has_peers(alone)


def pairs(slow: int | None = None) -> list[list[Any]]:
    """Two hosts of four GPUs, each pair of a host at 370 GB/s; one GPU of the second has a quarter of it."""
    return [
        [f"node-{host} GPU {a}", f"node-{host} GPU {b}", 90e9 if host == 2 and slow in (a, b) else 370e9]
        for host in (1, 2)
        for a in range(4)
        for b in range(a + 1, 4)
    ]


def test_a_gpu_at_a_quarter_of_its_rate_is_found() -> None:
    about = {"backend": "nccl", "ranks": 8, "steps": [{"bytes": 1 << 30, "seconds": 0.006}], "errors": {}}
    assert fabric.judge_all_reduce({**about, "pairs": pairs()}) == []
    (slow,) = fabric.judge_all_reduce({**about, "pairs": pairs(slow=3)})
    assert (slow.host, slow.level) == ("node-2", "red") and "GPU 3" in slow.what and "90 GB/s" in slow.what
    assert fabric.all_reduce_summary({**about, "pairs": pairs(slow=3)}) == [
        "all-reduce of 8 ranks (nccl): 1 GiB 6 ms",
        "12 pairs of GPUs of a host: 90 GB/s to 370 GB/s each way (median 370 GB/s)",
    ]


def test_a_host_starts_a_process_for_each_of_its_ranks(tmp_path: Path) -> None:
    """With gloo in the place of NCCL: two ranks of one host, all sums right, their pair measured."""
    questions = {
        "mark": "answer: ",
        "backend": "gloo",
        "ranks": ["node-1 GPU 0", "node-1 GPU 1"],
        "here": [[0, 0], [1, 1]],
        "address": "127.0.0.1",
        "port": free_port(),
        "rounds": [[[0, 1]]],
        "limit_s": 60.0,
    }
    words = [sys.executable, "-m", "llmtrain.features.doctor.all_reduce", json.dumps(questions)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=Path(all_reduce.__file__).parents[3])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer: ")]
    said = json.loads(line.removeprefix("answer: "))
    assert done.returncode == 0, (said, done.stderr)
    assert [step["bytes"] for step in said["steps"]][:3] == [4 << 10, 256 << 10, 4 << 20]
    ((first, second, rate),) = said["pairs"]
    assert (first, second) == (0, 1) and 1e6 < rate < 1e12


@pytest.mark.parametrize(
    ("driver", "cuda", "says"),
    [
        ("570.86.10", "13.0", r"driver 570\.86\.10 .*CUDA 13\.0.*\b580\b"),
        ("515.65.01", "12.6", r"driver 515\.65\.01 .*CUDA 12\.6.*\b525\b"),
        ("580.95.05", None, r"torch 2\.13\.0 .*CUDA"),
        ("535.104.05", "12.6", ""),
        ("580.95.05", "13.0", ""),
    ],
)
def test_a_driver_that_torchs_build_does_not_run_on_is_named(driver: str, cuda: str | None, says: str) -> None:
    given = with_gpus()
    for facts in given.facts.values():
        facts["devices"] = {**facts["devices"], "count": 2, "driver": driver}
        facts["packages"] = {**facts["packages"], "torch": "2.13.0", "cuda": cuda}
    told = [finding for finding in checks.all_gpus(given) if finding.check == "versions"]
    assert bool(told) == bool(says)
    for finding in told:
        assert re.search(says, finding.what) and "--index-url https://" in finding.fix and finding.level == "red"
