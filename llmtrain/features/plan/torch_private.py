"""Private names of torch that a rehearsal needs: one function for each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

GROUPED = torch.ops.aten._grouped_mm.default
"""The product of torch's grouped experts."""

READ = torch.ops.aten._local_scalar_dense.default
"""The operator that reads a tensor's only element: `item`, `tolist`, `bool`."""


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """torch._subclasses.fake_tensor.FakeTensorMode: tensors made in it have a shape and no elements."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values(error: BaseException) -> bool:
    """torch._subclasses.fake_tensor.DynamicOutputShapeException and DataDependentOutputException: tensors without
    elements have no answer."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def arguments_by_name(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names in torch._ops.OpOverload._schema."""
    return dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs


def in_backward() -> bool:
    """True inside an autograd pass of this thread (torch._C._current_graph_task_id)."""
    return torch._C._current_graph_task_id() != -1
