"""fp8: chooses the linear layers that multiply in 8-bit floats, and describes the choice in the log.

P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. The layers are the torchao library's
(`models/fp8_linear.py`); weights, gradients and optimizer stay in the run's precision, and no file has fp8 tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from llmtrain.base import units
from llmtrain.config.problems import Places, stop
from llmtrain.models.experts import expert_blocks
from llmtrain.models.skeleton import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MULTIPLE = 16
"""fp8 products need inputs and outputs in multiples of 16 bytes, which are 16 elements."""
_OURS = "lora_"
"""Prefix of the names of an adapter's own layers, whose inner side is too narrow to gain from fp8."""


def maps_of(layer: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the linear layers in a decoder layer: ({path: layer} for fp8, {path: reason} for the others). Routers stay
    in bf16 as they choose experts; experts as their number of tokens, which varies, is the inner side of a product."""
    blocks = expert_blocks(layer)
    routed = {m for block in blocks for part in (block.router, *block.experts) for m in part.modules()}
    chosen: dict[str, nn.Linear] = {}
    others: dict[str, str] = {}
    for path, module in layer.named_modules():
        if type(module) is not nn.Linear or any(part.startswith(_OURS) for part in path.split(".")):
            continue
        if module in routed:
            others[path] = "of a mixture of experts"
        elif module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            others[path] = f"{module.out_features} x {module.in_features}, no multiples of {MULTIPLE}"
        else:
            chosen[path] = module
    return chosen, others


def check_maps(hf: PreTrainedModel, recipe: str, places: Places) -> None:
    """Raise ConfigError if torchao is not installed, or no linear layer can use fp8. `hf`: the complete skeleton."""
    if importlib.util.find_spec("torchao") is None:
        rule = "fp8 is computed by the torchao library, which is not installed here"
        remedy = "install it: pip install 'llmtrain[fp8]'; or remove the key"
        raise stop("model.fp8", recipe, rule, remedy, places.get("model.fp8"))
    if not any(maps_of(layer)[0] for layer in decoder_layers(hf)):
        rule = f"the decoder layers of {type(hf).__name__} have no linear maps (torch.nn.Linear) with sides that are"
        rule += f" multiples of {MULTIPLE}, outside of experts"
        raise stop("model.fp8", recipe, rule, "remove it", places.get("model.fp8"))


def line(hf: PreTrainedModel, recipe: str, *, emulated: bool) -> str:
    """Return a line for the log. `hf`: the complete skeleton."""
    layers = decoder_layers(hf)
    split = [maps_of(layer) for layer in layers]
    count, rest = sum(len(chosen) for chosen, _ in split), sum(len(others) for _, others in split)
    text = f"model.fp8 {recipe}: {count} linear maps of {units.counted(len(layers), 'decoder layer')} multiply in fp8"
    if emulated:
        text += ", emulated: a CPU cannot multiply in fp8, so steps take longer"
    reasons = {path: reason for _, others in split for path, reason in others.items()}
    if reasons:
        path, reason = next(iter(reasons.items()))
        text += f"; {rest} do not (such as {path}: {reason})"
    return f"{text}; the head and tensors of experts never do"


def use_fp8(layers: Iterable[nn.Module], recipe: str, *, emulated: bool) -> None:
    """Make the linear layers inside these layers multiply in fp8. Their parameters stay the same objects."""
    from llmtrain.models.fp8_linear import convert

    for layer in layers:
        convert(layer, maps_of(layer)[0].values(), recipe, emulated=emulated)


@contextlib.contextmanager
def without_fp8(module: nn.Module) -> Iterator[None]:
    """A context in which a module's linear layers multiply in its own precision, not in fp8, for exact comparisons."""
    layers: list[Any] = [layer for layer in module.modules() if getattr(layer, "multiplies_in_fp8", False)]
    try:
        for layer in layers:
            layer.multiplies_in_fp8 = False
        yield
    finally:
        for layer in layers:
            layer.multiplies_in_fp8 = True
