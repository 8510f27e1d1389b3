"""What a form of parallelism says of each parameter that a rank holds. Nothing else knows its shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from llmtrain.models.region import Region


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalParameter:
    """A parameter of this rank's module and the Hugging Face tensor that it is, or is a shard of."""

    name: str
    """Hugging Face name. Several shards of one tensor on a rank (experts) have the same."""
    parameter: nn.Parameter
    """As the module holds it; under ZeRO 3 partitioned, `ds_shape` is the shape of the shard."""
    shape: tuple[int, ...]
    """Of the whole Hugging Face tensor."""
    region: Region
    """Where the elements of the row-major flat parameter lie in the flat Hugging Face tensor."""
    copy: tuple[int, int] = (0, 1)
    """This is copy (index, of) among the ranks of other tensor-parallel and pipeline positions: a norm that every
    tensor-parallel rank holds, an embedding tied over two stages. Data-parallel replicas do not count here."""
