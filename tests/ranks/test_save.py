"""The saver itself: asynchronous and synchronous, memory that is short, disks and writers that fail."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from llmtrain.checkpoint import snapshot
from llmtrain.checkpoint.durable import DurableFile
from llmtrain.checkpoint.format import Manifest, hash_file, problems
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.rundir import find_folder
from llmtrain.checkpoint.save import Saver
from llmtrain.config.run import CheckpointConfig
from llmtrain.engine.ranks.ranks import Ranks
from tests.helpers import fake_cuda
from tests.helpers.training import Case, assembled, make_engine, resolved_run, train_steps

TRAINER = {"step": 2}


def saver_for(engine: Any, case: Case, checkpoints: Path, mode: Any, ranks: Ranks, *, own: bool = False) -> Saver:
    mix = resolved_run(case, ranks.world_size).mix
    return Saver(engine, find_folder(checkpoints, ranks, own=own), CheckpointConfig(mode=mode), mix, ranks)


def save_both_ways(case: Case, folder: str) -> tuple[list[str], bool, dict[str, torch.Tensor]]:
    """Synchronously, and asynchronously with steps on top. (paths, whether it was asynchronous, parameters)."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    want = assembled(engine, ranks)
    paths = []
    for mode in ("sync", "async"):
        with saver_for(engine, case, Path(folder) / mode, mode, ranks) as saver:
            saver.begin(2, TRAINER)
            if mode == "async":
                train_steps(case, engine, ranks, 2, 4, before_update=saver.before_update)
            outcome = saver.drain()
            assert outcome is not None and outcome.path is not None, outcome
            paths.append(str(outcome.path))
            asynchronous = saver.asynchronous
    engine.close()
    return paths, asynchronous, want


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0},
        {"stage": 1, "precision": "bf16"},
        {"stage": 2, "offload": "optimizer"},
        {"stage": 3},
        {"stage": 1, "optimizer": "muon"},
        {"stage": 1, "tensor": 2},
        {"stage": 1, "pipeline": 2},
    ],
    ids=lambda form: "-".join(str(v) for v in form.values()),
)
def test_a_copy_made_while_training_goes_on_is_the_state_at_the_boundary(pools, small_data, tmp_path, form):
    case = Case(data=small_data, steps=4, **form)
    (sync, behind), asynchronous, want = pools(2).run(save_both_ways, case, str(tmp_path))[0]
    assert asynchronous
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "trainer.json", "manifest.json"):
        assert (Path(sync) / name).read_bytes() == (Path(behind) / name).read_bytes(), name
    manifest = Manifest.read(Path(behind))
    assert problems(Path(behind), manifest, sorted(manifest.files)) == []
    reader = CheckpointReader(Path(behind))
    for name, value in want.items():
        assert torch.equal(reader.read(name, 0, value.numel()), value.float().reshape(-1)), name
    if case.optimizer != "muon":  # 12 bytes a parameter, and headers
        data = sum(entry.bytes for file, entry in manifest.files.items() if file.startswith("rank"))
        assert data - 2 * 65536 < 12 * sum(value.numel() for value in want.values()) <= data


def fail_and_save_again(case: Case, folder: str, small_disk: str) -> dict[str, Any]:
    """A disk that fills up in the middle of a save, a writer that is killed, host memory that is short."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    found: dict[str, Any] = {}
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1 << 40)  # type: ignore[attr-defined]
    try:
        for mode in ("sync", "async"):
            with saver_for(engine, case, Path(small_disk), mode, ranks) as saver:
                saver.begin(2, TRAINER)
                found[f"full {mode}"] = saver.drain()
                found[f"left {mode}"] = os.listdir(small_disk)
                ranks.meet()
    finally:
        shutil.disk_usage = usage
    with saver_for(engine, case, Path(folder), "async", ranks) as saver:
        saver.prepare()
        assert saver._copy is not None and saver._copy.problem() is None
        if ranks.rank == 1:
            psutil.Process(saver._copy.writer().pid).kill()
        saver.begin(2, TRAINER)
        found["killed"] = saver.drain()
        found["left killed"] = os.listdir(folder)
        ranks.meet()  # all have looked before rank 0 makes the next folder
        saver.begin(3, TRAINER)
        found["next"] = saver.drain()
    memory = psutil.virtual_memory
    psutil.virtual_memory = lambda: memory()._replace(available=1000)
    try:
        with saver_for(engine, case, Path(folder), "async", ranks) as saver:
            saver.begin(4, TRAINER)
            found["no memory"] = saver.drain()
            found["synchronous"] = not saver.asynchronous
    finally:
        psutil.virtual_memory = memory
    found |= save_from_a_device(engine, case, Path(folder).with_name("device"), ranks)
    engine.close()
    return found


def save_from_a_device(engine: Any, case: Case, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The state seems to be on a GPU, and the image has many registrations of page-locked memory; then the device
    refuses a copy on rank 1."""
    found: dict[str, Any] = {}
    there = replace(ranks, device=fake_cuda.DEVICE)
    with (
        fake_cuda.page_locks() as locks,
        patch.object(snapshot, "LOCKED_AT_ONCE", 1 << 16),
        saver_for(engine, case, folder, "async", there) as saver,
    ):
        plain = saver._pieces
        saver._pieces = lambda: [replace(each, device=there.device) for each in plain()]  # type: ignore[method-assign]
        saver.begin(2, TRAINER)
        found["device"] = saver.drain()
        assert locks.copies > len(plain()) and len(locks.locked) > 10
        locks.refuses_all = ranks.rank == 1
        saver.begin(3, TRAINER)
        found["refused"] = saver.drain()
        assert not saver.asynchronous and not locks.locked
        found["left refused"] = sorted(os.listdir(folder))
        ranks.meet()
        saver.begin(3, TRAINER)
        found["after it"] = saver.drain()
    return found


def test_a_failed_save_leaves_nothing_and_the_next_one_works(pools, small_data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        case = Case(data=small_data, steps=2, stage=1)
        everywhere = pools(2).run(fail_and_save_again, case, str(tmp_path / "run"), str(disk))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    for found in everywhere:
        for mode in ("sync", "async"):
            assert found[f"full {mode}"].path is None and found[f"left {mode}"] == []
            assert os.strerror(errno.ENOSPC) in found[f"full {mode}"].error
        assert found["killed"].path is None and found["left killed"] == []
        assert re.match("rank 1 .*checkpoint writer", found["killed"].error)
        for later, step in (("next", 3), ("no memory", 4)):
            assert found[later].path == tmp_path / "run" / f"step-{step:08d}", found[later]
            manifest = Manifest.read(found[later].path)
            assert problems(found[later].path, manifest, sorted(manifest.files)) == []
        assert found["synchronous"]
        assert found["refused"].error == "rank 1 could not write its file: CUDA error: invalid argument"
        assert found["left refused"] == ["step-00000002"]
        first, second = (found[name].path for name in ("device", "after it"))
        for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), "copied over several registrations"


def test_a_durable_file_is_what_was_written_for_any_cut(tmp_path):
    """Aligned and unaligned memory, pieces smaller and larger than a block, O_DIRECT or a file system without it."""
    memory = torch.randint(0, 256, (40_000_001,), dtype=torch.uint8).numpy().data
    for cuts in ((0, 40_000_001), (0, 1, 4097, 4098, 30_000_000, 40_000_001), (0, 17_000_000, 17_000_001, 40_000_001)):
        with DurableFile(tmp_path / "file") as file:
            for low, high in itertools.pairwise(cuts):
                file.write(memory[low:high])
            size, xxh3 = file.close()
        assert (tmp_path / "file").read_bytes() == bytes(memory)
        assert (size, xxh3) == (40_000_001, hash_file(tmp_path / "file"))
    with pytest.raises(RuntimeError), DurableFile(tmp_path / "gone") as file:
        file.write(memory[:100])
        raise RuntimeError
    assert not (tmp_path / "gone").exists()
