"""The moving average of the parameters: its definition, what it is evaluated as, and where a checkpoint has it.

test_cells.py takes it from each form of training to another one.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.rundir import find_folder
from llmtrain.checkpoint.save import Saver
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.features.ema import EmaConfig
from llmtrain.features.ema.part import EMA, Ema
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.pieces import put
from llmtrain.training.parts import Done
from llmtrain.training.setup import Setup
from llmtrain.training.step import Position, Session
from tests.helpers.training import Case, assembled, batches, make_setup, resolved_run, view_of

DECAY, STEPS = 0.7, 3
Tensors = dict[str, torch.Tensor]


def setup_of(case: Case) -> Setup:
    setup = make_setup(case)
    setup.run = replace(setup.run, config=replace(setup.run.config, ema=EmaConfig(decay=DECAY)))
    return setup


def means(ema: Ema, setup: Setup) -> Tensors:
    """Put together from the ranks' own parts."""
    mine = [(f.name, f.own_region, view_of(f)[f.own].clone()) for f in ema.state()]
    every = setup.ranks.gather(mine)
    names = {name for part in every for name, _, _ in part}  # an adapter leaves the others as they are
    whole = {name: torch.full(setup.engine.shapes()[name], float("nan")) for name in sorted(names)}
    for part in every:
        for name, region, values in part:
            put(whole[name].view(-1), region, values)
    return whole


def forward_copies(engine: Any) -> list[torch.Tensor]:
    return [copy.values.clone() for copy in engine.copies()]


def train_and_save(case: Case, folder: str) -> tuple[list[Tensors], Tensors, tuple[float, float, float], str]:
    """(masters before and after each step, the means, losses of the masters, of the means and of the masters again,
    the checkpoint)"""
    setup = setup_of(case)
    engine, ranks, run = setup.engine, setup.ranks, resolved_run(case, setup.ranks.world_size)
    assert isinstance(engine, ZeroEngine)
    ema, session = Ema(setup), Session(engine, ranks, run.mix.degrees, lambda _: 1.0, seed=0)
    ema.begin(Position())
    place, masters = run.mix.degrees.place(ranks.rank), [assembled(engine, ranks)]
    source = batches(case, (place.data, run.mix.degrees.data), case.accumulation)
    for step in range(1, STEPS + 1):
        done = session.step(batch := next(source))
        ema.after_step(Done(**vars(done), position=Position(step=step)))
        masters.append(assembled(engine, ranks))
    source.close()  # type: ignore[attr-defined]
    before = forward_copies(engine)
    losses = [engine.evaluate(batch.micro_batches)[0]["loss"]]
    with ema.in_place():
        losses.append(engine.evaluate(batch.micro_batches)[0]["loss"])
    losses.append(engine.evaluate(batch.micro_batches)[0]["loss"])
    assert all(map(torch.equal, before, forward_copies(engine)))
    assert all(torch.equal(value, masters[-1][name]) for name, value in assembled(engine, ranks).items())
    where = find_folder(Path(folder), ranks)
    with Saver(engine, where, run.config.checkpoint, run.mix, ranks, more=ema.state) as saver:
        saver.begin(STEPS, {"optimizer_step": STEPS, "ema": ema.to_json()})
        outcome = saver.drain()
    found = means(ema, setup)
    engine.close()
    assert outcome is not None and outcome.path is not None
    return masters, found, (losses[0], losses[1], losses[2]), str(outcome.path)


@pytest.mark.parametrize("form", [{"stage": 1, "precision": "bf16"}, {"stage": 3}], ids=str)
def test_the_mean_is_its_definition(pools, small_data, tmp_path, form):
    case = Case(data=small_data, steps=STEPS, **form)
    masters, found, (own, of_means, again), path = pools(2).run(train_and_save, case, str(tmp_path))[0]
    for name, value in found.items():
        wanted = masters[0][name].clone()
        for after in masters[1:]:  # as torch.optim.swa_utils.get_ema_multi_avg_fn has it
            wanted.lerp_(after[name], 1 - DECAY)
        assert torch.equal(value, wanted), name
    assert own == again != of_means
    with contextlib.closing(CheckpointReader(Path(path), parameters=EMA)) as reader:
        for name, value in found.items():
            assert torch.equal(reader.read(name, 0, value.numel()), value.reshape(-1)), name
            assert reader.checksums()[PARAM, name] == reader.checksums()[EMA, name]
