"""The check after the first step of an adapter, on two ranks."""

from __future__ import annotations

import torch

from llmtrain.features.adapter_check.part import unmoved
from llmtrain.models.parameters import B, local_parameter
from tests.helpers.training import Case, make_engine, train_steps
from tests.ranks.test_adapter import LORA, LR


def first_step(case: Case, without: str) -> tuple[list[str], int]:
    """What no gradient has reached after a step; of the parameter `without` it is lost on the way."""
    engine, ranks = make_engine(case)
    for name, parameter in engine.module.named_parameters():
        if local_parameter(name, parameter).name == without:
            parameter.register_hook(torch.zeros_like)
    train_steps(case, engine, ranks, 0, 1)
    found = unmoved(engine, ranks, B)
    engine.close()
    return found


def test_a_lora_b_that_no_gradient_reaches_is_named_after_one_step(pools, small_data):
    case = Case(data=small_data, adapter=LORA, lr=LR, stage=1)
    assert pools(2).run(first_step, case, "") == [([], 28)] * 2
    lost = "model.layers.2.mlp.up_proj.lora_B.weight"
    assert pools(2).run(first_step, case, lost) == [([lost], 28)] * 2
