"""Watching a small copy of a model run: which modules run when, what they get and give, what attention sees."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.parameters import freeze
from llmtrain.models.structure.shrink import shrunk_config, without_dropout
from llmtrain.models.transformers_private import attention_is, build_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST = 100_000_000  # parameters of a small copy: 0.4 GB, nothing written yet
_NAME = "llmtrain_probe"
"""Name of the attention function that watches."""


@dataclass(kw_only=True)
class Call:
    """One run of a module."""

    path: str
    begin: int
    """Its place among all beginnings and ends."""
    end: int = -1
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    grown: str = ""
    """An input besides the hidden state that parameters had a part in when the module began."""

    @property
    def hidden(self) -> Tensor | None:
        """The hidden state that it gets."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) and first.dim() == 3 else None

    @property
    def result(self) -> Tensor | None:
        """The hidden state that it gives."""
        given = self.output[0] if isinstance(self.output, tuple) and self.output else self.output
        return given if isinstance(given, Tensor) and given.dim() == 3 else None

    def same_result(self, other: Call) -> bool:
        """To the bit."""
        return self.result is not None and other.result is not None and torch.equal(self.result, other.result)

    def inputs(self) -> list[Tensor]:
        return list(_tensors([self.args, self.kwargs]))

    def outputs(self) -> list[Tensor]:
        return list(_tensors(self.output))

    def other_tensors(self) -> list[Tensor]:
        """All inputs but the hidden state."""
        return [tensor for tensor in self.inputs() if tensor is not self.hidden]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """One call of the attention function."""

    path: str
    """Module that called."""
    query: Tensor
    """[B, heads, T, size]"""
    key: Tensor
    """[B, key/value heads, T, size]"""
    value: Tensor
    output: Tensor
    """[B, T, heads, size]"""
    window: int | None


class Watch:
    """Records the calls of some modules while it is entered; `replace`: the hidden state that they get instead."""

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
            grown = [name for name, value in named for t in _tensors(value) if t.requires_grad and t is not call.hidden]
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
    """The arguments of a call with this hidden state in the place of its own."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def probe_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """A small real copy on the CPU in fp32, with random parameters and no dropout, whose class is the model's own.

    Raises ModelError.
    """
    config = without_dropout(shrunk_config(hf.config))
    if getattr(config, "output_router_logits", False):  # it asks for the loss of routers that parts of a model lack
        config.output_router_logits = False
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = build_with(type(hf), copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    except Exception as error:  # whatever a configuration with other numbers makes transformers or torch raise
        raise ModelError(f"model: no small copy of {type(hf).__name__} can be built: {error}") from error
    freeze(small)
    if (size := sum(p.numel() for p in small.parameters())) > _MOST:
        raise ModelError(
            f"model: {type(hf).__name__} has sizes that are not understood: its small copy has {size:,} parameters."
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in small.parameters():
            spread = 0.5 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return small.eval()


def run_copy(small: PreTrainedModel, ids: Tensor) -> Tensor:
    """Its logits. Raises ModelError."""
    return _run(small, small, ids).logits


def run_decoder(small: PreTrainedModel, ids: Tensor) -> Tensor:
    """The hidden states that its head would get, [B, T, H]. Raises ModelError."""
    return _run(small, small.base_model, ids).last_hidden_state


def _run(small: PreTrainedModel, part: nn.Module, ids: Tensor) -> Any:
    try:
        return part(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever transformers' code makes of small sizes or of missing parts
        raise ModelError(
            f"model: a small copy of {type(small).__name__} does not run: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def attention_seen(
    small: PreTrainedModel, *, cut: bool = False, compute: Callable[..., Tensor] | None = None
) -> Iterator[list[Attended]]:
    """Let the model's attention go through a function that records its calls; models with code of their own do not.

    Args:
        cut: the graph ends there, and begins again with what attention gives.
        compute: what attention gives, [B, T, heads, size] from query, key and value; default: attention.
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
    """[B, T, heads, size]; keys and values may have fewer heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if isinstance(mask, Tensor):
        scores = scores + mask[..., : key.shape[2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()
