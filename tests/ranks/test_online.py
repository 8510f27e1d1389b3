"""The reference computed at each step, from the base of an adapter, against the column of the same numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.data.stream.loader import validation_batches
from llmtrain.data.stream.train_data import TrainData
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from tests.helpers.adapters import plain_adapted
from tests.helpers.answers import (
    SMALL,
    STEPS,
    Figures,
    answers_case,
    plain_steps,
    prove_first,
)
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.training import (
    Case,
    Trace,
    assembled,
    case_data,
    largest_difference,
    make_engine,
    resolved_run,
    train_steps,
)
from tests.ranks.test_adapter import written
from tests.ranks.test_vocabulary import grown

pytestmark = pytest.mark.needs("peft")

ADAPTER = {"r": 4, "alpha": 8.0, "targets": ["all-linear"]}
SAVED = {**ADAPTER, "modules_to_save": ["lm_head", "model.embed_tokens", "*norm"]}
"""An adapter with modules that train whole: the reference has their initial values."""
TIED = {**SMALL, "tie_word_embeddings": True}


def trained(case: Case, config: Objective) -> tuple[Trace, Figures]:
    """As a run does it, with its column where it has one; the last figures are of a validation."""

    from llmtrain.engine.losses.function import LooksAhead
    from llmtrain.engine.losses.named import loss_of, with_reference
    from llmtrain.training.output_columns import write_columns
    from llmtrain.training.setup import base_of
    from tests.helpers.training import examined, joined

    ranks = joined()
    run, data = resolved_run(case, ranks.world_size), TrainData(case_data(case))
    if config.reference == "column":
        write_columns(examined(run), ranks)
        ranks.meet()
        data.take_reference(run.mix.precision)
    engine, ranks = make_engine(case)
    batch, rank = run.batch, engine.mesh.place.data
    spec = ModelSpec.of(run.config.model, run.config.adapter)
    base = base_of(engine, spec, spec.initial_weights(0, ranks.device))
    objective = with_reference(loss_of(config), config, base)
    prove_first(case, engine, ranks, config, data, base)
    trace = train_steps(case, engine, ranks, 0, STEPS, objective=objective, data=data)
    last = list(validation_batches(data, sequences=3, micro_batch=2, rank=rank, data_parallel=batch.data_parallel))
    if isinstance(objective, LooksAhead):
        objective.look(last, engine.evaluate)
    trace.figures.append(engine.evaluate(last, objective)[0])
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, trace.figures


def test_the_base_of_an_adapter_is_the_reference(pools: Any, tmp_path: Any) -> None:
    """The first ratio is exactly 0; all that follows is that of the column, within 1e-6."""
    folder = prepared_preferences(tmp_path)
    case = answers_case(folder, lr=5e-3, adapter=SAVED, stage=1, pipeline=2, accumulation=3, model=TIED)
    column = Objective.of("dpo")
    want, _ = pools(2).run(trained, case, column)[0]
    for got, figures in pools(2).run(trained, case, replace(column, reference="online")):
        zero = "pairs/margin"
        assert figures[0][zero] == 0.0 and abs(figures[-2][zero]) > 1e-4
        assert math.isclose(figures[0]["loss"], math.log(2), abs_tol=1e-6)
        assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-6 * max(want.losses)
        if got.parameters:
            assert largest_difference(got.parameters, want.parameters) < 1e-6


def halves(case: Case, config: Objective, folder: str, first: int) -> tuple[Trace, Figures]:
    """Step `first` and those after it, with a save before the third; from there where `first` is that step."""
    from llmtrain.checkpoint.format import frozen_source
    from llmtrain.engine.losses.named import loss_of, with_reference
    from llmtrain.engine.weights import prove_weights
    from llmtrain.training.setup import base_of
    from tests.helpers.answers import spoil
    from tests.helpers.checkpoints import trainer_state
    from tests.helpers.training import resume_from, save_checkpoint

    engine, ranks = make_engine(case)
    run, data = resolved_run(case, ranks.world_size), TrainData(case_data(case))
    spec = ModelSpec.of(run.config.model, run.config.adapter)
    source: Any = spec.initial_weights(0, ranks.device)
    trainer = trainer_state(HALF) | {"run": asdict(run.config), "model_config": spec.config.to_dict()}
    if first:
        spoil(engine)
        assert resume_from(engine, run.config, folder, trainer, ranks) is not None
    else:
        left_out = frozen_source(getattr(source, "base", source), spec.frozen, prove_weights(engine, source, ranks))
    objective = with_reference(loss_of(config), config, base_of(engine, spec, source))

    def save(step: int) -> None:
        if step == HALF and not first:
            save_checkpoint(engine, Path(folder) / "checkpoints", HALF, trainer, run, ranks, left_out)

    trace = train_steps(case, engine, ranks, first, STEPS, objective=objective, data=data, before=save)
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, trace.figures


HALF, TOKENS = 2, 264
FEW = 250
"""Tokens of the folder's model: those that begin and end a turn (256 and 257) have new rows."""


def test_new_tokens_have_their_initial_rows_in_the_reference_and_after_a_resume(pools: Any, tmp_path: Path) -> None:
    """DPO by its definition: the reference is the grown model before the first step, whoever asks and when."""
    data = prepared_preferences(tmp_path)
    sizes = {**SMALL, "tie_word_embeddings": False}
    folder = written(tmp_path / "hf", sizes | {"vocab_size": FEW})
    saved = {**SAVED, "modules_to_save": ["model.embed_tokens", "lm_head"]}
    case = answers_case(
        data,
        pretrained=folder,
        vocabulary=TOKENS,
        adapter=saved,
        lr=5e-3,
        model=sizes | {"vocab_size": TOKENS},
        stage=2,
    )
    hf = plain_adapted(replace(case, tensor=1))
    hf.load_state_dict(dict(grown(case).named_parameters()), strict=False)
    plain = Plain(hf, data)
    with torch.no_grad():
        first = dict(enumerate(plain.answers(list(range(len(plain.rows))))[0].tolist()))
    want = Trace(plain_steps(case, hf, lambda rows: plain.loss("dpo", rows, first)), [], dict(hf.named_parameters()))
    config, run = Objective.of("dpo", reference="online"), str(tmp_path / "run")
    whole, figures = pools(2).run(halves, case, config, run, 0)[0]
    assert figures[0]["pairs/margin"] == 0.0 and abs(figures[-1]["pairs/margin"]) > 1e-2
    rest, _ = pools(2).run(halves, replace(case, accumulation=1, stage=3), config, run, HALF)[0]
    for got, losses in ((whole, want.losses), (rest, want.losses[HALF:])):
        assert len(got.losses) == len(losses) and STEPS == 4
        assert max(abs(a - b) for a, b in zip(got.losses, losses, strict=True)) < 1e-5
        # A tenth of a step: AdamW divides by the size of a gradient, and some are rounding alone.
        assert largest_difference(got.parameters, want.parameters) < 0.1 * case.lr
