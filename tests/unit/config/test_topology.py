"""The table of legal mixes: each rule fires for its own mix and is silent for the one that its remedy names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config.topology import RULES, Degrees, Mix, clashes
from llmtrain.optim.optimizers import Muon

# (a mix that is refused, the first key that the refusal names, the change that its remedy proposes)
CASES = [
    (Mix(fp16=True, bf16=True), "fp16.enabled", {"fp16": False}),
    *((Mix(autocast=True, **{name: True}), "torch_autocast.enabled", {name: False}) for name in ("bf16", "fp16")),
    *(
        (Mix(autocast=True, degrees=Degrees(**{name: 2})), "torch_autocast.enabled", {"degrees": Degrees()})
        for name in ("pipeline", "tensor", "sequence", "expert")
    ),
    *(
        (Mix(autocast=True, **{name: True}), "torch_autocast.enabled", {"autocast": False, "bf16": True})
        for name in ("mlp_tiles", "fp8")
    ),
    (Mix(zero_stage=2, offload_param=True), "zero_optimization.offload_param.device", {"zero_stage": 3}),
    (Mix(offload_optimizer=True), "zero_optimization.offload_optimizer.device", {"zero_stage": 1}),
    (Mix(optimizer="muon", clip_norm=1.0), "optim.name", {"clip_norm": 0.0}),
    (Mix(optimizer="muon", zero_stage=2, offload_optimizer=True), "optim.name", {"offload_optimizer": False}),
    (Mix(optimizer="muon", zero_stage=3, reduce_scatter=True), "optim.name", {"reduce_scatter": False}),
    (Mix(optimizer="muon", zero_stage=1, bf16=True, fp32_accumulation=True), "optim.name", {"zero_stage": 2}),
    (Mix(optimizer="muon", bf16_moments=True), "bf16.bf16_optimizer_states", {"optimizer": "lion"}),
    (
        Mix(bf16_moments=True, zero_stage=1, offload_optimizer=True),
        "bf16.bf16_optimizer_states",
        {"offload_optimizer": False},
    ),
    (Mix(bf16_moments=True, beta=0.999), "bf16.bf16_optimizer_states", {"beta": 0.95}),
    (Mix(zero_stage=2, degrees=Degrees(pipeline=2)), "pipeline.stages", {"degrees": Degrees()}),
    (Mix(profiled=True, degrees=Degrees(pipeline=2)), "pipeline.stages", {"profiled": False}),
    (
        Mix(zero_stage=1, offload_optimizer=True, own_settings=True, degrees=Degrees(pipeline=2)),
        "pipeline.stages",
        {"own_settings": False},
    ),
    (Mix(optimizer="muon", degrees=Degrees(tensor=2)), "tensor_parallel.autotp_size", {"optimizer": "adamw"}),
    (Mix(degrees=Degrees(sequence=2, pipeline=2)), "sequence_parallel_size", {"degrees": Degrees(sequence=2)}),
    (Mix(keep_attention=True), "model.recompute.keep", {"recomputes": True}),
    (Mix(mlp_tiles=True, compile_layers=True), "model.mlp_tile_tokens", {"compile_layers": False}),
    (
        Mix(layer_inputs_on_host=True, compile_layers=True),
        "activation_checkpointing.cpu_checkpointing",
        {"compile_layers": False},
    ),
    (Mix(fp8=True, fp16=True), "model.fp8", {"fp16": False, "bf16": True}),
    (Mix(fp8=True, degrees=Degrees(tensor=2)), "model.fp8", {"degrees": Degrees(), "zero_stage": 3}),
    (Mix(optimizer="muon", degrees=Degrees(expert=2)), "expert_parallel.autoep_size", {"optimizer": "adamw"}),
    (Mix(compile_layers=True, degrees=Degrees(expert=2)), "expert_parallel.autoep_size", {"compile_layers": False}),
    (Mix(degrees=Degrees(expert=2, tensor=2)), "expert_parallel.autoep_size", {"degrees": Degrees(expert=2)}),
    (
        Mix(hpz=True, zero_stage=3, degrees=Degrees(tensor=2)),
        "zero_optimization.zero_hpz_partition_size",
        {"hpz": False},
    ),
    *(
        (Mix(zero_stage=2, degrees=Degrees(expert=2), **{name: False}), f"zero_optimization.{name}", {name: None})
        for name in ("reduce_scatter", "contiguous_gradients")
    ),
    (
        Mix(hpz=True, zero_stage=3, degrees=Degrees(expert=2)),
        "zero_optimization.zero_hpz_partition_size",
        {"hpz": False},
    ),
]


@pytest.mark.parametrize(("mix", "key", "change"), CASES)
def test_a_refused_mix_and_its_remedy(mix: Mix, key: str, change: dict[str, Any]) -> None:
    broken = clashes(mix)
    assert broken[0].keys[0] == key
    assert broken[0].reason
    assert broken[0].remedy
    assert clashes(replace(mix, **change)) == []


def test_every_rule_is_fired_by_a_case() -> None:
    fired = {id(rule) for mix, _, _ in CASES for rule in clashes(mix)}
    assert fired == {id(rule) for rule in (*RULES, *Muon.rules)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_plain_zero_is_legal(stage: int, precision: str | None) -> None:
    assert clashes(Mix(zero_stage=stage, fp16=precision == "fp16", bf16=precision == "bf16")) == []
