"""Where a decoder layer has experts, by structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from llmtrain.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer."""

    block: str
    """Module that holds router and experts: what ZeRO 3 has to gather as one."""
    router: str
    experts: str
    """Module that holds the weights of all experts: 3-D parameters [experts, ...], or a list of modules."""
    count: int
    top_k: int
    shared: tuple[str, ...]
    """What else in the block has parameters (shared experts and their gate)."""


def experts_of(hf: Any, path: str) -> Experts | None:
    """The experts of the layer at `path`: 3-D parameters of one module, or a list of modules that are all alike.

    Raises:
        ModelError: there are experts, but what chooses among them is not to be found.
    """
    layer = hf.get_submodule(path)
    for inner, module in layer.named_modules():
        count = _expert_count(module)
        if not count or not inner:
            continue
        block_name = inner.rpartition(".")[0]
        block = layer.get_submodule(block_name)
        routers: list[str] = []
        shared: list[str] = []
        for child, sibling in block.named_children():
            if sibling is module or not any(True for _ in sibling.parameters()):
                continue
            matrices = [p for p in sibling.parameters() if p.dim() == 2 and p.numel() > count]  # not [1, count]
            is_router = len(matrices) == 1 and matrices[0].shape[0] == count
            (routers if is_router else shared).append(_join(path, block_name, child))
        if len(routers) != 1:
            raise ModelError(
                f"model: {path}.{inner} holds {count} experts, but {len(routers)} modules beside it choose among them."
            )
        top_k = getattr(hf.get_submodule(routers[0]), "top_k", None) or getattr(block, "top_k", None)
        top_k = top_k or getattr(hf.config, "num_experts_per_tok", None)
        if not isinstance(top_k, int):
            raise ModelError(f"model: how many of its {count} experts a token of {path} goes to is not to be found.")
        return Experts(
            block=_join(path, block_name),
            router=routers[0],
            experts=_join(path, inner),
            count=count,
            top_k=top_k,
            shared=tuple(shared),
        )
    return None


def _expert_count(module: nn.Module) -> int:
    """0: it holds no experts."""
    direct = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
    if len(direct) >= 2 and len(set(direct)) == 1:  # a convolution has one
        return direct[0]
    if isinstance(module, nn.ModuleList) and len(module) > 1:
        matrices = [sum(p.dim() == 2 for p in child.parameters()) for child in module]
        if len({type(child) for child in module}) == 1 and min(matrices) >= 2:
            return len(module)
    return 0


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
