"""The number of layers that `auto` stands for: the bytes that it is counted from, and that it is the least."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.load import resolve
from llmtrain.config.run import AdapterConfig, ModelConfig, ResolvedRun
from llmtrain.config.stages import StageConfig
from llmtrain.data.stream.loader import AnswerBatch, MicroBatch, TaughtBatch
from llmtrain.engine.losses.named import loss_of
from llmtrain.models.language import LanguageModel
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import load_teacher, teacher_model
from llmtrain.objectives.objective import Objective
from llmtrain.training.memory import Activations, LiveBytes, count_activations, fewest_layers, held_bytes
from tests.helpers.families import FAMILIES, summed_loss
from tests.helpers.hf_folders import new_model
from tests.helpers.marks import slow
from tests.unit.models.test_recompute import recomputing
from tests.unit.models.test_tiled import model_of
from tests.unit.training.test_attention_auto import run_of

LENGTH, LAYERS = 64, 4


def resolved(
    folder: Path,
    json_keys: dict[str, Any],
    adapter: AdapterConfig | None = None,
    objective: Objective | None = None,
    **model: Any,
) -> ResolvedRun:
    sections = {"adapter": adapter or AdapterConfig(), "objective": objective or Objective.of("next_token")}
    isolate = model.get("attention") == "varlen"
    given = ModelConfig(config=FAMILIES["llama"], **model)
    return run_of(folder, json_keys, given, isolate=isolate, length=LENGTH, **sections)


def measured(layers: int, *, keep: bool) -> Activations:
    """The bytes of a step with numbers in it, by the same ledger."""
    model = recomputing(model_of("llama"), layers or None, "attention" if keep and layers else None, on_host=False)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    return of_a_step(model, [], lambda: summed_loss(model, tokens, tokens))


def of_a_step(model: LanguageModel, others: list[torch.Tensor], loss_of: Callable[[], torch.Tensor]) -> Activations:
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes([*model.parameters(), *grads, *others]) as live:
        loss = loss_of()
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


def micro_batch(top_k: int | None, *, answers: bool) -> MicroBatch:
    """Two rows whose tokens all count."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    given: dict[str, Any] = {"inputs": tokens, "labels": tokens, "sample_indices": [0, 1]}
    if answers:
        whose = torch.tensor([[0], [1]]).expand(2, LENGTH)
        return AnswerBatch(**given, answers=whose, rows=torch.arange(2), reference=torch.zeros(2))
    if top_k:
        return TaughtBatch(**given, words=torch.zeros(2, LENGTH, top_k, dtype=torch.int64),
                           logs=torch.zeros(2, LENGTH, top_k + 1))  # fmt: skip
    return MicroBatch(**given)


@pytest.mark.parametrize("objective", ["teacher", "column", "z_loss", "dpo"])
def test_what_an_objective_makes_of_the_head_is_counted(tmp_path, objective):
    """Against the run's own loss function with numbers in it. A teacher's logits, and its hidden states, which are
    wider than the student's here, exist while the student's activations do."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": FAMILIES["llama"]["vocab_size"]}
    if objective == "teacher":
        new_model("llama", **wide).save_pretrained(tmp_path / "teacher")
    named = {
        "teacher": lambda: Objective.of("distill", teacher=str(tmp_path / "teacher")),
        "column": lambda: Objective.of("distill", top_k=64),
        "z_loss": lambda: Objective.of("next_token", z_loss=1e-4),
        "dpo": lambda: Objective.of("dpo"),
    }[objective]()
    run = resolved(tmp_path, {"zero_optimization": {"stage": 1}}, objective=named, loss_chunk_tokens=1024)
    counted = count_activations(run, ModelSpec.of(run.run.model), None, None)

    teacher = load_teacher(teacher_model(named, run.run.model), "fp32", torch.device("cpu")) if named.teacher else None
    loss, model, micro = (
        loss_of(named, teacher),
        model_of("llama"),
        micro_batch(named.top_k, answers=objective == "dpo"),
    )
    model.head._chunk = 1024
    others = [] if teacher is None else [*teacher.tensors().values(), *teacher.to_empty("cpu")]
    of_hidden = lambda head, hidden: loss.sums(head, hidden, micro)[0]  # noqa: E731
    got = of_a_step(model, others, lambda: model(micro.inputs, of_hidden, None))
    assert abs(got.kept / counted.kept - 1) < 0.05
    assert abs(got.most / counted.most - 1) < 0.05


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
    spec = ModelSpec.of(run.run.model, AdapterConfig())
    assert abs(held_bytes(run, spec) / spec.facts.parameters - held) < 0.01


@pytest.mark.needs("peft")
def test_values_that_an_online_reference_began_with_are_held(tmp_path):
    """Beside what trains: those of the modules that train whole."""
    adapter = AdapterConfig(r=4, modules_to_save=["lm_head"])
    spec = ModelSpec.of(ModelConfig(config=FAMILIES["llama"]), adapter)
    head = FAMILIES["llama"]["vocab_size"] * FAMILIES["llama"]["hidden_size"]
    keys = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    held = [held_bytes(resolved(tmp_path, keys, adapter, Objective.of("dpo", reference=each)), spec)
            for each in ("column", "online")]  # fmt: skip
    assert held[1] - held[0] == 2 * head
