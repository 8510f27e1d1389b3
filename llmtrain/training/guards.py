"""Parts that end a run: on a request from outside, after skipped steps, or when the data has changed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.errors import DataError, TrainingStopped
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.threads import in_thread
from llmtrain.base.trees import lookup
from llmtrain.config.plugins import is_of_plugin
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.saving import Saving
from llmtrain.training.step import Position, Request, is_due

_AT_ONCE = 4 << 30
"""Bytes of data that a resume compares with checksums before its first step; more are compared during the steps."""
_RETURNS, _WITHIN = 3, 16
"""A loss scale that overflows again _RETURNS times within _WITHIN steps gets a warning."""


class Limits(Part):
    """Ends the run on a signal, or when `train.max_minutes` are over."""

    def __init__(self, launch: Launch) -> None:
        self._requests, self._ranks = launch.requests, launch.setup.ranks
        self._max_minutes, self._began_s = launch.setup.run.config.train.max_minutes, launch.began_s

    def request(self) -> Request:
        """Return this rank's request to stop. For train.max_minutes only rank 0's clock counts."""
        minutes = self._max_minutes
        up = minutes is not None and self._ranks.rank == 0 and time.monotonic() - self._began_s > 60 * minutes
        return Request(stop=self._requests.stop_reason is not None, sums={"time is up": [up]})

    def after_step(self, done: Done) -> None:
        if any(done.agreed.sums["time is up"]):
            self.ended = "train.max_minutes"


class SkippedSteps(Part):
    """Reports a skipped step with its sequences, and ends the run after too many in a row."""

    refuses_untrained = True
    """Whether a complete run must have changed a parameter."""

    def __init__(self, launch: Launch) -> None:
        self._setup, self._tracker, self._checkpoints = launch.setup, launch.tracker, launch.folder.checkpoints
        self._in_a_row = 0
        self._rate, self._last, self._steps_before, self._told = launch.session.rate, "", False, False
        self._waiting: list[Done] = []
        self._log_every = launch.setup.run.config.train.log_every
        self._returns: list[int] = []
        """Steps that overflowed directly after a step without overflow, with a dynamic loss scale."""

    def figures(self, done: Done) -> dict[str, Any]:
        return {"skipped_steps": done.position.settled().skipped_steps}

    def after_step(self, done: Done) -> None:
        """Look at the step's update. One whose outcome the host learns late is looked at after the next step, or before
        the next log. Raises TrainingStopped, on all ranks: after too many skipped steps."""
        self._waiting.append(done)
        waits = done.last or is_due(self._log_every, done.steps)
        while self._waiting and (waits or len(self._waiting) > 1 or not done.update.is_late):
            self._look_at(self._waiting.pop(0))

    def last(self, position: Position, *, complete: bool) -> None:
        for done in self._waiting:  # a part after this one has ended the run
            self._look_at(done)

    def _look_at(self, done: Done) -> None:
        stepped, self._steps_before = self._steps_before, not done.update.skipped
        if not done.update.skipped:
            self._in_a_row = 0
            return
        step, first = done.position.step, done.batch.first_index
        every = list(range(first, first + done.batch.sequences))
        if not done.agreed.weight:
            self._tracker.event("skip", step=step, what="no counted token", samples=every, loss_scaling=False)
            self._last = "no token of its sequences was counted"
            log.warn(f"step {step} skipped: no token of the sequences {units.some(every)} is counted")
            return
        if done.update.left_out:  # the part that left it out reports it
            return
        bad = [
            index
            for micro, sums in zip(done.batch.micro_batches, done.sums, strict=True)
            if not math.isfinite(float(sums[0]))
            for index in micro.sequences
        ]
        samples = sorted(index for of_rank in self._setup.ranks.gather(bad) for index in of_rank)
        # A dynamic loss scale is found by overflows, so with a finite loss an overflow is no fault.
        scaling = self._setup.run.finds_loss_scale and not samples
        objective = self._setup.run.config.objective
        of_plugin = f" of the plugin's objective.name {objective.name}" if is_of_plugin(objective) else ""
        what = ("loss" if samples else "gradient") + of_plugin
        named = samples or every
        self._tracker.event("skip", step=step, what=f"non-finite {what}", samples=named, loss_scaling=scaling)
        self._last = f"its {what} was not finite"
        if scaling:
            self._last += ", and fp16 still looked for its loss scale (fp16.initial_scale_power)"
            if stepped:
                self._return(step)
            return
        self._in_a_row += 1
        log.warn(f"step {step} skipped: non-finite {what}; sequences {units.some(named)} ({self._in_a_row} in a row)")
        if self._in_a_row >= self._setup.run.config.fault.max_skipped:
            scale = None if samples else lookup(self._setup.run.deepspeed, "fp16.loss_scale")
            static = f"set fp16.loss_scale from the static {scale} to 0 (dynamic), " if scale else ""
            raise TrainingStopped(
                f"{self._in_a_row} steps in a row were skipped for a non-finite {what}; fault.max_skipped is "
                f"{self._setup.run.config.fault.max_skipped}. Last sequences: {units.some(named)}. Look at them, "
                f"{static}lower optim.lr, or resume from an earlier checkpoint in {self._checkpoints}."
            )

    def _return(self, step: int) -> None:
        """Warn once if the loss scale grows back into an overflow within a few steps, again and again."""
        self._returns.append(step)
        window = lookup(self._setup.run.deepspeed, "fp16.loss_scale_window") or 1000  # DeepSpeed's default
        often = len(self._returns) >= _RETURNS and step - self._returns[-_RETURNS] <= _WITHIN
        if often and window <= _WITHIN and not self._told:  # with a longer window the scale does not grow so soon
            self._told = True
            log.warn(
                f"steps {units.some(self._returns[-_RETURNS:])} were skipped: the loss scale grows every "
                f"{window} steps until gradients overflow. Set fp16.loss_scale_window to 1000, DeepSpeed's default"
            )

    def refuse_untrained(self, position: Position) -> None:
        """Raise TrainingStopped, on all ranks, if no step of a complete run has changed a parameter."""
        rated = any(self._rate(step) for step in range(position.step))
        changed = rated and position.skipped_steps < position.step
        if changed or not position.step or not self.refuses_untrained:
            return
        last = f", the last because {self._last}" if self._last else ""
        reason = f"all were skipped{last}" if rated else "the learning rate was 0 in all (optim.lr, section schedule)"
        raise TrainingStopped(
            f"none of the {position.step} steps has changed a parameter: {reason}. So the run is not complete, and "
            "exports nothing. Correct that, and begin in another train.run_dir."
        )


class DataChanged(TrainingStopped):
    """The prepared data differs from its manifest."""

    exit_code = DataError.exit_code


class DataCheck(Part):
    """Compares the data's files with their checksums during the first steps, on a thread of each rank.

    Ranks on the same disk divide the files. A difference ends the run before its first save.
    """

    def __init__(self, launch: Launch) -> None:
        setup = launch.setup
        distinct = {id(data): data for data in (*setup.course.data, *setup.data.sets.values())}
        self._files = [file for data in distinct.values() for file in data.sums()]
        self._files += [file for choices in setup.data.choices.values() for file in choices.prepared.sums()]
        self._files = [file for file in self._files if file.is_here]  # the others are compared when they arrive
        self._ranks, self._log_every = setup.ranks, setup.run.config.train.log_every
        self._launch = launch
        self._closed, self._settled = False, False
        self._comparison: Future[str] | None = None
        """The error that the thread has found; empty: no error."""

    def begin(self, position: Position) -> None:
        """Start the thread. Raises DataChanged, on all ranks: when a resume finds other data."""
        stats = [os.stat(file.path) for file in self._files if file.path.is_file()]
        identity = hashlib.sha256(repr([(stat.st_ino, stat.st_ctime_ns) for stat in stats]).encode()).hexdigest()
        everyone = self._ranks.gather(identity)  # copies on two hosts differ in inode and time
        group = [rank for rank, identity in enumerate(everyone) if identity == everyone[self._ranks.rank]]
        self._mine = self._files[group.index(self._ranks.rank) :: len(group)]
        self._comparison = in_thread(self._compare, "data-check")
        size = sum(file.bytes for file in self._files)
        if self._launch.start.folder is not None and size <= _AT_ONCE:
            self._look(waits=True)  # the steps before were trained on the data as it was

    def after_step(self, done: Done) -> None:
        """Raises DataChanged, on all ranks."""
        due = self._launch.part(Saving).is_due(done)
        if not self._settled and (due or done.last or is_due(self._log_every, done.steps)):
            # A run that was asked to stop has no time to wait.
            self._look(waits=due or (done.last and not done.agreed.stop))
        if done.last:
            self.close(None)

    def _look(self, *, waits: bool) -> None:
        """Gather the ranks' results. `waits`: wait until all ranks have one. Raises DataChanged, on all ranks."""
        assert self._comparison is not None
        if waits:
            heart.awaits(os.getpid())  # bytes read are progress, waiting for a disk is not
            wait([self._comparison])
            heart.awaits(0)
        results = self._ranks.gather(self._comparison.result() if self._comparison.done() else None)
        if wrong := next(filter(None, results), None):
            raise DataChanged(f"{wrong}. The run ends before it saves a model trained on this data")
        self._settled = None not in results

    def close(self, error: BaseException | None) -> None:
        self._closed = True
        if self._comparison is not None:
            wait([self._comparison])

    def _compare(self) -> str:
        with contextlib.suppress(OSError):  # the steps have priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            for file in self._mine:
                file.compare(lambda: not self._closed)
        except DataError as error:
            return str(error)
        except Exception as error:
            return f"the data could not be compared with its checksums: {error!r}"
        return ""
