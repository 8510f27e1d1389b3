"""The step of a batch with excluded sequences, against plain PyTorch on the other rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.stages import Batch, Stage, Stages
from llmtrain.data.stream.loader import Course, TrainLoader
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.function import LooksAhead, LossFunction
from llmtrain.engine.losses.named import loss_of
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.objective import Objective
from llmtrain.optim.schedules import Constant
from llmtrain.training.output_columns import write_columns
from tests.helpers.answers import answers_case
from tests.helpers.families import FAMILIES
from tests.helpers.preference import prepared_preferences, prepared_unpaired, rows_read
from tests.helpers.training import (
    GLOBAL_BATCH,
    Case,
    case_data,
    case_degrees,
    examined,
    joined,
    make_engine,
    plain_balance,
    plain_model,
    resolved_run,
)

EXCLUDED = (0, 1, 2, 6, 7, 8, 11)
"""All rows of rank 0 in two micro-batches of three, and one of rank 1."""
BALANCED = {**FAMILIES["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}


def stepped(case: Case, trains: Objective, scale: float = 1.0) -> tuple[float, float]:
    """(loss, gradient norm) of the first step, with parameters times `scale` since the reference."""
    engine, ranks = make_engine(case)
    for parameter in engine.module.parameters():
        parameter.data.mul_(scale)
    degrees, config = case_degrees(case, ranks.world_size), replace(case_data(case), exclude=EXCLUDED)
    batch = Batch(
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH // degrees.data // case.accumulation,
        accumulation=case.accumulation,
        data_parallel=degrees.data,
        sequence_length=case.length,
    )
    stage = Stage(first_step=0, data=config, batch=batch, schedule=Constant(), schedule_from=0)
    course, place = Course(Stages((stage,)), [TrainData(config)]), degrees.place(ranks.rank)
    objective: LossFunction = loss_of(trains)
    if trains.reference == "column":
        course.data[0].take_reference("fp32")
    with TrainLoader(course, rank=place.data) as loader:
        micros = loader.build(0)
    counted = torch.tensor([float(sum(map(objective.weight, micros.micro_batches)) if place.leads else 0)])
    ranks.sum(counted)
    weight = int(counted[0])
    if isinstance(objective, LooksAhead):
        objective.look(micros.micro_batches, engine.evaluate)
    losses = engine.forward_backward(micros.micro_batches, lambda: weight, objective)
    mine = torch.stack(losses).sum(0).double().cpu() * (place.tensor == 0)
    loss = ranks.sum(mine)[0] / weight
    update = engine.update(1.0)
    engine.close()
    return float(loss), float(update.grad_norm)


def norm_of(model: Any, loss: torch.Tensor) -> float:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return float(torch.cat([each.reshape(-1).double() for each in found]).norm())


def plain(case: Case) -> tuple[float, float]:
    """The mean over the tokens of the other rows; experts balance over the excluded ones as separators."""
    model, data = plain_model(case), TrainData(case_data(case))
    kept = [index for index in range(GLOBAL_BATCH) if index not in EXCLUDED]
    rows = [[torch.from_numpy(each) for each in data.sequence(index)] for index in range(GLOBAL_BATCH)]
    inputs, labels = (torch.stack(each) for each in zip(*[rows[index] for index in kept], strict=True))
    logits = model(input_ids=inputs, use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORE
    )
    loss = nll / int((labels != IGNORE).sum())
    nothing = torch.full_like(inputs[:1], data.separator_id)
    seen = torch.cat([nothing if index in EXCLUDED else rows[index][0][None] for index in range(GLOBAL_BATCH)])
    balanced = plain_balance(model.config, model(input_ids=seen, use_cache=False), case.accumulation)
    return loss.item(), norm_of(model, loss + balanced)


FORMS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3},
    {"stage": 1, "pipeline": 2},
    {"stage": 1, "tensor": 2},
    {"stage": 1, "sequence": 2},
    {"stage": 1, "expert": 2, "model": BALANCED},
    {"stage": 3, "model": BALANCED},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(f"{k}{v}" for k, v in form.items() if k != "model"))
def test_excluded_rows_have_no_part_in_a_step(pools: Any, small_data: str, form: dict[str, Any]) -> None:
    """In fp32; 1e-5 is rounding."""
    case = Case(data=small_data, accumulation=2, **form)
    assert pools(2).run(stepped, case, Objective.of("next_token"))[0] == pytest.approx(plain(case), rel=1e-5)


def kept_rows(case: Case) -> list[int]:
    """The rows of the other sequences."""
    data = TrainData(case_data(case))
    return rows_read(data.sequence_at(index) for index in range(GLOBAL_BATCH) if index not in EXCLUDED)


@pytest.mark.parametrize(
    "form",
    [{"stage": 1}, {"stage": 3, "sequence": 2}, {"stage": 1, "pipeline": 2}],
    ids=lambda form: "-".join(f"{key}{value}" for key, value in form.items()),
)
def test_excluded_pairs_have_no_part_in_a_step(pools: Any, tmp_path_factory: Any, form: dict[str, Any]) -> None:
    """The mean over the pairs of the other sequences; 1e-4: log-probabilities are sums of many tokens."""
    from tests.ranks.test_preference import definition

    folder = prepared_preferences(Path(tmp_path_factory.mktemp("pairs")))
    case = answers_case(folder, accumulation=2, **form)
    model = plain_model(case)
    loss = definition(model, folder, "simpo")(kept_rows(case))
    got = pools(2).run(stepped, case, Objective.of("simpo"))[0]
    assert got == pytest.approx((float(loss), norm_of(model, loss)), rel=1e-4)


def write_reference(case: Case) -> None:
    ranks = joined()
    write_columns(examined(resolved_run(case, ranks.world_size)), ranks)
    ranks.meet()


@pytest.mark.parametrize("form", [{"stage": 1}, {"stage": 1, "pipeline": 2}], ids=str)
def test_excluded_judged_answers_have_no_part_in_a_step(
    pools: Any, tmp_path_factory: Any, form: dict[str, Any]
) -> None:
    """Neither in the loss nor in kto's z: the mean log-ratio over the answers of other sequences."""
    from tests.ranks.test_preference import definition

    folder, scale = prepared_unpaired(Path(tmp_path_factory.mktemp("judged"))), 0.5
    case = answers_case(folder, accumulation=2, **form)
    model = plain_model(case)
    loss_of_rows = definition(model, folder, "kto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    loss, config = loss_of_rows(kept_rows(case)), Objective.of("kto", undesirable_weight=0.25)
    pools(2).run(write_reference, case)
    got = pools(2).run(stepped, case, config, scale)[0]
    assert got == pytest.approx((float(loss), norm_of(model, loss)), rel=1e-4)
