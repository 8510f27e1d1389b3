"""QLoRA: the frozen maps beside an adapter in 4 bits, once their values have arrived and been proved.

T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314: NF4, in blocks of 64 elements
with a scale each in fp32 (4.5 bits an element), by the bitsandbytes library. Forward and backward pass compute with
the values that the blocks stand for, in the precision that the map had.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import ConfigError
from llmtrain.models.parameters import Packed, Shard, local_parameter, set_packed, set_shard

_BLOCK = 64


def need_bitsandbytes() -> None:
    """Raises ConfigError: bitsandbytes is not installed."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"adapter.quantize = nf4: 4 bits are packed by the bitsandbytes library, which is not installed here "
            f"({error}). Install it: pip install 'llmtrain[quantize]'; or remove the key."
        ) from error


@torch.no_grad()
def quantize_maps(module: nn.Module) -> str:
    """Put the maps beside which `module` has peft's layers into 4 bits, in place. Returns a line for the log.

    Raises ConfigError: bitsandbytes cannot do it on this device.
    """
    from peft.tuners.lora import LoraLayer

    before = after = 0
    for layer in [each for each in module.modules() if isinstance(each, LoraLayer)]:
        linear: Any = layer.get_base_layer()
        before += linear.weight.nbytes
        try:
            packed = PackedLinear(linear)
        except Exception as error:  # whatever a device without kernels makes of it
            raise ConfigError(
                f"adapter.quantize = nf4: bitsandbytes cannot pack a weight on {linear.weight.device} ({error}). "
                "Remove the key: ZeRO 3 shards the frozen weights, offload_param keeps them on the host."
            ) from error
        layer.base_layer = packed
        after += packed.nbytes
    return f"frozen maps beside the adapter in 4 bits (NF4): {after / 2**30:.3g} GiB, were {before / 2**30:.3g}"


class PackedLinear(nn.Module):
    """A linear map whose frozen weight is in blocks of 4 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes the weight of `linear`, which is empty afterwards: others may still name it."""
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        given, held = linear.weight, local_parameter("", linear.weight)
        self._shape, self._dtype = given.shape, given.dtype
        # A block to a row: bitsandbytes 0.50 on CPU unpacks blocks that go on in the next row with the wrong scales.
        blocks = F.pad(given.data.reshape(-1), (0, -given.numel() % _BLOCK)).view(-1, _BLOCK)
        packed, self._state = quantize_4bit(blocks, blocksize=_BLOCK, quant_type="nf4", compress_statistics=False)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        set_shard(self.weight, Shard(shape=held.shape, region=held.region, copy=held.copy, name=held.name))
        set_packed(self.weight, Packed(dtype=given.dtype, values=self.values))
        given.data = given.data.new_empty(0)

    @property
    def nbytes(self) -> int:
        """Of blocks and scales."""
        return int(self.weight.nbytes + self._state.absmax.nbytes)

    def values(self) -> Tensor:
        """The weight that the blocks stand for, [outputs, inputs]."""
        from bitsandbytes.functional import dequantize_4bit

        blocks: Tensor = dequantize_4bit(self.weight.data, self._state)
        return blocks.view(-1)[: self._shape.numel()].view(self._shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Unpacked.apply(x.to(self._dtype), self)
        return y if self.bias is None else y + self.bias


class _Unpacked(torch.autograd.Function):
    """x W^T. Autograd would keep W for the backward pass: here it is unpacked once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.values())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.values(), None
