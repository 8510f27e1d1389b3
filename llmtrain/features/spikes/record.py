"""The part of a run that records each step in steps.bin, reports spikes, and leaves out updates of outliers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.engine.api import Update
from llmtrain.features.spikes import SpikesConfig
from llmtrain.features.spikes.pins import pin
from llmtrain.features.spikes.steps import STEPS, StepFile, StepRow
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Passes, Position, is_due

_MOST = 256
"""Most steps whose figures stay on the device until they are read; they are read at log points at the latest."""
_RESTART = 3
"""A jump of the loss within this many steps after a resume is attributed to the resume."""
BEFORE, AFTER = 7, 3
"""How many steps before and after a spike's first step the replay in its event trains."""


class Record(Part):
    """Keeps loss and norm of each step on the device. At log points, where the host waits for the device anyway, and
    before saves, the steps go to steps.bin and to the detector of spikes."""

    key = "spikes"

    def __init__(self, launch: Launch) -> None:
        setup = launch.setup
        self._setup, self._ranks, self._tracker, self._folder = setup, setup.ranks, launch.tracker, launch.folder
        settings = setup.run.config.section(SpikesConfig)
        self._checkpoints, self._most_pinned = launch.checkpoints, settings.pinned
        self._every, self._degrees = setup.run.config.train.log_every, setup.run.mix.degrees
        self._sums: list[Tensor] = []
        """Sums of the micro-batches since they were last read, on the device."""
        self._updates: list[Update] = []
        self._steps: list[StepRow] = []
        """Steps since figures were last read, without their figures."""
        self.detector = Detector()
        self._limit, self._session = settings.skip_outliers, launch.session
        if self._limit is not None:
            self._every = 1  # a verdict needs all steps before
        self._started = launch.start.position.step
        self._stage = setup.course.at(self._started).stage
        self._file: StepFile | None = None

    def begin(self, position: Position) -> None:
        if self._ranks.rank == 0:
            self._file = StepFile(self._folder.path / STEPS, start_step=position.step)
            if self._file.damage:
                self._tracker.event("record_damaged", step=position.step, text=self._file.damage)

    def to_json(self) -> list[Any]:
        """Return the usual values for a checkpoint. The steps are read first, because a spike among them keeps a
        checkpoint that this save would make superfluous."""
        self.read()
        return self.detector.to_json()

    def restore(self, saved: Any, folder: Path) -> None:
        """Continue with the checkpoint's usual values, by which spikes.skip_outliers decides on updates."""
        self.detector.restore(saved)

    def after_step(self, done: Done) -> None:
        if done.batch.stage != self._stage:
            self._stage = done.batch.stage
            self.read()
            self.detector.restart()
        self._sums += done.sums
        self._updates.append(done.update)
        step, weight = done.position.step, done.agreed.weight
        self._steps.append(StepRow(step=step, weight=weight, lr_factor=done.lr_factor))
        if done.last or len(self._steps) == _MOST or is_due(self._every, done.steps):
            self.read()
        if done.update.left_out:
            step, first = done.position.step, done.batch.first_index
            samples = list(range(first, first + done.batch.sequences))
            self._tracker.event("skip", step=step, what="outlier", samples=samples, loss_scaling=False)
            log.warn(f"step {step}: the update is left out, because loss or norm is an outlier (spikes.skip_outliers)")

    def around_passes(self, passes: Passes) -> AbstractContextManager[None] | None:
        """Decide by loss and gradient norm whether to leave out the update, the same on all ranks.

        The update of a stage's first step is never left out.
        """
        limit = self._limit
        if limit is None or self._setup.course.at(self._session.step_number).stage != self._stage:
            return None
        return self._decide_update(passes, limit)

    @contextmanager
    def _decide_update(self, passes: Passes, limit: float) -> Iterator[None]:
        yield
        mean = math.fsum(self._shares(passes.sums, 1)[0]) / passes.weight
        passes.leave_out = lambda norm: self.detector.outlier(mean, norm, limit) is not None

    def _shares(self, sums: Sequence[Tensor], count: int) -> list[list[float]]:
        """Return the loss sums of `count` steps, [count][data-parallel rank]. Waits for the device."""
        place = self._degrees.place(self._ranks.rank)
        shares = torch.zeros(count, self._degrees.data, dtype=torch.float64)
        if place.tensor == 0:  # the ranks of a tensor-parallel group have the same loss
            shares[:, place.data] = torch.stack(list(sums)).unflatten(0, (count, -1)).sum(1)[:, 0].cpu()
        of_groups: list[list[float]] = self._ranks.sum(shares).tolist()
        return of_groups

    def read(self) -> None:
        """Read the figures of the collected steps, write them, and report spikes. Waits for the device; all ranks call
        it together."""
        if not self._steps:
            return
        rows = []
        shares = self._shares(self._sums, len(self._steps))
        for step, of_groups, update in zip(self._steps, shares, self._updates, strict=True):
            loss = math.fsum(of_groups) / (step.weight or math.nan)
            norm = math.nan if update.grad_norm is None else float(update.grad_norm)
            flags: dict[str, Any] = {"skipped": update.skipped, "left_out": update.left_out}
            rows.append(replace(step, loss=loss, norm=norm, shares=tuple(of_groups), **flags))
        self._steps, self._sums, self._updates = [], [], []
        if self._file is not None:
            self._file.append(rows)
        finds_scale = self._setup.run.finds_loss_scale
        for row in (row for row in rows if row.weight):
            # Overflows with a finite loss are normal while a dynamic loss scale is found.
            scaling = finds_scale and math.isfinite(row.loss) and not math.isfinite(row.norm)
            if spike := self.detector.take(row.step, row.loss, math.nan if scaling else row.norm):
                self._report_spike(spike)

    def _report_spike(self, spike: Spike) -> None:
        usual = f"{spike.deviations:.1f} deviations above {spike.median:.4g}, the median of the 20 steps before"
        text = f"step {spike.step}: the {spike.figure} {spike.value:.4g} is {usual}"
        if self._started < spike.step <= self._started + _RESTART and self._started:
            self._tracker.event("jump", **asdict(spike), text=text, resumed=self._started)
            log.info(
                f"{text}. The launch resumed at step {self._started}, so the jump is not caused by the data of "
                "this step"
            )
            return
        checkpoint = pin(self._checkpoints.path, spike.step, self._most_pinned) if self._checkpoints.leads else None
        how = "No earlier checkpoint exists" if checkpoint is None else "The newest checkpoint before the spike is kept"
        # From the kept checkpoint on: an older one may be gone when the steps are trained again.
        first, last = max(1, spike.step - BEFORE, (checkpoint or 0) + 1), spike.step + AFTER
        command = f"llmtrain replay {self._folder.path} --steps {first}:{last}"
        self._tracker.event("spike", **asdict(spike), text=text, kept=checkpoint is not None, replay=command)
        self._tracker.alert(f"Spike at step {spike.step}", f"{text}\n{command}")
        log.warn(f"{text}. {how}. To find its sequences: {command}")

    def close(self, error: BaseException | None) -> None:
        """Write the last steps if all ranks have agreed on the end."""
        if isinstance(error, TrainingStopped):
            self.read()
        if self._file is not None:
            self._file.close()


_NEAR, _FAR = 20, 200
_LEAST = 20
"""How many steps must pass before a step is judged."""
_DEVIATIONS = 5.0
"""Limit in deviations after many steps. After 20 steps it is twice as high, as the deviation is less certain."""
_NORMAL = 1.4826
"""Ratio of a normal distribution's standard deviation to the median distance from its median."""
_APART = 5
"""Number of steps without an outlier after which a spike has ended."""
_NEW_LEVEL = 100
"""After this many outliers in a row they are a new level and no spike: the statistics begin anew."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    step: int
    """First step of the spike."""
    figure: str
    """The figure that spiked: "loss" or "gradient norm"."""
    value: float
    median: float
    """Median of the figure in the 20 steps before."""
    deviations: float


class Level:
    """The usual values of a figure: its median and deviation over the last steps."""

    def __init__(self, floor: float, *, relative: bool) -> None:
        """`floor`: smallest deviation that is assumed; with `relative` as a share of the median."""
        self._floor, self._relative = floor, relative
        self._values: deque[float] = deque(maxlen=_NEAR)
        self._distances: deque[float] = deque(maxlen=_FAR)
        self._taken, self._usual = 0, 0.0
        """Median of the distances from the median. It is computed for every tenth step only, as it takes 40 us."""

    def measure(self, value: float) -> tuple[float, float]:
        """Return (median, deviations of `value` above it); (nan, 0) after too few steps."""
        if len(self._distances) < _LEAST:
            return math.nan, 0.0
        median = statistics.median(self._values)
        floor = self._floor * abs(median) if self._relative else self._floor
        deviation = max(_NORMAL * self._usual, floor)
        return median, (value - median) / deviation if math.isfinite(value) else math.inf

    @property
    def uncertainty(self) -> float:
        """Factor by which limits are raised: 2 after 20 steps, 1.1 after 200."""
        return 1 + _LEAST / max(1, len(self._distances))

    def to_json(self) -> list[Any]:
        return [list(self._values), list(self._distances), self._taken, self._usual]

    def restore(self, saved: Any) -> None:
        """Raises TypeError, ValueError."""
        values, distances, taken, usual = saved
        self._values.extend(map(float, values))
        self._distances.extend(map(float, distances))
        self._taken, self._usual = int(taken), float(usual)

    def take(self, value: float) -> None:
        if self._values:
            self._distances.append(abs(value - statistics.median(self._values)))
        self._values.append(value)
        self._taken += 1
        if self._distances and (self._taken % 10 == 0 or len(self._distances) == _LEAST):
            self._usual = statistics.median(self._distances)


class Detector:
    """Finds spikes and outliers. It must get the steps of a run in their order."""

    def __init__(self) -> None:
        self._since_outlier, self._in_a_row = _APART, 0
        self.restart()

    def restart(self) -> None:
        """Forget the usual values, because other data or another schedule begins."""
        self._loss, self._norm = Level(0.02, relative=True), Level(math.log(1.28), relative=False)

    def to_json(self) -> list[Any]:
        return [self._loss.to_json(), self._norm.to_json(), self._since_outlier, self._in_a_row]

    def restore(self, saved: Any) -> None:
        """Continue with the usual values of a checkpoint, or with none if it has none."""
        try:
            loss, norm, since, in_a_row = saved
            self._loss.restore(loss)
            self._norm.restore(norm)
            self._since_outlier, self._in_a_row = int(since), int(in_a_row)
        except (TypeError, ValueError):
            self.restart()

    def outlier(self, loss: float, norm: float, limit: float | None = None) -> tuple[str, float, float, float] | None:
        """Return (figure, value, median, deviations) if a figure is more than `limit` deviations above its median.

        `norm`: NaN if there is none. `limit`: by default the one of spikes.
        """
        median, deviations = self._loss.measure(loss)
        measured = [("loss", loss, median, deviations, self._loss.uncertainty)]
        if not math.isnan(norm):
            median, deviations = self._norm.measure(_log(norm))
            measured.append(("gradient norm", norm, math.exp(median), deviations, self._norm.uncertainty))
        above = [entry[:4] for entry in measured if entry[3] > (limit or _DEVIATIONS * entry[4])]
        return max(above, key=lambda entry: entry[3], default=None)

    def take(self, step: int, loss: float, norm: float) -> Spike | None:
        """Add a step to the statistics. Returns a spike if one begins with this step, else None."""
        outlier = self.outlier(loss, norm)
        if outlier is None:
            if math.isfinite(loss):
                self._loss.take(loss)
            if math.isfinite(norm):
                self._norm.take(_log(norm))
            self._since_outlier, self._in_a_row = self._since_outlier + 1, 0
            return None
        first, self._since_outlier = self._since_outlier >= _APART, 0
        self._in_a_row += 1
        if self._in_a_row > _NEW_LEVEL:
            self._in_a_row = 0
            self.restart()
        figure, value, median, deviations = outlier
        return Spike(step=step, figure=figure, value=value, median=median, deviations=deviations) if first else None


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30)) if math.isfinite(norm) else norm
