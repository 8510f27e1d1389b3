"""What no adapter can do, and adapters that do not fit: refused by name, with a remedy, before training."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.base.errors import CheckpointError, ConfigError
from llmtrain.checkpoint.hf.inference import Sampling, generate
from llmtrain.checkpoint.load import _refuse_other_adapter
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models.parameters import PREFIX, WEIGHTS
from llmtrain.models.spec import ModelSpec
from tests.helpers.families import FROZEN
from tests.helpers.ranks import RankFailed
from tests.helpers.training import LLAMA, Case, resolved_run
from tests.ranks.test_adapter import LORA, resumed, saved, written

pytestmark = pytest.mark.needs("peft")

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MAMBA = {
    "model_type": "mamba2",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 4,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, "its r is 8, but the section adapter has 4"),
        ({"lora_alpha": 3}, "(?s)lora_alpha.*16.0"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "IA3"}, "IA3"),
        (None, "PEFT"),
        ({}, "model.layers.0.mlp.down_proj.lora_A.weight"),
    ],
)
def test_an_adapter_to_begin_with_that_is_another_is_refused_by_name(tmp_path, change, says):
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "use_rslora": False, "use_dora": False, "bias": "none"}
    if change is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | change))
        save_file({PREFIX + "model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, tmp_path / WEIGHTS)
    spec = ModelSpec.of(ModelConfig(config=dict(LLAMA)), AdapterConfig(r=4, start=str(tmp_path)))
    with pytest.raises(ConfigError, match=says):
        spec.initial_weights(0, torch.device("cpu"))


def test_an_adapter_to_begin_with_as_peft_writes_it_for_a_longer_vocabulary(tmp_path):
    """peft writes such a module three times: as it is, as the trained copy, and with its first values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(LLAMA)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    plain.save_pretrained(tmp_path / "base")
    more = plain.config.vocab_size + 8
    plain.resize_token_embeddings(more, mean_resizing=False)
    whole = ["model.embed_tokens", "lm_head"]
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", modules_to_save=whole, task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    model.get_base_model().lm_head.modules_to_save["default"].weight.data.fill_(0.5)
    model.save_pretrained(tmp_path / "peft")
    base = ModelConfig(pretrained=str(tmp_path / "base"), vocabulary=more)
    spec = ModelSpec.of(base, AdapterConfig(r=4, modules_to_save=whole, start=str(tmp_path / "peft")))
    source = spec.initial_weights(0, torch.device("cpu"))
    assert source.shape("lm_head.weight")[0] == more and bool((source.read("lm_head.weight", 0, 99) == 0.5).all())
    tensors = load_file(tmp_path / "peft" / WEIGHTS)
    wrapped = {name.replace(PREFIX, f"{PREFIX}module."): tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "peft" / WEIGHTS)
    with pytest.raises(ConfigError, match=r"`module\.`"):
        spec.initial_weights(0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("form", "adapter", "says"),
    [
        ({"stage": 1, "tensor": 2}, {"r": 4, "dropout": 0.1}, "adapter.dropout = 0.1(.|\n)*autotp_size = 2"),
        (
            {"extra": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}},
            {"r": 4},
            "never updates its second copies",
        ),
    ],
)
def test_what_no_adapter_can_do_is_refused_by_name(small_data, form, adapter, says):
    """DoRA and maps in 4 bits: test_cells.py."""
    with pytest.raises(ConfigError, match=says) as told:
        resolved_run(Case(data=small_data, adapter=adapter, **form), 2)
    assert "remedy" in str(told.value)


def test_dora_on_maps_that_peft_takes_for_the_experts_is_refused_by_name():
    """peft 0.21 could not load the folder that such a run exports."""
    model = ModelConfig(config=dict(FROZEN["deepseek_v3"]))
    named = r"model\.layers\.0\.mlp\.down_proj(.|\n)*down_proj, gate_proj"
    with pytest.raises(ConfigError, match=named) as refused:
        _ = ModelSpec.of(model, AdapterConfig(r=4, dora=True)).adapted
    assert refused.value.keys == {"adapter.dora"}
    assert ModelSpec.of(model, AdapterConfig(r=4, dora=True, targets=["*.o_proj"])).adapted is not None


def test_a_target_that_is_none_and_a_missing_library_are_told(monkeypatch, tmp_path):
    model = ModelConfig(config=dict(LLAMA))
    for target, told in (("*.q_prj", r"\*\.q_prj(.|\n)*q_proj"), ("lm_head", "lm_head")):
        with pytest.raises(ConfigError, match=told) as refused:
            _ = ModelSpec.of(model, AdapterConfig(r=4, targets=[target])).adapted
        assert refused.value.keys == {"adapter.targets"}
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"'llmtrain.adapters.'"):
        _ = ModelSpec.of(model, AdapterConfig(r=4)).adapted
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"(?s)test_a_target.*'llmtrain.adapters.'"):
        generate(tmp_path, "A prompt", Sampling())


@pytest.mark.parametrize(
    ("model", "adapter", "says"),
    [
        (GPT2, {}, r"transformer\.h\.0\.attn\.c_attn"),
        (GPT2, {"targets": ["*.c_attn"]}, r"transformer\.h\.0\.attn\.c_attn"),
        (MIXTRAL, {"targets": ["*.experts"]}, r"model\.layers\.0\.mlp\.experts"),
        (MIXTRAL, {"targets": ["model.layers.1.mlp.experts.0.w1"]}, r"model\.layers\.1\.mlp\.experts"),
        (LLAMA, {"modules_to_save": ["embed_tokens"]}, r"model\.embed_tokens"),
        (
            MAMBA,
            {"targets": ["*.in_proj"], "modules_to_save": ["*.0.mixer"]},
            r"backbone\.layers\.0\.mixer",
        ),
        (LLAMA, {"modules_to_save": ["*.q_proj"]}, r"(?s)model\.layers\.0\.self_attn\.q_proj.*adapter\.targets"),
    ],
)
def test_maps_that_get_no_adapter_and_modules_that_cannot_train_whole_are_named(model, adapter, says):
    with pytest.raises(ConfigError, match=says) as told:
        spec = ModelSpec.of(ModelConfig(config=dict(model), attention="eager"), AdapterConfig(r=4, **adapter))
        _ = spec.adapted, spec.frozen
    assert "remedy" in str(told.value)


def test_experts_train_whole_beside_an_adapter():
    adapter = AdapterConfig(r=4, modules_to_save=["*.experts"])
    spec = ModelSpec.of(ModelConfig(config=dict(MIXTRAL)), adapter)
    assert {name for name in spec.shapes if ".experts." in name} == spec.saved
    assert all(len(spec.shapes[name]) == 3 for name in spec.saved) and not spec.saved & spec.frozen


def test_a_full_run_and_an_adapters_do_not_continue_each_other(pools, small_data, tmp_path):
    """Not its parameters alone either: the model beside which an adapter trains is model.pretrained."""
    base = written(tmp_path / "hf", LLAMA)
    full, lora = (Case(data=small_data, pretrained=base, adapter=adapter, stage=2) for adapter in ({}, LORA))
    pools(2).run(saved, full, str(tmp_path / "full"))
    with pytest.raises(RankFailed, match=r"CheckpointError: (.|\n)*adapter(.|\n)*to-hf RUN FOLDER\)"):
        pools(2).run(resumed, lora, str(tmp_path / "full"))
    states = [TrainerState(run={"adapter": {"r": rank}}) for rank in (4, None)]
    with pytest.raises(CheckpointError, match=r"(?s)\(adapter.r 4\).*--merge"):
        _refuse_other_adapter(*states, tmp_path)
