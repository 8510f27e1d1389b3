"""Which moments an optimizer keeps of a tensor, and AdamW or Lion with theirs in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"
MOMENTS = "moments"
"""Key of a parameter group: the kinds of moments that the optimizer keeps of each of its tensors -> their dtype."""
_CHUNK = 1 << 24  # elements that have fp32 moments at once: 128 MiB with AdamW


def moments_of(optimizer: Any, flat: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of a tensor that `optimizer` steps, by kind, each as long as the tensor.

    What the optimizer would create at its first step is created now, with the step counter at 0.
    """
    state = optimizer.state[flat]
    kinds: dict[str, torch.dtype] = settings[MOMENTS]
    if MOMENTUM not in kinds and "step" not in state:
        on_host = hasattr(optimizer, "fp32_optimizer_states")  # DeepSpeed's own, which count in Python
        device = flat.device if optimizer.defaults.get("fused", True) else torch.device("cpu")
        state["step"] = 0 if on_host else torch.zeros((), dtype=torch.float32, device=device)
    for kind, dtype in kinds.items():
        if kind not in state:
            state[kind] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
    return {kind: state[kind] for kind in kinds}


class Bf16Moments(torch.optim.Optimizer):
    """An optimizer that works element by element, with moments in bf16 between its steps and in fp32 within one.

    So DeepSeek-V3 was trained (arXiv 2412.19437, 3.3.3), whose masters are fp32, too. DeepSpeed has bf16 moments
    beside bf16 masters only, which lose every update of less than 2^-9 of a weight.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """`inner`: AdamW or Lion over groups that name their moments (`MOMENTS`); its own state is not used."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            kept = [moments_of(self, p, group) for p in parameters]
            for pieces in _batches([p.numel() for p in parameters]):
                self._step(group, [(parameters[i], kept[i], low, high) for i, low, high in pieces])
            for parameter in parameters:
                self.state[parameter]["step"] += 1

    def _step(self, group: dict[str, Any], pieces: list[tuple[Tensor, dict[str, Tensor], int, int]]) -> None:
        """Of the elements [low, high) of these parameters."""
        wide: dict[Tensor, Any] = {}
        for parameter, kept, low, high in pieces:
            assert parameter.grad is not None
            piece = parameter.detach().view(-1)[low:high]
            piece.grad = parameter.grad.view(-1)[low:high].to(piece.dtype)
            wide[piece] = {kind: moment.view(-1)[low:high].float() for kind, moment in kept.items()}
            wide[piece]["step"] = self.state[parameter]["step"].clone()
        self._inner.param_groups = [{**group, "params": list(wide)}]
        self._inner.state = wide  # type: ignore[assignment]
        self._inner.step()
        for (_, kept, low, high), moments in zip(pieces, wide.values(), strict=True):
            for kind, moment in kept.items():
                moment.view(-1)[low:high].copy_(moments[kind])


def _batches(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """(tensor, low, high) of pieces of tensors with so many elements, at most `_CHUNK` elements together."""
    batch: list[tuple[int, int, int]] = []
    room = _CHUNK
    for index, size in enumerate(sizes):
        low = 0
        while low < size:
            high = min(size, low + room)
            batch.append((index, low, high))
            room -= high - low
            low = high
            if not room:
                yield batch
                batch, room = [], _CHUNK
    if batch:
        yield batch
