"""Swap files: what is refused before a start, and what a disk may do to them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base import disks
from llmtrain.base.errors import ConfigError
from llmtrain.cli import main
from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.features.doctor import checks, probe
from llmtrain.features.nvme import KEY, WEIGHTS_KEY, weights
from llmtrain.features.nvme.building import check_folder
from llmtrain.features.nvme.store import Handle, Store, SwapError
from tests.unit.config.conftest import here
from tests.unit.config.test_config_right import loaded

__all__ = ["here"]

NAME = "/names/rank0/exp_avg-3_7.tensor.swp"


def swapping(stage: int = 3, optim: str = "adamw", **offload: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    tree = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", **offload}}
    return {"optim": {"name": optim}}, {"zero_optimization": tree}


def weights_in_files(path: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}}


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        (swapping(nvme_path=None), (KEY, "nvme_path")),
        (weights_in_files(None), (WEIGHTS_KEY, "nvme_path")),
        (swapping(ratio=0.5), ("zero_optimization.offload_optimizer.ratio", "= 0.5")),
        (swapping(stage=2), ("zero_optimization.offload_optimizer.device", '= "nvme"')),
        (swapping(optim="muon"), ("optim.name", "adamw")),
    ],
    ids=["no path", "no path for weights", "ratio", "ZeRO 2", "Muon"],
)
def test_a_json_that_cannot_swap_is_refused(here: Path, files: Any, refusal: tuple[str, str]) -> None:
    key, value = refusal
    with pytest.raises(ConfigError, match=value) as refused:
        loaded(here, *files)
    assert key in refused.value.keys


def test_keys_of_swap_files_are_read_with_them_alone(here: Path) -> None:
    aio = {"aio": {"block_size": 262144}}
    assert not [note for note in loaded(here, swapping()[0], {**swapping()[1], **aio}).notes if "aio" in note]
    idle = loaded(here, {}, {"zero_optimization": {"stage": 3}, **aio}).notes
    assert any(note.startswith("ds.json: aio.block_size: no effect") for note in idle), idle


def test_what_maps_weights_reads_no_sizes_of_buffers(here: Path) -> None:
    given, tree = weights_in_files("/disk")
    tree["zero_optimization"]["offload_param"]["max_in_cpu"] = 7
    run = loaded(here, given, tree)
    assert run.mix.weights_on_disk and run.mix.offload_param and not run.mix.swaps
    (note,) = [note for note in run.notes if "max_in_cpu" in note]
    assert "nvme_path" not in note and "kernel" in note


def test_folders_that_are_no_disk_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(KEY, str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def refuses(name: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=f'{name}"\n.*{reason}') as refused:
            check_folder(KEY, str(tmp_path / name))
        assert refused.value.keys == {KEY}

    for name, reason in {"missing": "no such folder", "file": "not a folder", "/dev/shm": "tmpfs"}.items():
        refuses(name, reason)
    with monkeypatch.context() as patch:
        patch.setattr(disks, "file_system", lambda _: "nfs4")
        refuses("folder", "nfs4")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _raising(errno.EROFS))
        refuses("folder", os.strerror(errno.EROFS))


def test_doctor_measures_the_disk(tmp_path: Path) -> None:
    facts = {"disks": probe.look_disks({"disks": {KEY: str(tmp_path), "other": str(tmp_path / "missing")}})}
    assert facts["disks"][KEY]["speeds"].keys() == {"write", "read"} and min(facts["disks"][KEY]["speeds"].values()) > 0
    facts["disks"][KEY]["speeds"] = {"write": 3e8, "read": 2e9}
    survey = checks.Survey(
        hosts=(Host(name="node-1", slots=2, devices=(0, 1), line=1),),
        python="python",
        folder="/",
        facts={"node-1": facts},
    )
    slow, missing = [found for found in checks.each_host(survey) if found.check == "disk"]
    assert (slow.level, missing.level) == ("yellow", "red")
    assert f"{tmp_path} ({KEY})" in slow.what and "286.1 MiB" in slow.what and f"{tmp_path}/missing" in missing.what


def _raising(number: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def handle(tmp_path: Path) -> Handle:
    return Handle(Store(tmp_path, KEY, block=8192, requests=4))


@pytest.mark.parametrize("numel", [2048 * 5, 2048 * 5 + 3], ids=["pages", "odd"])
def test_what_was_written_is_read(handle: Handle, tmp_path: Path, numel: int) -> None:
    values = handle.new_cpu_locked_tensor(numel, torch.zeros(1)).copy_(torch.randn(numel))
    assert handle.is_pinned(values[7:]) and not handle.is_pinned(torch.zeros(1))
    handle.async_pwrite(values, NAME, 0)
    handle.async_pwrite(values[:1000] + 1, "other", 0)
    assert handle.wait() == 2
    handle.store.set_part(NAME, 8000, torch.ones(2000).view(torch.uint8))
    values[2000:4000] = 1
    again = torch.empty(numel)
    handle.async_pread(again, NAME, 0)
    assert handle.wait() == 1 and torch.equal(again, values)
    assert torch.equal(handle.store.part(NAME, 4 * 1999, 4 * 2003).view(torch.float32), values[1999:2003])
    assert not list(tmp_path.iterdir()), "a file has a name, and a killed run would leave it"


@pytest.mark.parametrize("damage", ["bit", "end"])
def test_a_damaged_file_is_named(handle: Handle, damage: str) -> None:
    handle.async_pwrite(torch.randn(8192), NAME, 0)
    handle.wait()
    file = next(Path(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_swap(n, handle))
    if damage == "bit":
        with file.open("r+b") as bytes_:
            bytes_.seek(20_000)
            bytes_.write(b"!")
    else:
        os.truncate(file, 20_000)
    handle.async_pread(torch.empty(8192), NAME, 0)
    with pytest.raises(SwapError, match=r"exp_avg-3_7.* 16384 to 24576 .*checkpoint"):
        handle.wait()


def _is_swap(number: str, handle: Handle) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith(str(handle.store.folder))
    except FileNotFoundError:
        return False


def test_a_full_disk_ends_the_run_before_a_byte_is_lost(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _raising(errno.ENOSPC))
    with pytest.raises(SwapError, match=f"{WEIGHTS_KEY} = .* 2048 bytes for weights cannot be had: No space left"):
        weights.mapped(tmp_path, WEIGHTS_KEY, 1024, torch.bfloat16)
    with pytest.raises(SwapError, match=f"{KEY} = .*exp_avg-3_7.* 4096 bytes cannot be had: No space left on device"):
        handle.async_pwrite(torch.zeros(1024), NAME, 0)


def test_a_plan_counts_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 bytes a parameter: master, two moments, gradient; no folder is asked for, nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    found = {}
    nvme = {"device": "nvme", "nvme_path": "/not/here"}
    for device, offload in {
        "cpu": {"offload_optimizer": {"device": "cpu"}},
        "nvme": {"offload_optimizer": {**nvme, "buffer_count": 5}},
        "both": {"offload_optimizer": {**nvme, "buffer_count": 5}, "offload_param": nvme},
    }.items():
        offload |= {"stage": 3, "stage3_param_persistence_threshold": 0}
        Path("ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": offload}))
        assert main(["plan", "run.yaml", "--json", "--slots", "2", "--device", "h100-80"]) == 0
        found[device] = json.loads(capsys.readouterr().out)["kinds"][0]["rehearsed"]
    parameters = 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert found["nvme"]["disk"] == pytest.approx(16 * parameters / 2, rel=0.01) and found["cpu"]["disk"] == 0
    assert found["nvme"]["peak"] == found["cpu"]["peak"]
    phases = found["nvme"]["phases"]
    assert found["both"]["disk"] == pytest.approx((16 + 2) * parameters / 2, rel=0.01)
    assert phases["step"]["swap buffers (host)"] == pytest.approx(5 * 4 * parameters / 2, rel=0.01)
    assert not [label for label in phases["step"] if label in ("masters (host)", "moments (host)")]


RUN = """\
deepspeed: ds.json
model:
  config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64, tie_word_embeddings: false}
data: {path: not/prepared/yet, sequence_length: 64}
train: {global_batch: 8, micro_batch: 4, max_steps: 10}
"""
