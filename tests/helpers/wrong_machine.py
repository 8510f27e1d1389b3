"""A machine that computes wrong: a module of one rank has one bit of its output, or of its gradient, the other way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIGN, EXPONENT, MANTISSA = (31,), range(23, 31), range(19, 23)
"""Bits of fp32: of the mantissa the highest four."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    module: str
    bit: int
    element: int
    every: int = 1
    """Wrong in one of these calls."""
    first: int = 0
    """The first wrong call."""
    backward: bool = False
    """Wrong in the gradient."""

    @classmethod
    def seeded(cls, seed: int, modules: list[str]) -> Wrong:
        draw = random.Random(seed)
        every = (1, 10)[seed % 2]
        return cls(
            module=draw.choice(modules),
            bit=draw.choice(draw.choice([SIGN, EXPONENT, MANTISSA])),
            element=draw.randrange(1 << 30),
            every=every,
            first=draw.randrange(every),
            backward=draw.random() < 0.5,
        )


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, wrong: Wrong) -> Tensor:
        return flipped(values, wrong)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def flipped(values: Tensor, wrong: Wrong) -> Tensor:
    found = values.detach().clone().contiguous()
    half = found.element_size() == 2  # bf16 has the upper 16 bits of fp32
    words = found.view(-1).view(torch.int16 if half else torch.int32)
    mask = torch.tensor([1 << wrong.bit >> 16 * half]).to(words.dtype)
    words[wrong.element % words.numel()] ^= mask[0]
    return found


def modules_of(model: nn.Module) -> list[str]:
    """The modules with parameters that a forward pass calls, without the head, which gives a loss."""
    return [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not name.endswith(("head", "lm_head"))
    ]


def compute_wrong(model: nn.Module, wrong: Wrong) -> Callable[[], None]:
    """Returns the repair."""
    calls = [0]

    def hook(_module: nn.Module, _given: Any, output: Tensor) -> Tensor | None:
        calls[0] += 1
        if (calls[0] - 1) % wrong.every != wrong.first:
            return None
        if not wrong.backward:
            return _Flip.apply(output, wrong)  # type: ignore[no-any-return, no-untyped-call]
        if output.requires_grad:
            output.register_hook(lambda gradient: flipped(gradient, wrong))
        return None

    return model.get_submodule(wrong.module).register_forward_hook(hook).remove
