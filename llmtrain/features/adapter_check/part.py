"""The part that ends a run with an adapter that no gradient reaches."""

from __future__ import annotations

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.engine.api import Engine
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.parameters import B
from llmtrain.optim.optimizers import PARAM
from llmtrain.training.parts import Done, Launch, Part


def unmoved(engine: Engine, ranks: Ranks, ending: str) -> tuple[list[str], int]:
    """Return (parameters that no gradient has reached yet, number of parameters) among the names with this ending.

    A moment is zero until its parameter has a gradient. All ranks call it together, after a step.
    """
    reached = set()
    for piece in engine.state():
        if piece.kind != PARAM and piece.name.endswith(ending) and piece.name not in reached:
            with piece.open() as values:
                if bool(values.any()):
                    reached.add(piece.name)
    everywhere = {name for share in ranks.gather(sorted(reached)) for name in share}
    every = [name for name in engine.shapes() if name.endswith(ending)]
    return sorted(set(every) - everywhere), len(every)


class AdapterCheck(Part):
    """Checks after the first update that every B has got a gradient (A gets none yet, as B is zero)."""

    def __init__(self, launch: Launch) -> None:
        self._setup = launch.setup

    def after_step(self, done: Done) -> None:
        """Raises TrainingStopped, on all ranks."""
        if done.position.optimizer_step > 1:  # without a wait
            return
        if done.position.settled().optimizer_step != 1 or done.update.skipped:
            return
        still, count = unmoved(self._setup.engine, self._setup.ranks, B)
        if len(still) == count:
            raise TrainingStopped(
                f"no gradient has reached any of the {count} lora_B in the first step: the adapter does not train. "
                "Run llmtrain parity on this run, and report what it says."
            )
        if still:
            log.warn(
                f"no gradient has reached {len(still)} of {count} lora_B in the first step, first {still[0]}. Experts "
                "that got no token may follow later; if the loss does not depend on a map, leave it out of "
                "adapter.targets."
            )
        else:
            log.info(f"adapter: a gradient has reached every lora_B ({count}) in the first step")
