"""Tensors of a model that no step changes: a family's own, such as the bias that corrects a router's choice of experts,
and parameters that a run freezes.

transformers has the first as parameters without a gradient (Ernie 4.5 MoE, AFMoE, Laguna) or as buffers that belong
into a folder's files (DeepSeek-V3, GLM-4 MoE, dots1); none of its families changes one in training. Here all of them
are buffers: each rank that has the module has the whole tensor in fp32, as DeepSpeed partitions, rounds and updates
parameters only (ZeRO 1, 2 and 3 of 0.19.8 have no master of a parameter without a gradient).

The second stay parameters, without a gradient, in the precision of the forward pass: their values are in the module
alone, partitioned under ZeRO 3. Checkpoints hold them in that precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.config.problems import Places, nearest, stop
from llmtrain.config.run import ModelConfig
from llmtrain.models.patches import passing_buffers


def freeze(hf: nn.Module) -> None:
    """Make buffers of the parameters that do not train. Those on the meta device, or partitioned, become NaN.

    Raises:
        ModelError: the model's files hold a tensor of integers, which no checkpoint here can hold.
    """
    made: dict[int, Tensor] = {}
    for module in hf.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.requires_grad:
                continue
            if id(parameter) not in made:
                shape = getattr(parameter, "ds_shape", None)
                unknown = shape is not None or parameter.is_meta
                made[id(parameter)] = (
                    torch.full(tuple(shape or parameter.shape), float("nan"), device="cpu")
                    if unknown
                    else parameter.detach().float()
                )
            delattr(module, name)
            module.register_buffer(name, made[id(parameter)])
    for name, buffer in frozen_tensors(hf).items():
        if not buffer.is_floating_point():
            kind = str(buffer.dtype).removeprefix("torch.")
            raise ModelError(
                f"model: {type(hf).__name__} keeps {name} ({kind}) with its weights, and checkpoints hold "
                "floating-point tensors only: it would be lost. Such models cannot be trained or converted; take "
                "another family."
            )


def frozen_names(hf: nn.Module, model: ModelConfig, places: Places | None = None) -> frozenset[str]:
    """The parameters that `model.freeze` and `model.train_only` keep from training; a tied one by its first name.

    `places`: where the user wrote what, for messages.

    Raises:
        ConfigError: a pattern matches no parameter, or one name of a tied parameter only; nothing is left to train.
    """
    key, patterns = ("model.train_only", model.train_only) if model.train_only else ("model.freeze", model.freeze)
    if not patterns:
        return frozenset()
    place = (places or {}).get(key)
    names: dict[int, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    every = [name for tied in names.values() for name in tied]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            near = nearest(pattern, every) or every[0]
            raise stop(key, pattern, "matches no parameter of the model", f"correct it; one of them is {near}", place)
    frozen = set()
    for tied in names.values():
        matched = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in tied]
        if len(set(matched)) > 1:
            named, other = tied[matched.index(True)], tied[matched.index(False)]
            rule = f"it names {named} and not {other}, which are one tied tensor: both train, or neither"
            raise stop(key, patterns, rule, f"name {other} too, or neither", place)
        if matched[0] != bool(model.train_only):
            frozen.add(tied[0])
    if len(frozen) == len(names):
        raise stop(key, patterns, f"leaves none of the {len(names)} parameters to train", "name fewer of them", place)
    return frozenset(frozen)


def frozen_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Tensors of the module's weights that do not train, by name. `freeze` has seen the module."""
    passing = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=remove_duplicate)
        for name in passing_buffers(part)
    }
    every = module.named_buffers(remove_duplicate=remove_duplicate)
    return {name: buffer for name, buffer in every if name not in passing}


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and after them what does not train: all that a checkpoint holds of a model, by name."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from frozen_tensors(module, remove_duplicate=remove_duplicate).items()


def tensor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Their shapes."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
