"""A part, a figure, an objective and a schedule of a user."""

from dataclasses import dataclass

import torch

from llmtrain import Metric, Part, Schedule, bounded
from llmtrain.base.choice import AT_LEAST_1


@dataclass(kw_only=True)
class Count(Part, entry="count"):
    """Counts the steps of all launches."""

    start: int = bounded(0, AT_LEAST_1, "write 7")

    def open(self, launch):
        self.seen = self.start

    def after_step(self, done):
        self.seen += 1

    def figures(self, done):
        return {"count/steps": self.seen}

    def to_json(self):
        return self.seen

    def restore(self, kept, folder):
        self.seen = kept


@dataclass(frozen=True, kw_only=True)
class Halves(Schedule, choice="halves"):
    """Halves the rate every so many steps."""

    every: int = bounded(2, AT_LEAST_1, "write 2")

    def after_warmup(self, step, max_steps):
        return 0.5 ** (step // self.every)


@dataclass(kw_only=True)
class Likely(Metric, entry="likely"):
    """Share of tokens whose loss is below a limit."""

    below: float = 5.5

    def values(self, nll, labels):
        return (nll < self.below).to(torch.float32)
