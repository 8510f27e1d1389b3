"""Where models have experts, what they cost, and which part of which tensor a rank holds when experts are shared."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.base.errors import ModelError
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import ModelConfig
from llmtrain.models.experts import balance_coefficient, check_stages, expert_blocks, experts_per_token
from llmtrain.models.skeleton import construct, load_config, skeleton
from llmtrain.models.spec import ModelSpec
from llmtrain.models.transformers_private import documents_are
from llmtrain.tracking.metrics import metrics, routing_metrics
from tests.helpers.config_workplace import write
from tests.helpers.families import EXPERTS, FAMILIES
from tests.helpers.launching import REPO
from tools.families.configs import families, has_experts, tiny


def config_of(fields: dict[str, Any]) -> Any:
    return load_config(ModelConfig(config=dict(fields)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_are_found_in_mixtures_and_in_no_dense_model(family: str) -> None:
    blocks = expert_blocks(skeleton(load_config(ModelConfig(config=dict(FAMILIES[family])))))
    layers = {"mixtral": [0, 1, 2, 3], "qwen3_moe": [0, 2, 3]}.get(family, [])  # qwen3_moe: layer 1 is dense
    assert [block.name for block in blocks] == [f"model.layers.{index}.mlp" for index in layers]
    assert all(block.count == 4 for block in blocks)
    assert all(type(block.router).__name__.endswith("TopKRouter") for block in blocks)


def test_a_list_of_experts_is_found_whatever_it_is_called() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3)])
            self.choose = nn.Linear(8, 3, bias=False)

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"feed": Sparse()}) for _ in range(2)])})
    blocks = expert_blocks(model)
    assert [block.name for block in blocks] == ["layers.0.feed", "layers.1.feed"]
    assert blocks[0].count == 3
    assert isinstance(blocks[0].router, nn.Linear)


def test_a_convolution_is_no_mixture() -> None:
    block = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 3), "gate": nn.Linear(8, 4)})
    assert expert_blocks(block) == []


@pytest.mark.parametrize("family", EXPERTS)
def test_flops_count_the_experts_of_a_token_only(family: str) -> None:
    """By hand: two of four experts of three matrices each, in each layer that has some."""
    fields = FAMILIES[family]
    sizes = ModelSpec.of(ModelConfig(config=dict(fields))).facts
    layers, width = {"mixtral": (4, 48), "qwen3_moe": (3, 24)}[family]
    model = skeleton(load_config(ModelConfig(config=dict(fields))))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2) - 512 * 32  # the embedding is looked up
    assert sizes.matmul_parameters == matrices - layers * 2 * 3 * 32 * width
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert experts_per_token(model.config) == 2


class Launches(TorchDispatchMode):
    """Operators by name: what a GPU would get, and what the host would wait for."""

    WAITS = ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.last = ""
        """The operator that ran last."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = function.overloadpacket.__name__
        self.ran[self.last] += 1
        return function(*args, **(kwargs or {}))


def launches(fields: dict[str, Any], experts: int) -> tuple[Counter[str], bool]:
    """(operators of a forward and backward pass with so many experts, whether some are in one matrix of a layer)"""

    def with_experts(fields: dict[str, Any]) -> dict[str, Any]:
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        inner = {key: with_experts(value) for key, value in fields.items() if isinstance(value, dict)}
        return {**fields, **inner, **{key: experts for key in names if fields.get(key, 0) > 1}}

    config = config_of(with_experts(fields))
    try:
        model = construct(config, "sdpa", torch.float32)
    except ModelError:
        model = construct(config, "eager", torch.float32)
    torch.manual_seed(0)
    model.init_weights()
    counted = Launches()
    with documents_are(None), counted:
        model(input_ids=torch.arange(32)[None] * 7 % 500 + 3, use_cache=False).logits.square().mean().backward()
    return counted.ran, any(p.dim() == 3 and len(p) == experts for p in model.parameters())


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_as_many_launches_however_many_there_are_and_nobody_waits(family: str) -> None:
    few, many = (launches(FAMILIES[family], experts)[0] for experts in (4, 16))
    assert few == many and few["_grouped_mm"] > 0
    assert not any(few[name] for name in Launches.WAITS)


PAGE = (REPO / "docs/parallelism.md").read_text()


@pytest.mark.slow
def test_the_page_says_which_family_takes_which_way() -> None:
    found: dict[str, list[str]] = {"grouped": [], "loop": [], "all": []}
    for family in families():
        fields = tiny(family)
        if not has_experts(fields) and family not in ("dbrx", "jetmoe", "llama4_text"):  # names of their own
            continue
        try:
            (few, _), (many, stacked) = (launches(fields, experts) for experts in (4, 8))
        except ModelError:  # deepseek_v4 is refused
            continue
        if few["_grouped_mm"]:
            assert few == many, family
            found["grouped"].append(family)
        elif few != many:
            found["loop"].append(family)
        elif stacked:
            found["all"].append(family)
    rows = re.findall(r"^\| (?:\w+ ){1,3}\| [^|]+ \| ([a-z0-9_, ]+) \|$", PAGE, re.MULTILINE)[1:]
    assert rows == [", ".join(names) for names in found.values()], found


def test_the_coefficient_acts_as_in_transformers() -> None:
    quiet = {**FAMILIES["mixtral"], "router_aux_loss_coef": 0.02}
    assert balance_coefficient(config_of(quiet)) == 0.0
    assert balance_coefficient(config_of({**quiet, "output_router_logits": True})) == 0.02
    assert balance_coefficient(config_of(FAMILIES["llama"])) == 0.0


def test_a_pipeline_does_not_drop_the_balancing_loss() -> None:
    check_stages(config_of(FAMILIES["mixtral"]))
    with pytest.raises(ModelError, match=r"(?s)output_router_logits.*output_router_logits"):
        check_stages(config_of({**FAMILIES["mixtral"], "output_router_logits": True}))


def test_metrics_of_routing() -> None:
    nothing = routing_metrics(math.nan, [[0, 0], [0, 0]])  # since the last row no step had a counted token
    assert math.isnan(nothing["moe/imbalance"]) and nothing["moe/idle_experts"] == 4
    row = routing_metrics(2.5, [[6, 2, 0, 0], [2, 2, 2, 2]])
    assert row == {
        "moe/aux_loss": 2.5,
        "moe/imbalance": 3.0,
        "moe/imbalance_per_layer": [3.0, 1.0],
        "moe/idle_experts": 2,
        "moe/tokens_per_expert": [8, 4, 2, 2],
    }
    assert row.keys() <= metrics().keys()


@pytest.mark.parametrize(
    ("section", "precision", "stage", "degree", "runs_at"),
    [
        ({"autoep_size": 2}, "bf16", 0, 2, 1),  # DeepSpeed leaves shared experts out of bf16's gradient norm there
        ({"autoep_size": 2}, "fp32", 0, 2, 0),
        ({"autoep_size": 2, "enabled": True}, "bf16", 3, 2, 3),
        ({"autoep_size": 2, "enabled": False}, "bf16", 0, 1, 0),
    ],
)
def test_the_section_of_the_json(tmp_path, monkeypatch, section, precision, stage, degree, runs_at) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {
        "expert_parallel": section,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
    }
    write(tmp_path, ds=changes)
    parsed = parse(["--config", "run.yaml"])
    run = resolve(parsed.config, 4, places=parsed.places)
    assert (run.mix.degrees.expert, run.mix.degrees.data, run.mix.zero_stage) == (degree, 4, runs_at)
    assert run.expert_parallel == {**section, "autoep_size": degree}
    assert "expert_parallel" not in run.deepspeed
    assert any("gradient norm" in note for note in run.notes) == (stage != runs_at)
