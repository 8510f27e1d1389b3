"""peft's LoRA layer as ours computes it: the same values, with one pass over the map's output less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.models.transformers_private import OperatorMode

pytestmark = pytest.mark.needs("peft")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_b_is_added_as_it_is_computed(dtype: torch.dtype) -> None:
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    from llmtrain.models.lora import scaled_first

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8)
    theirs = Linear(nn.Linear(24, 40, bias=False), "default", config=config, r=4, lora_alpha=8).to(dtype)
    nn.init.normal_(theirs.lora_B["default"].weight, std=0.1)
    ours, x = scaled_first(copy.deepcopy(theirs)), torch.randn(2, 5, 24, dtype=dtype)
    operators: list[str] = []

    class Note(OperatorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == 2 * 5 * 40:
                operators.append(func.overloadpacket.__name__)
            return result

    with Note():
        value = ours(x)
    # The map's own product and the sum with the adapter's; a third one would be an addition of two.
    assert [name for name in operators if name in ("mm", "addmm", "add", "mul", "bmm")] == ["mm", "addmm"]
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(value, theirs(x), rtol=rounding, atol=rounding)
    value.float().square().sum().backward()
    theirs(x).float().square().sum().backward()
    for name in ("lora_A", "lora_B"):
        got, want = getattr(ours, name)["default"].weight.grad, getattr(theirs, name)["default"].weight.grad
        torch.testing.assert_close(got, want, rtol=8 * rounding, atol=8 * rounding * float(want.abs().max()))
