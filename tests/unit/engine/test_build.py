"""Numbers of DeepSpeed's JSON that llmtrain derives from the model, where the JSON leaves them alone."""

from __future__ import annotations

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn

from llmtrain.config.topology import Mix
from llmtrain.engine.deepspeed.build import _room


def model_of(width: int) -> nn.Module:
    """A head and three layers of three matrices each; one adapter."""
    with torch.device("meta"):
        layers = [nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))) for _ in range(3)]
        return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(width, 8), "adapter": nn.Linear(4, 4)})


def test_zero_3_has_room_for_the_next_layer_of_those_that_it_gathers_as_a_whole() -> None:
    usual = {"stage3_prefetch_bucket_size": 50_000_000, "stage3_max_live_parameters": 1_000_000_000}
    large, small = model_of(20_000), model_of(100)
    assert _room(large, Mix(zero_stage=3)).items() >= usual.items()  # nothing is gathered as a whole
    for model in (large, small):
        for layer in model["layers"]:
            set_z3_leaf_module(layer, True)
    assert _room(small, Mix(zero_stage=3)).items() >= usual.items()
    layer = 3 * 20_000**2
    assert (
        _room(large, Mix(zero_stage=3)).items()
        >= {"stage3_prefetch_bucket_size": layer, "stage3_max_live_parameters": 2 * layer}.items()
    )
    huge = model_of(40_000)
    set_z3_leaf_module(huge["layers"][0], True)
    assert _room(huge, Mix(zero_stage=3)) == {
        "reduce_bucket_size": 500_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
    assert _room(large, Mix(zero_stage=2)) == {"reduce_bucket_size": 500_000_000}


def test_a_bucket_is_no_larger_than_the_gradients() -> None:
    model = model_of(20_000).requires_grad_(False)
    model["adapter"].requires_grad_(True)
    assert [_room(model, Mix(zero_stage=stage))["reduce_bucket_size"] for stage in (1, 2, 3)] == [20] * 3


def test_adapters_stay_whole_where_they_take_little() -> None:
    """Of lora_70b all: 0.207e9 elements, the largest of 458,752; of rank 128 beside all maps of 70B none beyond."""

    def threshold(rank: int, layers: int) -> int | None:
        def pair() -> dict[str, nn.Module]:
            return {"lora_A": nn.Linear(8192, rank, bias=False), "lora_B": nn.Linear(rank, 28672, bias=False)}

        with torch.device("meta"):
            model = nn.ModuleList(nn.ModuleDict(pair()) for _ in range(layers))
            model.append(nn.Linear(8192, 8192))
        return _room(model, Mix(zero_stage=3)).get("stage3_param_persistence_threshold")

    assert threshold(16, 300) == 16 * 28672
    assert threshold(2, 300) == 100_000
    assert threshold(128, 300) is None
