"""Builds a transformers model from a run's model section: its configuration, the model, and its skeleton."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.base import untrusted
from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models import transformers_private
from llmtrain.models.parameters import freeze
from llmtrain.models.score import gives_scores

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of the DeepSpeed JSON -> dtype."""
_MOST = 10_000  # limit on layers, labels and experts in a configuration
_COUNT = re.compile(r"^(?!.*size).*(layer|label|expert)")


class TooLargeError(ModelError):
    """A tensor of the model does not fit this host's memory."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context without transformers' warnings and its report on a folder's tensors: our own checks replace them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def load_config(model: ModelConfig, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration of a model. Code in its folder runs only with `trust_remote_code`, which no key of a run
    sets. Raises ModelError."""
    config = _given_config(model, trust_remote_code=trust_remote_code)
    try:
        config.get_text_config()
    except ValueError:  # MusicGen has an encoder and a decoder of text
        raise ModelError(
            f"model: the configuration of a {config.model_type} model holds several text models, and llmtrain does "
            "not know which of them to train. Name the configuration of one of them."
        ) from None
    if model.vocabulary is not None:
        config.get_text_config().vocab_size = model.vocabulary
    return config


def _given_config(model: ModelConfig, *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    named = model.pretrained or model.config
    try:
        if isinstance(named, dict):
            fields = untrusted.loads(json.dumps(named), infinite=True)  # a config.json's fields in YAML
            _refuse_endless(fields)
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        path = model.folder or Path(str(named))
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():  # reading a pipe could wait for ever
            raise FileNotFoundError(f"{file} is no file")
        fields = untrusted.loads(file.read_bytes(), infinite=True)
        _refuse_endless(fields)
        if not trust_remote_code:
            refuse_code(file, fields)
        if "auto_map" in fields:
            return AutoConfig.from_pretrained(file.parent, trust_remote_code=True)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except ModelError:
        raise
    except Exception as error:
        key = "model.pretrained" if model.pretrained else "model.config"
        name = named.get("model_type") if isinstance(named, dict) else named
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(f"{key}: {name} is not a model configuration: {reason}") from error


def refuse_code(file: Path, fields: Any) -> None:
    """Refuse a configuration that makes transformers load code. Raises ModelError."""
    if key := untrusted.names_code(fields):
        raise ModelError(
            f"{file}: {key} names Python code of the model's own, which llmtrain does not run. If transformers has "
            f"this model itself, remove {key} from the file (model.attention chooses the attention); if you trust the "
            "code, convert the folder with --trust-remote-code."
        )


def _refuse_endless(fields: dict[str, Any]) -> None:
    """Refuse a number of layers, labels or experts whose objects would fill the memory. Raises ModelError."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _refuse_endless(value)
        elif type(value) is int and value > _MOST and _COUNT.search(key):
            raise ModelError(
                f"model: {key} = {value} in its configuration is above the limit of {_MOST}. Correct the number."
            )


def auto_class(config: PreTrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if gives_scores(config) else AutoModelForCausalLM


def construct(
    config: PreTrainedConfig, attention: str, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the transformers model with uninitialised parameters, after `freeze`. Raises ModelError."""
    from transformers.initialization import no_init_weights

    none = f"model.attention {attention}: transformers has none for {config.model_type}; set model.attention to eager."
    # With sdpa transformers 5.17 silently leaves out the cap of attention scores (Gemma-2), which changes the logits.
    if attention == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        raise ModelError(none)
    if attention == transformers_private.VARLEN:
        from llmtrain.models.varlen import register

        register()
    try:
        with no_init_weights():  # also skips tying, done below
            hf = auto_class(config).from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
            )
        hf.tie_weights()
        transformers_private.fuse_gelu(hf)
    except Exception as error:  # any error of transformers or torch about strange numbers
        if "does not support" in str(error):  # sdpa or flash attention, which not every family has
            raise ModelError(none) from error
        if re.search("allocate memory|calculation overflowed", str(error)):  # before a tensor moves to meta
            reason = (
                str(error).splitlines()[0].partition("Error code")[0].rpartition("DefaultCPUAllocator: ")[2].strip()
            )
            sizes = [(v, k) for k, v in config.get_text_config(decoder=True).to_dict().items() if type(v) is int]
            largest = ", ".join(f"{name} = {size}" for size, name in sorted(sizes, reverse=True)[:3])
            raise TooLargeError(
                f"model: one of its tensors alone needs more memory than this host has ({reason.rstrip('.')}). Correct "
                f"its sizes; the largest are {largest}."
            ) from error
        text = config.get_text_config(decoder=True)
        if "adding_idx must be within" in str(error):
            raise ModelError(
                f"model: pad_token_id = {text.pad_token_id} in its configuration is not in its vocabulary of "
                f"{text.vocab_size} tokens. Set it to one of them, or to null."
            ) from error
        raise ModelError(
            f"model.attention {attention}: transformers cannot build this model: {error}"
            + (" If it is the attention, set model.attention to eager." if attention != "eager" else "")
        ) from error
    freeze(hf)
    return hf


def skeleton(config: PreTrainedConfig, *, attention: str = "eager", trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the transformers model with parameters on the meta device (names and shapes) and real fp32 buffers, from a
    copy of `config`."""
    with transformers_private.parameters_on_meta():
        return construct(copy.deepcopy(config), attention, torch.float32, trust_remote_code=trust_remote_code)


def materialise(hf: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give each parameter on the meta device uninitialised memory, and move the buffers. Ties and shards are kept."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in hf.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    values = torch.empty(parameter.shape, dtype=dtype, device=device)
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                    attributes = vars(made[parameter])  # a fake tensor keeps its device there
                    attributes.update({**vars(parameter), **attributes})
                setattr(module, name, made[parameter])
        for buffer in module.buffers(recurse=False):
            if not buffer.is_meta:
                buffer.data = buffer.to(device)


def restore_buffers(hf: nn.Module, exact: nn.Module, device: torch.device) -> None:
    """Copy the buffers from `exact`: zero.Init rounds a constructor's buffers, for example rotary frequencies."""
    values = dict(exact.named_buffers())
    for name, buffer in hf.named_buffers():
        buffer.data = values[name].to(device, copy=True)  # a copy, also on the same device


def decoder_layers(hf: nn.Module) -> nn.ModuleList:
    """Return the module list with the most parameters, which is the decoder's. Raises ModelError if there is none."""
    lists = [m for m in hf.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(f"model: {type(hf).__name__} has no list of decoder layers. Train another family.")
    return max(lists, key=lambda m: sum(1 for _ in m.parameters()))


def layer_configs(text: Any) -> list[Any]:
    """Return the configuration of each layer if they differ (`per_layer_config`), else a list of the only one.
    (transformers raises an error if a field that differs between layers is read from the common configuration.)"""
    return list(text.per_layer_config) if text.is_heterogeneous else [text]


def language_model(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the skeleton of the language model with the same decoder, under the same names."""
    config = copy.deepcopy(hf.config)
    config.architectures = None
    return skeleton(config)
