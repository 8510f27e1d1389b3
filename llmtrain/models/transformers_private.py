"""Names of transformers and torch that are private, or public but replaced by us: all that llmtrain/models uses.

Verified with the versions in tracking/environment.py (VERIFIED). If a name is missing, its function raises
AttributeError or ImportError with that name.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION_KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Operators that scaled_dot_product_attention can become, for model.recompute.keep; torch has no public names."""

OperatorMode = TorchDispatchMode
"""torch.utils._python_dispatch.TorchDispatchMode, which sees every operator; documented by torch, but not public."""

VARLEN = "varlen"
"""Name of models/varlen.py's attention in transformers, and value of `model.attention`."""

_PACKED_SINCE = (5, 23)
"""Version of transformers since which masking_utils has the function for packed rows. 5.17 lacks it, and makes masks
within documents from distances in the row."""


def _set(owner: Any, name: str, new: Any) -> Any:
    """Set a name and return its old value. Raises AttributeError if the name is missing; setattr would not notice."""
    before = getattr(owner, name)
    setattr(owner, name, new)
    return before


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    before = _set(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def warnings_of_rope() -> Iterator[list[str]]:
    """A context that collects the warnings of transformers.modeling_rope_utils: unknown fields, impossible values."""
    warnings_: list[str] = []
    logger = logging.getLogger("transformers.modeling_rope_utils")
    handler = logging.Handler()
    handler.emit = lambda record: warnings_.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with _replaced(logger, "level", logging.WARNING), _replaced(logger, "propagate", False):
        try:
            yield warnings_
        finally:
            logger.removeHandler(handler)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Replaces nn.Module.register_parameter: each parameter that trains moves to the meta device when it is made.
    Buffers keep their values (with `torch.device("meta")` they would not), and a tied parameter stays one object."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.requires_grad and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    with _replaced(nn.Module, "register_parameter", register_on_meta):
        yield


@contextlib.contextmanager
def documents_are(documents_BT: Tensor | None) -> Iterator[None]:
    """Replaces transformers' search for documents in a row (masking_utils.find_packed_sequence_indices), which makes
    the host wait for the device in every forward pass."""
    from transformers import masking_utils

    with _replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: documents_BT):
        yield


@contextlib.contextmanager
def masks_of_whole_rows(places_BT: Tensor) -> Iterator[None]:
    """Replaces masking_utils._preprocess_mask_arguments and remap_positions_for_packed_sequence: transformers then
    makes masks for complete rows with these positions, although the model gets only some columns."""
    from transformers import __version__, masking_utils

    arguments = masking_utils._preprocess_mask_arguments
    version = tuple(int(number) for number in __version__.split(".")[:2])

    def of_whole_rows(config: PreTrainedConfig, inputs_embeds: Tensor, *args: Any, **kwargs: Any) -> Any:
        full_rows = inputs_embeds[:, :1].expand(-1, places_BT.shape[1], -1)  # only the shape matters
        return arguments(config, full_rows, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(masking_utils, "_preprocess_mask_arguments", of_whole_rows))
        name = "remap_positions_for_packed_sequence"
        if hasattr(masking_utils, name) or version >= _PACKED_SINCE:
            remap = getattr(masking_utils, name)
            remapped = lambda mask_function, position_ids: remap(mask_function, places_BT)  # noqa: E731
            stack.enter_context(_replaced(masking_utils, name, remapped))
        yield


def stand_before_attention(attend: Callable[..., Any]) -> None:
    """Replaces AttentionInterface.get_interface for all models, once in a process: every attention calls `attend(inner,
    module, query, key, value, ...)`, where `inner` is the function that transformers chose."""
    from transformers.modeling_utils import AttentionInterface

    plain = AttentionInterface.get_interface
    if getattr(plain, "llmtrain", False):  # our own mark
        return

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        inner = plain(self, attn_implementation, default)
        return lambda *args, **kwargs: attend(inner, *args, **kwargs)

    get_interface.llmtrain = True  # type: ignore[attr-defined]
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


@contextlib.contextmanager
def attention_is(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Replaces config._attn_implementation: the model uses this attention function without transformers' checks."""
    with _replaced(config, "_attn_implementation", name):
        yield


def attention_of(config: PreTrainedConfig) -> str:
    """PreTrainedConfig._attn_implementation: the name of the model's attention function."""
    return str(config._attn_implementation)


def loop_over_experts(config: PreTrainedConfig) -> None:
    """Sets config._experts_implementation, which is public only as an argument of the constructor, to transformers'
    loop."""
    _set(config, "_experts_implementation", "eager")


def build_with(kind: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """PreTrainedModel._from_config: builds this class; AutoModelForCausalLM may choose another one for the config."""
    return kind._from_config(config, **kwargs)


def fuse_gelu(hf: PreTrainedModel) -> None:
    """Replace GELUs with tanh, which transformers (activations.py) computes in eight operators, by torch's single
    operator. The values are the same within rounding; a step of a small GPT-2 on a CPU takes 58 ms instead of 81."""
    from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation

    unfused = (NewGELUActivation, FastGELUActivation, GELUTanh)
    for module in hf.modules():
        for name, child in module.named_children():
            if type(child) in unfused:
                setattr(module, name, nn.GELU(approximate="tanh"))


def initialise(hf: PreTrainedModel, part: nn.Module) -> None:
    """PreTrainedModel._init_weights, applied to a part outside of the model; init_weights is for the complete model."""
    part.apply(hf._init_weights)


def give_memory(part: nn.Module, make: Callable[..., Tensor], device: torch.device) -> nn.Module:
    """nn.Module._apply, as `to_empty`, which imports sympy for tensors on the meta device."""
    return part._apply(lambda old: make(old.shape, dtype=old.dtype, device=device))


def takes_flash_attention(hf: PreTrainedModel) -> bool:
    """PreTrainedModel._supports_flash_attn."""
    return hf._supports_flash_attn


def loads_as_causal_model(config: PreTrainedConfig) -> bool:
    """AutoModelForCausalLM._model_mapping: True if a folder with this configuration loads as a causal model."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def score_class(config: PreTrainedConfig) -> str | None:
    """AutoModelForSequenceClassification._model_mapping: the class as which a folder with this configuration loads."""
    from transformers import AutoModelForSequenceClassification

    classes: Any = AutoModelForSequenceClassification._model_mapping
    return str(classes[type(config)].__name__) if type(config) in classes else None


def names_not_saved(hf: PreTrainedModel) -> set[str]:
    """PreTrainedModel._keys_to_ignore_on_save."""
    return set(hf._keys_to_ignore_on_save or ())


def patterns_not_loaded(hf: PreTrainedModel) -> set[str]:
    """PreTrainedModel._keys_to_ignore_on_load_unexpected."""
    return set(hf._keys_to_ignore_on_load_unexpected or ())


def passing_buffers(module: nn.Module) -> set[str]:
    """nn.Module._non_persistent_buffers_set: the module's own buffers that a state_dict leaves out."""
    return module._non_persistent_buffers_set


def storage_of(tensor: Tensor) -> int:
    """UntypedStorage._cdata: tells storages on the meta device apart, whose data_ptr is always 0."""
    return tensor.untyped_storage()._cdata


_TURNED = re.compile(r"(Conv1D|Llama4TextExperts|Inkling\w*Relative(Logits|PositionBias))\.|DbrxExpertGLU\.w2")
_NO_MATRIX = re.compile(r"^Conv1d|^Embedding|bias|A_log|\.D$|time_mix|scale|rel_pos|embed")


def matrices(part: nn.Module) -> Iterator[tuple[nn.Parameter, int, int, bool]]:
    """Yield (matrix [.., rows, columns], rows, columns, True if its rows are the inputs) for each linear layer and
    expert.

    torch.nn.Linear has a row for each output; GPT-2's Conv1D and some families' experts have a row for each input.
    Convolution kernels, embeddings and stacked values (biases of experts, decay rates of states) are left out.
    """
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            of = f"{type(module).__name__}.{name}"
            shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 the parameter itself is flat
            if len(shape) >= 2 and not _NO_MATRIX.search(of):
                turned = _TURNED.match(of) is not None or getattr(module, "is_transposed", False)
                yield parameter, shape[-2], shape[-1], turned


def varlen_backward(
    tensors: tuple[Tensor, ...], bounds: Tensor, longest: int, *, scale: float | None, window: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.ops.torch_attn._varlen_attn_backward: the gradients of torch.nn.attention.varlen.varlen_attn, of which only
    the forward pass is public. `tensors`: the gradient of the output, query, key, value, the output and its logsumexp.
    The arguments are the same from torch 2.11 to 2.14."""
    unused = torch.zeros(2, dtype=torch.uint64, device=bounds.device)  # random state for dropout
    causal = window == (-1, 0)
    backward = torch.ops.torch_attn._varlen_attn_backward
    of_q, of_k, of_v = backward(*tensors, bounds, bounds, longest, longest, causal, unused, scale, list(window))
    return of_q, of_k, of_v


def is_without_memory(tensor: Tensor) -> bool:
    """torch._subclasses.fake_tensor.FakeTensor: True for a tensor without elements, fake or on the meta device."""
    return type(tensor).__name__ == "FakeTensor" or tensor.is_meta


with_values = _disable_current_modes
"""A context in which new tensors have elements, although a mode outside makes fake ones; any `OperatorMode` is off."""


@contextlib.contextmanager
def fresh_compilation_cache() -> Iterator[None]:
    """torch._inductor.utils.fresh_cache: compiles without the cache, and without torch's worker processes
    (compile_threads), which would keep using the folder of Triton's kernels that is deleted at the end."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with _replaced(config, "compile_threads", 1), fresh_cache():
        yield


def set_compile_threads(count: int) -> None:
    """torch._inductor.config.compile_threads: sets it, since torch reads the environment only when it is imported."""
    from torch._inductor import config

    _set(config, "compile_threads", count)
