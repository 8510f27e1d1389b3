"""Parameters that a run freezes, on real ranks: plain PyTorch with the same ones frozen is the measure."""

from __future__ import annotations

import functools
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.engine.api import PARAM
from llmtrain.errors import UserError
from tests.helpers.checkpoints import trainer_state
from tests.helpers.parity import Form, check
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assembled,
    largest_difference,
    make_engine,
    plain_pytorch,
    resolved_run,
    resume_from,
    run_case,
    save_checkpoint,
    train_steps,
)

FREEZE = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.[12].mlp.up_proj.weight", "*.3.*layernorm.weight")


@functools.cache
def reference(data: str) -> Trace:
    return plain_pytorch(Case(data=data, freeze=FREEZE))


def frozen_of(names: Any) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in FREEZE)}


def initial(model: dict[str, Any] = LLAMA) -> dict[str, torch.Tensor]:
    from llmtrain.config.run import ModelConfig
    from llmtrain.models.spec import ModelSpec

    source = ModelSpec.of(ModelConfig(config=dict(model))).initial_weights(0, torch.device("cpu"))
    shapes = {name: source.shape(name) for name in source.order()}
    return {name: source.read(name, 0, torch.Size(s).numel()).view(s).clone() for name, s in shapes.items()}


def whole_run(case: Case) -> tuple[Trace, set[str]]:
    """A training; names of which this rank keeps state of the optimizer."""
    engine, ranks = make_engine(case)
    trace = train_steps(case, engine, ranks, 0, case.steps)
    stepped = {piece.name for piece in engine.state() if piece.kind != PARAM}
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, stepped


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "accumulation": 3},
        {"stage": 3},
        {"stage": 3, "extra": {"activation_checkpointing": {}}},
        {"stage": 2, "extra": {"activation_checkpointing": {}}, "mlp_tile_tokens": 8},
        {"stage": 3, "offload": "all"},
        {"stage": 1, "sequence": 2},
        {"stage": 1, "pipeline": 2, "accumulation": 2},
        {"stage": 0, "tensor": 2},
        {"stage": 3, "tensor": 2},
    ],
    ids=lambda form: "-".join(f"{k}={v}" for k, v in form.items()),
)
def test_fp32_forms_agree_with_plain_pytorch_that_freezes_the_same(pools, small_data, form):
    want = reference(small_data)
    outcomes = pools(2).run(whole_run, Case(data=small_data, freeze=FREEZE, **form))
    got, _ = outcomes[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 2e-6
    assert max(abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True)) < 1e-5
    assert largest_difference(got.parameters, want.parameters) < 1e-5
    frozen, before = frozen_of(want.parameters), initial()
    assert len(frozen) == 14 and all(torch.equal(got.parameters[name], before[name]) for name in frozen)
    assert not any(torch.equal(got.parameters[name], before[name]) for name in before.keys() - frozen)
    assert set().union(*(stepped for _, stepped in outcomes)) == before.keys() - frozen


MIXTRAL = {
    **LLAMA,
    "num_local_experts": 4,
    "num_hidden_layers": 2,
    "model_type": "mixtral",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0, "expert": 2},
        {"stage": 2, "expert": 2},
        {"stage": 3, "expert": 2},
        {"stage": 1, "pipeline": 2, "accumulation": 2},
        {"stage": 2, "tensor": 2},
    ],
    ids=lambda form: "-".join(f"{k}={v}" for k, v in form.items()),
)
def test_experts_and_a_tied_embedding_stay_as_they_are(pools, small_data, form):
    freeze = ("model.layers.0.mlp.experts.*", "model.embed_tokens.weight", "lm_head.weight", "*.mlp.gate.weight")
    case = Case(data=small_data, model=MIXTRAL, freeze=freeze, **form)
    want, before = plain_pytorch(case), initial(MIXTRAL)
    got, _ = pools(2).run(whole_run, case)[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-5
    assert max(abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True)) < 1e-4
    assert largest_difference(got.parameters, want.parameters) < 1e-5
    same = {name for name in before if torch.equal(got.parameters[name], before[name])}
    assert same == {name for name in before if any(fnmatchcase(name, pattern) for pattern in freeze)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_keeps_frozen_values_in_the_forward_precision(pools, small_data, stage):
    want = reference(small_data)
    got = pools(2).run(run_case, Case(data=small_data, freeze=FREEZE, stage=stage, precision="bf16"))[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1.5e-3
    before = initial()
    for name in frozen_of(before):
        assert torch.equal(got.parameters[name], before[name].bfloat16().float())


def half(case: Case, folder: str, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps [first, last) of a training, from the folder's checkpoint if there is one; saved at the end."""
    engine, ranks = make_engine(case)
    resolved = resolved_run(case, ranks.world_size)
    resume_from(engine, resolved.run, folder, trainer_state(first), ranks)
    trace = train_steps(case, engine, ranks, first, last)
    save_checkpoint(engine, Path(folder) / "checkpoints", last, trainer_state(last), resolved, ranks)
    parameters = assembled(engine, ranks)
    engine.close()
    return trace.losses, parameters


@pytest.mark.parametrize(("one", "other"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_a_checkpoint_goes_from_zero_1_to_zero_3(pools, small_data, tmp_path, one, other):
    want, before = reference(small_data), initial()
    losses, _ = pools(2).run(half, Case(data=small_data, freeze=FREEZE, stage=1, precision=one), str(tmp_path), 0, 4)[0]
    case = Case(data=small_data, freeze=FREEZE, stage=3, precision=other)
    more, parameters = pools(2).run(half, case, str(tmp_path), 4, 8)[0]
    tolerated = 2e-6 if one == other == "fp32" else 1.5e-3
    assert max(abs(a - b) for a, b in zip(losses + more, want.losses, strict=True)) < tolerated
    for name in frozen_of(before):
        value = before[name] if one == other == "fp32" else before[name].bfloat16().float()
        assert torch.equal(parameters[name], value)


@pytest.mark.parametrize(
    "form",
    [
        Form(zero=3, precision="bf16", freeze=("model.embed_tokens.*", "model.layers.0.*")),
        Form(zero=1, tied=True, train_only=("model.layers.[13].*",), accumulation=2),
        Form(zero=2, optimizer="muon", freeze=("model.layers.*",)),
        Form(zero=3, optimizer="muon", train_only=("model.layers.1.*.q_proj.weight", "model.norm.weight")),
        Form(zero=0, precision="bf16", family="ernie4_5_moe", train_only=("model.layers.1.*",)),
    ],
    ids=lambda form: form.name,
)
def test_parity_freezes_the_same(pools, form):
    outcome = check(pools, replace(form, steps=8))
    assert outcome.verdict.passed, outcome.verdict.first


def refused(case: Case) -> str:
    try:
        make_engine(case)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("form", "freeze", "says"),
    [
        ({"stage": 1, "pipeline": 2, "accumulation": 2}, "model.*", "leaves stage 0 of pipeline.stages 2 nothing"),
        ({"stage": 1, "expert": 2, "model": MIXTRAL}, "*.experts.*", "leaves no experts to train"),
    ],
)
def test_a_form_that_would_have_nothing_to_train_is_refused_on_every_rank(pools, small_data, form, freeze, says):
    for told in pools(2).run(refused, Case(data=small_data, freeze=(freeze,), **form)):
        assert "model.freeze" in told and says in told


def test_a_checkpoint_with_moments_of_other_parameters_is_refused(pools, small_data, tmp_path):
    case = Case(data=small_data, freeze=FREEZE, stage=1)
    pools(2).run(half, case, str(tmp_path), 0, 1)
    for freeze in ((), (*FREEZE, "lm_head.*")):
        (told, *_) = pools(2).run(half_refused, replace(case, freeze=freeze), str(tmp_path))
        assert "Train the same parameters" in told and "resume_weights_only" in told


def half_refused(case: Case, folder: str) -> str:
    try:
        half(case, folder, 1, 2)
    except UserError as error:
        return str(error)
    return ""
