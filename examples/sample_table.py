"""A part: continuations of a prompt while training goes on, as a table (`parts: {sample_table: {every: 100}}`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain import Part
from llmtrain.features.samples.continuing import Prompts, continuations


@dataclass(kw_only=True)
class SampleTable(Part, entry="sample_table"):
    """Greedy continuations by the run's engine, in samples.md of the run's folder."""

    prompt: str = "def read("
    every: int = 100
    """Optimizer steps between two rows."""
    tokens: int = 16

    def open(self, launch: Any) -> None:
        self.setup, self.file = launch.setup, launch.folder.path / "samples.md"
        self.prompts = Prompts.of([self.prompt], self.tokens, self.setup.data.first)

    def after_step(self, done: Any) -> None:
        if done.position.step % self.every == 0:
            (text,) = continuations(self.setup, self.prompts)  # all ranks compute it together
            if self.setup.ranks.rank == 0:
                with self.file.open("a") as file:
                    file.write(f"| {done.position.step} | {text!r} |\n")
