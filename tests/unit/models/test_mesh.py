"""How many process groups the degrees of parallelism cost: with NCCL each is a collective of all ranks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from llmtrain.config.topology import Degrees
from llmtrain.models.parallel.mesh import Mesh

MIXES = [
    {"tensor": 1},
    {"tensor": 8},
    {"sequence": 8},
    {"pipeline": 4},
    {"tensor": 4, "sequence": 2},
    {"tensor": 2, "pipeline": 2},
    {"expert": 4},
]


def meshes(monkeypatch: pytest.MonkeyPatch, degrees: Degrees, *, nccl: bool) -> list[tuple[Mesh, Counter[str]]]:
    """The mesh of the first and of the last rank, and the calls that each made. A group is the list of its ranks."""
    made = []
    world = SimpleNamespace(bound_device_id="cuda:0" if nccl else None)
    for rank in (0, degrees.world_size - 1):
        calls: Counter[str] = Counter()

        def new_group(ranks: list[int], rank: int = rank, calls: Counter[str] = calls, **_: Any) -> Any:
            calls["new_group"] += 1
            return ranks if rank in ranks else None

        def split_group(split_ranks: list[list[int]], rank: int = rank, calls: Counter[str] = calls) -> Any:
            calls["split_group"] += 1
            return next(ranks for ranks in split_ranks if rank in ranks)

        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
        monkeypatch.setattr(dist, "get_world_size", lambda group: degrees.world_size)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(dist, "split_group", split_group)
        made.append((Mesh(degrees), calls))
    return made


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "gloo"])
@pytest.mark.parametrize("world_size", [8, 512])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(f"{name}{degree}" for name, degree in mix.items()))
def test_few_calls_whatever_the_world(monkeypatch, mix, world_size, nccl):
    shared = mix.get("tensor", 1) * mix.get("sequence", 1) * mix.get("pipeline", 1)
    degrees = Degrees(**mix, data=world_size // shared)
    for mesh, calls in meshes(monkeypatch, degrees, nccl=nccl):
        if shared == 1:
            assert not calls
        if nccl:
            assert calls.total() <= 4 and "new_group" not in calls, calls
        # With gloo a rank outside of a group has nothing to do, but torch wants to be asked for each.
        assert nccl or calls.total() <= sum(len(degrees.groups(*a)) for a in AXES if len(degrees.groups(*a)) > 1)
        held = {"tensor": mesh.tensor, "sequence": mesh.sequence, "data": mesh.data, "both": mesh.data_and_sequence}
        for (name, group), along in zip(held.items(), AXES, strict=True):
            if group is None:
                assert getattr(degrees, name) == 1
                continue
            ranks = list(range(world_size)) if group is dist.group.WORLD else group
            assert ranks == next(each for each in degrees.groups(*along) if mesh.rank in each), name
        assert mesh.get_tensor_model_parallel_src_rank() == mesh.rank // degrees.tensor * degrees.tensor


AXES = [("tensor",), ("sequence",), ("data",), ("data", "sequence")]


def test_deepspeeds_sums_over_no_tensor_parallel_rank_stay_on_the_rank(monkeypatch):
    """None would be all ranks for it (runtime/utils.py get_global_norm_of_tensors)."""
    for mesh, _ in meshes(monkeypatch, Degrees(sequence=2, data=4), nccl=True):
        assert mesh.mpu is mesh and mesh.get_model_parallel_group() == [mesh.rank]
