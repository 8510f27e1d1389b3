"""Cost of an empty part of a plugin a step: `python -m tools.bench.plugin_part` times the calls of the loop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from llmtrain.training.parts import Part
from llmtrain.training.plugin_parts import Guarded
from llmtrain.training.step import Position, Request

_STEPS, _ROUNDS = 20_000, 7


def step_s(part: Part) -> float:
    """Seconds a step, the smallest of some rounds."""
    done: Any = SimpleNamespace(position=Position(step=1))
    found = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        for _ in range(_STEPS):
            _ = Request() | part.request()
            part.before_update()
            part.after_step(done)
        found.append((time.perf_counter() - began_s) / _STEPS)
    return min(found)


if __name__ == "__main__":
    print(f"an empty part of a plugin: {1e6 * step_s(Guarded('empty', Part(), ranks=None)):.1f} microseconds a step")  # type: ignore[arg-type]
    print(f"an empty part of llmtrain: {1e6 * step_s(Part()):.1f} microseconds a step")
