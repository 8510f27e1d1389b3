"""`llmtrain prepare --on slurm` in a job of a real Slurm on the hosts of a lab."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from llmtrain.commands.prepare import main as prepare
from tests.cluster.launched import MET_S
from tests.cluster.test_slurm_real import Batch, pytestmark
from tools.lab.lab import Lab
from tools.lab.slurm import Slurm

__all__ = ["pytestmark"]


def corpus_words(folder: Path, documents: int) -> list[str]:
    """Words of a preparation in shards of 50 kB, whose result on one machine is in `alone`."""
    source = folder / "a.jsonl"
    source.write_text("".join(f'{{"text": "document {n} {"and words " * 40}"}}\n' for n in range(documents)))
    words = ["--source", str(source), "--vocab-size", "300", "--shard-bytes", "50000"]
    assert prepare([*words, "--out", str(folder / "alone")]) == 0
    return words


def assert_same_bytes(folder: Path) -> None:
    """`set` has the files of `alone`."""
    names = sorted(path.relative_to(folder / "alone") for path in (folder / "alone").rglob("*"))
    assert names == sorted(path.relative_to(folder / "set") for path in (folder / "set").rglob("*"))
    for name in names:
        one, other = folder / "alone" / name, folder / "set" / name
        assert one.is_dir() or one.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("seed", range(3))
def test_a_preparation_loses_a_node_and_the_workers_of_another(lab3: Lab, tmp_path: Path, seed: int) -> None:
    """In an allocation that outlives its nodes, in either order and at any moment."""
    rng, words = random.Random(seed), corpus_words(tmp_path, 8000)
    command = f"exec llmtrain prepare {' '.join(words)} --out {tmp_path / 'set'} --on slurm"
    job = Batch(Slurm(lab3), tmp_path / "recipe.yaml", "--no-kill", command=command)
    for what in rng.sample(["node", "workers"], 2):
        at, until = rng.randrange(1, 40), time.monotonic() + MET_S
        while len(list((tmp_path / "set/unfinished").glob("unit-*.json"))) < at:
            assert time.monotonic() < until and job.shown("JobState") in ("PENDING", "RUNNING"), job.text
            time.sleep(0.01)
        if what == "node":
            lab3.hosts[2].kill()
            continue
        for each in lab3.hosts[1].processes():
            if "prepare_hosts.hosts" in " ".join(each.cmdline()):
                each.kill()
    assert job.ended() == "COMPLETED", job.text
    assert "node-2" in job.text and "node-3" in job.text
    assert_same_bytes(tmp_path)
