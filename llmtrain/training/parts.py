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
    """The position after the step, as changed by the parts that were called before this one."""
    complete: bool = False
    """True if the run has all of its steps."""
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
        """True if no step follows in this launch."""
        return self.complete or self.agreed.stop


class Part(Entry, section="parts"):
    """A component of a run. All ranks call every method together; the default methods do nothing.

    The loop keeps the run's position. `begin` and `after_step` may return a new position, equal on all ranks, from
    which the later parts and the next step continue; None means no change. A plugin's part always returns None. Since
    several steps may pass at once, a part tests `is_due(every, done.steps)`.

    `training/run.py` lists the parts in the order of their calls. A plugin's part is a dataclass with a name (`class
    Count(Part, entry="count")`), whose fields are set below `parts.count`.
    """

    own_methods: ClassVar[frozenset[str]] = frozenset({"around_passes", "eval_figures", "variants", "last"})
    """Methods that only llmtrain's own parts may define: a plugin's class with one of them is refused."""
    key = ""
    """Name of the part's entry in a checkpoint's trainer.json; empty: the part has no entry."""
    communicates_beside = False
    """True if the part's collectives may run in another thread while a step computes."""
    ended = ""
    """Reason for completing the run before its last step, the same on all ranks; empty: go on. A plugin's part asks for
    an end by `request` instead."""

    def open(self, launch: Launch) -> None:
        """Called once before the other methods, only on a plugin's part. `launch`: the run's engine, data and so on."""

    def begin(self, position: Position) -> Position | None:
        """Called before the first step. Returns the position to continue from.

        Raises StopAsked, on all ranks: when a rank was asked to stop meanwhile; the launch then ends without a save.
        """
        return None

    def request(self) -> Request:
        """Return what this rank sends in the next step's all-reduce. A plugin's part may set only `stop` and `save`: if
        the part failed on one rank, its sums would be missing there, and the ranks would wait for each other."""
        return Request()

    def around_passes(self, passes: Passes) -> AbstractContextManager[None] | None:
        """Return a context around the step's forward and backward passes, or None. At its end the context may read the
        sums in `passes` and leave out the update. Not called on a plugin's part."""
        return None

    def before_update(self) -> None:
        """Called between the backward pass and the optimizer's update."""

    def after_step(self, done: Done) -> Position | None:
        """Called after each step. Returns the position to continue from."""
        return None

    def last(self, position: Position, *, complete: bool) -> None:
        """Called after the last step of a launch. `complete`: the run has all of its steps. Not for plugins."""

    def figures(self, done: Done) -> dict[str, Any]:
        """Return figures for the metrics of a logged step, by their keys in tracking/metrics.py; the figures of a
        plugin's part are logged as NAME/KEY. Only rank 0's figures are used."""
        return {}

    def eval_figures(self, step: int) -> dict[str, float]:
        """Return further figures of an evaluation, by their keys in tracking/metrics.py. Not for plugins."""
        return {}

    def variants(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return other values of the parameters, such as an average, as name -> context in which the model uses them.
        An evaluation also measures the model in each context, as eval/NAME. Not called on a plugin's part."""
        return {}

    def state(self) -> list[StateTensor]:
        """Return the tensors that a checkpoint saves."""
        return []

    def to_json(self) -> Any:
        """Return the entry of trainer.json; it is saved under `key`."""
        return None

    def restore(self, kept: Any, folder: Path) -> None:
        """Called before `begin` to restore the checkpoint in `folder`. `kept`: what `to_json` returned then."""

    def close(self, error: BaseException | None) -> None:
        """Called once at the end of the launch. `error`: the exception that ended it, if any."""
