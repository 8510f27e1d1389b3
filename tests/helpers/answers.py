"""Runs over answers (preferences, judged ones, scores), as a launch does them and as plain PyTorch does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.objectives.objective import Objective
from tests.helpers.preference import rows_read
from tests.helpers.training import (
    GLOBAL_BATCH,
    LLAMA,
    Case,
    Trace,
    assembled,
    case_data,
    counted,
    make_engine,
    plain_training,
    resolved_run,
    save_checkpoint,
    train_steps,
)

if TYPE_CHECKING:
    from llmtrain.engine.deepspeed.engine import ZeroEngine

LENGTH, STEPS = 192, 4
SMALL = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
Figures = list[dict[str, float]]


def answers_case(data: str, **form: Any) -> Case:
    """A case whose sequences hold several answers."""
    return Case(data=data, length=LENGTH, isolate_documents=True, steps=STEPS, **{"model": SMALL, **form})


def prove_first(
    case: Case, engine: ZeroEngine, ranks: Ranks, config: Objective, data: TrainData, base: Any = None
) -> None:
    """Prove the identities of the initial weights as a run does. `base`: that of a reference computed at each step."""
    from llmtrain.engine.losses.named import loss_of, with_reference
    from llmtrain.training.proofs import StartProof

    run = resolved_run(case, ranks.world_size)
    run = replace(run, config=replace(run.config, objective=config))
    wrap = functools.partial(with_reference, objective=config, base=base)
    about: Any = {"engine": engine, "run": run, "place": engine.mesh.place, "ranks": ranks}
    StartProof(**about, objective=wrap(loss_of(config)), with_reference=wrap).prove(run.stages[0], data)


def spoil(engine: ZeroEngine) -> None:
    """Other weights than any run has, so that a checkpoint has to bring them."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(1.0)


def plain_steps(case: Case, hf: Any, loss_of: Callable[[list[int]], torch.Tensor]) -> list[float]:
    """Losses of all steps by PlainTraining. `loss_of`: from the rows of the split that a step takes, which alone is
    asked of us."""
    training, data = plain_training(case, hf), TrainData(case_data(case))
    for step in range(STEPS):
        sequences = [data.sequence_at(step * GLOBAL_BATCH + at) for at in range(GLOBAL_BATCH)]
        training.step(loss_of(rows_read(sequences)))
    return training.losses


def trained_answers(
    case: Case, config: Objective, data: TrainData, folder: str = "", *, resumes: bool = False
) -> tuple[Trace, Figures]:
    """All steps, in an engine of this case. `folder`: saves there after two steps; `resumes`: begins with other weights
    from there."""
    from llmtrain.checkpoint.load import load_checkpoint
    from llmtrain.checkpoint.reader import CheckpointReader
    from llmtrain.checkpoint.trainer_state import TrainerState
    from llmtrain.engine.losses.named import loss_of

    engine, ranks = make_engine(case)
    run = resolved_run(case, ranks.world_size)
    if resumes:
        spoil(engine)
        load_checkpoint(engine, CheckpointReader(next(Path(folder).glob("step-*"))), TrainerState(), ranks)

    def save(step: int) -> None:
        if step == 2 and folder and not resumes:
            state = {
                **counted(engine),
                "step": 2,
                "tokens": 0,
                "model_config": engine.module.config.to_dict(),
                "run": asdict(run.config),
            }
            save_checkpoint(engine, Path(folder), 2, state, run, ranks)

    if not folder:
        prove_first(case, engine, ranks, config, data)
    first = 2 if resumes else 0
    trace = train_steps(case, engine, ranks, first, STEPS, objective=loss_of(config), data=data, before=save)
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, trace.figures
