"""Parameters that a gradient has reached, by the optimizer's moments."""

from __future__ import annotations

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.engine.api import Engine
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.optim.optimizers import PARAM


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


def check_adapter(engine: Engine, ranks: Ranks) -> None:
    """Every B gets a gradient in the first step, though A gets none yet: B is zero. Raises TrainingStopped."""
    from llmtrain.models.adapter import B

    still, count = unmoved(engine, ranks, B)
    if len(still) == count:
        raise TrainingStopped(
            f"no gradient has reached any of the {count} lora_B in the first step: the adapter does not train. "
            "Compare the run with its definition: llmtrain parity, and report what it says."
        )
    if still:
        log.warn(
            f"no gradient has reached {len(still)} of {count} lora_B in the first step, first {still[0]}. The loss "
            "does not depend on those maps (experts that no token met do so later); else leave them out of "
            "adapter.targets."
        )
        return
    log.info(f"adapter: a gradient has reached every lora_B ({count}) in the first step")
