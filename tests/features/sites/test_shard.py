"""Elements that a rank exchanges: their fragments, and the ranks of a site that tell one another of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites.shard import Replicas, copies, fragment_of, joined
from llmtrain.storage.region import Region

SHAPES = {
    "model.embed_tokens.weight": (100, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (100, 8),
    **{f"model.layers.{layer}.mlp.weight": (8, 16) for layer in range(12)},
    **{f"model.layers.{layer}.norm.weight": (8,) for layer in range(12)},
}


def test_every_parameter_is_in_one_fragment_with_its_layer() -> None:
    found = fragment_of(SHAPES, 3)
    assert found.keys() == SHAPES.keys() and set(found.values()) == {0, 1, 2}
    assert all(
        found[f"model.layers.{layer}.{part}.weight"] == layer % 3 for layer in range(12) for part in ("mlp", "norm")
    )
    assert found["lm_head.weight"] != found["model.embed_tokens.weight"]
    assert found == fragment_of(dict(reversed(SHAPES.items())), 3)
    assert set(fragment_of(SHAPES, 1).values()) == {0}


def pieces(*found):
    return [(at, name, Region(low, high - low)) for at, name, low, high in found]


def test_only_ranks_that_hold_elements_of_others_are_joined():
    own = [pieces((0, "w", 0, 4)), pieces((0, "w", 4, 8)), pieces((0, "v", 0, 6)), pieces()]
    held = [pieces((0, "w", 0, 8)), pieces((0, "w", 0, 8)), pieces((0, "v", 0, 6)), pieces((0, "v", 2, 5))]
    assert joined(own, held) == [[0, 1], [2, 3]]
    assert joined(own[:3], own[:3]) == []  # as under ZeRO


def test_rows_of_a_split_tensor_come_from_its_owner():
    columns = Region(0, 6, ((1, 2),), 4)  # columns 1 and 2 of a [3, 4] tensor
    sent, into = np.arange(12, dtype=np.float32) + 100, np.zeros(10, np.float32)
    for each in copies([(0, "w", Region(0, 12))], [(4, "w", columns)]):
        each.take(sent, into)
    assert into.tolist() == [0, 0, 0, 0, 101, 102, 105, 106, 109, 110]


def test_elements_without_an_owner_are_noticed():
    said = (pieces((0, "w", 0, 4)), pieces((0, "w", 0, 8)))
    with pytest.raises(AssertionError, match=r"\b8 elements.*\b4 "):
        Replicas(Ranks(), *said)


def test_all_get_the_bits_of_the_owner():
    """Two ranks, threads in place of processes; each owns half of one tensor."""
    own = [pieces((0, "w", 0, 3)), pieces((0, "w", 3, 7))]
    held = pieces((2, "w", 0, 7))
    box, barrier = {}, threading.Barrier(2)
    values, results = torch.randn(7).numpy(), {}

    class TwoRanks(Ranks):
        def gather(self, value):
            return [(each, held) for each in own]

        def copy_from(self, source, values):
            if self.rank == source:
                box["sent"] = values.clone()
            barrier.wait(5)
            values.copy_(box["sent"])
            barrier.wait(5)

    def run(rank):
        found = Replicas(TwoRanks(rank=rank, world_size=2), own[rank], held)
        part = slice(0, 3) if rank == 0 else slice(3, 7)
        into = np.zeros(9, np.float32)
        into[2 + part.start : 2 + part.stop] = values[part]
        found.share(values[part], into)
        results[rank] = into

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert all(np.array_equal(results[rank][2:], values) and not results[rank][:2].any() for rank in range(2))
