"""Objectives over pairs against their definitions in plain PyTorch: ZeRO 0 to 3, a pipeline, tensor parallelism.

Both sides are fp32: 1e-5 is a few roundings of a loss near 1 after four steps.

More than 20 CPU s: seven objectives train on two ranks and in plain PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.config.run import ModelConfig
from llmtrain.data.kinds.judged import Judged
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import TrainData
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from tests.helpers.adapters import plain_adapted
from tests.helpers.answers import Figures, answers_case, plain_steps, trained_answers
from tests.helpers.preference import Plain, kto, prepared_preferences, prepared_unpaired
from tests.helpers.training import (
    Case,
    Trace,
    assert_agrees,
    case_data,
    largest_difference,
    plain_model,
    resolved_run,
)

pytestmark = pytest.mark.needs("peft")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_preferences(tmp_path_factory.mktemp("pairs"))


def case_of(pairs: str, **form: Any) -> Case:
    return answers_case(pairs, **{"lr": 3e-4, **form})


def plainly(case: Case, name: str, **options: float) -> Trace:
    """One process, each row alone; only which rows a step takes is asked of us."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(case.model)
    hf = (
        plain_adapted(case)
        if case.adapter
        else AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    )
    source = ModelSpec.of(ModelConfig(config=dict(case.model))).initial_weights(0, torch.device("cpu"))
    with torch.no_grad():
        for parameter, value in () if case.adapter else hf.named_parameters():
            value.copy_(source.read(parameter, 0, value.numel()).view_as(value))
    losses = plain_steps(case, hf, definition(hf, case.data, name, **options))
    return Trace(losses, [], {name: p.detach().clone() for name, p in hf.named_parameters()})


def definition(hf: Any, folder: str, name: str, **options: float) -> Callable[[list[int]], torch.Tensor]:
    """The loss of rows of the folder. The reference is the model as it is now."""
    plain = Plain(hf, folder)
    count = len(plain.rows)
    if name == "kto":
        plain.mismatched(list(range(count)))
        desired = torch.from_numpy(PreparedSet(folder).split("train").entries(Judged.entry)["desirable"].astype(bool))
    with torch.no_grad():
        reference = dict(enumerate(plain.answers(list(range(len(plain.rows))))[0].tolist()))

    def loss(rows: list[int]) -> torch.Tensor:
        if name != "kto":
            return plain.loss(name, rows, reference, **options)
        others = [count + row for row in rows]
        with torch.no_grad():
            ratios = plain.answers(others)[0] - torch.tensor([reference[row] for row in others])
        return kto(plain.answers(rows)[0], torch.tensor([reference[row] for row in rows]), desired[rows], ratios)

    return loss


def trained(case: Case, config: Objective, column: bool) -> tuple[Trace, Figures]:
    """As a run does it: the reference's column under this form, then steps."""

    from llmtrain.training.output_columns import write_columns
    from tests.helpers.training import examined, joined

    ranks = joined()
    run, data = resolved_run(case, ranks.world_size), TrainData(case_data(case))
    if column:
        write_columns(examined(run), ranks)
        ranks.meet()
    data.take_reference("fp32")
    return trained_answers(case, config, data)


FORMS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "accumulation": 2},
    {"stage": 2, "accumulation": 3},
    {"stage": 3, "extra": {"activation_checkpointing": {}}},
    {"stage": 1, "pipeline": 2, "accumulation": 3},
]


@functools.cache
def plain_dpo(pairs: str) -> Trace:
    return plainly(case_of(pairs), "dpo")


def test_dpo_is_its_definition_where_ranks_share_rows(pools, pairs):
    want = plain_dpo(pairs)
    assert want.losses[0] == pytest.approx(math.log(2), abs=1e-6) and want.losses[-1] < want.losses[0] - 0.01
    case = case_of(pairs, stage=3, sequence=2, accumulation=2)
    for got, figures in pools(2).run(trained, case, Objective.of("dpo"), True):
        first, last = figures[0], figures[-1]
        assert first["pairs/margin"] == 0.0 and abs(first["loss"] - math.log(2)) < 1e-6  # the reference is the start
        assert last["pairs/margin"] > 0 and last["pairs/accuracy"] > 0.5
        assert last["pairs/chosen_log_prob"] - first["pairs/chosen_log_prob"] != 0.0
        assert_agrees(got, want, loss=1e-5, parameters=1e-5)


def test_the_reference_of_an_adapter_that_goes_on_is_that_adapter(pools, pairs, tmp_path):
    """Preferences after an adapter of a fine-tuning: the first ratio is to that adapter's model, not to its base."""
    from peft import LoraConfig, get_peft_model

    case = case_of(pairs, stage=2, lr=3e-3)
    torch.manual_seed(4)
    config = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(plain_model(case), config).save_pretrained(str(tmp_path))
    case = replace(case, adapter={"r": 4, "alpha": 16.0, "start": str(tmp_path)})
    adapted, base = plainly(case, "dpo"), plainly(replace(case, adapter={}), "dpo")
    got, figures = pools(2).run(trained, case, Objective.of("dpo"), True)[0]
    assert figures[0]["pairs/margin"] == 0.0 and abs(figures[0]["loss"] - math.log(2)) < 1e-6
    assert max(abs(a - b) for a, b in zip(got.losses, adapted.losses, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(got.losses, base.losses, strict=True)) > 1e-4


OTHERS: list[tuple[str, dict[str, float], dict[str, Any]]] = [
    ("dpo", {"smoothing": 0.2, "beta": 0.3}, FORMS[2]),
    ("robust", {}, FORMS[3]),
    ("ipo", {}, FORMS[4]),
    ("dpo_norm", {}, FORMS[2]),
    ("rpo", {"alpha": 0.5}, FORMS[3]),
    ("simpo", {}, FORMS[4]),
    ("orpo", {}, FORMS[1]),
]


def test_every_objective_is_its_definition(pools, pairs):
    """At a third of the rate: AdamW makes an update of a gradient that is all rounding; some have those."""
    pools(2).run(trained, case_of(pairs), Objective.of("dpo"), True)  # writes the column
    for name, options, form in OTHERS:
        form = {**form, "lr": 1e-4}
        want = plainly(case_of(pairs, lr=1e-4), name, **options)
        config = Objective.of(name, **options)  # type: ignore[arg-type]
        got, _ = pools(2).run(trained, case_of(pairs, **form), config, False)[0]
        assert max(abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-5, name
        assert (worst := largest_difference(got.parameters, want.parameters)) < 1e-5, (name, worst)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_unpaired(tmp_path_factory.mktemp("judged"))


def test_kto_in_a_pipeline_is_its_definition(pools, judged):
    """z is of the global batch: three micro-batches a rank and one give the same."""
    want = plainly(case_of(judged, lr=2e-3), "kto")
    config = Objective.of("kto", beta=0.1, desirable_weight=1.0, undesirable_weight=0.25)
    for got, figures in pools(2).run(trained, case_of(judged, **{**FORMS[4], "lr": 2e-3}), config, True):
        assert figures[0]["unpaired/kl"] == 0.0 and any(each["unpaired/kl"] > 0.1 for each in figures)
        assert_agrees(got, want, loss=1e-5, parameters=5e-5)
