"""Which linear maps of a decoder ranks can share, and how each is cut: found by structure, and rehearsed."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError, UserError
from llmtrain.models.structure import sharding_proof
from llmtrain.models.structure.calls import Call, Watch, attention_seen
from llmtrain.models.structure.decoder_parts import anatomy_of
from llmtrain.models.structure.projections import Projections, projections
from llmtrain.models.structure.sharding_proof import Map, TooSlow, rehearse
from llmtrain.models.structure.small_copy import probe_copy, run_copy
from tests.helpers.families import FAMILIES, FROZEN, HYBRID, VARIANTS
from tests.helpers.renamed import renamed
from tests.unit.models.test_decoder_parts import meta

MAPS: dict[str, dict[str, Any]] = {
    "gpt2": {"attn.c_attn": ("column", (32, 32, 32)), "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
    "gpt_neox": {
        "attention.query_key_value": "column",
        "attention.dense": "row",
        "mlp.dense_h_to_4h": "column",
        "mlp.dense_4h_to_h": "row",
    },
    "opt": {
        **{f"self_attn.{k}_proj": "column" for k in "qkv"},
        "self_attn.out_proj": "row",
        "fc1": "column",
        "fc2": "row",
    },
    "phi3": {
        "self_attn.qkv_proj": ("column", (32, 16, 16)),
        "self_attn.o_proj": "row",
        "mlp.gate_up_proj": ("column", (80, 80)),
        "mlp.down_proj": "row",
    },
}
MAPS["gpt_neox_serial"], MAPS["opt_projected"], MAPS["phi3_longrope"] = MAPS["gpt_neox"], MAPS["opt"], MAPS["phi3"]
ATTENTION = {**{f"self_attn.{k}_proj": "column" for k in "qkv"}, "self_attn.o_proj": "row"}
MLP = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
NORMS = {
    "qwen3": "each_head",
    "qwen3_moe": "each_head",
    "gemma3": "each_head",
    "olmo2": "across_heads",
    "stablelm_full": "one_head",
}
GPT2_LIKE = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NUMBERS = {
    "gpt2": ("split_size",),
    "opt": ("num_heads",),
    "opt_projected": ("num_heads",),
    "phi3": ("num_key_value_heads",),
    "phi3_longrope": ("num_key_value_heads",),
    "stablelm": ("num_heads", "num_key_value_heads"),
    "stablelm_full": ("num_heads", "num_key_value_heads"),
}


def of_layer(found: Projections, layer: str) -> dict[str, Any]:
    return {
        entry.path.removeprefix(f"{layer}."): (kind, entry.sections) if entry.sections else kind
        for entry in found.maps
        if entry.path.startswith(f"{layer}.")
        for kind in ["column" if entry.column else "row"]
    }


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_maps(name: str) -> None:
    fields = {**FAMILIES, **VARIANTS}[name]
    hf = meta(fields)
    anatomy = anatomy_of(hf)
    found = projections(hf, anatomy)
    for layer in anatomy.layers:
        expected = MAPS.get(name, ATTENTION if layer.experts else {**ATTENTION, **MLP})
        assert of_layer(found, layer.path) == expected
    for entry in found.maps:
        assert entry.bias == (getattr(hf.get_submodule(entry.path), "bias", None) is not None)
        assert entry.transposed == (name == "gpt2")
    heads = hf.config.num_attention_heads
    assert (found.heads, found.kv_heads) == (heads, getattr(hf.config, "num_key_value_heads", heads))
    assert {norm.kind for norm in found.norms} == ({NORMS[name]} if name in NORMS else set())
    each = {"stablelm_full": 4 + 2}.get(name, 2) if name in NORMS else 0
    assert len(found.norms) == 4 * each
    assert found.local_numbers == NUMBERS.get(name, ())


def test_shared_experts_are_shared_and_their_gates_are_not() -> None:
    gate_beside = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "moe_intermediate_size": 24}
    hf = meta({**FAMILIES["qwen3_moe"], **gate_beside, "mlp_only_layers": []})
    anatomy = anatomy_of(hf)
    assert anatomy.layers[0].experts == "model.layers.0.mlp.experts"
    shared = {path.replace("mlp.", "mlp.shared_expert."): kind for path, kind in MLP.items()}
    assert of_layer(projections(hf, anatomy), "model.layers.0") == {**ATTENTION, **shared}

    gated_attention = {
        "model_type": "afmoe",
        "num_dense_layers": 1,
        "num_shared_experts": 1,
    }  # its router is a linear map
    hf = meta({**FAMILIES["qwen3_moe"], **gated_attention})
    found = of_layer(projections(hf, anatomy_of(hf)), "model.layers.1")
    shared = {path.replace("mlp.", "mlp.shared_experts."): kind for path, kind in MLP.items()}
    assert found == {**ATTENTION, "self_attn.gate_proj": "column", **shared}


def test_low_rank_attention() -> None:
    """All heads share a rotary key, which kv_a_proj_with_mqa makes: it and the norm behind it stay whole."""
    hf = meta(FROZEN["deepseek_v3"])
    anatomy = anatomy_of(hf)
    found = projections(hf, anatomy)
    attention = {"self_attn.q_b_proj": "column", "self_attn.kv_b_proj": "column", "self_attn.o_proj": "row"}
    assert of_layer(found, "model.layers.0") == {**attention, **MLP}
    shared = {path.replace("mlp.", "mlp.shared_experts."): kind for path, kind in MLP.items()}
    assert of_layer(found, "model.layers.3") == {**attention, **shared}
    assert found.entries == tuple(f"{layer.path}.self_attn.kv_a_proj_with_mqa" for layer in anatomy.layers)
    assert {(norm.path.rsplit(".", 1)[1], norm.kind) for norm in found.norms} == {("kv_a_layernorm", "each_head")}
    assert {entry.path.rsplit(".", 1)[1] for entry in found.maps if entry.inside} == {"kv_b_proj"}
    assert not found.note


def test_attention_of_another_kind_stays_whole() -> None:
    """Three of four layers have linear attention: of those the MLP is sharded."""
    hf = meta(HYBRID)
    found = projections(hf, anatomy_of(hf))
    assert of_layer(found, "model.layers.0") == MLP
    norms = {norm.path for norm in found.norms}
    assert of_layer(found, "model.layers.3") == {**ATTENTION, **MLP}
    assert norms == {f"model.layers.3.self_attn.{k}_norm" for k in "qk"}
    assert found.attentions == ("model.layers.3.self_attn",)
    assert found.note.startswith("the attention of 3 of 4 layers is complete on every rank")

    hf = meta({"model_type": "falcon", **GPT2_LIKE})
    found = projections(hf, anatomy_of(hf))
    assert of_layer(found, "transformer.h.1") == {"mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"}
    assert (found.heads, found.kv_heads, found.attentions) == (0, 0, ())


def test_maps_of_a_model_with_other_names() -> None:
    hf = renamed(tie_word_embeddings=True)
    found = projections(hf, anatomy_of(hf))
    # Both fused maps keep together what belongs together: shares lie side by side.
    assert of_layer(found, "body.steps.3") == {
        "look.mix": "column",
        "look.back": "row",
        "wide": "column",
        "narrow": "row",
    }
    assert found.attentions == tuple(f"body.steps.{i}.look" for i in range(4))
    assert found.widths == (80,)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "bloom", **GPT2_LIKE}, "does not call transformers' attention function once"),
        ({**FAMILIES["llama"], "model_type": "bitnet"}, "ffn_sub_norm"),
    ],
)
def test_maps_that_ranks_cannot_share(fields: dict[str, Any], reason: str) -> None:
    hf = meta(fields)
    anatomy = anatomy_of(hf)
    with pytest.raises(ModelError, match=reason):
        projections(hf, anatomy)


@pytest.mark.parametrize(("rank", "error"), [(1, TooSlow), (None, ModelError)])
def test_a_host_without_time_says_nothing_about_the_model(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, error: type[UserError]
) -> None:
    """A rank that comes late is the host's fault; a rank that meets the others less often is the model's."""
    hf = meta(FAMILIES["llama"])
    anatomy, given = anatomy_of(hf), sharding_proof._ShardedMap.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        if self._rank == rank:
            time.sleep(0.5)
        if rank is None and self._rank == 1 and not self._column:
            return hidden.new_zeros(*hidden.shape[:-1], len(self.weight))
        return given(self, hidden)

    monkeypatch.setattr(sharding_proof, "_SECONDS", 0.2)
    monkeypatch.setattr(sharding_proof._ShardedMap, "forward", forward)
    with pytest.raises(error) as raised:
        projections(hf, anatomy)
    assert isinstance(raised.value, ModelError) == (error is ModelError)


def test_the_rehearsal_notices_a_wrong_cut() -> None:
    small = probe_copy(meta(FAMILIES["gpt2"]))
    with attention_seen(small), Watch(small, ["transformer.h.1"]) as watch:
        run_copy(small, torch.arange(12).reshape(1, 12))
    right = [
        Map(path="attn.c_attn", column=True, transposed=True, sections=(32, 32, 32), bias=True),
        Map(path="attn.c_proj", column=False, transposed=True, sections=None, bias=True),
    ]
    layer = small.get_submodule("transformer.h.1")
    with attention_seen(small):
        assert rehearse(layer, watch.calls[0], right, [], "attn", heads=(4, 4)) == ("split_size",)
        wrong = [Map(path="attn.c_attn", column=True, transposed=True, sections=None, bias=True), right[1]]
        with pytest.raises(ModelError, match="another result"):
            rehearse(layer, watch.calls[0], wrong, [], "attn", heads=(4, 4))


def test_no_thread_of_a_proof_outlives_it() -> None:
    """A thread on its way out holds a lock of MKL, for which a process forked in that moment waits for ever."""
    before = set(os.listdir("/proc/self/task"))
    ranks = [nn.Linear(64, 64) for _ in range(8)]
    for _ in range(50):
        assert sharding_proof._play(ranks, Call(path="", begin=0, args=(torch.ones(64, 64),)))[1] is None
        assert set(os.listdir("/proc/self/task")) <= before
