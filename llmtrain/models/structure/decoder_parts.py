"""Finds the parts of a transformers decoder by a forward pass, not by their names.

A small copy of the model (small_copy.py) runs once with every module watched. The modules are sorted into those that
run before the first layer, those that run after the last one, and the rest. Then each layer runs alone on the hidden
state that it got in the complete model, and must return the same bits. Any other connection between layers (keys and
values of another layer, a second stream, values computed from the tokens) changes the result, and such a model is
refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.loss import HeadForm
from llmtrain.models.parameters import named_tensors
from llmtrain.models.structure.calls import Watch, attention_seen
from llmtrain.models.structure.small_copy import check_same_structure, probe_copy, run_copy
from llmtrain.models.transformers_private import with_values

# Replacements for parts of a decoder that a rank does not have, with which transformers' own forward still runs.


class AbsentLayer(nn.Module):
    """Replaces a decoder layer and returns its input unchanged."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self._as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self._as_tuple else hidden_states


class AbsentBefore(nn.Module):
    """Replaces a module before the first layer (embedding, norm, projection); returns zeros shaped like its output."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The first tensor argument is [B, T] or [B, T, any]. Returns [B, T, width]."""
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return first.new_zeros((*first.shape[:2], self._width), dtype=self._dtype)


class AbsentAfter(nn.Module):
    """Replaces the final norm or projection and returns its input unchanged."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = (2, 12)
"""Batch size and length of the probe's tokens."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """A module that contributes to the first layer's hidden state."""

    path: str
    width: int
    """Last dimension of the module's output in the full model."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    path: str
    sliding: bool
    """True if the layer's attention looks back over a window only."""
    experts: str | None
    """Path of the module with all its experts' weights, as 3-D parameters [experts, ...]; None without experts."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a decoder. Paths are dotted module names; with ".weight" they are Hugging Face names of
    parameters."""

    embedding: str
    before: tuple[Before, ...]
    """The embedding and all other modules before the first layer, in the order in which they run."""
    layer_list: str
    """Path of the nn.ModuleList; layer i is `f"{layer_list}.{i}"`."""
    layers: tuple[Layer, ...]
    layers_return_tuples: bool
    after: tuple[str, ...]
    """Modules between the last layer and the head, in the order in which they run (final norm, projection)."""
    head: str
    tied: bool
    """True if head and embedding are one parameter."""


@with_values()
def anatomy_of(hf: PreTrainedModel) -> Anatomy:
    """Return the parts of a causal language model, proved on a small copy. The model itself may be on the meta device.
    Raises ModelError: it cannot be divided into layers; the message has the reason."""
    _refuse_other_kinds(hf)
    small = probe_copy(hf)
    check_same_structure(hf, small)
    layer_list = _layer_list(small)
    parts = _Found(small, layer_list)
    head = parts.head()
    before, after = parts.sort_parts(head)
    parts.prove(before, after, head)
    _check_parameters(hf, layer_list, [*before, *after, head])
    embedding = parts.embedding(before)
    words: Any = hf.get_submodule(embedding)
    width, hidden = words.embedding_dim, hf.config.hidden_size
    return Anatomy(
        embedding=embedding,
        before=tuple(
            Before(path=path, width=width if parts.width(path) == parts.width(embedding) else hidden) for path in before
        ),
        layer_list=layer_list,
        layers=tuple(_layers(hf, layer_list, parts.sliding())),
        layers_return_tuples=parts.returns_tuples,
        after=tuple(after),
        head=head,
        tied=hf.get_submodule(head).weight is hf.get_submodule(embedding).weight,
    )


def _refuse_other_kinds(hf: PreTrainedModel) -> None:
    config, name = hf.config, type(hf).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model: {name} has an encoder and a decoder; llmtrain trains only decoders.")
    if config.get_text_config() is not config:
        inner = ", ".join(sorted(getattr(config, "sub_configs", {}))) or "several configurations"
        raise ModelError(
            f"model: {name} wraps a text model together with others ({config.model_type}: {inner}); "
            "llmtrain trains only text models. Train its text model by itself."
        )
    if getattr(config, "layerdrop", 0.0):
        raise ModelError(
            f"model: layerdrop {config.layerdrop} skips layers at random, different ones on each rank; set it to 0."
        )


def _layer_list(hf: nn.Module) -> str:
    """Return the path of the only list of layers that no other list contains. Raises ModelError."""
    lists = {
        path: m for path, m in hf.named_modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())
    }
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    name = type(hf).__name__
    if not outer:
        raise ModelError(f"model: {name} has no nn.ModuleList of decoder layers. Train another family.")
    if len(outer) > 1:
        raise ModelError(f"model: {name} has several lists of layers ({', '.join(outer)}); llmtrain supports one list.")
    return outer[0]


def layer_paths(hf: nn.Module, layer_list: str) -> list[str]:
    return [f"{layer_list}.{name}" for name, _ in hf.get_submodule(layer_list).named_children()]


def probe_tokens(small: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, min(small.config.vocab_size, 512), _TOKENS, generator=generator)


def _parts(hf: nn.Module, layer_list: str) -> list[str]:
    """Return the paths of all children of the decoder and its parents, except the list of layers and its parents."""
    names = layer_list.split(".")
    chain = [".".join(names[:depth]) for depth in range(len(names) + 1)]
    paths = []
    for parent in chain[:-1]:
        for child, _ in hf.get_submodule(parent).named_children():
            path = f"{parent}.{child}" if parent else child
            if path not in chain:
                paths.append(path)
    return paths


def _check_parameters(hf: nn.Module, layer_list: str, others: list[str]) -> None:
    """Check that each parameter belongs to exactly one part, except a parameter that head and embedding share."""
    name = type(hf).__name__
    owners: dict[int, str] = {}
    for path in [*layer_paths(hf, layer_list), *others]:
        for inner, parameter in named_tensors(hf.get_submodule(path)):
            owner = owners.setdefault(id(parameter), path)
            if owner != path and not (owner in others and path in others):
                raise ModelError(
                    f"model: {name} has one parameter in {owner} and in {path} ({inner}): layers that share weights "
                    "cannot be on different ranks."
                )
    for inner, parameter in named_tensors(hf):
        if id(parameter) not in owners:
            raise ModelError(
                f"model: {name} has the parameter {inner}, which is in no layer and in no part before "
                "or after the layers."
            )


class _Found:
    def __init__(self, small: PreTrainedModel, layer_list: str) -> None:
        self._small, self._parts, self._ids = small, _parts(small, layer_list), probe_tokens(small)
        paths = layer_paths(small, layer_list)
        with Watch(small, [*self._parts, *paths]) as watch:
            self._logits = run_copy(small, self._ids)
        with (
            contextlib.suppress(ModelError),
            attention_seen(small) as self._attended,
        ):  # old models bypass it
            run_copy(small, self._ids)
        calls = {path: [call for call in watch.calls if call.path == path] for path in [*self._parts, *paths]}
        self._calls = calls
        for index, path in enumerate(paths):
            if len(calls[path]) != 1:
                raise self._refusal(f"layer {index} runs {len(calls[path])} times in a forward pass, not once")
        self._layers = [calls[path][0] for path in paths]
        self._check_chain()
        self.returns_tuples = isinstance(self._layers[0].output, tuple)

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"model: {type(self._small).__name__} cannot be divided into layers: {reason}.")

    def _check_chain(self) -> None:
        """Check that each layer gets the previous layer's output, and no other input that depends on parameters."""
        for index, call in enumerate(self._layers):
            if call.hidden is None or call.result is None:
                raise self._refusal(f"layer {index} does not map one hidden state to one hidden state")
            if index and not torch.equal(call.hidden, self._layers[index - 1].result):  # type: ignore[arg-type]
                raise self._refusal(f"the input of layer {index} is not the output of layer {index - 1}")
            if call.grown:
                raise self._refusal(
                    f"layer {index} takes more than the hidden state: {call.grown} is computed from parameters"
                )

    def head(self) -> str:
        """Return the path of the linear layer that runs last, outside of the decoder."""
        linear = [path for path in self._parts if isinstance(self._small.get_submodule(path), nn.Linear)]
        called = [path for path in linear if "." not in path and self._calls[path]]
        if not called:
            raise self._refusal("it has no linear layer as a head, outside of its decoder")
        return max(called, key=lambda path: self._calls[path][-1].begin)

    def sort_parts(self, head: str) -> tuple[list[str], list[str]]:
        """Return the paths of the modules before and after the layers. The rest have no parameters, and every rank with
        a layer needs them: rotary embeddings."""
        first, last = self._layers[0].begin, self._layers[-1].end
        before: list[str] = []
        after: list[str] = []
        taken = {tensor.data_ptr() for call in self._layers for tensor in call.other_tensors()}
        for path in self._parts:
            calls = self._calls[path]
            bare = not any(True for _ in self._small.get_submodule(path).parameters())
            if path == head:
                continue
            if not calls and not bare:
                raise self._refusal(f"{path} has parameters but does not run in a forward pass")
            gives = {tensor.data_ptr() for call in calls for tensor in call.outputs()}
            if not calls or (bare and gives & taken):
                continue
            if all(call.end < first for call in calls):
                before.append(path)
            elif all(call.begin > last for call in calls):
                after.append(path)
            else:
                raise self._refusal(f"{path} runs between the layers")
            if len(calls) > 1:
                raise self._refusal(f"{path} runs {len(calls)} times in a forward pass")
        for paths in (before, after):
            paths.sort(key=lambda path: self._calls[path][0].begin)
        return before, after

    def embedding(self, before: list[str]) -> str:
        words = self._small.config.vocab_size
        modules = {path: self._small.get_submodule(path) for path in before}
        embeddings = [path for path, m in modules.items() if isinstance(m, nn.Embedding) and m.num_embeddings >= words]
        tokens = [path for path in embeddings if any(torch.equal(t, self._ids) for t in self._calls[path][0].inputs())]
        if len(tokens) != 1:
            raise self._refusal(f"{len(tokens)} modules embed the tokens ({', '.join(tokens) or 'none'})")
        return tokens[0]

    def width(self, path: str) -> int:
        return self._calls[path][0].outputs()[0].shape[-1]

    def sliding(self) -> list[bool]:
        """Return for each layer of the small copy whether its attention has a window."""
        windows = {call.path: call.window for call in self._attended}
        inside = [[w for path, w in windows.items() if path.startswith(f"{call.path}.")] for call in self._layers]
        return [any(window is not None for window in of_layer) for of_layer in inside]

    def prove(self, before: list[str], after: list[str], head: str) -> None:
        """Run each layer without the others, and the modules after the layers without these. Raises ModelError: a bit
        differs."""
        small, count = self._small, len(self._layers)
        modules = {
            path: small.get_submodule(path) for path in [*before, *(call.path for call in self._layers), *after, head]
        }
        absent: dict[str, nn.Module] = {path: AbsentBefore(self.width(path), self._logits.dtype) for path in before}
        absent |= {path: AbsentAfter() for path in [*after, head]}
        absent |= {call.path: AbsentLayer(self.returns_tuples) for call in self._layers}
        last = self._layers[-1].result
        assert last is not None
        try:
            for index, call in enumerate(self._layers):
                _put(small, {**absent, call.path: modules[call.path]})
                with Watch(small, [call.path], replace=call.hidden) as watch:
                    self._run(f"layer {index} without the others")
                if not (watch.calls and watch.calls[0].same_result(call)):
                    raise self._refusal(
                        f"layer {index} gives something else without the other layers: they share more than "
                        "the hidden state"
                    )
            _put(small, {**absent, **{path: modules[path] for path in [*after, head]}})
            with Watch(small, [self._layers[count - 1].path], replace=last):
                logits = self._run("the parts after the layers without those")
        finally:
            _put(small, modules)
        if not torch.equal(logits, self._logits):
            raise self._refusal(f"{', '.join([*after, head])} without the layers do not give the model's logits")
        form = HeadForm.of(small.config)
        try:
            hidden = small.base_model(input_ids=self._ids, use_cache=False).last_hidden_state
            plain = form.apply(small.get_submodule(head)(hidden).float())
        except Exception as error:  # a module runs between the base model and the head
            reason = f"{head} does not accept the output of {type(small.base_model).__name__} ({error})"
            raise self._refusal(reason) from error
        if not torch.allclose(plain, self._logits.float(), rtol=1e-5, atol=1e-6):
            raise self._refusal(
                f"its logits are not those of {head} with the scale {form.scale} and the cap {form.softcap}, "
                "which is what the loss computes"
            )

    def _run(self, what: str) -> Tensor:
        try:
            return run_copy(self._small, self._ids)
        except ModelError as error:
            raise self._refusal(f"{what}: {error}") from error


def _put(hf: nn.Module, modules: dict[str, nn.Module]) -> None:
    for path, module in modules.items():
        hf.set_submodule(path, module)


def _layers(hf: PreTrainedModel, layer_list: str, sliding: list[bool]) -> Iterator[Layer]:
    """Yield the layers of the full model. `sliding`: for each layer of the copy, whether it has a window."""
    types = getattr(hf.config, "layer_types", None)
    for index, path in enumerate(layer_paths(hf, layer_list)):
        of_type = "sliding" in types[index] or "chunked" in types[index] if types else all(sliding)
        yield Layer(path=path, sliding=of_type, experts=_experts(hf, path))


def _experts(hf: nn.Module, path: str) -> str | None:
    """Return the path of the experts in the layer at `path`, or None. (A convolution has only one 3-D parameter.)"""
    for inner, module in hf.get_submodule(path).named_modules():
        counts = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
        if inner and len(counts) >= 2 and len(set(counts)) == 1:
            return f"{path}.{inner}"
    return None
