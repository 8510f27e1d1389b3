"""Parts of plugins: an exception in one ends the run on all ranks, after a save."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.base import log
from llmtrain.base.errors import ModelError
from llmtrain.config.plugins import CHANGED, PluginError, place_of
from llmtrain.config.run import RunConfig, same_command
from llmtrain.engine.api import StateTensor
from llmtrain.engine.ranks.plugin_code import calling
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position, Request

T = TypeVar("T")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Lost(ModelError):
    """A part has changed state that a save needs, and that cannot be restored."""


class Surroundings:
    """State of the run that a part's method must not change. Reading it never waits for a device."""

    def __init__(self, module: nn.Module, zero_stage: int) -> None:
        self._module = module
        self._names, self._parameters = [], []
        for name, parameter in module.named_parameters():
            self._names.append(name)
            self._parameters.append(parameter)
        # With ZeRO 3 a parameter has its shape only while it is used; without masters, changed values are not lost.
        self._shaped = [] if zero_stage == 3 else self._parameters
        self._mastered = self._parameters if zero_stage in (1, 2) else []
        self._trained, self._shapes = self._trains(), [each.shape for each in self._shaped]

    def _trains(self) -> list[bool]:
        return [each.requires_grad for each in self._parameters]

    def seen(self) -> dict[str, Any]:
        """Return the state that can be restored: its description in messages -> its value."""
        return {
            "torch.set_grad_enabled": torch.is_grad_enabled(),
            "torch.set_default_dtype": torch.get_default_dtype(),
            "train() or eval() of the model": self._module.training,
            "the handlers of the signals by which the run is asked to save": [*map(signal.getsignal, _SIGNALS)],
            "the working directory": os.getcwd(),
        }

    def kept(self) -> tuple[bool, list[int]]:
        """Return the state that cannot be restored: (True if process groups exist, each parameter's version counter in
        torch, which counts changes in place)."""
        return dist.is_initialized(), [each._version for each in self._mastered]

    def compare(self, seen: dict[str, Any], kept: tuple[bool, list[int]]) -> None:
        """Compare the state with the state before a call, and restore it. Raises RuntimeError: when it has changed;
        Lost: when the run could no longer save."""
        (groups, before), (groups_now, after) = kept, self.kept()
        if groups and not groups_now:
            raise Lost("it has destroyed the process groups of the run (destroy_process_group)")
        now, trained = self.seen(), self._trains()
        changed = [words for words in seen if seen[words] != now[words]]
        changed += [] if trained == self._trained else ["requires_grad of parameters"]
        if changed:
            self._put_back(*seen.values())
            raise RuntimeError(f"it has changed {', '.join(changed)}, and must restore that before it returns")
        if (shapes := [each.shape for each in self._shaped]) != self._shapes:
            at = next(index for index, shape in enumerate(shapes) if shape != self._shapes[index])
            words = f"{tuple(self._shapes[at])} is {tuple(shapes[at])} now"
            raise Lost(f"it has changed the shape of {self._names[at]}: {words}")
        if before != after:
            at = next(index for index, version in enumerate(after) if version != before[index])
            raise RuntimeError(
                f"it has changed the values of {self._names[at]}. The optimizer's master parameters "
                "overwrite that with the next update"
            )

    def _put_back(self, grad: bool, dtype: torch.dtype, trains: bool, handlers: list[Any], folder: str) -> None:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        self._module.train(trains)
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            parameter.requires_grad_(trained)
        os.chdir(folder)


class Guarded(Part):
    """A plugin's part. After an exception on a rank, that rank no longer calls the part and asks all ranks to stop:
    they train one more step and save, and `close_all` ends them with one error."""

    def __init__(self, name: str, part: Part, ranks: Ranks, surroundings: Surroundings) -> None:
        self.name, self.key, self._ranks = name, f"parts.{name}", ranks
        self._part, self._surroundings = part, surroundings
        self.failure: str | None = None
        self._step, self._stops, self._closed = 0, False, False

    @property
    def asks(self) -> str:
        """Reason for asking all ranks to stop; empty: none."""
        return self.failure or (f"{self.key} asked to stop" if self._stops else "")

    def open(self, launch: Launch) -> None:
        self._together("open", lambda: self._part.open(launch))

    def begin(self, position: Position) -> Position | None:
        self._step = position.step
        return self._together("begin", lambda: _is(self._part.begin(position), type(None)))

    def restore(self, kept: Any, folder: Path) -> None:
        self._together("restore", lambda: self._part.restore(kept, folder))

    def request(self) -> Request:
        asked = self._call("request", lambda: _asked(self._part.request()), Request())
        self._stops |= asked.stop
        return asked if self.failure is None else Request(stop=True)

    def before_update(self) -> None:
        self._call("before_update", self._part.before_update, None)

    def after_step(self, done: Done) -> Position | None:
        self._step = done.position.step
        done = replace(done, position=done.position.settled())
        return self._call("after_step", lambda: _is(self._part.after_step(done), type(None)), None)

    def figures(self, done: Done) -> dict[str, Any]:
        named: dict[str, Any] = self._call("figures", lambda: _figures(self._part.figures(done)), {})
        return {f"{self.name}/{key}": value for key, value in named.items()}

    def state(self) -> list[StateTensor]:
        return self._call("state", lambda: [_is(each, StateTensor) for each in self._part.state()], [])

    def to_json(self) -> Any:
        return self._call("to_json", lambda: json.loads(json.dumps(self._part.to_json())), None)

    def close(self, error: BaseException | None) -> None:
        if not self._closed:
            self._closed = True
            self._call("close", lambda: self._part.close(error), None)
            if error is not None and self.failure is not None and self.failure not in str(error):
                log.warn(self.failure)

    def _together(self, hook: str, call: Callable[[], T]) -> T | None:
        """Call a hook that comes before the first step. Raises AgreedError."""
        with self._ranks.together():
            result = self._call(hook, call, None)
            if self.failure is not None:
                raise PluginError(self.failure)
        return result

    def _call(self, hook: str, call: Callable[[], T], instead: T) -> T:
        if self.failure is not None:
            return instead
        if getattr(type(self._part), hook, None) is getattr(Part, hook):  # the default: nothing to watch
            return call()
        told = f"{self.key}: {hook} at step {self._step}"
        seen, kept = self._surroundings.seen(), self._surroundings.kept()
        try:
            with calling(self.key, hook):
                result = call()
            self._surroundings.compare(seen, kept)
            return result
        except Lost as error:
            self.failure = f"{told}: {error}"
            raise Lost(self.failure) from error
        except BaseException as error:  # a signal only raises a flag during a run: Ctrl-C here is the plugin's own
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.failure = f"{told}: {place_of(error)}{what}"
            return instead


def _is(given: T, *kinds: type) -> T:
    """Return the result if it has one of the types that the loop needs, else raise TypeError."""
    if not isinstance(given, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"it returns {type(given).__name__}, but must return {wanted}")
    return given


def _asked(given: Request | None) -> Request:
    """Return the request of a part; None becomes an empty one. Raises TypeError: when the request sets other fields
    than `stop` and `save`, since ranks could then wait for each other."""
    if given not in (None, *(Request(stop=stop, save=save) for stop in (False, True) for save in (False, True))):
        raise TypeError(f"it returns {given}, but must return None or Request() with stop=True, save=True or both")
    return given or Request()


def _figures(given: dict[str, Any]) -> dict[str, Any]:
    """Return the figures, with tensors and arrays of one element as numbers. Raises TypeError if a value is no
    number."""
    found = {_is(key, str): value.item() if hasattr(value, "item") else value for key, value in given.items()}
    for key, value in found.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not isinstance(number, Real):
                raise TypeError(
                    f"it returns {type(number).__name__} as {key}, which must be a number or a list of numbers"
                )
    return found


def guarded(launch: Launch) -> list[Part]:
    """Make and open the parts of the section `parts`, in order. All ranks call it. Raises AgreedError."""
    setup = launch.setup
    surroundings = Surroundings(setup.engine.module, setup.run.mix.zero_stage)
    made = [Guarded(name, part, setup.ranks, surroundings) for name, part in setup.run.config.parts.items()]
    for part in made:
        part.open(launch)
    return list(made)


def first_failure(parts: Sequence[Part], ranks: Ranks) -> str | None:
    """Return the failure of a plugin's part on the first rank that has one, or None. All ranks call it."""
    mine = next((part.failure for part in parts if isinstance(part, Guarded) and part.failure), None)
    found = ((rank, failure) for rank, failure in enumerate(ranks.gather(mine)) if failure)
    return next((f"rank {rank}: {failure}" if ranks.world_size > 1 else failure for rank, failure in found), None)


def close_all(parts: Sequence[Part], ranks: Ranks, config: RunConfig) -> None:
    """Close the parts of plugins after a run has saved, the last first. All ranks call it.

    Raises AgreedError: when a part has failed on a rank, while it was closed or before.
    """
    for part in reversed(parts):
        if isinstance(part, Guarded):
            part.close(None)
    if failure := first_failure(parts, ranks):
        raise AgreedError(
            f"{failure}. The run has saved; fix the plugin, and {same_command(config, CHANGED, 'ok')} continues",
            PluginError.exit_code,
        )
