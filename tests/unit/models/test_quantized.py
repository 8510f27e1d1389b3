"""Weights in 4 bits beside an adapter. tests/ranks/test_cells.py trains with them."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.base.errors import ConfigError
from llmtrain.models.parameters import local_parameter
from llmtrain.models.quantized import PackedLinear, need_bitsandbytes
from llmtrain.parity.plain_maps import NF4, in_four_bits

pytestmark = pytest.mark.needs("peft", "bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (96, 48), (7, 33)], ids=str)
def test_a_packed_map_computes_with_the_values_of_the_definition(shape, dtype) -> None:
    """Also where a block goes on in the next row. Forward and both gradients are those of the rounded weight, to the
    bit."""
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    given, bias = linear.weight.clone(), linear.bias
    linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    packed = PackedLinear(linear, torch.device("cpu"), dtype)
    with packed.write() as values:
        values.copy_(given.reshape(-1))
    want = in_four_bits(given)
    held = local_parameter("", packed.weight)
    assert held.packed is not None and held.packed.dtype == dtype and held.shape == shape
    assert torch.equal(held.values(), want.reshape(-1)) and not torch.equal(want, given)
    assert (want - given).abs().max() < 0.16 * given.abs().max()  # half of the widest gap of NF4, 0.304
    assert packed.nbytes <= given.numel() * 0.5625 + 64  # 4.5 bits, and a rest
    x, y = (torch.randn(5, shape[1], dtype=dtype, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    out, plain = packed(x), F.linear(y, want) + bias
    assert torch.equal(out, plain)
    (out.float() ** 2).sum().backward()
    (plain.float() ** 2).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_the_sixteen_values_are_normal_quantiles() -> None:
    """The means of neighbouring quantiles (appendix E): 8 on the positive side with 1, 7 on the negative, and zero."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.5 * ((1 - 1 / (2 * 15)) + (1 - 1 / (2 * 16)))
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    every = torch.cat([negative, torch.zeros(1), positive]).sort().values
    assert torch.allclose(every / every.abs().max(), torch.tensor(NF4), atol=1e-6)


def test_a_library_that_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"(?s)adapter.quantize.*'llmtrain\[quantize\]'"):
        need_bitsandbytes()
