"""When a run saves, and what it says about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from llmtrain.base import log
from llmtrain.base.errors import CheckpointError, TrainingStopped
from llmtrain.checkpoint.folder import CheckpointFolder
from llmtrain.checkpoint.format import step_folder
from llmtrain.checkpoint.frozen import NOWHERE, FrozenSource
from llmtrain.checkpoint.host_files import fetch_all
from llmtrain.checkpoint.retain import keep_newest
from llmtrain.checkpoint.save import Outcome, Saver
from llmtrain.cluster import messages
from llmtrain.config.run import CheckpointConfig
from llmtrain.config.topology import Mix
from llmtrain.engine.api import Engine, StateTensor
from llmtrain.engine.dist.control import Agreement
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.training.step import is_due

if TYPE_CHECKING:
    from llmtrain.tracking.tracker import Tracker

_TELL_S = 1.0
"""A shorter wait for a checkpoint is in the events only."""


class Saving:
    """The checkpoints of one launch. All ranks call every method together. Use as a context manager."""

    def __init__(
        self,
        engine: Engine,
        folder: CheckpointFolder,
        settings: CheckpointConfig,
        mix: Mix,
        ranks: Ranks,
        tracker: Tracker,
        *,
        saved_step: int | None,
        max_failed: int,
        frozen: FrozenSource = NOWHERE,
        more: Callable[[], list[StateTensor]] = list,
    ) -> None:
        """`mix`: how the run computes. `saved_step`: the step whose checkpoint the folder holds already. `max_failed`:
        saves that may fail in a row. `frozen`: parameters that checkpoints name and do not hold. `more`: what they
        hold beside the engine's state."""
        self._settings = settings
        self._ranks, self._tracker = ranks, tracker
        self._folder = folder
        self._saver = Saver(engine, folder, settings, mix, ranks, frozen, more)
        self._saved_step = saved_step
        self._max_failed, self._failed_in_a_row = max_failed, 0
        self._began_s = time.monotonic()

    def __enter__(self) -> Saving:
        self._saver.check_shares()  # now: a form that has its shards wrong must not train until its first save
        self._saver.prepare()
        if shortage := self._saver.shortage(self._settings.keep):
            log.warn(shortage)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.__exit__(kind, error, trace)

    def time_is_due(self) -> bool:
        """Whether rank 0 finds that `every_minutes` have passed."""
        minutes = self._settings.every_minutes
        return minutes is not None and self._ranks.rank == 0 and time.monotonic() - self._began_s > 60 * minutes

    def is_due(self, steps: range, agreed: Agreement) -> bool:
        """Whether all ranks save after these steps."""
        return agreed.save or is_due(self._settings.every_steps, steps)

    def status(self) -> tuple[bool, bool]:
        """For the ranks' next agreement: whether this rank's part of the save under way has ended, or failed."""
        return self._saver.status()

    def before_update(self) -> None:
        """Call before the optimizer writes."""
        self._saver.before_update()

    def advance(self, agreed: Agreement) -> None:
        """Go on with the save under way, if all ranks have come so far."""
        self._report(self._saver.advance(agreed.save_ended, agreed.save_failed))

    def settle(self) -> None:
        """Wait for the save under way."""
        self._report(self._saver.drain())

    def save(self, step: int, trainer_state: Callable[[], dict[str, Any]]) -> None:
        """Begin a checkpoint of this step. A failed save is reported and training goes on."""
        self._began_s = began_s = time.monotonic()
        if self._saver.busy:
            if self._settings.when_busy == "skip":
                self._tracker.event("save_skipped", step=step)
                log.warn(
                    f"no checkpoint at step {step}: the one before is still being written (checkpoint.when_busy: skip)"
                )
                return
            self.settle()
            waited_s = time.monotonic() - began_s
            self._tracker.event("save_waited", step=step, seconds=round(waited_s, 3))
            if waited_s > _TELL_S:
                log.warn(
                    f"training waited {waited_s:.1f} s at step {step} until the checkpoint before was written. Save "
                    "less often (checkpoint.every_steps), or set checkpoint.when_busy to skip"
                )
        if self._saved_step == step:
            return
        try:
            self._saver.begin(step, trainer_state())
        except CheckpointError as error:
            self._failed(step, str(error))
        if not self._saver.asynchronous:
            self.settle()

    @property
    def gives_up(self) -> bool:
        """So many saves have failed in a row that training on would only lose more."""
        return self._failed_in_a_row >= self._max_failed

    def end_unsaved(self, step: int, trainer_state: Callable[[], dict[str, Any]]) -> NoReturn:
        """End a run that cannot save: write its state once more, with what retention would then delete deleted before.

        Raises TrainingStopped where that succeeds, else CheckpointError.
        """
        failed = f"{self._failed_in_a_row} checkpoints in a row failed; fault.max_failed_saves is {self._max_failed}"
        if self._folder.leads:
            for gone in keep_newest(self._folder.path, max(1, self._settings.keep - 1)):
                log.warn(f"{gone} was deleted before the last save, to make room for it")
        try:
            self._save_last(step, trainer_state)
        except CheckpointError as error:
            raise CheckpointError(f"{failed}. {error}") from error
        raise TrainingStopped(f"{failed}. The run has ended, and its state at step {step} is saved. Mend what kept the "
                              "others from being written, and the same command goes on.")  # fmt: skip

    def last(self, step: int, trainer_state: Callable[[], dict[str, Any]], *, exports: bool) -> None:
        """The checkpoint at the end of a launch; if rank 0 `exports` it, its folder gets all files.

        Raises CheckpointError when it cannot be written.
        """
        self._save_last(step, trainer_state)
        if exports:
            fetch_all(step_folder(self._folder.path, step), self._folder, self._ranks)

    def _save_last(self, step: int, trainer_state: Callable[[], dict[str, Any]]) -> None:
        self.settle()
        if self._saved_step == step:
            return
        for attempt in range(2):  # a writer that was killed is replaced at the second
            try:
                self._saver.begin(step, trainer_state())
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
        """What a failed last save means, and what to do."""
        before = f"step {self._saved_step}" if self._saved_step else "the beginning"
        return f"The training up to step {step} is not saved. Mend that, and the same command goes on from {before}."

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
        self._tracker.event("save_failed", step=step, error=error)
        times = f"{self._failed_in_a_row} of {self._max_failed} in a row"
        log.warn(f"checkpoint at step {step} failed ({times}), training goes on: {error}")
