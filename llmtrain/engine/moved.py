"""Which parameters have been reached by a gradient, as the optimizer's moments tell it."""

from __future__ import annotations

from llmtrain.dist.control import from_all
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import Engine
from llmtrain.optimizers import PARAM


def unmoved(engine: Engine, ranks: Ranks, ending: str) -> tuple[list[str], int]:
    """(parameters that no gradient has reached yet, of how many), of those whose names end so.

    Every moment begins as zero, and stays zero until there is a gradient. All ranks call it together, after a step.
    """
    reached = set()
    for piece in engine.state():
        if piece.kind != PARAM and piece.name.endswith(ending) and piece.name not in reached:
            with piece.open() as values:
                if bool(values.any()):
                    reached.add(piece.name)
    everywhere = {name for share in from_all(ranks, sorted(reached)) for name in share}
    every = [name for name in engine.shapes() if name.endswith(ending)]
    return sorted(set(every) - everywhere), len(every)
