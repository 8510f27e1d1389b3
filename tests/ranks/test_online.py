"""The reference computed at each step, from the base of an adapter, against the column of the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config.run import ObjectiveConfig
from llmtrain.data.stream.loader import validation_batches
from llmtrain.data.stream.packing import TrainData
from llmtrain.models.spec import ModelSpec
from tests.helpers.answers import SMALL, Figures, answers_case, as_in_a_trace, prove_first, session_figures
from tests.helpers.preference import prepared_preferences, prepared_unpaired
from tests.helpers.training import (
    Case,
    Trace,
    assembled,
    case_data,
    largest_difference,
    make_engine,
    resolved_run,
)

pytestmark = pytest.mark.needs("peft")

ADAPTER = {"r": 4, "alpha": 8.0, "targets": ["all-linear"]}
SAVED = {**ADAPTER, "modules_to_save": ["lm_head", "model.embed_tokens", "*norm"]}
"""An adapter with modules that train whole: the reference has their initial values."""
TIED = {**SMALL, "tie_word_embeddings": True}


def trained(case: Case, config: ObjectiveConfig) -> tuple[Trace, Figures]:
    """As a run does it, with its column where it has one; the last figures are of a validation."""
    import torch.distributed as dist

    from llmtrain.commands.columns import write_columns
    from llmtrain.objectives.named import objective_of, with_reference
    from llmtrain.objectives.objective import LooksAhead
    from llmtrain.training.setup import base_of
    from tests.helpers.training import checked, joined

    ranks = joined()
    resolved, data = resolved_run(case, ranks.world_size), TrainData(case_data(case))
    if config.reference == "column":
        write_columns(checked(resolved), ranks)
        dist.barrier(group=ranks.control)
        data.take_reference(resolved.precision)
    engine, ranks = make_engine(case)
    batch, rank = resolved.batch, engine.mesh.place.data
    spec = ModelSpec.of(resolved.run.model, resolved.run.adapter)
    base = base_of(engine, spec, spec.initial_weights(0, ranks.device))
    objective = with_reference(objective_of(config), config, base)
    prove_first(case, engine, ranks, config, data, base)
    figures = session_figures(case, engine, ranks, objective, data)
    last = list(validation_batches(data, sequences=3, micro_batch=2, rank=rank, data_parallel=batch.data_parallel))
    if isinstance(objective, LooksAhead):
        objective.look(last, engine.evaluate)
    figures.append(engine.evaluate(last, objective)[0])
    trace = as_in_a_trace(figures, assembled(engine, ranks))
    engine.close()
    return trace, figures


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("dpo", {"stage": 3, "accumulation": 2, "extra": {"activation_checkpointing": {}}}),
        pytest.param("dpo", {"stage": 1, "pipeline": 2, "accumulation": 3}, marks=pytest.mark.slow),
        pytest.param("kto", {"stage": 1, "pipeline": 2, "accumulation": 3}, marks=pytest.mark.slow),
        pytest.param("kto", {"stage": 2, "accumulation": 3}, marks=pytest.mark.slow),
        pytest.param("ipo", {"stage": 0, "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("dpo", {"stage": 1, "tensor": 2}, marks=pytest.mark.slow),
        ("dpo", {"stage": 3, "adapter": SAVED, "extra": {"activation_checkpointing": {}}}),
        ("dpo", {"stage": 1, "adapter": SAVED, "pipeline": 2, "accumulation": 3, "model": TIED}),
        pytest.param("kto", {"stage": 2, "adapter": SAVED, "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("dpo", {"stage": 1, "adapter": SAVED, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("dpo", {"stage": 3, "adapter": SAVED, "offload": "all"}, marks=pytest.mark.slow),
        pytest.param("dpo", {"stage": 0, "adapter": SAVED}, marks=pytest.mark.slow),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(k if isinstance(v, dict) else f"{k}{v}" for k, v in value.items() if k != "extra")
    ),
)
def test_the_base_of_an_adapter_is_the_reference(pools: Any, tmp_path: Any, name: str, form: dict[str, Any]) -> None:
    """The first ratio is exactly 0; all that follows is that of the column, within 1e-6."""
    folder = prepared_unpaired(tmp_path) if name == "kto" else prepared_preferences(tmp_path)
    case = answers_case(folder, **{"adapter": ADAPTER, "lr": 5e-3, **form})
    column = ObjectiveConfig(name=name)  # type: ignore[arg-type]
    want, _ = pools(2).run(trained, case, column)[0]
    for got, figures in pools(2).run(trained, case, replace(column, reference="online")):
        zero = "unpaired/kl" if name == "kto" else "pairs/margin"
        assert figures[0][zero] == 0.0 and abs(figures[-2][zero]) > 1e-4
        if name == "dpo":
            assert math.isclose(figures[0]["loss"], math.log(2), abs_tol=1e-6)
        assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-6 * max(want.losses)
        if got.parameters:
            assert largest_difference(got.parameters, want.parameters) < 1e-6
