"""Describes each parameter that a rank holds, by its form of parallelism; lists frozen tensors.

No step changes a family's own constants, for example the bias that corrects a router's choice of experts, and
parameters that a run freezes. transformers has the first as parameters without a gradient (Ernie 4.5 MoE, AFMoE,
Laguna) or as buffers that belong into a folder's files (DeepSeek-V3, GLM-4 MoE, dots1). Here all of them are buffers:
each rank with the module has the complete tensor in fp32, because DeepSpeed partitions, rounds and updates parameters
only (ZeRO 1, 2 and 3 of 0.19.8 have no master of a parameter without a gradient). The second stay parameters, without a
gradient, in the precision of the forward pass: their values are in the module alone, partitioned under ZeRO 3, and
checkpoints hold them in that precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.config.problems import Places, nearest, stop
from llmtrain.config.run import ModelConfig
from llmtrain.models.transformers_private import passing_buffers
from llmtrain.storage.region import Region, whole

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""Suffixes of an adapter's tensors after the path of their linear map."""
WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
"""The files of a PEFT folder, and the prefix of its tensors' names."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Access to the full-precision values of a parameter in fewer bits."""

    dtype: torch.dtype
    values: Callable[[], Tensor]
    """Computes the values at each call."""
    write: Callable[[], AbstractContextManager[Tensor]]
    """A context that gives memory for the flat values, and packs them at the end."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalParameter:
    """A tensor of this rank's module with the Hugging Face tensor that it equals or is a shard of."""

    name: str
    """Hugging Face name. Several shards of one tensor on a rank (experts) share it."""
    parameter: Tensor
    """The module's tensor; under ZeRO 3 a parameter is partitioned, `ds_shape` is the shape of the shard."""
    shape: tuple[int, ...]
    """Shape of the complete Hugging Face tensor."""
    region: Region
    """Positions of the row-major flat parameter's elements in the flat Hugging Face tensor."""
    copy: tuple[int, int] = (0, 1)
    """(index, count) of this copy among the ranks of other tensor-parallel and pipeline positions: a norm that every
    tensor-parallel rank holds, an embedding tied over two stages. Data-parallel replicas do not count here."""

    @property
    def packed(self) -> Packed | None:
        return getattr(self.parameter, "llmtrain_packed", None)

    def values(self) -> Tensor:
        """Flat, in full precision: [region.numel]."""
        return (self.parameter.detach() if self.packed is None else self.packed.values()).reshape(-1)

    @property
    def trains(self) -> bool:
        """True if the optimizer updates this parameter."""
        return isinstance(self.parameter, nn.Parameter) and self.parameter.requires_grad


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Attribute of a parameter that is a part of a Hugging Face tensor, or not its only copy."""

    shape: tuple[int, ...]
    region: Region
    copy: tuple[int, int] = (0, 1)
    name: str = ""
    """Its Hugging Face name, if its module has another."""


def set_shard(parameter: Tensor, shard: Shard) -> None:
    """Attach a shard to the object, so that it survives DeepSpeed's changes of the values."""
    parameter.llmtrain_shard = shard  # type: ignore[attr-defined]


def set_packed(parameter: Tensor, packed: Packed) -> None:
    parameter.llmtrain_packed = packed  # type: ignore[attr-defined]


def local_parameter(name: str, parameter: Tensor) -> LocalParameter:
    """Describe a parameter by its Hugging Face name: the complete tensor, unless a shard is attached."""
    shard: Shard | None = getattr(parameter, "llmtrain_shard", None)
    if shard is None:  # under ZeRO 3 the parameter itself is empty between its uses
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        shard = Shard(shape=shape, region=whole(shape))
    name = shard.name or name
    return LocalParameter(name=name, parameter=parameter, shape=shard.shape, region=shard.region, copy=shard.copy)


def freeze(hf: nn.Module) -> None:
    """Turn the parameters that do not train into buffers. Those on the meta device, or partitioned, become NaN.

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
    Raises ConfigError: a pattern matches no parameter or one name of a tied one, or nothing is left to train."""
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
    """Weights of the module that do not train, by name. Call `freeze` before."""
    passing = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=remove_duplicate)
        for name in passing_buffers(part)
    }
    every = module.named_buffers(remove_duplicate=remove_duplicate)
    return {name: buffer for name, buffer in every if name not in passing}


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then frozen tensors: all tensors in a checkpoint of a model, by name."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from frozen_tensors(module, remove_duplicate=remove_duplicate).items()


def tensor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
