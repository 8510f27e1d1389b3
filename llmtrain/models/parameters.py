"""The description of each parameter that a rank holds, by its form of parallelism. Nothing else knows its shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmtrain.storage.region import Region, whole


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A parameter in fewer bits, and the full-precision values that it stands for."""

    dtype: torch.dtype
    values: Callable[[], Tensor]
    """Makes them anew."""
    write: Callable[[], AbstractContextManager[Tensor]]
    """A context that gives memory for the flat values, and packs what is in it at the end."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalParameter:
    """A tensor of this rank's module and the Hugging Face tensor that it is, or is a shard of."""

    name: str
    """Hugging Face name. Several shards of one tensor on a rank (experts) have the same."""
    parameter: Tensor
    """As the module holds it; under ZeRO 3 a parameter is partitioned, `ds_shape` is the shape of the shard."""
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    region: Region
    """Positions of the row-major flat parameter's elements in the flat Hugging Face tensor."""
    copy: tuple[int, int] = (0, 1)
    """This is copy (index, of) among the ranks of other tensor-parallel and pipeline positions: a norm that every
    tensor-parallel rank holds, an embedding tied over two stages. Data-parallel replicas do not count here."""

    @property
    def packed(self) -> Packed | None:
        """The full-precision tensor that a parameter in fewer bits stands for."""
        return getattr(self.parameter, "llmtrain_packed", None)

    def values(self) -> Tensor:
        """The flat values, [region.numel]: the parameter's own, or those that it stands for."""
        return (self.parameter.detach() if self.packed is None else self.packed.values()).reshape(-1)

    @property
    def trains(self) -> bool:
        """True if the optimizer has it; models/frozen.py lists the others."""
        return isinstance(self.parameter, nn.Parameter) and self.parameter.requires_grad


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Attribute of a parameter that is not the whole of a Hugging Face tensor, or not its only copy."""

    shape: tuple[int, ...]
    region: Region
    copy: tuple[int, int] = (0, 1)
    name: str = ""
    """Its Hugging Face name, where the module that holds it has another."""


def set_shard(parameter: Tensor, shard: Shard) -> None:
    """The note stays with the object, whatever DeepSpeed does to its values."""
    parameter.llmtrain_shard = shard  # type: ignore[attr-defined]


def set_packed(parameter: Tensor, packed: Packed) -> None:
    """Note it at the object, as `set_shard` does."""
    parameter.llmtrain_packed = packed  # type: ignore[attr-defined]


def local_parameter(name: str, parameter: Tensor) -> LocalParameter:
    """A parameter by its Hugging Face name: the whole tensor, unless it says otherwise."""
    shard: Shard | None = getattr(parameter, "llmtrain_shard", None)
    if shard is None:  # under ZeRO 3 the parameter itself is empty between its uses
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        shard = Shard(shape=shape, region=whole(shape))
    name = shard.name or name
    return LocalParameter(name=name, parameter=parameter, shape=shard.shape, region=shard.region, copy=shard.copy)
