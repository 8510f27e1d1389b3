"""Parameters that a run freezes, on real ranks: plain PyTorch with the same ones frozen is the measure."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base.errors import UserError
from llmtrain.checkpoint.format import Manifest, frozen_source
from llmtrain.config.run import ModelConfig
from llmtrain.engine.weights import prove_weights
from llmtrain.models.source import INDEX, SafetensorsSource
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.tensorfile import TensorFile
from tests.helpers.checkpoints import flip, trainer_state
from tests.helpers.ranks import RankFailed
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assembled,
    assert_agrees,
    make_engine,
    plain_pytorch,
    resolved_run,
    resume_from,
    save_checkpoint,
    train_steps,
)
from tests.ranks.test_adapter import same, state_of, written

FREEZE = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.[12].mlp.up_proj.weight", "*.3.*layernorm.weight")


def frozen_of(names: Any) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in FREEZE)}


def initial(model: dict[str, Any] = LLAMA) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("form", [{"stage": 3}, {"stage": 1, "pipeline": 2, "accumulation": 2}], ids=str)
def test_no_byte_of_a_frozen_parameter_changes_and_no_optimizer_has_it(pools, small_data, form):
    case = Case(data=small_data, freeze=FREEZE, **form)
    outcomes = pools(2).run(whole_run, case)
    got, _ = outcomes[0]
    assert_agrees(got, plain_pytorch(case), loss=2e-6, norm=1e-5, parameters=1e-5)
    frozen, before = frozen_of(got.parameters), initial()
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


def begun(case: Case, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Two steps from a folder of weights, and a checkpoint as a run saves it."""
    engine, ranks = make_engine(case)
    run = resolved_run(case, ranks.world_size)
    spec = ModelSpec.of(run.config.model)
    source = SafetensorsSource(case.pretrained, spec.layout)
    left_out = frozen_source(source, spec.frozen, prove_weights(engine, source, ranks))
    train_steps(case, engine, ranks, 0, 2)
    save_checkpoint(engine, Path(folder) / "checkpoints", 2, trainer_state(2), run, ranks, left_out)
    state = state_of(engine, ranks)
    engine.close()
    return state


def gone_on(case: Case, folder: str) -> tuple[str, dict[str, dict[str, torch.Tensor]]]:
    """Where frozen parameters are, and the state, after a resume into an engine with other values; or why not."""
    engine, ranks = make_engine(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(1.0)
    try:
        resumed = resume_from(engine, resolved_run(case, ranks.world_size).config, folder, trainer_state(2), ranks)
    except UserError as error:
        engine.close()
        return f"{type(error).__name__}: {error}", {}
    assert resumed is not None
    state = state_of(engine, ranks)
    engine.close()
    return str(resumed.frozen.folder), state


LLAMA_FORMS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "accumulation": 3},
    {"stage": 3},
    {"stage": 1, "pipeline": 2, "accumulation": 2},
    {"stage": 3, "tensor": 2},
    {"stage": 1, "sequence": 2},
]
MIXTRAL_FORMS: list[dict[str, Any]] = [{"stage": 3}, {"stage": 0, "expert": 2}]


@pytest.mark.parametrize(
    ("model", "freeze", "forms"),
    [
        (LLAMA, FREEZE, LLAMA_FORMS),
        (MIXTRAL, ("model.layers.0.mlp.experts.*", "model.embed_tokens.weight", "lm_head.weight"), MIXTRAL_FORMS),
    ],
    ids=["llama", "mixtral"],
)
def test_what_a_folder_has_is_in_no_checkpoint_and_comes_back_in_every_form(
    pools, small_data, tmp_path, model, freeze, forms
):
    case = Case(
        data=small_data,
        model=model,
        pretrained=written(tmp_path / "hf", model, max_shard_size="200KB"),
        freeze=freeze,
        stage=1,
    )
    saved = pools(2).run(begun, case, str(tmp_path / "run"))[0]
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = Manifest.read(path)
    frozen = {name for name in saved[PARAM] if any(fnmatchcase(name, pattern) for pattern in freeze)}
    assert manifest.frozen.parts.keys() == frozen
    assert not frozen & {piece.name for entry in manifest.files.values() for piece in entry.pieces}
    for form in forms:
        where, state = pools(2).run(gone_on, replace(case, **form), str(tmp_path / "run"))[0]
        assert where == case.pretrained and same(state, saved), form


def test_bf16_rounds_what_it_reads_and_fp32_reads_it_whole(pools, small_data, tmp_path):
    folder = written(tmp_path / "hf", LLAMA, max_shard_size="200KB")
    case = Case(
        data=small_data, pretrained=folder, freeze=FREEZE, precision="bf16", stage=1, pipeline=2, accumulation=2
    )
    saved = pools(2).run(begun, case, str(tmp_path / "run"))[0]
    _, state = pools(2).run(gone_on, case, str(tmp_path / "run"))[0]
    assert same(state, saved)
    _, state = pools(2).run(gone_on, replace(case, precision="fp32"), str(tmp_path / "run"))[0]
    source = SafetensorsSource(folder, ModelSpec.of(ModelConfig(pretrained=folder)).layout)
    for name in frozen_of(saved[PARAM]):
        exact = source.read(name, 0, saved[PARAM][name].numel()).view_as(saved[PARAM][name])
        assert torch.equal(saved[PARAM][name], exact.bfloat16().float()) and torch.equal(state[PARAM][name], exact)


def test_a_changed_folder_ends_the_resume_and_a_moved_one_is_found_by_model_pretrained(pools, small_data, tmp_path):
    folder = Path(written(tmp_path / "hf", LLAMA, max_shard_size="200KB"))
    case = Case(data=small_data, pretrained=str(folder), freeze=FREEZE, stage=1)
    saved = pools(2).run(begun, case, str(tmp_path / "run"))[0]
    folder.rename(tmp_path / "moved")
    where, state = pools(2).run(gone_on, replace(case, pretrained=str(tmp_path / "moved")), str(tmp_path / "run"))[0]
    assert where == str(tmp_path / "moved") and same(state, saved)

    shutil.copytree(tmp_path / "moved", folder)
    other = replace(case, stage=3, pretrained=str(tmp_path / "moved"))
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"]["model.embed_tokens.weight"]
    for change, says in ((flip_embedding, "other values of model.embed_tokens.weight"), (Path.unlink, file.name)):
        change(file)
        for told, _ in pools(2).run(gone_on, other, str(tmp_path / "run")):
            assert told.startswith("FrozenSourceError") and str(folder) in told and says in told, told
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def flip_embedding(file: Path) -> None:
    with TensorFile(file) as held:
        flip(file, held.entries["model.embed_tokens.weight"].end - 1)


def test_a_stage_that_would_have_nothing_to_train_is_refused(pools, small_data):
    case = Case(data=small_data, freeze=("model.*",), stage=1, pipeline=2, accumulation=2)
    with pytest.raises(RankFailed, match=r"(?s)model\.freeze.*pipeline\.stages 2"):
        pools(2).run(make_engine, case)


def test_a_checkpoint_with_moments_of_other_parameters_is_refused(pools, small_data, tmp_path):
    case = Case(
        data=small_data, pretrained=written(tmp_path / "hf", LLAMA, max_shard_size="200KB"), freeze=FREEZE, stage=1
    )
    pools(2).run(begun, case, str(tmp_path / "run"))
    for freeze in ((), (*FREEZE, "lm_head.*")):
        (told, _), _ = pools(2).run(gone_on, replace(case, freeze=freeze), str(tmp_path / "run"))
        assert "resume_weights_only" in told and ("(28 " in told) == (not freeze), told
