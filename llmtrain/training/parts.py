"""`Part`: a component of a run next to the step, such as saving or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from llmtrain.base.choice import Entry
from llmtrain.engine.api import StateTensor
from llmtrain.training.step import Passes, Position, Request, Step

if TYPE_CHECKING:
    from llmtrain.checkpoint.rundir import CheckpointFolder, RunDirectory
    from llmtrain.data.stream.loader import TrainLoader
    from llmtrain.engine.ranks.stop_requests import StopRequests
    from llmtrain.tracking.metrics import Throughput
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.setup import Setup
    from llmtrain.training.start import Start
    from llmtrain.training.step import Session

Kind = TypeVar("Kind", bound="Part")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The objects that the parts of a run are made from."""

    setup: Setup
    start: Start
    folder: RunDirectory
    checkpoints: CheckpointFolder
    requests: StopRequests
    tracker: Tracker
    session: Session
    loader: TrainLoader
    speed: Throughput
    """The clock of the run, which leaves out saves and evaluations."""
    began_s: float
    """time.monotonic() from which train.max_minutes counts."""
    parts: list[Part]
    """The parts made so far, in the order in which the loop calls them."""

    def part(self, kind: type[Kind]) -> Kind:
        return next(part for part in self.parts if isinstance(part, kind))


@dataclass(frozen=True, kw_only=True)
class Done(Step):
    """A completed step, and the state of the run after it."""

    position: Position
    """After the step, and after the parts before this one in the list."""
    complete: bool = False
    """The run has all of its steps."""
    data_wait_s: float = 0.0
    """Seconds that this rank waited for the batch."""
    step_s: float = 0.0
    """Seconds that the step took on this rank."""
    comm_s: float = 0.0
    """Seconds of `step_s` inside collectives, as the watch counts them (base/rank/heartbeat.py)."""

    @property
    def steps(self) -> range:
        """Optimizer steps that the position has passed: one, or more if a part has moved it."""
        return range(self.number + 1, self.position.step + 1)

    @property
    def last(self) -> bool:
        """No step follows in this launch."""
        return self.complete or self.agreed.stop


class Part(Entry, section="parts"):
    """A component of a run. All ranks call every method together; each default does nothing.

    The loop keeps the run's position. A part moves it, the same way on all ranks, by the result of `begin` or
    `after_step`, and the parts after it in the list and the next step continue from there; None leaves the position.
    Since several steps may pass at once, a part asks `is_due(every, done.steps)`. A plugin's part always returns None.

    `training/run.py` lists the parts in the order of their calls. A plugin's part is a dataclass with a name (`class
    Count(Part, entry="count")`), whose fields are set below `parts.count`.
    """

    own_methods: ClassVar[frozenset[str]] = frozenset({"around_passes", "eval_figures", "variants", "last"})
    """Methods that are called on llmtrain's own parts alone: a plugin's class with one of them is refused."""
    key = ""
    """Name of its entry in a checkpoint's trainer.json; empty: it has none."""
    communicates_beside = False
    """Its collectives may run in another thread while a step computes."""
    ended = ""
    """Reason for completing the run before its last step, the same on all ranks; empty: none. A plugin's part asks for
    an end by `request` instead."""

    def open(self, launch: Launch) -> None:
        """Called once at first, for a plugin's part. `launch`: the run's objects, such as its engine and data."""

    def begin(self, position: Position) -> Position | None:
        """Called before the first step. Returns the position to continue from.

        Raises: StopAsked, on all ranks: a rank was asked to stop while they waited; the launch ends without a save.
        """
        return None

    def request(self) -> Request:
        """Return this rank's entry in the next step's all-reduce; a plugin's part may set `stop` and `save` alone: one
        that fails on a rank gives no sums there, and the ranks would wait for each other."""
        return Request()

    def around_passes(self, passes: Passes) -> AbstractContextManager[None] | None:
        """Return a context around the step's forward and backward passes, which may look at their sums and leave the
        update out in the end; None: there is nothing to do. Not of a plugin's part."""
        return None

    def before_update(self) -> None:
        """Called between the backward pass and the optimizer's update."""

    def after_step(self, done: Done) -> Position | None:
        """Called after each step. Returns the position to continue from."""
        return None

    def last(self, position: Position, *, complete: bool) -> None:
        """Called after the last step of a launch that has begun. `complete`: the run has all of its steps. Not of a
        plugin's part."""

    def figures(self, done: Done) -> dict[str, Any]:
        """Return figures for the metrics of a logged step, by their keys in tracking/metrics.py; those of a plugin's
        part are logged as NAME/KEY. Rank 0's are used."""
        return {}

    def eval_figures(self, step: int) -> dict[str, float]:
        """Called at each evaluation: return further figures, by their keys in tracking/metrics.py. Not of a plugin's
        part."""
        return {}

    def variants(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return the part's other values of the parameters, such as an average: name -> context in which the model uses
        them. An evaluation measures each as eval/NAME. Not of a plugin's part."""
        return {}

    def state(self) -> list[StateTensor]:
        """Return the tensors that a checkpoint saves."""
        return []

    def to_json(self) -> Any:
        """Return the entry of trainer.json; it is saved under `key`."""
        return None

    def restore(self, kept: Any, folder: Path) -> None:
        """Called before `begin` to restore the state of the checkpoint in `folder`. `kept`: its result of `to_json`."""

    def close(self, error: BaseException | None) -> None:
        """Called once at the end of the launch. `error`: the exception that ended it, if any."""
