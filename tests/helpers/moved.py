"""The bytes that operators read and write, as a GPU would move them: each tensor once an operator, views nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_READ = ("copy_", "zero_", "fill_", "zeros", "zeros_like", "full", "new_zeros")
_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "record_stream", "lift_fresh", "set_", "set_data")


class MovedBytes(TorchDispatchMode):
    """Adds up bytes by operator. Messages between ranks count apart, as what a rank gives into them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.message_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.message_bytes += sum(_size(t) for t in tree_leaves(args) if isinstance(t, Tensor))
        elif func.namespace == "aten" and not func.is_view and name not in _NOTHING:
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            given = {id(t): t for t in tree_leaves((args, named)) if isinstance(t, Tensor)}
            written = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            if name == "copy_" and _place(args[0]) == _place(args[1]):
                return made  # torch copies nothing onto itself
            if name == "_to_copy" and _place(made) == _place(args[0]):
                return made
            if name in _NOT_READ:
                given.pop(id(args[0]) if name.endswith("_") else 0, None)
            self.bytes[name] += sum(map(_size, given.values())) + sum(map(_size, written))
        return made

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @contextlib.contextmanager
    def inside(self, owner: Any, *names: str) -> Iterator[None]:
        """A context that counts within the methods `names` of an object, and nothing outside."""
        plain = {name: getattr(owner, name) for name in names}

        def counted(method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._inside:
                    return method(*args, **kwargs)
                self._inside = True
                try:
                    with self:
                        return method(*args, **kwargs)
                finally:
                    self._inside = False

            return call

        for name, method in plain.items():
            setattr(owner, name, counted(method))
        try:
            yield
        finally:
            for name in names:
                delattr(owner, name)

    _inside = False


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
