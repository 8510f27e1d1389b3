"""From the model section of a run to a module that maps (inputs, labels) to a summed loss."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from llmtrain.config.run import ModelConfig
from llmtrain.errors import ModelError
from llmtrain.models.layout import FolderLayout
from llmtrain.models.loss import HeadForm, chunked_nll_sum
from llmtrain.models.source import ParameterSource, RandomSource, SafetensorsSource

_MOST = 10_000  # layers, labels or experts


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes that the throughput figures need."""

    parameters: int
    matmul_parameters: int
    """Weights that are multiplied with activations: all matrices but the embedding, with a tied head counted once."""
    layers: int
    attention_width: int
    """heads x head size."""
    vocab_size: int


class LanguageModel(nn.Module):
    """A transformers causal LM whose forward gives the summed loss. Its parameters are `hf.` + Hugging Face names."""

    def __init__(self, hf: nn.Module, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self._chunk = chunk
        self._form = HeadForm.of(hf.config)
        head = hf.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            raise ModelError(f"model: the head of {type(hf).__name__} is no linear layer ({type(head).__name__}).")
        # The loss must run inside the head's own forward: ZeRO 3 has the head's weight only there.
        head.forward = types.MethodType(_head_forward, head)  # type: ignore[method-assign]

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """inputs [B, T], labels [B, T] already shifted (IGNORE = not counted) -> summed loss, fp32 scalar, in nats."""
        with _one_sequence_a_row():
            hidden_BTH = self.hf.base_model(input_ids=inputs, use_cache=False).last_hidden_state  # type: ignore[operator]
        return self.hf.get_output_embeddings()(hidden_BTH, labels, self._chunk, self._form)  # type: ignore[operator]


@contextlib.contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Tell transformers that no row holds several sequences with positions of their own.

    It looks for them in every forward pass and waits for the device to know (masking_utils.py,
    find_packed_sequence_indices): the GPU then idles while the host queues the next kernels.
    """
    from transformers import masking_utils

    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor | None = None,
    chunk: int = 0,
    form: HeadForm | None = None,
) -> Tensor:
    """The head as it was (logits) without labels; with labels the summed loss."""
    if labels is None or form is None:
        return F.linear(hidden, head.weight, head.bias)
    return chunked_nll_sum(hidden, head.weight, head.bias, labels, chunk=chunk, form=form)


def hf_names(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Parameters by Hugging Face name; a tied parameter appears once."""
    return dict(model.hf.named_parameters())


def load_config(model: ModelConfig, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of `model.pretrained` or `model.config`.

    Code that a folder carries runs with `trust_remote_code` only; no key of a run sets it.
    """
    from transformers import AutoConfig

    given = model.pretrained or model.config
    try:
        if isinstance(given, dict):
            fields = dict(given)
            _refuse_endless(fields)
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        path = Path(str(given))
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():  # a pipe would keep us waiting
            raise FileNotFoundError(f"{file} is no file")
        fields = json.loads(file.read_text())
        _refuse_endless(fields)
        if "auto_map" in fields and not trust_remote_code:
            raise ModelError(
                f"{file}: it asks for Python code of its own (auto_map), which is not run. If transformers has this "
                "model itself, remove auto_map from the file; if you trust the code, convert with --trust-remote-code."
            )
        if "auto_map" in fields:
            return AutoConfig.from_pretrained(file.parent, trust_remote_code=True)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except ModelError:
        raise
    except Exception as error:
        key = "model.pretrained" if model.pretrained else "model.config"
        raise ModelError(f"{key}: {given!r} is not a model configuration: {error}") from error


def _refuse_endless(fields: dict[str, Any]) -> None:
    """A count that transformers would build so many objects for, until the memory is full. Raises ModelError."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _refuse_endless(value)
        elif type(value) is int and value > _MOST and any(word in key for word in ("layer", "label", "expert")):
            raise ModelError(f"model configuration: {key}: {value} is more than any model has (at most {_MOST}).")


def build_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    zero3_config: dict[str, Any] | None,
    checkpoint_activations: dict[str, Any] | None,
) -> LanguageModel:
    """The module with uninitialised parameters; the engine writes the values afterwards, slice by slice.

    Args:
        dtype: precision of the parameters; under ZeRO 3 the DeepSpeed dict says the same.
        zero3_config: the DeepSpeed dict when parameters must be born partitioned (ZeRO 3), else None.
        checkpoint_activations: the JSON's activation_checkpointing section, or None for no recomputation.
    """
    config = load_config(model)
    with contextlib.ExitStack() as stack:
        if zero3_config is not None:
            import deepspeed

            # Not given `dtype`: on a device without fp16, DeepSpeed 0.19.8 then takes bf16 whatever was asked for
            # (partition_parameters.py _set_dtype); from its config it takes the right one.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=zero3_config))
        else:
            stack.enter_context(device)
        hf = _construct(config, model.attention, dtype)
    _restore_buffers(hf, skeleton(model), device)
    hf.config.use_cache = False
    if checkpoint_activations is not None:
        _checkpoint_activations(hf, checkpoint_activations)
    if model.compile_layers:
        for layer in decoder_layers(hf):
            layer.compile()
    return LanguageModel(hf, model.loss_chunk_tokens)


def _construct(config: Any, attention: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():  # skips transformers' tying as well
            hf = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
            )
        hf.tie_weights()
        return hf
    except Exception as error:  # whatever a configuration with strange numbers makes transformers or torch raise
        raise ModelError(
            f"model.attention {attention}: transformers cannot build this causal language model: {error} "
            "If it is the attention, set model.attention to eager."
        ) from error


def skeleton(model: ModelConfig, *, trust_remote_code: bool = False) -> Any:
    """The transformers model with its parameters on the meta device (names and shapes) and real fp32 buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a tied parameter must stay the same object
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
        return _construct(config, "eager", torch.float32, trust_remote_code=trust_remote_code)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _restore_buffers(hf: nn.Module, exact: nn.Module, device: torch.device) -> None:
    """Give buffers their values back: zero.Init rounds what a constructor makes, rotary frequencies among it."""
    values = dict(exact.named_buffers())
    for name, buffer in hf.named_buffers():
        buffer.data = values[name].to(device)


def initial_weights(model: ModelConfig, seed: int, device: torch.device) -> ParameterSource:
    """Where the weights of a new run come from."""
    if model.pretrained is not None:
        return SafetensorsSource(model.pretrained, FolderLayout(skeleton(model)))
    return RandomSource(skeleton(model), seed, device)


def decoder_layers(hf: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the longest module list of the decoder."""
    lists = [m for m in hf.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(f"model: {type(hf).__name__} has no list of decoder layers.")
    return max(lists, key=lambda m: sum(1 for _ in m.parameters()))


def facts(model: ModelConfig) -> ModelFacts:
    """Sizes, from the skeleton."""
    hf = skeleton(model)
    text = hf.config.get_text_config()
    embedding = hf.get_input_embeddings().weight
    tied = hf.get_output_embeddings().weight is embedding
    total = sum(p.numel() for p in hf.parameters())
    matrices = sum(p.numel() for p in hf.parameters() if p.dim() >= 2)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFacts(
        parameters=total,
        matmul_parameters=matrices if tied else matrices - embedding.numel(),
        layers=text.num_hidden_layers,
        attention_width=text.num_attention_heads * head_size,
        vocab_size=text.vocab_size,
    )


def _checkpoint_activations(hf: Any, section: dict[str, Any]) -> None:
    """Recompute each decoder layer in the backward pass; with cpu_checkpointing its input waits on the host."""
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if section.get("cpu_checkpointing"):
        # DeepSpeed's own function for this loses the gathered weights of ZeRO 3 in the recomputation.
        for module in hf.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = _checkpoint_on_host


def _checkpoint_on_host(function: Any, *args: Any) -> Any:
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False)
