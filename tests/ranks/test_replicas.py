"""What several ranks should hold alike: a changed bit is named with its tensor and its rank, and nothing else is."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.config.topology import Degrees
from llmtrain.optim.optimizers import PARAM
from tests.helpers.families import FAMILIES, FROZEN
from tests.helpers.training import LLAMA, Case, batches, make_engine, make_setup, train_steps

TIED = {**LLAMA, "tie_word_embeddings": True}
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
SMALL_STAY_GATHERED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}
"""As in a model of usual size: ZeRO 3 keeps norms gathered and partitions matrices."""


def flip(engine: Any, name: str) -> None:
    """Change the lowest bit of one element of what the forward pass reads."""
    held = next(each for each in engine.module.local_parameters() if each.name == name)
    if held.packed is not None:
        held.parameter.data.view(-1)[held.parameter.numel() // 3] ^= 1
        return
    (values,) = (copy.values for copy in engine.copies() if copy.name == name and not copy.partition)
    words = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    words[values.numel() // 3] ^= 1


def watched(case: Case, name: str, guilty: int, checks: int = 3) -> tuple[list[Any], list[Any], list[Any]]:
    """(differences of clean steps, of the last one after a flip on `guilty`, once it is undone)."""
    from llmtrain.engine.weights import masters_apart
    from llmtrain.training.replicas import Replicas

    engine, ranks = make_engine(case)
    replicas = Replicas(engine, ranks)
    clean = []
    for step in range(checks):
        train_steps(case, engine, ranks, step, step + 1)
        clean += replicas.differences({"step": step})
    clean += filter(None, [masters_apart(engine, ranks)])
    if ranks.rank == guilty:
        flip(engine, name)
    found = replicas.differences({"step": checks})
    if ranks.rank == guilty:
        flip(engine, name)
    healed = replicas.differences({"step": checks})
    engine.close()
    return clean, found, healed


def check(pools: Any, world: int, case: Case, name: str, guilty: int, groups: tuple[tuple[int, ...], ...]) -> None:
    for clean, found, healed in pools(world).run(watched, case, name, guilty):
        assert clean == [] and healed == []
        assert [(each.name, each.groups) for each in found] == [(name, groups)]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"stage": 0, "precision": "bf16"}, UP),
        ({"stage": 1, "precision": "bf16"}, UP),
        ({"stage": 2, "precision": "bf16", "accumulation": 2}, UP),
        ({"stage": 3, "precision": "bf16", "extra": SMALL_STAY_GATHERED}, NORM),
        ({"stage": 1, "optimizer": "muon"}, UP),
        ({"stage": 2, "adapter": {"r": 4, "quantize": "nf4"}}, UP),
        ({"tensor": 2, "stage": 3, "extra": SMALL_STAY_GATHERED}, NORM),
        ({"sequence": 2, "stage": 1}, UP),
        ({"pipeline": 2, "stage": 1, "model": TIED, "accumulation": 2}, "model.embed_tokens.weight"),
        ({"expert": 2, "stage": 1, "model": FAMILIES["mixtral"]}, NORM),
        ({"stage": 3, "precision": "bf16", "model": FROZEN["afmoe"]}, "model.layers.2.mlp.expert_bias"),
    ],
    ids=lambda value: (
        "-".join(str(v) for k, v in value.items() if k not in ("model", "extra")) if isinstance(value, dict) else ""
    ),
)
def test_a_flipped_bit_is_named_and_clean_steps_are_not(pools, small_data, form, name):
    check(pools, 2, Case(data=small_data, **form), name, 1, ((0,), (1,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name", "guilty", "groups"),
    [
        ({"pipeline": 2, "stage": 1, "model": TIED}, "model.embed_tokens.weight", 3, ((0, 1, 2), (3,))),
        ({"tensor": 2, "stage": 2}, UP, 3, ((1,), (3,))),
        ({"tensor": 2, "pipeline": 2, "stage": 1}, "model.layers.3.input_layernorm.weight", 2, ((2,), (3,))),
    ],
    ids=str,
)
def test_with_four_ranks_the_majority_tells_who_is_wrong(pools, small_data, form, name, guilty, groups):
    check(pools, 4, Case(data=small_data, steps=40, **form), name, guilty, groups)


def kept_as_another(case: Case) -> tuple[list[Any], Any, list[str]]:
    """(what is apart in a healthy engine, after two masters are exchanged; their names)."""
    from llmtrain.engine.weights import masters_apart

    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    healthy = masters_apart(engine, ranks)
    trained = {held.name for held in engine.module.local_parameters() if held.trains}
    pieces = [p for p in engine.state() if p.kind == PARAM and p.name in trained and p.region.numel > 64]
    found: dict[Any, str] = {}
    pair: list[str] = []
    for piece in pieces:
        other = found.setdefault((piece.region, piece.dtype), piece.name)
        if other != piece.name:
            pair = sorted([other, piece.name])
            break
    names = dict(zip(pair, reversed(pair), strict=True))
    plain = engine.state
    engine.state = lambda: [replace(p, name=names.get(p.name, p.name)) for p in plain()]  # type: ignore[method-assign]
    wrong = masters_apart(engine, ranks)
    told = "" if wrong is None else wrong.message(engine, ranks)
    engine.close()
    return healthy, wrong, [*pair, told]


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0, "precision": "bf16"},
        {"stage": 1, "precision": "bf16", "optimizer": "muon"},
        {"stage": 2, "extra": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}},
        {"stage": 2, "offload": "optimizer", "precision": "bf16"},
        {"stage": 3, "offload": "all"},
        {"stage": 3, "precision": "bf16", "extra": SMALL_STAY_GATHERED},
        {"tensor": 2, "stage": 1},
        {"pipeline": 2, "stage": 1, "model": TIED, "accumulation": 2},
        {"expert": 2, "stage": 2, "model": FAMILIES["mixtral"]},
        {"stage": 1, "freeze": ("model.layers.0.*",)},
    ],
    ids=lambda form: "-".join(str(v) for k, v in form.items() if k not in ("model", "extra")),
)
def test_masters_under_other_names_than_they_train_under_are_found(pools, small_data, form):
    """On each rank the masters, which a checkpoint would hold, are compared with what the forward pass reads."""
    answers = pools(2).run(kept_as_another, Case(data=small_data, **form))
    for healthy, wrong, (*_, told) in answers:
        assert healthy is None
        assert wrong.names == answers[0][1].names
        assert f"other values of {wrong.names[0]} " in told and "stage" in told
        assert ("round_robin_gradients = true" in told) == ("round_robin" in str(form))
    for _, wrong, (one, other, _) in answers:
        assert {one, other} <= set(wrong.names)


def moved_expert(case: Case) -> list[Any]:
    """An expert of rank 1 changes, of which nobody else has a copy, and one of NaNs is the same on all ranks."""
    from llmtrain.training.replicas import Replicas

    engine, ranks = make_engine(case)
    replicas = Replicas(engine, ranks)
    for copy in engine.copies():
        if copy.name == NORM:
            copy.values.fill_(float("nan"))
        if ranks.rank == 1 and "experts" in copy.name:
            copy.values.add_(1)
    found = replicas.differences({"of all": 1}, {f"of rank {ranks.rank} alone": ranks.rank})
    engine.close()
    return found


def test_what_one_rank_alone_holds_is_nobodys_difference_and_nans_are_equal(pools, small_data):
    case = Case(data=small_data, expert=2, stage=1, model=FAMILIES["mixtral"])
    assert pools(2).run(moved_expert, case) == [[], []]


def ended(case: Case, fault: str, guilty: int) -> tuple[str, str]:
    """The errors of `ReplicaCheck` after a step: (a healthy one, one with a fault on rank `guilty`)."""
    from llmtrain.base.errors import TrainingStopped
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.replica_check import ReplicaCheck
    from llmtrain.training.step import seed_step

    setup = make_setup(case)
    engine, ranks, run = setup.engine, setup.ranks, setup.run
    degrees: Degrees = run.mix.degrees
    told = []
    for faulty in (False, True):
        wrong = faulty and ranks.rank == guilty
        place = degrees.place(ranks.rank).data
        source = batches(case, (place, degrees.data), case.accumulation, 4 + (wrong and fault == "index"))
        batch = next(source)
        source.close()  # type: ignore[attr-defined]
        if wrong and fault == "tokens":
            batch.micro_batches[0].inputs[0, 3] += 1
        seed_step(0 + (wrong and fault == "seed"), 4, ranks.rank // degrees.tensor)
        position = {"step": 5 + (wrong and fault == "step"), "tokens": 500}
        tracker = Tracker(".", run_id="", config={}, total_steps=None, enabled=False)
        data: Any = SimpleNamespace(fingerprint="another" if wrong and fault == "data" else "folder")
        setup.course.data = (data,)
        launch: Any = SimpleNamespace(setup=setup, tracker=tracker)
        try:
            ReplicaCheck(launch).check(position, batch, 1.0)
            told.append("")
        except TrainingStopped as error:
            told.append(str(error))
    engine.close()
    return told[0], told[1]


@pytest.mark.parametrize(
    ("fault", "form", "says"),
    [
        ("index", {}, "first sequence .*48 on rank 0 .{host}., 60 on rank 1"),
        ("seed", {}, "random seed "),
        ("seed", {"tensor": 2}, "random seed "),
        ("step", {}, "step of the run .*5 on rank 0 .{host}., 6 on rank 1 .{host}."),
        ("data", {}, 'data fingerprint .*"folder" on rank 0 .{host}., "another" on rank 1'),
        ("tokens", {"tensor": 2}, "tokens of data-parallel group 0 "),
        ("tokens", {"sequence": 2}, "tokens of data-parallel group 0 "),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 7 else "",
)
def test_a_rank_with_other_data_seed_or_count_is_named(pools, small_data, fault, form, says):
    import socket

    for healthy, told in pools(2).run(ended, Case(data=small_data, **form), fault, 1):
        assert healthy == ""
        assert re.search(says.format(host=socket.gethostname()), told), told


def splits_of_a_site(case: Case) -> int:
    """Count this rank's calls of ncclCommSplit while a site on GPUs learns which ranks hold the same elements.

    Played with the world bound to a device, as it is with NCCL: torch itself decides who splits.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    from llmtrain.features.sites.shard import Shard

    class Communicator:
        splits = 0

        def perform_nocolor_split(self, device: torch.device) -> None:
            """ncclCommSplit without a group for this rank: a collective of all ranks."""
            self.splits += 1

    engine, ranks = make_engine(case)
    world, nccl = dist.group.WORLD, Communicator()
    assert world is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_get_split_source", lambda group: nccl)
        patch.setattr(world, "bound_device_id", torch.device("cuda", 0))
        shard = Shard(engine, fragments=1, ranks=ranks, frozen=frozenset())
        assert world.bound_device_id == torch.device("cuda", 0)
    assert shard._replicas is not None
    engine.close()
    return nccl.splits


@pytest.mark.parametrize(
    "form", [{"pipeline": 4, "model": TIED}, {"tensor": 2}, {"pipeline": 2, "model": TIED}], ids=["pp4", "tp2", "pp2"]
)
def test_no_rank_of_a_site_waits_in_nccl_for_a_group_that_it_is_not_in(pools, small_data, form):
    """Tied embeddings are on the first of 4 stages and on the last: the others entered ncclCommSplit, these never."""
    assert pools(4).run(splits_of_a_site, Case(data=small_data, stage=1, **form)) == [0] * 4
