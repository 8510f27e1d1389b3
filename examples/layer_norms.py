"""A part: the gradient's norm in each decoder layer, as figures of the log (`parts: {layer_norms: {every: 10}}`)."""

import re
from collections import Counter
from dataclasses import dataclass

from deepspeed.utils import safe_get_full_grad

from llmtrain import Part


@dataclass(kw_only=True)
class LayerNorms(Part, entry="layer_norms"):
    """L2 norms of the gradient, before clipping."""

    every: int = 10
    """Optimizer steps between measurements."""

    def open(self, launch):
        self.session, self.model, self.norms = launch.session, launch.setup.engine.module, {}

    def before_update(self):
        if (self.session.step_number + 1) % self.every == 0:
            squares = Counter()
            for name, parameter in self.model.named_parameters():
                layer = re.search(r"layers\.(\d+)\.", name)
                if layer and (gradient := safe_get_full_grad(parameter)) is not None:  # gathered from all ranks
                    squares[f"layer_{layer[1]}"] += float(gradient.float().square().sum())
            self.norms = {layer: square**0.5 for layer, square in squares.items()}

    def figures(self, done):
        return self.norms
