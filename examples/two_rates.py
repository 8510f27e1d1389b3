"""An optimizer: AdamW with another learning rate for embeddings (`optim.name: two_rates`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from llmtrain import bounded
from llmtrain.optim.optimizers import AdamW, Group


@dataclass(frozen=True, kw_only=True)
class TwoRates(AdamW, choice="two_rates"):
    """AdamW whose embeddings have a learning rate of their own."""

    embedding_lr: float = bounded(3e-3, above=0)
    """Peak learning rate of the embeddings; the schedule multiplies it as well."""

    def groups(self, model: Any) -> Iterator[Group]:
        tables = [module.weight for module in model.hf.modules() if isinstance(module, nn.Embedding)]
        yield Group(name="embeddings", parameters=tables, settings={**self.group(), "lr": self.embedding_lr})
