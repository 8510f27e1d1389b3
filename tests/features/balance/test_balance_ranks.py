"""Ranks of unequal speed: with unequal shares, changed midway, the training is plain PyTorch's on the same batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.features.balance.part import LoadBalance
from tests.helpers.preference import prepared_preferences
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assembled,
    assert_agrees,
    counted,
    make_setup,
    plain_pytorch,
    save_checkpoint,
    uneven,
)

STEPS, HALF = 8, 5


class Said:
    """In place of the clock: what a rank says of its speed, step by step."""

    def __init__(self, paces: list[int]) -> None:
        self.paces = paces

    def measured(self, micros: Any) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def take(self) -> int:
        return self.paces.pop(0)

    def forget(self) -> None:
        pass


@dataclass
class Found(Trace):
    """A training, and who has trained what."""

    shares: list[tuple[int, ...] | None] = field(default_factory=list)
    """Of each step."""
    indices: list[list[int]] = field(default_factory=list)
    """Of this rank's samples, by step."""
    sizes: list[list[int]] = field(default_factory=list)
    """Rows of this rank's micro-batches, by step."""


def part(case: Case, found: Found, steps: range, speeds: list[list[int]], folder: str) -> None:
    """Steps of a launch that goes on from the folder's checkpoint, and leaves one. `speeds`: by step, by rank."""
    from llmtrain.features.balance import part as load_balance
    from llmtrain.training.parts import Done
    from llmtrain.training.step import Position

    load_balance.SETTLE_STEPS, load_balance.WINDOW_STEPS = 0, 1
    setup = make_setup(case)
    engine, ranks, run = setup.engine, setup.ranks, setup.run
    kept = None
    if steps.start:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.data.add_(1.0)
        path = Path(folder) / "checkpoints" / f"step-{steps.start:08d}"
        trainer = TrainerState.read(path)
        load_checkpoint(engine, CheckpointReader(path), trainer, ranks)
        kept = trainer.entries["shares"]
    session = setup.session(steps.start)
    tracker: Any = SimpleNamespace(event=lambda *args, **kwargs: None)
    with setup.loader(steps.start * run.batch.global_batch) as loader:
        launch: Any = SimpleNamespace(setup=setup, session=session, loader=loader, tracker=tracker)
        shares = LoadBalance(launch)
        shares.pace = Said([each[ranks.rank] for each in speeds])
        if kept is not None:
            shares.restore(kept, path)
        for step in steps:
            given = next(loader)
            found.shares.append(shares.sequences)
            found.indices.append([index for micro in given.micro_batches for index in micro.sequences])
            found.sizes.append([len(micro.inputs) for micro in given.micro_batches])
            batch = uneven(given) if not case.objective else given
            done = session.step(batch, shares.request(), around=shares.around_passes)
            found.losses.append(session.figures(done)["loss"])
            found.norms.append(float(done.update.grad_norm))
            shares.after_step(Done(**vars(done), position=Position(step=step + 1)))
    trainer = {"step": steps.stop, **counted(engine), "shares": shares.to_json()}
    save_checkpoint(engine, Path(folder) / "checkpoints", steps.stop, trainer, run, ranks)
    found.parameters = assembled(engine, ranks)
    engine.close()


def with_a_resume(case: Case, folder: str, speeds: list[list[int]]) -> Found:
    """All steps, in two launches."""
    from llmtrain.features.balance import part as load_balance

    found, before = Found([], []), (load_balance.SETTLE_STEPS, load_balance.WINDOW_STEPS)
    part(case, found, range(HALF), speeds[:HALF], folder)
    part(case, found, range(HALF, STEPS), speeds[HALF:], folder)
    load_balance.SETTLE_STEPS, load_balance.WINDOW_STEPS = before
    return found


def speeds_of(ranks: int) -> list[list[int]]:
    """The second half of the ranks is half as fast; from step 4 on the first half is three times slower than they."""
    half = ranks // 2
    return [[1] * half + [2] * half] * 3 + [[6] * half + [2] * half] * (STEPS - 3)


@pytest.mark.parametrize(
    "form", [{"stage": 1, "accumulation": 3}, {"stage": 3, "sequence": 2, "accumulation": 3}], ids=str
)
def test_unequal_shares_are_the_same_training(
    pools: Any, small_data: str, tmp_path: Path, form: dict[str, Any]
) -> None:
    """Loss, gradient norm and parameters of plain PyTorch: fp32 sums in another order differ by 1e-6."""
    case = Case(data=small_data, steps=STEPS, **form)
    world = 2 * case.tensor * case.sequence
    want = plain_pytorch(case)
    found = pools(world).run(with_a_resume, case, str(tmp_path), speeds_of(world))
    first = found[0]
    assert len(set(first.shares)) == 3, first.shares  # equal, then two others
    assert first.shares[HALF] == first.shares[HALF - 1] != first.shares[0]  # the resume goes on with what was decided
    for step in range(STEPS):
        read = sorted({tuple(each.indices[step]) for each in found})
        assert sorted(index for one in read for index in one) == list(range(12 * step, 12 * step + 12)), (step, read)
    assert any(len(set(map(len, step))) > 1 for step in zip(*(each.indices for each in found), strict=True))
    assert_agrees(first, want, loss=1e-5, norm=1e-5, parameters=1e-5)


@pytest.mark.slow
def test_pairs_of_unequal_shares(pools: Any, tmp_path: Path) -> None:
    """A loss by the pair: against the same ranks with equal shares."""
    model = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    case = Case(
        data=prepared_preferences(tmp_path / "data"),
        length=192,
        isolate_documents=True,
        steps=STEPS,
        model=model,
        stage=2,
        objective={"name": "simpo"},
    )
    want = pools(2).run(with_a_resume, case, str(tmp_path / "equal"), [[1, 1]] * STEPS)[0]
    got = pools(2).run(with_a_resume, case, str(tmp_path / "other"), speeds_of(2))[0]
    assert set(want.shares) == {(6, 6)} and len(set(got.shares)) == 3
    assert_agrees(got, want, loss=1e-5, parameters=1e-5)
