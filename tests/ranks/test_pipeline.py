"""Pipelines against plain PyTorch in one process, fp32, 5 steps; what their stages hold; what they refuse.

Tolerance: as in test_parity.py; a pipeline changes the order of summation only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ModelError
from llmtrain.models.loss import HeadForm
from llmtrain.training.setup import check_head
from tests.helpers.families import FAMILIES, VARIANTS, tied
from tests.helpers.processors import on_device
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assert_agrees,
    joined,
    make_engine,
    plain_pytorch,
    poisoned,
    resolved_run,
    run_case,
)

ALL = {**FAMILIES, **VARIANTS}
_REFERENCES: dict[str, Trace] = {}


def reference(data: str, **model: Any) -> Trace:
    key = repr((data, sorted(model.items(), key=str)))
    return _REFERENCES.setdefault(key, plain_pytorch(Case(data=data, **model)))


def attention_of(fields: dict[str, Any]) -> str:
    return "eager" if fields["model_type"] == "gemma2" else "sdpa"  # transformers has no sdpa for its soft cap


def agrees(pools: Any, data: str, world_size: int, model: dict[str, Any], **form: Any) -> None:
    about_model = {"model": model, "attention": attention_of(model)}
    if "isolate_documents" in form:
        about_model["isolate_documents"] = form.pop("isolate_documents")
    want = reference(data, **about_model)
    got = pools(world_size).run(run_case, Case(data=data, stage=1, **about_model, **form))[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-4, parameters=1e-5)
    assert min(want.norms) > 0.1  # it does train


SMALL_BUCKETS = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}
FORMS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, tied(FAMILIES["gpt2"]), {"pipeline": 2, "accumulation": 3}),
    (2, tied(FAMILIES["gemma2"]), {"pipeline": 2, "accumulation": 2}),
    (2, tied(ALL["opt_projected"]), {"pipeline": 2, "accumulation": 3}),
    (2, tied(LLAMA), {"pipeline": 2, "partition": (3, 1), "extra": SMALL_BUCKETS}),
    (3, tied(FAMILIES["gemma3"]), {"pipeline": 3, "accumulation": 3, "isolate_documents": True}),
    (
        4,
        tied(FAMILIES["qwen2"], False),
        {"pipeline": 4, "accumulation": 6, "isolate_documents": True, "extra": {"activation_checkpointing": {}}},
    ),
]


@pytest.mark.parametrize(
    ("world_size", "model", "form"), FORMS, ids=[f"{model['model_type']}-{size}" for size, model, _ in FORMS]
)
def test_a_pipeline_trains_as_one_process_does(pools, small_data, world_size, model, form):
    agrees(pools, small_data, world_size, model, **form)


@pytest.mark.parametrize(
    ("precision", "tie", "loss"), [("bf16", True, 1.5e-3), ("bf16", False, 1.5e-3), ("fp16", True, 2e-3)]
)
def test_half_precision_with_gradients_accumulated_in_fp32(pools, small_data, precision, tie, loss):
    """DeepSpeed 0.19.8 trains a pipeline that accumulates in fp32 wrongly: the head, and what is tied to it.

    Tolerances as in test_forms.py.
    """
    model = tied(LLAMA, tie)
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    case = Case(data=small_data, stage=1, pipeline=2, accumulation=3, precision=precision, extra=sums, model=model)
    got = pools(2).run(on_device, True, run_case, case)[0]
    assert_agrees(got, reference(small_data, model=model), loss=loss, norm=1e-2)


def test_muon_on_stages_whose_groups_differ(pools, small_data):
    """Only the ends have AdamW's matrices beside Muon's: the norm is one sum over all groups of a stage."""
    case = Case(data=small_data, stage=1, optimizer="muon", steps=6)
    want = pools(1).run(run_case, case)[0]
    got = pools(4).run(run_case, replace(case, pipeline=4, accumulation=3))[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-5, parameters=1e-5)


def held(case: Case) -> tuple[list[str], int, list[str]]:
    """(names, elements of all parameters) of this rank, and what it is told of its stages."""
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec

    ranks = joined()
    run = resolved_run(case, ranks.world_size)
    model: Any = build_model(run, ModelSpec.of(run.config.model), ranks.device, mesh_of(run.mix.degrees))
    assert not any(p.is_meta for p in model.parameters())
    elements = sum(p.numel() for p in model.parameters())
    return [local.name for local in model.local_parameters()], elements, model.notes


def test_a_rank_holds_its_stage_alone(pools, small_data):
    """One of four even stages: a quarter of the layers; embedding and head on the two ends."""
    model = {**LLAMA, "vocab_size": 512, "num_hidden_layers": 8}
    case = Case(data=small_data, stage=1, pipeline=4, partition="uniform", model=model, accumulation=12)
    shares = pools(4).run(held, case)
    names = [name for share in shares for name in share[0]]
    assert len(names) == len(set(names)) == 8 * 9 + 3
    for stage, (mine, elements, notes) in enumerate(shares):
        assert {name.split(".")[2] for name in mine if ".layers." in name} == {str(2 * stage), str(2 * stage + 1)}
        ends = 512 * 64 * (stage in (0, 3)) + 64 * (stage == 3)
        assert elements - ends == 2 * (64 * 64 * 3 + 64 * 160 * 3 + 2 * 64)
        assert all(value in notes[-1] for value in ("4 stages", "2 + 2 + 2 + 2", "12 micro-batches", " 20% ")), notes


def said_of_a_wrong_head(case: Case) -> str:
    """The error of the check of the start, once the last stage scales its logits."""
    engine, _ = make_engine(case)
    if engine.deepspeed.is_last_stage():
        engine.module.head.form = HeadForm(scale=3.0)
    try:
        check_head(engine, torch.arange(32).unsqueeze(0))
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_every_stage_hears_of_a_head_that_computes_another_loss(pools, small_data):
    for message in pools(3).run(said_of_a_wrong_head, Case(data=small_data, stage=1, pipeline=3, accumulation=2)):
        assert "loss of LlamaForCausalLM" in message


@pytest.mark.parametrize(
    ("precision", "rank"),
    [
        ("fp32", 3),
        ("bf16", 0),
    ],
)
def test_a_nan_on_one_stage_skips_the_step_on_all(pools, small_data, precision, rank):
    case = Case(data=small_data, stage=1, pipeline=2, accumulation=3, precision=precision, model=tied(LLAMA))
    for skipped, finite, unchanged in pools(4).run(poisoned, case, 2, rank):
        assert skipped == [False, False, True, False] and finite and unchanged
