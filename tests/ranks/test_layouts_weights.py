"""A Hugging Face folder loaded under every form: each rank reads its pieces, and every copy on every rank is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.engine.weights import fill_parameters, prove_weights
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import PARAM
from tests.helpers.families import FAMILIES, tied
from tests.helpers.training import Case, assembled, make_engine, view_of

DENSE = tied(FAMILIES["qwen2"])
EMBEDDING, NORM, DOWN = "model.embed_tokens.weight", "model.norm.weight", "model.layers.3.mlp.down_proj.weight"
EXPERTS = "model.layers.3.mlp.experts.gate_up_proj"


def load_and_break(case: Case, folder: str, faults: list[tuple[str, str]]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What the proof says without and with each fault on the last rank; the weights as they arrived."""
    engine, ranks = make_engine(case)
    source = ModelSpec.of(ModelConfig(pretrained=folder)).initial_weights(0, torch.device("cpu"))
    told = []
    held: dict[str, torch.Tensor] = {}
    for kind, name in [("", ""), *faults]:
        fill_parameters(engine, source)
        engine.refresh()
        held = held or assembled(engine, ranks)
        if ranks.rank == ranks.world_size - 1:
            _break(engine, kind, name)
        try:
            prove_weights(engine, source, ranks)
            told.append("")
        except ModelError as error:
            told.append(str(error))
    engine.close()
    return told, held if ranks.rank == 0 else {}


@torch.no_grad()
def _break(engine: Any, kind: str, name: str) -> None:
    if kind == "master":
        view = next(view_of(f) for f in engine.state() if (f.kind, f.name) == (PARAM, name) and f.region.numel)
        view[-1] += 1e-6
    elif kind == "copy":
        parameter = next(held.parameter for held in engine.module.local_parameters() if held.name == name)
        values = getattr(parameter, "ds_tensor", parameter).detach().reshape(-1)
        values[0] *= 1.01
    elif kind == "swapped":  # a sum over all positions alone would not see it
        view = next(view_of(f) for f in engine.state() if (f.kind, f.name) == (PARAM, name) and f.region.numel > 1)
        view[:2] = view[:2].flip(0)


@pytest.mark.parametrize(
    ("world_size", "form", "faults"),
    [
        (2, {"tensor": 2}, [("master", NORM), ("swapped", DOWN), ("master", EMBEDDING)]),
        (4, {"tensor": 2, "stage": 1}, [("copy", NORM), ("copy", DOWN), ("swapped", DOWN)]),
        (4, {"tensor": 2, "stage": 2, "precision": "bf16"}, [("copy", NORM), ("copy", DOWN), ("copy", EMBEDDING)]),
        (4, {"tensor": 2, "stage": 3}, [("master", NORM), ("copy", DOWN), ("copy", EMBEDDING)]),
        (2, {"pipeline": 2, "stage": 1}, [("copy", EMBEDDING), ("master", EMBEDDING), ("swapped", DOWN)]),
        (2, {"sequence": 2, "stage": 3}, [("copy", NORM), ("master", EMBEDDING)]),
        (2, {"expert": 2, "stage": 1}, [("copy", EXPERTS), ("swapped", EXPERTS)]),
        (4, {"expert": 2, "stage": 3}, [("copy", EXPERTS), ("master", EXPERTS)]),
    ],
    ids=str,
)
def test_every_copy_is_proved(pools, small_data, tmp_path, world_size, form, faults):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = FAMILIES["mixtral"] if "expert" in form else DENSE
    torch.manual_seed(5)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.normal_()
    hf.save_pretrained(tmp_path)
    answers = pools(world_size).run(load_and_break, Case(data=small_data, model=model, **form), str(tmp_path), faults)
    for name, parameter in hf.named_parameters():
        assert torch.equal(answers[0][1][name], parameter.detach()), name
    for told, _ in answers:
        assert told[0] == ""
        for (kind, name), text in zip(faults, told[1:], strict=True):
            assert " 1 of " in text and name in text, (kind, name, text)
