"""A model's likeliest words at each counted token: the teacher's column of `llmtrain reference`."""

from __future__ import annotations

from torch import Tensor

from llmtrain.data.stream.loader import MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE


class Likeliest:
    """A loss function that keeps a model's likeliest words in place of each label, micro-batch by micro-batch."""

    figures: tuple[str, ...] = ("loss",)

    def __init__(self, top_k: int, temperature: float) -> None:
        self._top_k, self._temperature = top_k, temperature
        self.found: list[tuple[list[int], Tensor, Tensor]] = []
        """(samples of a micro-batch, words int64 [n, k], logs fp32 [n, k + 1]: see `TopWords`) of its n counted labels,
        on the host, of all ranks that share their rows; in a pipeline on the last stage only."""

    def weight(self, micro: MicroBatch) -> int:
        """Labels that count."""
        return int((micro.labels != IGNORE).sum())

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]: the mass that the words leave to all others."""
        counted = micro.labels != IGNORE
        own = head.own(counted)
        likeliest = head.top_words(hidden[own], self._top_k, self._temperature)
        words, logs = (
            head.whole(each.new_zeros(*own.shape, each.shape[1]).masked_scatter(own.unsqueeze(-1), each))[counted]
            for each in (likeliest.words, likeliest.logs)
        )
        self.found.append((micro.sample_indices, words.cpu(), logs.cpu()))
        return likeliest.logs[:, -1].exp().sum().unsqueeze(0)
