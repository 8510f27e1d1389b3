"""Describes each parameter that a rank holds, whatever the form of parallelism, and lists frozen tensors.

Two kinds of tensors do not change in training: a family's own constants, such as the bias that corrects a router's
choice of experts, and parameters that a run freezes. In transformers the constants are parameters without a gradient
(Ernie 4.5 MoE, AFMoE, Laguna) or buffers that are saved in a folder's files (DeepSeek-V3, GLM-4 MoE, dots1). Here all
constants are buffers: each rank with the module has the complete tensor in fp32, because DeepSpeed partitions, rounds
and updates only parameters (ZeRO 1, 2 and 3 of 0.19.8 have no master of a parameter without a gradient). Parameters
that a run freezes stay parameters, without a gradient, in the precision of the forward pass: their values are only in
the module, partitioned under ZeRO 3, and checkpoints hold them in that precision.
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
"""Suffixes of an adapter's tensors after the path of their linear layer."""
WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
"""The files of a PEFT folder, and the prefix of its tensors' names."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Access to the full-precision values of a parameter that is stored in fewer bits."""

    dtype: torch.dtype
    values: Callable[[], Tensor]
    """Returns the full-precision values, computed at each call."""
    write: Callable[[], AbstractContextManager[Tensor]]
    """A context with memory for the flat values, which are packed at its end."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalParameter:
    """A tensor of this rank's module, and the Hugging Face tensor that it equals or is a shard of."""

    name: str
    """Hugging Face name. Several shards of one tensor on a rank (experts) have the same name."""
    parameter: Tensor
    """The module's tensor. Under ZeRO 3 it is partitioned, and `ds_shape` is the shape of the shard."""
    shape: tuple[int, ...]
    """Shape of the complete Hugging Face tensor."""
    region: Region
    """The elements of the flat Hugging Face tensor that the flat (row-major) parameter holds, in its order."""
    copy: tuple[int, int] = (0, 1)
    """(index, number) of this copy among equal ones at other tensor-parallel ranks and pipeline stages, such as a norm
    on every tensor-parallel rank or an embedding tied over two stages. Data-parallel replicas do not count."""

    @property
    def packed(self) -> Packed | None:
        return getattr(self.parameter, "llmtrain_packed", None)

    def values(self) -> Tensor:
        """Return the values, flat and in full precision: [region.numel]."""
        return (self.parameter.detach() if self.packed is None else self.packed.values()).reshape(-1)

    @property
    def trains(self) -> bool:
        """Return True if the optimizer updates this parameter."""
        return isinstance(self.parameter, nn.Parameter) and self.parameter.requires_grad


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Attached to a parameter that is only a part of a Hugging Face tensor, or one of several copies."""

    shape: tuple[int, ...]
    region: Region
    copy: tuple[int, int] = (0, 1)
    name: str = ""
    """Hugging Face name, if the name in the module is another."""


def set_shard(parameter: Tensor, shard: Shard) -> None:
    """Attach the shard to the tensor object, so that it survives DeepSpeed's changes of the values."""
    parameter.llmtrain_shard = shard  # type: ignore[attr-defined]


def set_packed(parameter: Tensor, packed: Packed) -> None:
    parameter.llmtrain_packed = packed  # type: ignore[attr-defined]


def local_parameter(name: str, parameter: Tensor) -> LocalParameter:
    """Describe a parameter: it is the complete tensor `name`, unless a shard is attached."""
    shard: Shard | None = getattr(parameter, "llmtrain_shard", None)
    if shard is None:  # under ZeRO 3 the parameter itself is empty between its uses
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        shard = Shard(shape=shape, region=whole(shape))
    name = shard.name or name
    return LocalParameter(name=name, parameter=parameter, shape=shard.shape, region=shard.region, copy=shard.copy)


def freeze(hf: nn.Module) -> None:
    """Turn the parameters that do not train into buffers, with NaN for those on the meta device or partitioned. Raises
    ModelError: the model has a weight of integers, which checkpoints cannot hold."""
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
    """Return the parameters that `model.freeze` and `model.train_only` keep from training, tied ones by their first
    name. Raises ConfigError if a pattern matches no parameter or only one name of a tied one, or if nothing is left to
    train."""
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
    """Return the weights of the module that do not train, by name. Call `freeze` first."""
    passing = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=remove_duplicate)
        for name in passing_buffers(part)
    }
    every = module.named_buffers(remove_duplicate=remove_duplicate)
    return {name: buffer for name, buffer in every if name not in passing}


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then frozen tensors, by name: all tensors of the model that a checkpoint holds."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from frozen_tensors(module, remove_duplicate=remove_duplicate).items()


def tensor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
