"""docker/Dockerfile, launch/kubernetes.yaml and launch/skypilot.yaml: what they install and start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.cluster.hosts.hostfile import read_hostfile
from tests.helpers.launching import REPO

DOCKERFILE = (REPO / "docker/Dockerfile").read_text()


def image_commands() -> list[str]:
    return re.findall(r"^RUN (.*)$", DOCKERFILE, flags=re.M)


def read(name: str) -> Any:
    return yaml.safe_load((REPO / "launch" / name).read_text())


def played(script: str, folder: Path, **env: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Run a script with a stand-in for llmtrain. Returns (lines of its words, the script's end)."""
    (folder / "bin").mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("")
    program = folder / "bin/llmtrain"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/words\n')
    program.chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": "/home/me", **env}
    done = subprocess.run(["bash", "-ec", script], cwd=folder, env=env, capture_output=True, text=True)
    return (folder / "words").read_text().splitlines() if (folder / "words").exists() else [], done


def test_the_image_installs_what_make_installs() -> None:
    rule = re.search(r"^\$\(VENV\)/\.run:.*\n((?:\t.*\n)+)", (REPO / "Makefile").read_text(), flags=re.M)
    assert rule is not None
    make = [
        line.strip().replace("$(BIN)/", "").replace("$(CONSTRAINTS)", "constraints.txt")
        for line in rule[1].splitlines()
        if "pip install" in line
    ]
    make[0] = make[0].replace(
        "$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))", "${TORCH_INDEX:+--index-url $TORCH_INDEX}"
    )
    make[-1] = make[-1].replace("-e '.[adapters]'", "'.[adapters,gpu]'")
    assert [command for command in image_commands() if "pip install" in command] == make


def test_the_job_starts_the_quickstart_and_knows_the_exit_codes(tmp_path: Path) -> None:
    spec = read("kubernetes.yaml")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    gpus = {each["name"]: each["value"] for each in container["env"]}["GPUS"]
    assert int(gpus) == container["resources"]["limits"]["nvidia.com/gpu"]
    words, done = played(container["args"][0], tmp_path, GPUS=gpus)
    assert done.returncode == 0, done.stderr
    assert words == [
        "prepare --source stdlib --vocab-size 1024 --out data/stdlib",
        "launch --hostfile hosts -- launch/recipes/quickstart.yaml",
    ]
    assert [(host.name, host.slots) for host in read_hostfile(tmp_path / "hosts")] == [("localhost", 8)]
    ends, ignored = spec["podFailurePolicy"]["rules"]
    assert ends["onExitCodes"]["values"] == [2, 3] and ends["onExitCodes"]["containerName"] == container["name"]
    assert ignored["action"] == "Ignore" and pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][0] in DOCKERFILE and (REPO / "launch/recipes/quickstart.yaml").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rented_machine_starts_the_ranks_of_all(tmp_path: Path, rank: int) -> None:
    task = read("skypilot.yaml")
    words, done = played(
        task["run"],
        tmp_path,
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        **task["envs"],
    )
    assert done.returncode == 0, done.stderr
    if rank:
        assert words == []
        return
    assert words == ["launch --hostfile hosts -- launch/recipes/quickstart.yaml --checkpoint.dir /home/me/checkpoints"]
    assert [(host.name, host.slots) for host in read_hostfile(tmp_path / "hosts")] == [("10.0.0.4", 8), ("10.0.0.5", 8)]
    target = task["setup"].split("make ")[-1].split()[0]
    assert re.search(rf"^{re.escape(target)}:", (REPO / "Makefile").read_text(), flags=re.M)


@pytest.mark.slow
def test_the_commands_of_the_image_without_docker(tmp_path: Path) -> None:
    """All but the packages of Debian, in a folder in place of /; then what the image starts."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout.decode()
    source = tmp_path / "opt/src"
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-P", REPO / name, source / name], check=True)
    env = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "HOME", "LANG"))}
    env |= {
        "PATH": f"{tmp_path}/opt/llmtrain/bin:{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "DS_IGNORE_CUDA_DETECTION": "1",
        "TORCH_INDEX": "",
    }
    here = source
    for command in image_commands():
        if not command.startswith("apt-get"):
            command = command.replace("/opt/llmtrain", f"{tmp_path}/opt/llmtrain").replace("/work", f"{tmp_path}/work")
            done = subprocess.run(["sh", "-ec", command], cwd=here, env=env, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    small = "--train.max_steps 2 --schedule.warmup_steps 1 --train.eval_sequences 8 --train.export false"
    train = f"llmtrain train --config launch/recipes/quickstart.yaml {small}"
    prepare = "llmtrain prepare --source README.md --vocab-size 1024 --out data/stdlib"
    (tmp_path / "work/README.md").write_bytes((REPO / "README.md").read_bytes() * 8)
    env |= {"DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    for words in (prepare, train):
        done = subprocess.run(words.split(), cwd=tmp_path / "work", env=env, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
