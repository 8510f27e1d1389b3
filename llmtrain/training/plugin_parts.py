"""The parts that plugins bring to a run: an exception in one ends the run on all ranks, after a save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.base import log
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.config.plugins import PluginError, place_of
from llmtrain.engine.api import StateTensor
from llmtrain.engine.dist.control import AgreedError, from_all, together
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position, Request

T = TypeVar("T")


class Guarded(Part):
    """A plugin's part. After its first exception on a rank it is called no more there, and the rank asks all to stop:
    they train one step further, save, and `raise_failures` ends them alike."""

    def __init__(self, name: str, part: Part, ranks: Ranks) -> None:
        """`part`: as the run's configuration has it."""
        self.name, self.key, self._ranks = name, f"parts.{name}", ranks
        self._part = part
        self.failure: str | None = None
        self._step = 0

    def open(self, launch: Launch) -> None:
        self._together("open", lambda: self._part.open(launch))

    def begin(self, position: Position) -> Position | None:
        self._step = position.step
        return self._together("begin", lambda: _is(self._part.begin(position), Position, type(None)))

    def restore(self, kept: Any, folder: Path) -> None:
        self._together("restore", lambda: self._part.restore(kept, folder))

    def request(self) -> Request:
        asked = self._call("request", lambda: _is(self._part.request(), Request), Request())
        return asked if self.failure is None else Request(stop=True)

    def before_update(self) -> None:
        self._call("before_update", self._part.before_update, None)

    def after_step(self, done: Done) -> Position | None:
        self._step = done.position.step
        return self._call("after_step", lambda: _is(self._part.after_step(done), Position, type(None)), None)

    def figures(self, done: Done) -> dict[str, Any]:
        named: dict[str, Any] = self._call("figures", lambda: dict(self._part.figures(done)), {})
        return {f"{self.name}/{key}": value for key, value in named.items()}

    def state(self) -> list[StateTensor]:
        return self._call("state", self._part.state, [])

    def to_json(self) -> Any:
        return self._call("to_json", self._part.to_json, None)

    def close(self, error: BaseException | None) -> None:
        self._call("close", lambda: self._part.close(error), None)
        if self.failure is not None:
            log.warn(self.failure)

    def _together(self, hook: str, call: Callable[[], T]) -> T | None:
        """Call a hook that comes before the first step. Raises AgreedError."""
        with together(self._ranks):
            result = self._call(hook, call, None)
            if self.failure is not None:
                raise PluginError(self.failure)
        return result

    def _call(self, hook: str, call: Callable[[], T], instead: T) -> T:
        if self.failure is not None:
            return instead
        try:
            with heart.calling(self.key, hook):
                return call()
        except BaseException as error:  # a signal only raises a flag during a run: Ctrl-C here is the plugin's own
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.failure = f"parts.{self.name}: {hook} at step {self._step}: {place_of(error)}{what}"
            return instead


def _is(given: T, *kinds: type) -> T:
    """Raise TypeError where a plugin's method has returned what the loop cannot use."""
    if not isinstance(given, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"it returns {type(given).__name__}; wanted is {wanted}")
    return given


def guarded(parts: dict[str, Part], launch: Launch) -> list[Part]:
    """The parts of a run's `parts` section, opened, in their order there. All ranks call it. Raises AgreedError."""
    made = [Guarded(name, part, launch.setup.ranks) for name, part in parts.items()]
    for part in made:
        part.open(launch)
    return list(made)


def raise_failures(parts: Sequence[Part], ranks: Ranks) -> None:
    """End all ranks alike where a plugin's part has failed on one of them. All ranks call it.

    Raises: AgreedError.
    """
    mine = [part.failure for part in parts if isinstance(part, Guarded)]
    if not mine:
        return
    for rank, failures in enumerate(from_all(ranks, mine)):
        if failure := next((each for each in failures if each is not None), None):
            where = f"rank {rank}: " if ranks.world_size > 1 else ""
            raise AgreedError(f"{where}{failure}. The run has saved; mend the plugin, and the same command continues",
                              PluginError.exit_code)  # fmt: skip
