"""Cost of an empty part of a plugin a step: `python -m tools.bench.plugin_part` times the calls of the loop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from torch import nn

from llmtrain.training.parts import Part
from llmtrain.training.plugin_parts import Guarded, Surroundings
from llmtrain.training.step import Position, Request

_STEPS, _ROUNDS, _PARAMETERS = 500, 20, 300


class Empty(Part):
    """A part whose methods do nothing."""

    def request(self) -> Request:
        return Request()

    def before_update(self) -> None:
        return None

    def after_step(self, done: Any) -> None:
        return None


def step_s(part: Part) -> float:
    """Seconds of CPU time a step, the smallest of some rounds."""
    done: Any = SimpleNamespace(position=Position(step=1))
    found = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(_STEPS):
            _ = Request() | part.request()
            part.before_update()
            part.after_step(done)
        found.append((time.thread_time() - began_s) / _STEPS)
    return min(found)


if __name__ == "__main__":
    model = nn.ParameterList([nn.Parameter() for _ in range(_PARAMETERS)])
    guarded = Guarded("empty", Empty(), None, Surroundings(model, 1))  # type: ignore[arg-type]
    print(f"an empty part of a plugin: {1e6 * step_s(guarded):.1f} microseconds a step")
    print(f"an empty part of llmtrain: {1e6 * step_s(Empty()):.1f} microseconds a step")
