"""A part: the gradient's norm in each decoder layer, as figures of the log (`parts: {layer_norms: {every: 10}}`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deepspeed.utils import safe_get_full_grad

from llmtrain import Part


@dataclass(kw_only=True)
class LayerNorms(Part, entry="layer_norms"):
    """L2 norms of the gradient, before clipping."""

    every: int = 10
    """Optimizer steps between measurements."""

    def open(self, launch: Any) -> None:
        self.session, self.model, self.norms = launch.session, launch.setup.engine.module, dict[str, float]()

    def before_update(self) -> None:
        if (self.session.step_number + 1) % self.every == 0:
            squares: dict[str, float] = {}
            for name, parameter in self.model.named_parameters():
                layer = re.search(r"layers\.(\d+)\.", name)
                if layer and (gradient := safe_get_full_grad(parameter)) is not None:  # gathered from all ranks
                    squares[layer[1]] = squares.get(layer[1], 0.0) + float(gradient.float().square().sum())
            self.norms = {f"layer_{layer}": square**0.5 for layer, square in squares.items()}

    def figures(self, done: Any) -> dict[str, Any]:
        return self.norms
