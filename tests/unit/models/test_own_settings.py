"""Learning rates and weight decay of single parameters: which parameter has which, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.load import parse
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models.own_settings import OwnSettings, own_settings
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import AdamW, Muon
from llmtrain.parity.plain import _own
from llmtrain.parity.small import own_settings_here
from tests.helpers.config_workplace import write
from tests.helpers.families import FAMILIES
from tools.families.configs import tiny

LLAMA = FAMILIES["llama"]  # four layers


def spec(family: str = "llama", adapter: AdapterConfig | None = None, **fields: Any) -> ModelSpec:
    return ModelSpec.of(ModelConfig(config={**FAMILIES[family]}, **fields), adapter)


@pytest.mark.parametrize(
    ("family", "embeddings", "layers", "others"),
    [
        ("llama", ["model.embed_tokens.weight"], "model.layers.{}.", ["model.norm.weight", "lm_head.weight"]),
        ("gpt2", ["transformer.wte.weight", "transformer.wpe.weight"], "transformer.h.{}.", ["transformer.ln_f.bias"]),
    ],
)
def test_a_rate_falls_from_layer_to_layer(family: str, embeddings: list[str], layers: str, others: list[str]) -> None:
    """gpt2's head is tied to its embedding, and has that name and rate."""
    some = spec(family)
    own = own_settings(some, AdamW(layer_decay=0.5))
    assert set(own) == set(some.shapes) and all(each.weight_decay is None for each in own.values())
    depth = some.facts.layers
    assert all(own.pop(name).lr_factor == 0.5**depth for name in embeddings)
    for index in range(depth):
        inside = [own.pop(name).lr_factor for name in list(own) if name.startswith(layers.format(index))]
        assert len(inside) > 5 and set(inside) == {0.5 ** (depth - 1 - index)}
    assert set(others) <= set(own) and {each.lr_factor for each in own.values()} == {1.0}


def test_patterns_give_values_beside_the_layers_and_only_to_what_trains() -> None:
    optim = Muon(layer_decay=0.5, lr_factor_of={"*.mlp.*": 3.0}, weight_decay_of={"*norm*": 0.3})
    own = own_settings(spec(freeze=["model.layers.0.*"]), optim)
    assert not any(name.startswith("model.layers.0.") for name in own)
    assert own["model.layers.2.mlp.up_proj.weight"] == OwnSettings(1.5, None)
    assert own["model.layers.3.input_layernorm.weight"] == own["model.norm.weight"] == OwnSettings(1.0, 0.3)
    assert set(own_settings(spec(), AdamW()).values()) == {OwnSettings(1.0, None)}


@pytest.mark.needs("peft")
def test_an_adapter_has_the_rate_of_its_layer() -> None:
    own = own_settings(spec(adapter=AdapterConfig(r=2)), AdamW(layer_decay=0.5, lr_factor_of={"*lora_B*": 16.0}))
    assert own["model.layers.1.self_attn.q_proj.lora_B.weight"] == OwnSettings(4.0, None)
    assert own["model.layers.1.self_attn.q_proj.lora_A.weight"] == OwnSettings(0.25, None)
    assert all(".lora_" in name for name in own)


@pytest.mark.parametrize(
    ("family", "model", "optim", "words"),
    [
        (
            "llama",
            {},
            {"weight_decay_of": {"*.nrom.*": 0.0}},
            r"optim.weight_decay_of.\*.nrom.\* = 0.0.*matches no "
            "parameter that trains.*one of them is model",
        ),
        ("llama", {"freeze": ["lm_head.*"]}, {"lr_factor_of": {"lm_head.*": 2.0}}, "matches no parameter that trains"),
        (
            "llama",
            {},
            {"lr_factor_of": {"*norm*": 2.0, "model.norm.*": 3.0}},
            r"model.norm.\* = 3.0.*\*norm\* gives "
            "model.norm.weight another value, 2",
        ),
        ("gpt2", {}, {"lr_factor_of": {"*.wte.*": 2.0, "lm_head.*": 3.0}}, "gives transformer.wte.weight ano"),
    ],
)
def test_a_pattern_for_nothing_and_two_for_one_parameter_are_refused(
    family: str, model: dict[str, Any], optim: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        own_settings(spec(family, **model), AdamW(**optim))


def test_patterns_have_dots_in_the_yaml_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"optim": {"name": "lion", "weight_decay_of": {"*.bias": 0, "model.norm.*": 0.5}}})
    optim = parse(["run.yaml", "--optim.lr_factor_of.model.layers.*", "2", "--optim.layer_decay", "0.9"]).config.optim
    assert optim.weight_decay_of == {"*.bias": 0.0, "model.norm.*": 0.5}
    assert optim.lr_factor_of == {"model.layers.*": 2.0} and optim.layer_decay == 0.9


def test_a_parity_check_takes_the_patterns_that_its_small_copy_has() -> None:
    optim = AdamW(lr_factor_of={"model.layers.30.*": 2.0, "*norm*": 2.0}, weight_decay_of={"*.29.*": 0.0})
    here = own_settings_here(dict(LLAMA), ModelConfig(config=dict(LLAMA)), AdapterConfig(), optim)
    assert here.lr_factor_of == {"*norm*": 2.0} and here.weight_decay_of == {}


def test_a_block_that_layers_share_has_the_rate_of_the_last() -> None:
    """Zamba 2's is in layers 1, 3 and 5 of 6, under the name of the first; parity's definition says the same."""
    kinds = ["mamba", "hybrid"] * 3
    fields = {**tiny("zamba2"), "num_hidden_layers": 6, "layer_types": kinds, "num_mem_blocks": 1}
    shared = ModelSpec.of(ModelConfig(config={**fields, "layers_block_type": kinds}, attention="eager"))
    optim = AdamW(layer_decay=0.5)
    own = own_settings(shared, optim)
    assert own["model.layers.1.shared_transformer.self_attn.q_proj.weight"].lr_factor == 1.0
    assert own["model.layers.1.linear.weight"].lr_factor == 0.5**4
    for name, parameter in shared.skeleton.named_parameters():
        assert _own(shared.skeleton, name, parameter, optim)[0] == own[name].lr_factor, name
