"""A vocabulary sharded over a tensor-parallel group: rows of the embedding and of the head, and the loss.

The method is Megatron-LM's (arXiv 1909.08053, section 3), in the chunks of models/loss.py: a rank has the logits of its
own words, and the group sums what the softmax needs, two numbers a token.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models.parallel.tensor_layers import copied, summed


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows: words [first, first + count) of `total`. The first ranks may have one more than the others."""

    group: Any
    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, group: Any) -> VocabularyShard:
        """That of this rank."""
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        counts = _counts(total, degree)
        return cls(group, sum(counts[:rank]), counts[rank], total)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits [..., V] from the shards; no gradient goes through them."""
        own = F.linear(hidden, weight, bias).detach()
        counts = _counts(self.total, dist.get_world_size(self.group))
        parts = [own.new_empty(*own.shape[:-1], counts[0]) for _ in counts]
        dist.all_gather(parts, F.pad(own, (0, counts[0] - self.count)), group=self.group)
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)

    def shared(self, hidden: Tensor) -> Tensor:
        """The hidden state, which all ranks have alike, for `chunked_nll_sum` of models/loss.py from their shards."""
        return copied(hidden, self.group)

    def take_largest(self, values: Tensor) -> None:
        """Put the largest of all ranks into each element."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def add_up(self, values: Tensor) -> None:
        """Put the sum over all ranks into each element."""
        dist.all_reduce(values, group=self.group)


def _counts(total: int, degree: int) -> list[int]:
    each, more = divmod(total, degree)
    return [each + (rank < more) for rank in range(degree)]


def shard_embedding(embedding: nn.Embedding, vocabulary: VocabularyShard) -> None:
    """Let an embedding whose weight is a shard look up all words: every rank adds its own, the others add zeros.

    The module's own forward stays in between: some scale what they look up (Gemma 3).
    """
    own = embedding.forward
    padding = embedding.padding_idx
    if padding is not None:
        here = vocabulary.first <= padding < vocabulary.first + vocabulary.count
        embedding.padding_idx = padding - vocabulary.first if here else None

    def forward(embedding: nn.Embedding, input: Tensor) -> Tensor:
        row = input - vocabulary.first
        elsewhere = (row < 0) | (row >= vocabulary.count)
        return summed(own(row.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0), vocabulary.group)

    embedding.forward = types.MethodType(forward, embedding)  # type: ignore[method-assign]
