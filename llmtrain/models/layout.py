"""Maps a model's parameters to the tensors in a Hugging Face folder's files.

transformers 5 keeps the experts of a layer as one parameter and renames others, but its files have the old form (one
tensor for each expert). The rules are transformers' own: it converts the model's tensors to the file's on the meta
device, and each result is traced back to the parameter of which it is a view.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from llmtrain.base.errors import ModelError
from llmtrain.models.parameters import frozen_tensors, named_tensors, tensor_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from llmtrain.models.transformers_private import names_not_saved, patterns_not_loaded, storage_of

_DERIVED = (".inv_freq", ".masked_bias", ".attn.bias")
"""Ends of the names of buffers that old versions of transformers saved, but that the model computes itself."""


@dataclass(frozen=True)
class Part:
    """A tensor in a file that consists of the elements [start, start + numel) of a flat parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Placement:
    parts: dict[str, list[tuple[str, Part]]]
    """Parameter -> [(name of a file's tensor, its part of the parameter)], in the order of the elements."""
    twins: dict[str, str] = field(default_factory=dict)
    """Name of a file's tensor that repeats a tied weight -> the tied parameter."""
    derived: list[str] = field(default_factory=list)
    """Names of tensors that the model computes itself."""
    surplus: list[str] = field(default_factory=list)
    """Names of tensors that belong nowhere in the model."""


class _FollowViews(TorchFunctionMode):
    """Makes `contiguous` return its argument: a copy could not be traced back to a parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


class FolderLayout:
    """The tensors in a model's folder, and their places in its parameters. Raises ModelError if transformers converts a
    tensor otherwise than by cutting a parameter into consecutive parts."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self.skeleton = skeleton
        self.shapes = tensor_shapes(skeleton)
        """Shape of every parameter by the model's name, frozen parameters included; a tied parameter appears once."""
        self.frozen = set(frozen_tensors(skeleton))
        """Names of the parameters that do not train."""
        every = dict(named_tensors(skeleton, remove_duplicate=False))
        first = {id(parameter): name for name, parameter in named_tensors(skeleton)}
        self._tied = {name: first[id(p)] for name, p in every.items() if name not in self.shapes}
        self.tied = len(self._tied)
        """Number of names whose parameter has another, first name."""
        state = skeleton.state_dict()
        self._known = {name: torch.empty(value.shape, device="meta") for name, value in state.items()}
        mapping: list[Any] = get_model_conversion_mapping(self.skeleton)
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._renamings: list[Any] = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
        self.tensors: dict[str, Part] = self._written_tensors()
        """Name of a tensor that `save_pretrained` writes -> its part of a parameter, in the order of writing."""
        self.together: dict[str, tuple[int, int]] = self._groups()
        """Tensor -> (group, elements of the group). `save_pretrained` puts tensors that share memory (a group) in one
        file."""

    def place(self, tensors: Iterable[str]) -> Placement:
        """Find each parameter's tensors by transformers' new or old names or by the model's own, with the decoder's
        prefix or without. Raises ModelError if two tensors are the same part, or a conversion is not supported."""
        from transformers.core_model_loading import dot_natural_key

        placement, unread = Placement(parts={}), patterns_not_loaded(self.skeleton)
        named = [(tensor, *self._model_name(tensor)) for tensor in sorted(tensors, key=dot_natural_key)]
        for tensor, name, converted in sorted(named, key=lambda item: item[1] in self._tied):
            if name not in self._known:
                derived = f".{tensor}".endswith(_DERIVED) or any(re.search(pattern, tensor) for pattern in unread)
                (placement.derived if derived else placement.surplus).append(tensor)
            elif name in self._tied and self._tied[name] in placement.parts:
                placement.twins[tensor] = self._tied[name]
            else:
                parameter = self._tied.get(name, name)
                part = self._part(tensor, parameter) if converted else Part(parameter, 0, self.shapes[parameter])
                placement.parts.setdefault(parameter, []).append((tensor, part))
        for parts in placement.parts.values():
            parts.sort(key=lambda item: item[1].start)
            for (a, left), (b, right) in pairwise(parts):
                if left.start + left.numel > right.start:
                    raise ModelError(f"{a} and {b} are both the same part of the model's {left.parameter}. Remove one.")
        return placement

    def _written_tensors(self) -> dict[str, Part]:
        from transformers.core_model_loading import revert_weight_conversion

        state = self._saved_state()
        owner = {storage_of(value): name for name, value in state.items()}
        parts = {}
        with _FollowViews():
            written = revert_weight_conversion(self.skeleton, dict(state))
        for tensor, view in written.items():
            name = owner.get(storage_of(view))
            if name is None or not view.is_contiguous():
                raise ModelError(
                    f"{type(self.skeleton).__name__}: transformers does not make the file's {tensor} by cutting a "
                    "parameter into consecutive parts; llmtrain cannot read or write such models. Train another family."
                )
            parts[tensor] = Part(name, view.storage_offset(), tuple(view.shape))
        return parts

    def _groups(self) -> dict[str, tuple[int, int]]:
        from transformers.core_model_loading import revert_weight_conversion

        written = revert_weight_conversion(self.skeleton, self._saved_state())
        item = torch.empty((), device="meta").element_size()
        return {tensor: (storage_of(view), view.untyped_storage().nbytes() // item) for tensor, view in written.items()}

    def _saved_state(self) -> dict[str, torch.Tensor]:
        skipped = set(self._tied) | names_not_saved(self.skeleton)
        return {name: value for name, value in self._known.items() if name not in skipped}

    def _model_name(self, tensor: str) -> tuple[str, bool]:
        """Return (the model's name for the parameter of a file's tensor, True if transformers converts the tensor)."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.skeleton.base_model_prefix
        name, pattern = rename_source_key(tensor, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and tensor in self._known:
            return tensor, False
        return name, pattern is not None

    def _part(self, tensor: str, parameter: str) -> Part:
        prefix = f"{self.skeleton.base_model_prefix}."
        for name in (tensor, prefix + tensor, tensor.removeprefix(prefix)):
            if name in self.tensors and self.tensors[name].parameter == parameter:
                return self.tensors[name]
        raise ModelError(
            f"{tensor} becomes a part of the model's {parameter}, but llmtrain cannot find which: transformers would "
            "write it under another name. Load the folder with transformers and save it again."
        )
