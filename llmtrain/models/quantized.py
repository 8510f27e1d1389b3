"""QLoRA: the frozen linear layers of an adapted model in 4 bits, packed one after another while they are loaded.

T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314: NF4 by the bitsandbytes library,
in blocks of 64 elements that each have an fp32 scale (4.5 bits an element). Forward and backward pass compute with the
unpacked values, in the precision that the layer had before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.base.errors import ConfigError
from llmtrain.models.parameters import Packed, Shard, local_parameter, set_packed, set_shard
from llmtrain.models.transformers_private import is_without_memory

_BLOCK = 64
_AT_A_TIME = 1 << 14
"""Number of blocks packed at a time: 1 M elements."""


def need_bitsandbytes() -> None:
    """Check that bitsandbytes is installed. Raises ConfigError."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"adapter.quantize = nf4: 4 bits are packed by the bitsandbytes library, which is not installed here "
            f"({error}). Install it: pip install 'llmtrain[quantize]'; or remove the key."
        ) from error


def packed_line(module: nn.Module) -> str:
    maps = [packed for packed in module.modules() if isinstance(packed, PackedLinear)]
    before, after = (sum(getattr(packed, name) for packed in maps) for name in ("plain_bytes", "nbytes"))
    return f"frozen maps below the adapter in 4 bits (NF4): {after / 2**30:.3g} GiB, were {before / 2**30:.3g}"


class PackedLinear(nn.Module):
    """A linear layer whose frozen weight is stored in blocks of 4 bits."""

    def __init__(self, linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> None:
        """Make the layer without values. `linear`: the layer on the meta device, whose weight in `dtype` never gets
        memory."""
        super().__init__()
        local = local_parameter("", linear.weight)
        self._shape, self._dtype = linear.weight.shape, dtype
        blocks = -(-self._shape.numel() // _BLOCK)
        weight = torch.empty(blocks * _BLOCK // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self._scales = torch.empty(blocks, dtype=torch.float32, device=device)
        self._state: Any = None
        set_shard(self.weight, Shard(shape=local.shape, region=local.region, copy=local.copy, name=local.name))
        set_packed(self.weight, Packed(dtype=dtype, values=self.values, write=self.write))

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes + self._scales.nbytes)

    @property
    def plain_bytes(self) -> int:
        return self._shape.numel() * self._dtype.itemsize

    @contextlib.contextmanager
    def write(self) -> Iterator[Tensor]:
        """A context with memory for the flat weight, which is packed at its end. Raises ConfigError if bitsandbytes
        cannot pack on this device."""
        device, size = self.weight.device, self._shape.numel()
        values = torch.zeros(len(self._scales) * _BLOCK, dtype=self._dtype, device=device)
        yield values[:size]
        try:
            self._pack(values.view(-1, _BLOCK))
        except Exception as error:  # any error of a device without kernels
            raise ConfigError(
                f"adapter.quantize = nf4: bitsandbytes cannot pack a weight on {device} ({error}). Remove the key: "
                "ZeRO 3 shards the frozen weights, offload_param keeps them on the host."
            ) from error

    @torch.no_grad()
    def _pack(self, blocks: Tensor) -> None:
        """Pack some blocks at a time, so that little temporary memory is needed. `blocks`: one in each row, because
        bitsandbytes 0.50 on a CPU unpacks blocks that continue in the next row with wrong scales."""
        from bitsandbytes.functional import QuantState, quantize_4bit

        for low in range(0, len(blocks), _AT_A_TIME):
            some = blocks[low : low + _AT_A_TIME]
            packed, state = quantize_4bit(some, blocksize=_BLOCK, quant_type="nf4", compress_statistics=False)
            at = low * _BLOCK // 2
            self.weight.data[at : at + packed.numel()] = packed.view(-1, 1)
            self._scales[low : low + len(some)] = state.absmax
        form: dict[str, Any] = {"shape": blocks.shape, "dtype": self._dtype, "blocksize": _BLOCK, "quant_type": "nf4"}
        self._state = QuantState(absmax=self._scales, code=state.code, **form)

    def values(self) -> Tensor:
        """Unpack the weight, [outputs, inputs]."""
        from bitsandbytes.functional import dequantize_4bit

        blocks: Tensor
        if is_without_memory(self._scales):  # nothing was packed
            blocks = torch.empty(len(self._scales), _BLOCK, dtype=self._dtype, device=self.weight.device)
        else:
            blocks = dequantize_4bit(self.weight.data, self._state)
        return blocks.view(-1)[: self._shape.numel()].view(self._shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Unpacked.apply(x.to(self._dtype), self)
        return y if self.bias is None else y + self.bias


class _Unpacked(torch.autograd.Function):
    """Computes x W^T. Autograd would keep W for the backward pass; here W is unpacked again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.values())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.values(), None
