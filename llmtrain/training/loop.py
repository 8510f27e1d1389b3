"""The loop of a run: one step after another, and its parts between them."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.stream.loader import TrainLoader
from llmtrain.training.parts import Done, Part
from llmtrain.training.step import Position, Request, Session


def train_steps(
    session: Session, loader: TrainLoader, parts: Sequence[Part], position: Position, *, limit: int | None
) -> tuple[Position, bool]:
    """Train until the run is complete, its time is up, or someone asks to stop.

    Args:
        session: takes the steps.
        loader: gives their batches. Closed at the end.
        parts: called in this order.
        position: where the run stands.
        limit: optimizer steps of the whole run; None: only time or a signal ends it.

    Returns: (where the run stands, False if it was asked to stop).
    """

    def complete() -> bool:
        return (limit is not None and position.step >= limit) or any(part.ended for part in parts)

    def before_update() -> None:
        for part in parts:
            part.before_update()

    for part in parts:
        position = part.begin(position) or position
    stopped, goes_on = False, not complete()
    with contextlib.closing(loader):
        while goes_on:
            session.step_number = position.step  # a part may have moved it
            loader.seek(position.sample_index, position.step)
            heart.begin_step()
            waited_s = loader.data_wait_s
            batch = next(loader)
            waited_s = loader.data_wait_s - waited_s
            request = functools.reduce(operator.or_, (part.request() for part in parts), Request())
            step = session.step(batch, request, before_update)
            before, position = position.step, _after(position, step.update.skipped, loader.next_index, batch.tokens)
            step_s, comm_s = heart.end_step(position.step)
            for part in parts:
                done = Done(**vars(step), position=position, steps=range(before + 1, position.step + 1),
                            complete=complete(), data_wait_s=waited_s, step_s=step_s, comm_s=comm_s)  # fmt: skip
                position = part.after_step(done) or position
            stopped = step.agreed.stop and not complete()
            goes_on = not (complete() or step.agreed.stop or step.agreed.time_up)
    return position, not stopped


def _after(position: Position, skipped: bool, sample_index: int, tokens: int) -> Position:
    return replace(
        position,
        step=position.step + 1,
        tokens=position.tokens + tokens,
        sample_index=sample_index,
        skipped_steps=position.skipped_steps + int(skipped),
        optimizer_step=position.optimizer_step + int(not skipped),
    )
