"""An ordinary machine with NVIDIA GPUs, simulated: a driver and pip, no CUDA toolkit, GPUs hidden or few."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ConfigError, UserError
from llmtrain.cli import main
from llmtrain.cluster.hosts.hostfile import Host, on_visible_devices
from llmtrain.commands import train
from llmtrain.commands.launch import main as launch
from llmtrain.config.topology import Mix
from llmtrain.engine.ranks import device
from llmtrain.engine.ranks.device import device_index, use_deterministic_kernels
from llmtrain.engine.ranks.rendezvous import _shared_devices
from tests.helpers.launching import write_recipe
from tests.runs.test_bench import load

ROOT = Path(__file__).parents[2]
EIGHT = Host(name="localhost", slots=8, devices=tuple(range(8)), line=1)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx\nAlternatively, go to ..."
)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def eight_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose nvidia-smi lists 8 GPUs."""
    program(tmp_path / "bin/nvidia-smi", 'for i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done')
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "MAKEFLAGS")}
    return {**kept, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def make(folder: Path, env: dict[str, str], *words: str) -> str:
    argv = ["make", "--no-print-directory", "-C", str(folder), "-f", str(ROOT / "Makefile"), *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("visible", "ranks", "devices"),
    [(None, 8, "0-7"), ("4,5", 2, "4-5"), ("0", 1, "0"), ("", 2, "0-1")],  # none visible: 2 ranks on the CPU
)
def test_launch_without_a_hostfile_takes_the_gpus_that_are_visible(
    tmp_path, eight_gpus, small_data, capsys, monkeypatch, visible, ranks, devices
):
    monkeypatch.setenv("PATH", eight_gpus["PATH"])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recipe = write_recipe(tmp_path, small_data)
    assert launch(["--dry-run", "--", str(recipe), "--train.global_batch", "16"]) == 0
    shown = capsys.readouterr().out
    assert f"1 host, {ranks} rank" in shown and f"devices {devices}\n" in shown


STUB = """case "$*" in
  "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  *) echo "DS_IGNORE_CUDA_DETECTION=$DS_IGNORE_CUDA_DETECTION $*" >> "$LOG";;
esac"""


def test_make_install_asks_for_no_cuda_toolkit_and_takes_the_build_of_torch_that_is_named(tmp_path, eight_gpus):
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    program(tmp_path / "stub/python3", STUB)
    env = {**eight_gpus, "LOG": str(tmp_path / "log"), "PYTHON": str(tmp_path / "stub/python3")}
    make(tmp_path, env, "install", "TORCH_INDEX=https://example.org/cu126")
    torch, _, *deepspeed = (tmp_path / "log").read_text().splitlines()
    assert "torch>=2.11" in torch and "--index-url https://example.org/cu126" in torch
    assert len(deepspeed) == 2 and all("--no-build-isolation -e" in line for line in deepspeed)
    assert all(line.startswith("DS_IGNORE_CUDA_DETECTION=1 ") for line in deepspeed)


def test_launch_keeps_to_the_visible_devices_and_to_the_slots():
    assert on_visible_devices(EIGHT, {"CUDA_VISIBLE_DEVICES": " 5, 4 "}).devices == (4, 5)
    assert on_visible_devices(EIGHT, {"CUDA_VISIBLE_DEVICES": "4,5", "DS_ACCELERATOR": "cpu"}) == EIGHT
    one = Host(name="localhost", slots=1, devices=(0,), line=1)
    assert on_visible_devices(one, {"CUDA_VISIBLE_DEVICES": "6,7"}).devices == (6,)


@pytest.mark.parametrize("shown", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-1/1/0", "0,x"])
def test_devices_that_the_launcher_cannot_name_are_refused(shown: str):
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        on_visible_devices(EIGHT, {"CUDA_VISIBLE_DEVICES": shown})


def test_launch_hands_the_visible_devices_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "hosts").write_text("localhost slots=8\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (tmp_path / "manifest.json").write_text("{}")
    run = ["launch/recipes/quickstart.yaml", "--data.path", str(tmp_path)]
    assert main(["launch", "--hostfile", str(tmp_path / "hosts"), "--dry-run", "--", *run]) == 0
    told = capsys.readouterr().out
    (world,) = re.findall(r"--world_info=(\S+)", told)
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": [4, 5]} and "1 host, 2 ranks" in told


def test_make_gpu_check_installs_what_it_asks_for(tmp_path, eight_gpus):
    """After `make train` alone it ended for want of peft and pytest-timeout, on a new clone for want of a device."""
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    said = make(tmp_path, eight_gpus, "-n", "gpu-check")
    assert said.index("-e '.[dev]'") < said.index("tools/gpu_check.sh runs/gpu-check")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"peft", "pytest_timeout"} <= set(load("facts").PACKAGES)
    assert {"peft", "pytest-timeout"} <= {re.split(r"[^a-z-]", each)[0] for each in extras["dev"]}


@pytest.mark.parametrize(
    ("local_rank", "ranks", "visible", "index"),
    [(0, 8, 8, 0), (7, 8, 8, 7), (3, 8, 1, 0), (0, 1, 1, 0), (2, 3, 2, None), (8, 16, 8, None), (0, 2, 0, None)],
)
def test_the_device_of_a_rank(monkeypatch, local_rank, ranks, visible, index):
    if index is not None:
        assert device_index(local_rank, ranks, visible) == index
        return
    told = rf"{visible} cuda devices? for {ranks} ranks .*slots in the hostfile to"
    with pytest.raises(
        ConfigError, match=told if visible else r"no cuda device .*Remove the variable, or set it to cpu"
    ):
        device_index(local_rank, ranks, visible)


class FakeCuda:
    """DeepSpeed's accelerator on a machine with one GPU whose driver may be too old."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        if self._error:
            raise RuntimeError(self._error)

    def is_fp16_supported(self) -> bool:
        return True


def test_a_driver_older_than_torchs_cuda_is_named_with_the_build_that_it_runs(monkeypatch):
    monkeypatch.setattr(device, "get_accelerator", lambda: FakeCuda(OLD_DRIVER))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError) as refused:
        device.own_device()
    named = ("CUDA 13.0", "12040", "--index-url https://download.pytorch.org/whl/cu126")
    assert all(word in str(refused.value) for word in named)


@pytest.mark.parametrize(
    ("environ", "cuda", "refused"),
    [
        ({}, None, "is a build without CUDA"),
        ({}, "13.0", "`nvidia-smi` shows whether the driver answers"),
        ({"DS_ACCELERATOR": "cpu"}, None, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, "13.0", ""),
    ],
)
def test_a_machine_with_gpus_does_not_train_on_the_processor_in_silence(monkeypatch, environ, cuda, refused):
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device.Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(device, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    if not refused:
        assert device.own_device().type == "cpu"
        return
    with pytest.raises(ConfigError, match=refused):
        device.own_device()


@pytest.mark.parametrize(
    ("capability", "precision", "fp8", "said"),
    [
        ((7, 5), "bf16", None, r"bf16.enabled is true, but the device \(cuda\).*or use fp16"),
        ((8, 0), "bf16", None, None),
        ((8, 0), "bf16", "rowwise", r"A card \(compute capability 8.0\).*capability 8.9 on.*Set model.fp8 to null"),
        ((8, 9), "fp32", "rowwise", "products are bf16, but the run is in fp32: set bf16.enabled to true in zero1"),
        ((8, 9), "bf16", "rowwise", None),
    ],
)
def test_a_gpu_without_bf16_or_fp8_is_refused_and_nothing_is_emulated(monkeypatch, capability, precision, fp8, said):
    monkeypatch.setattr(device, "get_accelerator", FakeCuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A card")
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        device.check_device(Mix(bf16=precision == "bf16"), "sdpa", fp8, "zero1.json")


def test_two_ranks_on_one_gpu_are_named_when_they_meet():
    def rank(number: int, host: str, uuid: str) -> dict[str, Any]:
        return {"seat": {"rank": number, "host": host}, "device_id": uuid}

    own = [rank(0, "a", "GPU-1"), rank(1, "a", "GPU-2"), rank(2, "b", "GPU-1"), rank(3, "b", "")]
    assert _shared_devices(own) == ""
    assert _shared_devices([*own, rank(4, "a", "GPU-2")]).startswith("ranks 1, 4 have the same GPU of a:")


def test_deterministic_training_is_asked_for_before_torchs_libraries_start(tmp_path, monkeypatch):
    seen: list[str | None] = []

    def look(resolved: Any) -> None:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise UserError("far enough")

    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text("{}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr("llmtrain.training.examine.examine", look)
    paths = ["--data.path", str(tmp_path / "data"), "--train.run_dir", str(tmp_path / "run")]
    words = ["--config", "launch/recipes/quickstart.yaml", *paths]
    for more in ([], ["--train.deterministic", "true"]):
        with pytest.raises(UserError, match="far enough"):
            train.main([*words, *more])
    assert seen == [None, ":4096:8"]
    try:
        use_deterministic_kernels()
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
