"""A vocabulary that the ranks of a tensor-parallel group share: rows of the embedding and of the head, and the loss.

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

from llmtrain.models.loss import IGNORE, HeadForm, add_gradients, scaled_gradients
from llmtrain.models.parallel.tensor_layers import copied, summed


@dataclass(frozen=True)
class Words:
    """This rank's rows: words [first, first + count) of `total`. The first ranks may have one more than the others."""

    group: Any
    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, group: Any) -> Words:
        """The share of this rank."""
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        counts = _counts(total, degree)
        return cls(group, sum(counts[:rank]), counts[rank], total)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `all_logits`."""
        return all_logits(hidden, weight, bias, self)

    def nll_sum(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, chunk: int, form: HeadForm
    ) -> Tensor:
        """See `shared_nll_sum`."""
        return shared_nll_sum(hidden, weight, bias, labels, chunk=chunk, form=form, words=self)

    def counts(self) -> list[int]:
        """Of every rank, the largest first."""
        return _counts(self.total, dist.get_world_size(self.group))


def _counts(total: int, degree: int) -> list[int]:
    each, more = divmod(total, degree)
    return [each + (rank < more) for rank in range(degree)]


def share_embedding(embedding: nn.Embedding, words: Words) -> None:
    """Let an embedding whose weight is a shard look up all words: every rank adds its own, the others add zeros.

    The module's own forward stays in between: some scale what they look up (Gemma 3).
    """
    own = embedding.forward
    padding = embedding.padding_idx
    if padding is not None:
        here = words.first <= padding < words.first + words.count
        embedding.padding_idx = padding - words.first if here else None

    def forward(embedding: nn.Embedding, input: Tensor) -> Tensor:
        row = input - words.first
        elsewhere = (row < 0) | (row >= words.count)
        return summed(own(row.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0), words.group)

    embedding.forward = types.MethodType(forward, embedding)  # type: ignore[method-assign]


def all_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: Words) -> Tensor:
    """Logits [..., V] from the shards; no gradient goes through them."""
    own = F.linear(hidden, weight, bias).detach()
    counts = words.counts()
    parts = [own.new_empty(*own.shape[:-1], counts[0]) for _ in counts]
    dist.all_gather(parts, F.pad(own, (0, counts[0] - words.count)), group=words.group)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)


def shared_nll_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, chunk: int, form: HeadForm, words: Words
) -> Tensor:
    """`chunked_nll_sum` of models/loss.py for a head whose rows the group shares; the same sum on every rank.

    Args:
        hidden: [..., H], the same on all ranks.
        weight, bias: [words.count, H] and [words.count].
        labels: [...], over the whole vocabulary.
    """
    flat_NH = copied(hidden.reshape(-1, hidden.shape[-1]), words.group)
    return _SharedNLL.apply(flat_NH, weight, bias, labels.reshape(-1), chunk, form, words)


class _SharedNLL(torch.autograd.Function):
    """As _ChunkedNLL of models/loss.py; V is this rank's part of the vocabulary."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk, form, words):
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for low in range(0, hidden.shape[0], chunk):
            rows = slice(low, low + chunk)
            hidden_CH, label_C = hidden[rows], labels[rows] - words.first
            mine_C1 = ((label_C >= 0) & (label_C < words.count)).unsqueeze(1)
            target_C1 = label_C.unsqueeze(1).masked_fill(~mine_C1, 0)
            counts_C1 = (labels[rows] != IGNORE).unsqueeze(1)
            logits_CV = form.apply(F.linear(hidden_CH, weight, bias).float())
            slope_CV = None if form.softcap is None else 1.0 - (logits_CV / form.softcap).square()
            most_C1 = logits_CV.amax(1, keepdim=True)
            dist.all_reduce(most_C1, op=dist.ReduceOp.MAX, group=words.group)
            logits_CV.sub_(most_C1)
            chosen_C1 = logits_CV.gather(1, target_C1).masked_fill(~mine_C1, 0.0)
            exp_CV = logits_CV.exp_()
            both_C2 = torch.cat([exp_CV.sum(1, keepdim=True), chosen_C1], dim=1)
            dist.all_reduce(both_C2, group=words.group)
            sum_C1, chosen_C1 = both_C2[:, :1], both_C2[:, 1:]
            total += torch.where(counts_C1, sum_C1.log() - chosen_C1, 0.0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            factor_C1 = counts_C1.float() * form.scale
            grad_CV = exp_CV.mul_(factor_C1 / sum_C1).scatter_add_(1, target_C1, -factor_C1 * mine_C1)
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            own_hidden = None if grad_hidden is None else grad_hidden[rows]
            add_gradients(grad_CV, hidden_CH, weight, own_hidden, grad_weight, grad_bias)
        ctx.grads = (grad_hidden, grad_weight, grad_bias, weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return (*scaled_gradients(ctx, grad_output), None, None, None, None)
