"""llmtrain doctor on three hosts: each fault is named, alone and where it is; a healthy lab raises no alarm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.features.doctor.faults import FAULTS, Place, bashrc, replaced, shell
from tests.helpers.launching import REPO, write_recipe
from tests.helpers.marks import slow
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab
from tools.lab.processes import default_environment

# Ways to find out: ssh, the probe, a comparison, the shared folder. The network: the healthy lab, and the slow tests.
QUICK = ("another host key", "no Python at the path", "another configuration", "a folder not mounted")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two commits with this llmtrain, which nobody edits while hosts are compared."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(REPO / "llmtrain", folder / "llmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"], ["commit", "-qm", "2", "--allow-empty"]):
        subprocess.run([*git, *words], check=True)
    return folder


@pytest.fixture
def place(lab3: Lab, tmp_path: Path, small_data: str, clone: Path) -> Place:
    recipe = write_recipe(tmp_path, small_data)
    recipe.write_text(recipe.read_text().replace("global_batch: 8", "global_batch: 12"))  # for 3 or 6 ranks
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for host in lab3.hosts:  # without a rate, pairs are as fast as the processors are free: no two alike
        host.shape(rate_mbit=400)
        # Tests beside these compile ops on this machine; a host would see the locks and not who holds them.
        shell(host, "mkdir -p ~/.cache/torch_extensions && mount -t tmpfs none ~/.cache/torch_extensions")
    return Place(lab=lab3, folder=tmp_path, recipe=recipe, run_dir=run_dir, clone=clone)


def doctor(place: Place, *words: str, slots: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmtrain", "doctor", "--hostfile", place.lab.hostfile(slots), *words]
    limit_s = 580 if "--build-ops" in words else 150  # three compilers at once, on the cores of one machine
    return place.hosts[0].run(command, cwd=place.clone, timeout_s=limit_s)


def examined(place: Place, *words: str, slots: int = 1) -> tuple[dict[str, Any], int]:
    done = doctor(place, "--json", "--config", str(place.recipe), *words, slots=slots)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout), done.returncode


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in FAULTS])
def test_every_fault_is_named(place: Place, name: str) -> None:
    fault = FAULTS[name]
    fault.make(place)
    report, code = examined(place, *fault.words, slots=fault.slots)
    findings = report["findings"]
    named = [
        each
        for each in findings
        if (each["host"], each["check"]) == (fault.host, fault.check) and re.search(fault.says, each["what"])
    ]
    assert named, findings
    assert {each["level"] for each in named} == {fault.level}
    assert all(each["fix"] for each in findings)
    beside = [each for each in findings if each["check"] not in (fault.check, *fault.also)]
    assert not beside, beside
    elsewhere = [each for each in findings if each["host"] != fault.host and each["check"] != "name"]
    assert not elsewhere, elsewhere
    assert code == (1 if fault.level == "red" else 0)


def test_a_folder_that_a_host_lacks_or_has_in_another_state(place: Place, small_data: str) -> None:
    """doctor names it with the key of the run, and launch starts nothing."""
    model, mixed = place.folder / "model", place.folder / "mixed"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    (model / "model.safetensors").write_bytes(bytes(300_000))
    shutil.copytree(small_data, mixed)
    text = place.recipe.read_text().replace(f"  path: {small_data}", f"  mixture: {{{small_data}: 1, {mixed}: 2}}")
    place.recipe.write_text(re.sub(r"  config:\n(    .*\n)+", f"  pretrained: {model}\n", text))
    shell(place.hosts[1], f"mount -t tmpfs none {small_data}")
    replaced(place, place.hosts[1], mixed / "train-00000.bin", "cut off")
    other = place.folder / "other"
    other.write_bytes(bytes(150_000) + b"1" + bytes(149_999))  # as large, and another
    shell(place.hosts[2], f"mount --bind {other} {model}/model.safetensors")
    report, code = examined(place, "--quick")
    said = {(each["host"], each["what"]) for each in report["findings"]}
    wanted = {
        ("node-2", f"data.mixture: {small_data} lacks manifest.json, tokenizer/tokenizer.json and 2 more files"),
        ("node-2", f"data.mixture: {mixed} differs from the others': train-00000.bin"),
        ("node-3", f"model.pretrained: {model} differs from the others': model.safetensors"),
    }
    assert code == 1 and said == wanted, report["findings"]
    command = ["llmtrain", "launch", "--hostfile", place.lab.hostfile(), place.recipe]
    env = {**default_environment(), "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    done = place.hosts[0].run(command, cwd=place.clone, env=env, timeout_s=150)
    assert done.returncode == 2 and not list(place.run_dir.iterdir()), done.stdout + done.stderr
    assert all(what in done.stderr for _, what in wanted), done.stderr


@pytest.mark.parametrize(
    ("closed", "level", "refused"), [(1, "yellow", 0), pytest.param(0, "red", 1, marks=pytest.mark.slow)]
)
def test_a_firewall_is_red_where_a_launch_would_fail(
    place: Place, warm: WarmCommands, closed: int, level: str, refused: int
) -> None:
    """Closed from outside, the last host's ranks get out to the first; the first host's rendezvous must be reached."""
    first, last = (place.lab.hosts[0], place.lab.hosts[2])
    (last if closed else first).firewall(22)
    report, code = examined(place)
    assert code == refused, report["findings"]
    assert {each["level"] for each in report["findings"]} == {level}, report["findings"]
    assert {each["check"] for each in report["findings"]} == {"fabric"}
    command = [
        "llmtrain",
        "launch",
        "--hostfile",
        place.lab.hostfile(),
        "--max-restarts",
        "0",
        place.recipe,
        "--train.max_steps",
        "1",
        "--train.eval",
        "false",
        "--fault.start_timeout_s",
        "20",
    ]
    env = warm.on_hosts(WANDB_MODE="disabled")
    done = place.hosts[0].run(command, cwd=place.folder, env=env, timeout_s=300)
    assert (done.returncode != 0) == bool(refused), done.stdout + done.stderr


def test_a_healthy_lab(place: Place) -> None:
    """Everything in order, a table with one line a host, figures of the network; nothing is left on the hosts."""
    before = sorted(os.listdir(place.run_dir))
    done = doctor(place, "--config", str(place.recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and "warn" not in done.stdout, done.stdout
    assert re.search(r"^ node-2( +(ok|-))+ *$", done.stdout, re.M), done.stdout
    assert re.search(r"3 pairs over TCP: \S+ [GM]bit/s to", done.stdout)
    assert re.search(r"all-reduce of 3 ranks \(gloo\): 4 KiB [\d.e+]+ ms", done.stdout)
    assert sorted(os.listdir(place.run_dir)) == before
    for host in place.hosts:
        assert [each.cmdline() for each in host.processes()] == []


@pytest.mark.slow
def test_ops_are_built_ahead(place: Place) -> None:
    """A run with offload wants CPUAdam: yellow, then built on all hosts, then in order; a dead build's lock goes."""
    for host in place.hosts:
        (host.home / ".bashrc").write_text("export TORCH_EXTENSIONS_DIR=/tmp/extensions\n")
    lock = place.hosts[1].tmp / "extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    offload = ("--quick", "--", "--deepspeed", str(REPO / "ds_configs/zero3_offload.json"))
    report, code = examined(place, *offload)
    assert code == 1 and {(f["host"], f["level"]) for f in report["findings"] if f["check"] == "ops"} == {
        ("node-1", "yellow"),
        ("node-2", "yellow"),
        ("node-3", "yellow"),
        ("node-2", "red"),
    }
    report, code = examined(place, "--build-ops", *offload)
    assert code == 0 and not [f for f in report["findings"] if f["check"] == "ops"], report["findings"]
    for host in place.hosts:
        assert list((host.tmp / "extensions").rglob("cpu_adam.so")), host.name


def test_the_page_shows_what_is_printed(place: Place) -> None:
    """docs/doctor.md: its command, on a lab with the two faults of its example."""
    page = (REPO / "docs/doctor.md").read_text()
    (command,) = re.findall(r"^```bash\n(.*?)\n```", page, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)\n```", page, re.M | re.S)
    shell(place.hosts[1], "mount -o remount,size=64m /dev/shm")
    bashrc(place.hosts[2], "export NCCL_IB_DISABLE=1")
    hostfile = place.lab.hostfile()
    command = command.replace(" hosts ", f" {hostfile} ").replace("launch/recipes/llama_1b.yaml", str(place.recipe))
    env = {**default_environment(), "PYTHONPATH": str(place.clone)}
    done = place.hosts[0].run(["sh", "-ec", command], cwd=place.clone, env=env, timeout_s=150)
    assert done.returncode == 1, done.stdout + done.stderr
    printed = [figureless(line) for line in done.stdout.splitlines()]
    missing = [line for line in shown.splitlines() if figureless(line) not in printed]
    assert not missing, (missing, done.stdout)


def figureless(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*( [kMG]bit| [kMG]iB|m?s\b)?", "#", " ".join(line.split()))
