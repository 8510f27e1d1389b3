"""The part of a run that saves and reports checkpoints."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any, NoReturn

from llmtrain.base import log
from llmtrain.base.errors import CheckpointError, TrainingStopped
from llmtrain.base.rank import messages
from llmtrain.base.rank.heartbeat import heart
from llmtrain.checkpoint.retain import Best, keep_newest
from llmtrain.checkpoint.save import Outcome, Saver
from llmtrain.config.run import same_command
from llmtrain.engine.api import StateTensor
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.reporting import Evaluation
from llmtrain.training.step import Position, Request, is_due

_TELL_S = 1.0
"""Seconds: training that waited less for a checkpoint writes an event, but no warning."""


class Saving(Part):
    def __init__(self, launch: Launch) -> None:
        """Raises AgreedError: when the ranks' pieces do not cover each tensor exactly once."""
        setup, folder, start, parts = launch.setup, launch.checkpoints, launch.start, launch.parts
        self._setup, self._settings, self._ranks = setup, setup.run.config.checkpoint, setup.ranks
        self._folder, self._tracker, self._speed, self._requests = folder, launch.tracker, launch.speed, launch.requests
        self._start, self._parts, self._evaluation = start, parts, launch.part(Evaluation)
        self._best = Best.chosen(self._settings.keep_best)
        self._command = same_command(setup.run.config)

        def more() -> list[StateTensor]:
            return [tensor for part in parts for tensor in part.state()]

        self._saver = Saver(setup.engine, folder, self._settings, setup.run.mix, self._ranks, start.frozen, more)
        self._saved_step = start.saved_step
        self._max_failed, self._failed_in_a_row = setup.run.config.fault.max_failed_saves, 0
        self._began_s, self._signalled = time.monotonic(), False
        self._saver.check_shares()  # now: wrong shards must not come to light only at the first save
        self._saver.prepare()
        stay = self._settings.keep + (0 if self._best is None else self._best.keep)
        if shortage := self._saver.shortage(stay):
            log.warn(shortage)

    def request(self) -> Request:
        self._signalled = self._requests.take_save()
        minutes = self._settings.every_minutes if self._ranks.rank == 0 else None
        due = minutes is not None and time.monotonic() - self._began_s > 60 * minutes
        return Request(save=self._signalled or due, sums={"save": self._saver.status()})

    def is_due(self, done: Done) -> bool:
        """Return True if all ranks save after the step. After a launch's last step `last` saves instead."""
        due = done.agreed.save or is_due(self._settings.every_steps, done.steps)
        return not done.last and (due or self._evaluation.is_best(done.position.step))

    def before_update(self) -> None:
        self._saver.before_update()

    def after_step(self, done: Done) -> None:
        """Advance the save under way if all ranks are ready, and begin one if it is due.

        Raises: TrainingStopped or CheckpointError, after too many failed saves in a row.
        """
        self._report(self._saver.advance(*done.agreed.sums["save"]))
        if self.is_due(done):
            with self._speed.checkpoint_stall(), heart.during("save"):
                if done.agreed.save and any(asked := self._ranks.gather(self._signalled)):
                    seat = self._ranks.seats[asked.index(True)]
                    log.info(f"step {done.position.step} is saved: rank {seat.rank} on {seat.host} was sent SIGUSR1")
                self.save(done.position)
        if not done.last and self._failed_in_a_row >= self._max_failed:
            self._end_unsaved(done.position)

    def close(self, error: BaseException | None) -> None:
        """Wait for the save under way if all ranks have agreed on the end."""
        if isinstance(error, TrainingStopped):
            self._settle()
        self._saver.__exit__()

    def _settle(self) -> None:
        self._report(self._saver.drain())

    def _trainer(self, position: Position) -> dict[str, Any]:
        engine, course, position = self._setup.engine, self._setup.course, position.settled()
        counters = {field.name: getattr(position, field.name) for field in fields(position) if field.name != "newest"}
        state = replace(
            self._start.trainer,
            **counters,
            loss_scale=engine.counters().loss_scale,
            model_config=engine.module.config.to_dict(),  # stages change it
            data_fingerprint=course.done(position.step).data.fingerprint,
            data_stages=course.record(position.step, position.sample_index),
            entries={part.key: part.to_json() for part in self._parts if part.key},
        )
        return state.to_json()

    def save(self, position: Position) -> None:
        """Begin a checkpoint. A failed save is reported and training continues."""
        step = position.step
        self._began_s = began_s = time.monotonic()
        if self._saver.busy:
            if self._settings.when_busy == "skip" and not self._evaluation.is_best(step):
                self._tracker.event("save_skipped", step=step)
                log.warn(
                    f"no checkpoint at step {step}: the previous one is not yet written (checkpoint.when_busy: skip)"
                )
                return
            self._settle()
            waited_s = time.monotonic() - began_s
            self._tracker.event("save_waited", step=step, seconds=round(waited_s, 3))
            if waited_s > _TELL_S:
                log.warn(
                    f"training waited {waited_s:.1f} s at step {step} until the previous checkpoint was written. Save "
                    "less often (checkpoint.every_steps), or set checkpoint.when_busy to skip"
                )
        if self._saved_step == step:
            return
        try:
            self._saver.begin(step, self._trainer(position))
        except CheckpointError as error:
            self._failed(step, str(error))
        if not self._saver.asynchronous:
            self._settle()

    def _end_unsaved(self, position: Position) -> NoReturn:
        """End a run whose saves fail: delete the checkpoints that the next save would make superfluous, and save once
        more. Raises TrainingStopped: when that save succeeds; CheckpointError: when it fails."""
        failed = f"{self._failed_in_a_row} checkpoints in a row failed; fault.max_failed_saves is {self._max_failed}"
        if self._folder.leads:
            for gone in keep_newest(self._folder.path, max(1, self._settings.keep - 1), best=self._best):
                log.warn(f"{gone} was deleted before the last save, to make room for it")
        try:
            self.last(position, complete=False)
        except CheckpointError as error:
            raise CheckpointError(f"{failed}. {error}") from error
        raise TrainingStopped(
            f"{failed}. The run has ended, and its state at step {position.step} is saved. Fix the "
            f"cause of the failed saves, and {self._command} continues."
        )

    def last(self, position: Position, *, complete: bool) -> None:
        """Write the last checkpoint of a launch. Raises CheckpointError."""
        self._settle()
        step = position.step
        if self._saved_step == step:
            return
        for attempt in range(2):  # the second one replaces a writer that was killed
            try:
                self._saver.begin(step, self._trainer(position))
            except CheckpointError as error:
                self._tracker.event("save_failed", step=step, error=str(error))
                raise CheckpointError(f"{error} {self._lost(step)}") from error
            outcome = self._saver.drain()
            assert outcome is not None
            if outcome.error and attempt:
                self._tracker.event("save_failed", step=step, error=outcome.error)
                raise CheckpointError(
                    f"the last checkpoint, at step {step}, failed: {outcome.error}. {self._lost(step)}"
                )
            if not outcome.error:
                self._report(outcome)
                return
            self._tracker.event("save_failed", step=step, error=outcome.error)
            log.warn(f"checkpoint at step {step} failed and is tried once more: {outcome.error}")

    def _lost(self, step: int) -> str:
        before = f"step {self._saved_step}" if self._saved_step else "the beginning"
        return f"The training up to step {step} is not saved. Fix that, and {self._command} continues from {before}."

    def _report(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.error:
            self._failed(outcome.step, outcome.error)
            return
        self._saved_step = outcome.step
        self._failed_in_a_row = 0
        if self._ranks.rank == 0:
            messages.emit("checkpoint", step=outcome.step)
        self._tracker.event(
            "save",
            step=outcome.step,
            path=str(outcome.path),
            seconds=round(outcome.seconds, 3),
            blocked_seconds=round(outcome.blocked_s, 3),
        )

    def _failed(self, step: int, error: str) -> None:
        self._failed_in_a_row += 1
        self._evaluation.lost(step)
        self._tracker.event("save_failed", step=step, error=error)
        times = f"{self._failed_in_a_row} of {self._max_failed} in a row"
        log.warn(f"checkpoint at step {step} failed ({times}), training continues: {error}")
