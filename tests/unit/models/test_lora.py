"""peft's LoRA layer as ours computes it: the same values, with one pass over the map's output less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Attention(nn.Module):
    """Three maps of one tensor, the last one maybe of another, the second maybe called first, and a map of what
    they give."""

    def __init__(self, apart: bool = False, early: bool = False) -> None:
        super().__init__()
        from peft import LoraConfig
        from peft.tuners.lora import Linear

        self.apart, self.early = apart, early
        config = LoraConfig(r=4, lora_alpha=8)
        for name, inputs, outputs in (("q_proj", 24, 40), ("k_proj", 24, 16), ("v_proj", 24, 16), ("o_proj", 24, 24)):
            made = Linear(nn.Linear(inputs, outputs, bias=False), "default", config=config, r=4, lora_alpha=8)
            made.base_layer.weight.requires_grad_(False)
            nn.init.normal_(made.lora_B["default"].weight, std=0.1)
            setattr(self, name, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.early:
            k, q = self.k_proj(x), self.q_proj(x)
        else:
            q, k = self.q_proj(x), self.k_proj(x)
        v = self.v_proj(x + 1 if self.apart else x)
        return self.o_proj(q[..., :24] + torch.cat([k, v], -1)[..., :24])


def gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    x.grad = None
    module(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed", "apart", "early"])
def test_layers_with_the_same_input_read_it_once(how: str) -> None:
    """The same gradients, by half of the products with A; a layer that gets another tensor is found."""
    from llmtrain.models.lora import scaled_first, share_inputs

    torch.manual_seed(0)
    plain = Attention(apart=how == "apart", early=how == "early")
    for layer in plain.children():
        scaled_first(layer)
    shared = copy.deepcopy(plain)
    share_inputs(dict(shared.named_children()))
    assert [name for name, _ in shared.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(2, 5, 24).requires_grad_()
    run: Any = shared
    inner = None
    if how == "compiled":
        shared.forward = torch.compile(shared.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    if how in ("recomputed", "early"):
        inner, shared = shared, nn.Module()
        shared.inner = inner
        shared.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    products: list[tuple[int, ...]] = []

    class Note(OperatorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "mm" and 24 in args[0].shape and 10 in args[0].shape:
                products.append(tuple(result.shape))
            return result

    for _ in range(2):
        want, got = gradients(plain, x), gradients(shared, x)
        for name, value in want.items():
            torch.testing.assert_close(got[f"inner.{name}" if inner is not None and name != "x" else name], value)
    if how == "compiled":
        assert shared.q_proj.shared is not None
        return
    with Note():
        run(x)
    few = [shape for shape in products if shape[1] in (4, 8, 12)]
    wanted = {"apart": [(10, 12), (10, 4), (10, 4)], "early": [(10, 4), (10, 8), (10, 4)]}
    assert few == wanted.get(how, [(10, 12), (10, 4)]), few
