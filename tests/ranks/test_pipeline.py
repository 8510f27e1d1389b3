"""Pipelines against plain PyTorch in one process, fp32, 5 steps; what their stages hold; what they refuse.

Tolerance: as in test_parity.py; a pipeline changes the order of summation only.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ModelError
from llmtrain.data.stream.loader import TrainData, validation_batches
from llmtrain.models.loss import HeadForm
from tests.helpers.families import FAMILIES, VARIANTS, tied
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assert_agrees,
    case_data,
    joined,
    make_engine,
    plain_pytorch,
    poisoned,
    resolved_run,
    run_case,
    train_steps,
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
    (4, tied(FAMILIES["qwen2"], False), {"pipeline": 4, "accumulation": 6, "isolate_documents": True,
                                         "extra": {"activation_checkpointing": {}}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "model", "form"), FORMS, ids=[f"{model['model_type']}-{size}" for size, model, _ in FORMS]
)
def test_a_pipeline_trains_as_one_process_does(pools, small_data, world_size, model, form):
    agrees(pools, small_data, world_size, model, **form)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_bf16_with_gradients_accumulated_in(pools, small_data, tie):
    """DeepSpeed 0.19.8 trains a pipeline that accumulates in fp32 wrongly: the head, and what is tied to it.

    Tolerances as in test_forms.py.
    """
    model = tied(LLAMA, tie)
    want = reference(small_data, model=model)
    case = Case(
        data=small_data,
        stage=1,
        pipeline=2,
        accumulation=3,
        precision="bf16",
        extra={"data_types": {"grad_accum_dtype": "fp32"}},
        model=model,
    )
    got = pools(2).run(run_case, case)[0]
    assert_agrees(got, want, loss=1.5e-3, norm=1e-2)


def test_fp16_with_gradients_accumulated_in(pools, small_data):
    from tests.ranks.test_forms import with_loss_scale

    want = reference(small_data, model=tied(LLAMA))
    case = Case(
        data=small_data,
        stage=1,
        pipeline=2,
        accumulation=3,
        precision="fp16",
        extra={"data_types": {"grad_accum_dtype": "fp32"}},
        model=tied(LLAMA),
    )
    got, scales = pools(2).run(with_loss_scale, case)[0]
    assert_agrees(got, want, loss=2e-3, norm=1e-2)
    assert scales[0] >= 1024


def test_muon_on_stages_whose_groups_differ(pools, small_data):
    """Only the ends have AdamW's matrices beside Muon's: the norm is one sum over all groups of a stage."""
    case = Case(data=small_data, stage=1, optimizer="muon", steps=6)
    want = pools(1).run(run_case, case)[0]
    got = pools(4).run(run_case, replace(case, pipeline=4, accumulation=3))[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-5, parameters=1e-5)


def held(case: Case) -> tuple[list[str], int]:
    """(names, elements of all parameters) of this rank."""
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec

    ranks = joined()
    resolved = resolved_run(case, ranks.world_size)
    model: Any = build_model(resolved, ModelSpec.of(resolved.run.model), ranks.device, mesh_of(resolved.degrees))
    assert not any(p.is_meta for p in model.parameters())
    elements = sum(p.numel() for p in model.parameters())
    return [local.name for local in model.local_parameters()], elements


def test_a_rank_holds_its_stage_alone(pools, small_data):
    """One of four even stages: a quarter of the layers; embedding and head on the two ends."""
    model = {**LLAMA, "vocab_size": 512, "num_hidden_layers": 8}
    shares = pools(4).run(held, Case(data=small_data, stage=1, pipeline=4, partition="uniform", model=model))
    names = [name for share in shares for name in share[0]]
    assert len(names) == len(set(names)) == 8 * 9 + 3
    for stage, (mine, elements) in enumerate(shares):
        assert {name.split(".")[2] for name in mine if ".layers." in name} == {str(2 * stage), str(2 * stage + 1)}
        ends = 512 * 64 * (stage in (0, 3)) + 64 * (stage == 3)
        assert elements - ends == 2 * (64 * 64 * 3 + 64 * 160 * 3 + 2 * 64)


@pytest.mark.parametrize(
    ("partition", "want"), [("parameters", (1, 2, 1)), ("uniform", (1, 2, 1)), ((1, 1, 2), (1, 1, 2))]
)
def test_how_layers_are_shared(pools, small_data, partition, want):
    shares = pools(3).run(held, Case(data=small_data, stage=1, pipeline=3, partition=partition))
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names, _ in shares]
    assert tuple(map(len, layers)) == want and len(set.union(*layers)) == sum(want)


def refusal(case: Case) -> str:
    try:
        held(case)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"partition": (1, 1, 3)}, "4 (the model's layers) in all"),
        ({"model": {**LLAMA, "num_hidden_layers": 2}}, "at most 2 stages"),
    ],
)
def test_stages_that_cannot_be_are_refused(pools, small_data, form, words):
    for message in pools(3).run(refusal, Case(data=small_data, stage=1, pipeline=3, **form)):
        assert "pipeline." in message and words in message


def evaluated(case: Case) -> tuple[float, int, float, str]:
    """(validation loss, its tokens, the same after a step, what the checks say of a head that is wrong)."""
    engine, ranks = make_engine(case)
    place = engine.mesh.place
    data = TrainData(case_data(case))

    def evaluate() -> tuple[dict[str, float], int]:
        split = {"rank": place.data, "data_parallel": engine.mesh.degrees.data}
        return engine.evaluate(validation_batches(data, sequences=7, micro_batch=3, **split))

    before, counted = evaluate()
    inputs = torch.from_numpy(data.sequence(0)[0][:32]).unsqueeze(0)
    engine.check_head(inputs)
    if case.isolate_documents:
        engine.check_isolation(inputs)
    train_steps(case, engine, ranks, 0, 1)  # shapes change back
    after, _ = evaluate()
    message = ""
    if engine.deepspeed.is_last_stage():
        engine.module.head.form = HeadForm(scale=3.0)
    try:
        engine.check_head(inputs)
    except ModelError as error:
        message = str(error)
    engine.close()
    return before["loss"], counted, after["loss"], message


def test_evaluation_and_the_checks_of_the_start(pools, small_data):
    """The same numbers as without a pipeline; another batch shape than in training."""
    from tests.ranks.test_forms import evaluated as evaluated_plainly

    plain = pools(1).run(evaluated_plainly, Case(data=small_data))[0]
    for world_size, stages, isolate in ((2, 2, True), (4, 2, False), (3, 3, True)):
        case = Case(data=small_data, stage=1, pipeline=stages, accumulation=2, isolate_documents=isolate)
        for loss, counted, after, message in pools(world_size).run(evaluated, case):
            if not isolate:
                assert abs(loss - plain) < 2e-6
            assert 0 < counted <= 7 * 32
            assert after < loss + 0.05 and after != loss
            assert "loss of LlamaForCausalLM computed in chunks" in message


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


def before_the_update(case: Case) -> tuple[bool, bool]:
    """(the callback sees the parameters of before the step, a gradient is there by then)."""
    engine, ranks = make_engine(case)
    before = {local.name: local.parameter.detach().clone() for local in engine.module.local_parameters()}
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        local = engine.module.local_parameters()
        same = all(torch.equal(before[held.name], held.parameter) for held in local)
        seen.append(
            (
                same,
                any(bool(g.any()) for group in engine.deepspeed.optimizer.averaged_gradients.values() for g in group),
            )
        )

    train_steps(case, engine, ranks, 0, 1, before_update=look)
    engine.close()
    assert len(seen) == 1
    return seen[0]


def test_what_comes_before_the_update(pools, small_data):
    for seen in pools(2).run(before_the_update, Case(data=small_data, stage=1, pipeline=2, accumulation=3)):
        assert seen == (True, True)


@functools.cache
def folder_of(path: str, tie: bool) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(tied(LLAMA, tie))
    torch.manual_seed(5)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    hf.save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_folder_is_loaded_stage_by_stage_and_proved(pools, small_data, tmp_path, tie):
    from tests.ranks.test_forms import load_pretrained

    folder = folder_of(str(tmp_path), tie)
    case = Case(data=small_data, stage=1, pipeline=2, model=tied(LLAMA, tie))
    assert pools(2).run(load_pretrained, case, folder, None) == [""] * 2
    for error in pools(2).run(load_pretrained, case, folder, "model.layers.3.mlp.down_proj.weight"):
        assert "1 of " in error and "layers.3.mlp.down_proj" in error


def announced(case: Case) -> list[str]:
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec

    ranks = joined()
    resolved = resolved_run(case, ranks.world_size)
    return build_model(resolved, ModelSpec.of(resolved.run.model), ranks.device, mesh_of(resolved.degrees)).notes


def test_the_bubble_is_told(pools, small_data):
    for lines in pools(2).run(announced, Case(data=small_data, stage=1, pipeline=2, accumulation=3)):
        assert lines[-1].startswith("pipeline of 2 stages with 2 + 2 decoder layers, 3 micro-batches a step")
        assert "waits 25% of the time" in lines[-1]
