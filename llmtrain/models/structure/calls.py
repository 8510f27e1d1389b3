"""Records, in order, the inputs and outputs of a model's modules and of its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.models.transformers_private import attention_is

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "llmtrain_probe"
"""Name of the attention function that records."""


@dataclass(kw_only=True)
class Call:
    path: str
    begin: int
    """Position among all beginnings and ends of calls."""
    end: int = -1
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    grown: str = ""
    """Name of an input, other than the hidden state, that depends on parameters; "" if there is none."""

    @property
    def hidden(self) -> Tensor | None:
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) and first.dim() == 3 else None

    @property
    def result(self) -> Tensor | None:
        first = self.output[0] if isinstance(self.output, tuple) and self.output else self.output
        return first if isinstance(first, Tensor) and first.dim() == 3 else None

    def same_result(self, other: Call) -> bool:
        return self.result is not None and other.result is not None and torch.equal(self.result, other.result)

    def inputs(self) -> list[Tensor]:
        return list(tensors_of([self.args, self.kwargs]))

    def outputs(self) -> list[Tensor]:
        return list(tensors_of(self.output))

    def other_tensors(self) -> list[Tensor]:
        return [tensor for tensor in self.inputs() if tensor is not self.hidden]


@dataclass(frozen=True, kw_only=True)
class Attended:
    path: str
    """Path of the module that called attention."""
    query: Tensor
    """[B, heads, T, size]"""
    key: Tensor
    """[B, key/value heads, T, size]"""
    value: Tensor
    output: Tensor
    """[B, T, heads, size]"""
    window: int | None


class Watch:
    """A context that records the calls of some modules. `replace`: a hidden state that they get instead of their
    own."""

    def __init__(self, hf: nn.Module, paths: list[str], replace: Tensor | None = None) -> None:
        self.calls: list[Call] = []
        self._hf, self._paths, self._replace, self._clock = hf, paths, replace, 0
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for path in self._paths:
            module = self._hf.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(self._begin(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end(path), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _begin(self, path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._replace is not None:
                args, kwargs = with_hidden(args, kwargs, self._replace)
            call = Call(path=path, begin=self._tick(), args=args, kwargs=kwargs)
            named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
            grown = [
                name for name, value in named for t in tensors_of(value) if t.requires_grad and t is not call.hidden
            ]
            call.grown = grown[0] if grown else ""
            self.calls.append(call)
            return args, kwargs

        return hook

    def _end(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = next(call for call in reversed(self.calls) if call.path == path and call.end < 0)
            call.end, call.output = self._tick(), output

        return hook


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


@contextlib.contextmanager
def attention_seen(
    small: PreTrainedModel, *, cut: bool = False, compute: Callable[..., Tensor] | None = None
) -> Iterator[list[Attended]]:
    """A context that routes the model's attention through a function that records its calls; attention that does not
    use transformers' interface is not recorded.

    Args:
        cut: detach attention's output, which becomes a new leaf of the graph.
        compute: replaces attention: returns [B, T, heads, size] from query, key and value.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[Attended] = []
    paths = {id(module): path for path, module in small.named_modules()}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        if compute is not None:
            output = compute(query, key, value)
        else:
            output = _attention(query, key, value, attention_mask, kwargs.get("scaling"), kwargs.get("softcap"))
        if cut:
            output = output.detach().requires_grad_()
        path, window = paths.get(id(module), ""), kwargs.get("sliding_window")
        calls.append(Attended(path=path, query=query, key=key, value=value, output=output, window=window))
        return output, None

    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = eager_mask
    try:
        with attention_is(small.config, _NAME):
            yield calls
    finally:
        del ALL_ATTENTION_FUNCTIONS[_NAME], ALL_MASK_ATTENTION_FUNCTIONS[_NAME]


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, cap: float | None) -> Tensor:
    """Return attention's output [B, T, heads, size]; key and value may have fewer heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if isinstance(mask, Tensor):
        scores = scores + mask[..., : key.shape[2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()
