"""Mixtures of experts: finds the blocks of a transformers model, watches its routers, and computes the balancing loss.

A module is a block of experts if a child of it holds matrices of E experts (3-D parameters [E, ., .], or a list of E
equal modules) and another holds a matrix [E, H], the router's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.transformers_private import loop_over_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertBlock:
    """A module that sends each token to some of its experts."""

    name: str
    module: nn.Module
    router: nn.Module
    """Its forward gives the logits [tokens, E], alone or first in a tuple with the chosen experts (integers)."""
    experts: tuple[nn.Module, ...]
    """The modules with the experts' matrices."""
    count: int
    """E, the model's number of experts, also if a rank holds only some."""

    @property
    def are_modules(self) -> bool:
        """True for separate modules in a list."""
        return any(isinstance(part, nn.ModuleList) for part in self.experts)


def expert_blocks(hf: nn.Module) -> list[ExpertBlock]:
    """Return the blocks of experts in the order of the layers; none in a dense model."""
    blocks = []
    for name, module in hf.named_modules():
        counts = {child: _experts_in(child) for child in module.children()}
        count = max(counts.values(), default=0)
        if count < 2:
            continue
        experts = tuple(child for child, number in counts.items() if number == count)
        router = _router(module, experts, count)
        if router is not None:
            blocks.append(ExpertBlock(name=name, module=module, router=router, experts=experts, count=count))
    return blocks


def _experts_in(module: nn.Module) -> int:
    """Return the number of experts in a module; 0: it holds none."""
    if isinstance(module, nn.ModuleList):
        kinds = {type(child) for child in module}
        return len(module) if len(kinds) == 1 and any(True for _ in module.parameters()) else 0
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return 0
    sizes = {shape_of(p)[0] for p in module.parameters(recurse=False) if len(shape_of(p)) == 3}
    return sizes.pop() if len(sizes) == 1 else 0


def _router(block: nn.Module, experts: tuple[nn.Module, ...], count: int) -> nn.Module | None:
    inside = {module for part in experts for module in part.modules()}
    for module in block.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                if len(shape_of(parameter)) == 2 and shape_of(parameter)[0] == count:
                    return module
    return None


def avoid_grouped_product(hf: PreTrainedModel, dtype: torch.dtype) -> None:
    """Choose transformers' loop over the experts if its default, torch's grouped product, refuses their widths."""
    if not all(fit_grouped_product(module, dtype) for module in hf.modules() if hasattr(module, "is_transposed")):
        loop_over_experts(hf.config)


def fit_grouped_product(experts: nn.Module, dtype: torch.dtype) -> bool:
    """True if torch's grouped product accepts the experts' matrices: their rows need multiples of 16 bytes, which a
    tensor-parallel shard may not have ("strides should be multiple of 16 bytes" in the first forward pass)."""
    matrices = [p for p in experts.parameters() if len(shape_of(p)) == 3]
    return not any(size * dtype.itemsize % 16 for matrix in matrices for size in shape_of(matrix)[1:])


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return a parameter's shape, also under ZeRO 3, where it is empty between its uses."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def experts_per_token(config: PreTrainedConfig) -> int | None:
    """Return how many experts a token goes to; None: the configuration lacks it."""
    text = config.get_text_config()
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    return next((int(k) for k in (getattr(text, name, None) for name in names) if isinstance(k, int)), None)


def idle_parameters(hf: nn.Module, config: PreTrainedConfig, among: Collection[Tensor]) -> int:
    """Elements of expert matrices that a token does not use, because their experts are not chosen for it.

    `among`: count these parameters only.
    """
    chosen = experts_per_token(config)
    if chosen is None:
        return 0
    idle = 0
    for block in expert_blocks(hf):
        elements = sum(p.numel() for part in block.experts for p in part.parameters() if p.dim() >= 2 and p in among)
        idle += elements - elements * chosen // block.count
    return idle


def balance_coefficient(config: PreTrainedConfig) -> float:
    """Factor on the load-balancing loss, by transformers' own rule."""
    text = config.get_text_config()
    wanted = bool(getattr(text, "output_router_logits", False))
    return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if wanted else 0.0


def check_stages(config: PreTrainedConfig) -> None:
    """Raises ModelError: stages of a pipeline would silently lose the load-balancing loss."""
    if coefficient := balance_coefficient(config):
        raise ModelError(
            f"pipeline.stages: the model's load-balancing loss (output_router_logits is true, router_aux_loss_coef is "
            f"{coefficient}) is made of the routers of all layers, and no stage has them all. Set output_router_logits "
            "to false in the model's configuration, or use ZeRO 3 or expert_parallel instead of the pipeline."
        )


def set_leaf_modules(hf: nn.Module, blocks: list[ExpertBlock]) -> None:
    """Let ZeRO 3 gather the parameters of all experts at once: ranks whose tokens choose different experts would wait
    for each other for ever (DeepSpeed #7461), also for a loop over one parameter, whose activations ZeRO 3 counts.
    JetMoE's attention stays: it calls only `map` and `reduce` of its block, which would get no gradient."""
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks:
        for module in (block.module,) if block.are_modules else block.experts:
            set_z3_leaf_module(module, True)
    for module in _holders(hf):
        set_z3_leaf_module(module, True)


def has_experts(hf: nn.Module) -> bool:
    """True also for experts outside of every `ExpertBlock`."""
    return bool(expert_blocks(hf) or _holders(hf))


def _holders(hf: nn.Module) -> list[nn.Module]:
    """The modules with experts' matrices, also outside of blocks: LongCat-Flash has more experts in one matrix than in
    the other, and DBRX stacks all in 2 dimensions."""
    return [
        module
        for module in hf.modules()
        if sum(len(shape_of(parameter)) == 3 for parameter in module.parameters(recurse=False)) > 1
        or "top_k_index" in inspect.signature(module.forward).parameters
    ]


@dataclass(frozen=True, kw_only=True)
class RoutingFigures:
    """Figures of the routers since the last call, over all ranks."""

    aux_loss: float
    """Mean over micro-batches of the load-balancing loss, before its coefficient."""
    tokens_LE: list[list[int]]
    """Number of tokens that each expert of each block got."""


class Routing:
    """Watches the routers: the load-balancing loss of each forward pass in training, and counts of tokens.

    The loss follows transformers' `load_balancing_loss_func` (Switch Transformer, arXiv 2101.03961, eqs. 4-6): E *
    sum_e f_e P_e, f_e being the share of (token, layer) pairs sent to expert e (they add up to the experts per token)
    and P_e the mean probability that the routers give it. f and P are taken over the micro-batches that all ranks do at
    the same time (in transformers, on each rank), so that the loss does not depend on the number of ranks. f cannot be
    differentiated, so an all-reduce of E counts is enough. With accumulation the loss of a step is the mean over its
    micro-batches: the f of a complete global batch is known only after its last pass.
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
        """Record each router's output once, without the recomputation of activations."""
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
                f"model: the router {type(module).__name__} does not give its scores of the {self.experts} experts, so "
                "what it chooses cannot be watched or balanced; this mixture of experts cannot be trained here."
            )
        chosen = next((t for t in outputs if torch.is_tensor(t) and not t.is_floating_point()), None)
        self._noted[index] = (logits, chosen)

    def balance(self) -> Tensor | None:
        """This rank's part of the watched pass's loss, times the coefficient; the ranks' parts add up. None: nothing to
        add to the loss."""
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
        """(tokens of each block and expert, probability of each expert summed over blocks and tokens, their number)."""
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
        """Add to the sums on the device; the host reads nothing."""
        if self._tokens_LE is None or self._aux_sum is None:
            self._tokens_LE = torch.zeros_like(tokens_LE, dtype=torch.float64)
            self._aux_sum = torch.zeros_like(part, dtype=torch.float64)
        self._tokens_LE += tokens_LE
        self._aux_sum += part
        self._passes += 1

    def take(self, sum_over_ranks: Callable[[Tensor], Tensor], *, counts: bool) -> RoutingFigures:
        """Every rank calls it. Waits for the device.

        Args:
            sum_over_ranks: of a host tensor, in place.
            counts: add this rank's numbers; true for one of the ranks that share their tokens.
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
    """A context in which the routers of a rank's module are not watched: no balancing loss, no counts."""
    routing, module.routing = module.routing, None
    try:
        yield
    finally:
        module.routing = routing
