"""Watches the routers of a mixture of experts, and computes the load-balancing loss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.experts import ExpertBlock, balance_coefficient, experts_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class RoutingFigures:
    """Figures of the routers since the last call, over all ranks."""

    aux_loss: float
    """Mean over micro-batches of the load-balancing loss, before its coefficient."""
    tokens_LE: list[list[int]]
    """Number of tokens that went to each expert of each block."""


class Routing:
    """Watches the routers: computes the load-balancing loss of each forward pass in training, and counts tokens.

    The loss is that of transformers' `load_balancing_loss_func` (Switch Transformer, arXiv 2101.03961, eqs. 4-6): E *
    sum_e f_e P_e, where f_e is the share of (token, layer) pairs sent to expert e (the shares add up to the experts per
    token) and P_e is the mean probability that the routers give to e. f and P are taken over the micro-batches that all
    ranks compute at the same time (in transformers, over one rank's), so that the loss does not depend on the number of
    ranks. f has no gradient, so an all-reduce of E counts is enough. With accumulation a step's loss is the mean over
    its micro-batches, because f of the global batch is known only after the last of them.
    """

    def __init__(self, blocks: list[ExpertBlock], config: PreTrainedConfig, group: Any) -> None:
        self.coefficient = balance_coefficient(config)
        self._experts_per_token = experts_per_token(config) or 1
        self.experts = blocks[0].count
        self._group, self._ranks = group, dist.get_world_size(group)
        self._noted: dict[int, tuple[Tensor, Tensor | None]] | None = None
        self.layers = len(blocks)
        self._tokens_LE: Tensor | None = None
        self._aux_sum: Tensor | None = None
        self._passes = 0
        for index, block in enumerate(blocks):
            block.router.register_forward_hook(functools.partial(self._note_router, index))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context that records each router's output once. Recomputation comes after it and is not recorded."""
        self._noted = {}
        try:
            yield
        except BaseException:
            self._noted = None
            raise

    def _note_router(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._noted is None or index in self._noted:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        logits = next((t for t in outputs if torch.is_tensor(t) and t.shape[-1] == self.experts), None)
        if logits is None:
            raise ModelError(
                f"model: the router {type(module).__name__} does not return logits for the {self.experts} experts, so "
                "its load balance cannot be measured. Train another family."
            )
        chosen = next((t for t in outputs if torch.is_tensor(t) and not t.is_floating_point()), None)
        self._noted[index] = (logits, chosen)

    def balance(self) -> Tensor | None:
        """Return this rank's part of the last pass's load-balancing loss, times the coefficient; the ranks' parts add
        up. None if the coefficient is 0."""
        noted, self._noted = self._noted, None
        assert noted is not None and len(noted) == self.layers, "a router of the model did not run"
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.coefficient > 0):
            tokens_LE, probability_E, rows = self._sums([noted[index] for index in range(self.layers)])
            total_E = tokens_LE.sum(0)
            if self._ranks > 1:
                dist.all_reduce(total_E, group=self._group)
            part = self.experts * (total_E / (rows * self._ranks) * probability_E / (rows * self._ranks)).sum()
        self._count_tokens(tokens_LE, part.detach())
        return self.coefficient * part if self.coefficient else None

    def _sums(self, noted: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, int]:
        """Return (tokens of each block and expert; probability of each expert, summed over blocks and tokens; number of
        summands)."""
        tokens, probabilities, rows = [], [], 0
        for logits, chosen in noted:
            probability_NE = torch.softmax(logits.reshape(-1, self.experts).float(), dim=-1)
            if chosen is None:
                chosen = probability_NE.topk(self._experts_per_token, dim=-1).indices
            chosen = chosen.detach().reshape(-1).long()
            ones = torch.ones_like(chosen, dtype=torch.float32)
            tokens.append(torch.zeros_like(probability_NE[0]).detach().scatter_add_(0, chosen, ones))
            probabilities.append(probability_NE.sum(0))
            rows += probability_NE.shape[0]
        return torch.stack(tokens), torch.stack(probabilities).sum(0), rows

    @torch.no_grad()
    def _count_tokens(self, tokens_LE: Tensor, part: Tensor) -> None:
        """Add to the sums on the device. The host does not wait."""
        if self._tokens_LE is None or self._aux_sum is None:
            self._tokens_LE = torch.zeros_like(tokens_LE, dtype=torch.float64)
            self._aux_sum = torch.zeros_like(part, dtype=torch.float64)
        self._tokens_LE += tokens_LE
        self._aux_sum += part
        self._passes += 1

    def take(self, sum_over_ranks: Callable[[Tensor], Tensor], *, counts: bool) -> RoutingFigures:
        """Return the figures since the last call, and reset them. All ranks call this. It waits for the device.

        Args:
            sum_over_ranks: sums a host tensor over the ranks, in place.
            counts: add this rank's numbers; True on one of the ranks that have the same tokens.
        """
        passes, self._passes = self._passes, 0
        empty = torch.zeros(self.layers * self.experts + 1, dtype=torch.float64)
        numbers = empty
        if self._tokens_LE is not None and self._aux_sum is not None:
            if counts:
                numbers = torch.cat([self._tokens_LE.reshape(-1), self._aux_sum.reshape(1)]).cpu()
            self._tokens_LE.zero_()
            self._aux_sum.zero_()
        sum_over_ranks(numbers)
        tokens_LE = numbers[:-1].long().reshape(self.layers, self.experts)
        return RoutingFigures(aux_loss=float(numbers[-1]) / (passes or torch.nan), tokens_LE=tokens_LE.tolist())


@contextlib.contextmanager
def unwatched(module: Any) -> Iterator[None]:
    """A context in which the routers of a rank's module are not watched: no load-balancing loss, no counts."""
    routing, module.routing = module.routing, None
    try:
        yield
    finally:
        module.routing = routing
