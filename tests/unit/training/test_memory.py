"""The number of layers that `auto` stands for: the bytes that it is counted from, and that it is the least."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.load import resolve
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, ResolvedRun, RunConfig, TrainConfig
from llmtrain.config.stages import StageConfig
from llmtrain.models.run.activations import Activations, LiveBytes, count_activations
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import AdamW
from llmtrain.training.memory import fewest_layers, held_bytes
from tests.helpers.families import FAMILIES, summed_loss
from tests.helpers.marks import slow
from tests.unit.models.test_recompute import recomputing
from tests.unit.models.test_tiled import model_of

LENGTH, LAYERS = 64, 4


def resolved(
    folder: Path, json_keys: dict[str, Any], adapter: AdapterConfig | None = None, **model: Any
) -> ResolvedRun:
    file = folder / "ds.json"
    file.write_text(json.dumps(json_keys))
    run = RunConfig(
        deepspeed=str(file),
        model=ModelConfig(config=FAMILIES["llama"], **model),
        data=DataConfig(path="(none)", sequence_length=LENGTH, isolate_documents=model.get("attention") == "varlen"),
        adapter=adapter or AdapterConfig(),
        optim=AdamW(lr=1e-4),
        train=TrainConfig(micro_batch=2, accumulation=1, max_steps=10),
    )
    return resolve(run, 1, "one process")


def measured(layers: int, *, keep: bool) -> Activations:
    """The bytes of a step with numbers in it, by the same ledger."""
    model = recomputing(model_of("llama"), layers or None, "attention" if keep and layers else None, on_host=False)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    with LiveBytes([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]) as live:
        loss = summed_loss(model, tokens, tokens)
        kept = live.now()
        loss.backward()
    return Activations(kept=kept, most=live.most)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict[tuple[int, bool], Activations]:
    """(recomputed layers, attention kept) -> what is counted."""
    run = resolved(tmp_path_factory.mktemp("run"), {"zero_optimization": {"stage": 1}}, loss_chunk_tokens=16)
    spec = ModelSpec.of(run.run.model)
    return {
        (layers, keep): count_activations(run, spec, layers or None, "attention" if keep and layers else None)
        for keep in (False, True)
        for layers in range(LAYERS + 1)
    }


@pytest.mark.parametrize("keep", [False, True])
def test_each_recomputed_layer_frees_as_much(table, keep):
    """And a step with numbers in it makes what is counted."""
    kept = [table[layers, keep].kept for layers in range(LAYERS + 1)]
    freed = [more - less for more, less in itertools.pairwise(kept)]
    assert all(each > 0 for each in freed) and max(freed) < 1.05 * min(freed)
    for layers in range(LAYERS + 1):
        got = measured(layers, keep=keep)
        assert abs(got.kept / table[layers, keep].kept - 1) < 0.05
        assert abs(got.most / table[layers, keep].most - 1) < 0.05


@pytest.mark.parametrize(
    "more",
    [
        {"attention": "varlen"},
        {"attention": "flash_attention_2"},
        slow({"mlp_tile_tokens": 16}),
        pytest.param({"adapter": AdapterConfig(r=4)}, marks=[pytest.mark.slow, pytest.mark.needs("peft")]),
    ],
    ids=str,
)
def test_other_layers_are_counted_too(table, tmp_path, more):
    run = resolved(tmp_path, {"zero_optimization": {"stage": 3}}, loss_chunk_tokens=16, **more)
    spec = ModelSpec.of(run.run.model, run.run.adapter)
    plain, half, every = (count_activations(run, spec, layers, None) for layers in (None, 2, "all"))
    assert abs(half.kept - (plain.kept + every.kept) / 2) < 0.02 * half.kept
    kept = count_activations(run, spec, "all", "attention")
    assert every.kept < kept.kept < half.kept
    if "attention" not in more:
        assert plain.kept < 0.95 * table[0, False].kept


def test_the_largest_micro_batch_of_a_runs_stages_counts(table, tmp_path):
    run = resolved(tmp_path, {"zero_optimization": {"stage": 1}}, loss_chunk_tokens=16).run
    data = replace(run.data, sequence_length=LENGTH // 2, stages=[StageConfig(from_step=5, sequence_length=LENGTH)])
    longer = resolve(replace(run, data=data), 1, "one process")
    assert count_activations(longer, ModelSpec.of(run.model), None, None) == table[0, False]


@pytest.mark.parametrize("wanted", [0, 1, 3, LAYERS])
@pytest.mark.parametrize("keep", [False, True])
def test_as_few_layers_as_fit(table, wanted, keep):
    def count(layers: int | str | None, keep: str | None) -> Activations:
        return table[LAYERS if layers == "all" else int(layers or 0), keep is not None]

    chosen, words = fewest_layers(count, LAYERS, table[wanted, keep].most, ("attention",) if keep else (None,))
    assert chosen.layers == (wanted or None)
    assert chosen.keep == ("attention" if keep and wanted else None)
    assert f"{wanted or 'none'} of {LAYERS} layers" in words


def test_attention_is_kept_where_there_is_room(table):
    def count(layers: int | str | None, keep: str | None) -> Activations:
        return table[LAYERS if layers == "all" else int(layers or 0), keep is not None]

    least_kept, least = table[LAYERS, True].most, table[LAYERS, False].most
    assert least < least_kept
    either = ("attention", None)
    assert fewest_layers(count, LAYERS, least_kept, either)[0].keep == "attention"
    assert fewest_layers(count, LAYERS, least_kept - 1, either)[0].keep is None
    chosen, words = fewest_layers(count, LAYERS, least - 1, either)
    assert (chosen.layers, chosen.keep) == ("all", None) and "not enough" in words


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({"zero_optimization": {"stage": 0}}, 16),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}, 16),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}, 16),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
          "zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}, 18),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1, "offload_optimizer": {"device": "cpu"}}}, 8),
        ({"zero_optimization": {"stage": 1}}, 24),  # a bucket of all gradients, twice
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 1}}, 18),  # gathered
    ],
    ids=str,
)  # fmt: skip
def test_bytes_beside_activations(tmp_path, keys, held):
    run = resolved(tmp_path, keys)
    facts = ModelSpec.of(run.run.model, AdapterConfig()).facts
    assert abs(held_bytes(run, facts) / facts.parameters - held) < 0.01
