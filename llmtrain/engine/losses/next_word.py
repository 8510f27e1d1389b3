"""The likeliest next token of each row: with it an engine of any form continues texts, one token a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.data.stream.loader import MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE


class NextWord:
    """A loss function whose figures are the ids that a model finds likeliest in place of the one label of each row that
    counts: an engine adds figures up over all ranks, so that each of them gets all ids."""

    def __init__(self, rows: int) -> None:
        """`rows`: of all micro-batches of all ranks; their sample indices number them."""
        self.figures: tuple[str, ...] = ("loss", *(f"row {index}" for index in range(rows)))

    def weight(self, micro: MicroBatch) -> int:
        """Rows."""
        return len(micro.sample_indices)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1 + rows]: no loss, and of this micro-batch's rows the ids; fp32 holds whole numbers below 2^24."""
        here = head.own(micro.labels != IGNORE)
        words = head.top_words(hidden[here], 1, 1.0).words[:, 0]
        samples = torch.tensor([0, *micro.sample_indices], device=hidden.device)[1:]
        rows = samples[here.nonzero()[:, 0]] + 1
        return torch.zeros(len(self.figures), device=hidden.device).index_add(0, rows, words.float())

    def ids(self, found: dict[str, float], weight: int) -> list[int]:
        """The id of each row, from an engine's figures and their weight."""
        return [round(found[name] * weight) for name in self.figures[1:]]
