"""Makes a small model with the structure of the user's."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.config.topology import Degrees
from llmtrain.models.adapter import ALL
from llmtrain.models.own_settings import matching, trained_names
from llmtrain.models.score import gives_scores, with_score
from llmtrain.models.skeleton import auto_class, construct, load_config
from llmtrain.models.source import RandomSource
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.small_copy import shrunk_config, without_dropout
from llmtrain.optim.optimizers import Optimizer


def noise(seed: int, name: str, count: int) -> Tensor:
    """Return normally distributed random numbers on the host, fixed by seed and name."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    return torch.randn(count, generator=torch.Generator().manual_seed(number))


class LoudSource(RandomSource):
    """The model's own initialisation, with matrices 6 times as large, and with vectors (also frozen ones) whose
    elements differ. At a standard deviation of 0.02 and a width of 64, a lost position offset would change the loss by
    less than rounding, and norms of 1 or biases of 0 would hide a swap. Factor 6 gives a gain near 1."""

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device) -> None:
        super().__init__(spec.skeleton, seed, device)
        self._noisy: dict[str, Tensor] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._noisy:
            shape = self.shape(name)
            count = int(torch.Size(shape).numel())
            values = super().read(name, 0, count).float()
            if name in self.frozen and bool((values != values[:1]).any()):
                pass  # the constructor computed it, and the model needs it unchanged
            elif name not in self.frozen and len(shape) >= 2:
                values = values * 6
            else:
                values = values + 0.1 * noise(self._seed, name, count).to(values.device)
            self._noisy[name] = values
        return self._noisy[name][start:stop]


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NO_SCORE = ("architectures",)
_SMALL = 5_000_000
"""Largest number of parameters of a model that is used unchanged if no smaller copy can be made."""


def small_model(model: ModelConfig, degrees: Degrees, *, scores: bool = False) -> tuple[dict[str, Any], float]:
    """Return (fields of the small model's config.json, its number of parameters over the user's). Raises ModelError."""
    config = with_score(load_config(model)) if scores else load_config(model)
    parameters = _parameters(config)
    sizes = {
        "layers": max(4, 2 * degrees.pipeline),
        "kv_heads": max(4, degrees.tensor * degrees.sequence),
        "experts": max(4, 2 * degrees.expert),
    }
    try:
        fields = _fields(shrunk_config(config, positions=64, **sizes), config.model_type)
        _prove(fields)
    except ModelError as error:
        if parameters > _SMALL:
            raise ModelError(
                f"{str(error).rstrip('.')}. `llmtrain parity` trains small copies only; training itself needs none. To "
                f"examine this model, give model.config small sizes of your own (at most {_SMALL:,} parameters)."
            ) from error
        fields = _fields(config, config.model_type)
        _prove(fields)
    return fields, _parameters(load_config(ModelConfig(config=fields))) / parameters


def _parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters, counted on the meta device, where they need no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in construct(config, "eager", torch.float32).parameters())


def patterns_here(fields: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return `model.freeze` and `model.train_only` without patterns that match no parameter of the small model. Raises
    ModelError if no pattern is left."""
    spec = _spec(fields)
    names = [name for name, _ in spec.skeleton.named_parameters(remove_duplicate=False)]
    found = {}
    for key, patterns in {"freeze": model.freeze, "train_only": model.train_only}.items():
        found[key] = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        if patterns and not found[key]:
            raise ModelError(
                f"model.{key} = {patterns}: none of them matches a parameter of the small copy, which has "
                f"{spec.facts.layers} layers. Give other patterns for the comparison: --model.{key} '[\"{names[0]}\"]'."
            )
    return found


def targets_here(fields: dict[str, Any], adapter: AdapterConfig) -> AdapterConfig:
    """Return `adapter` without start values and without targets that the small model lacks. Raises ModelError: none is
    left."""
    hf = _spec(fields).skeleton
    names = [name for name, _ in hf.named_modules()]
    whole = [p for p in adapter.modules_to_save if any(fnmatchcase(name, p) for name in names)]
    found = [pattern for pattern in adapter.targets if pattern == ALL or any(fnmatchcase(n, pattern) for n in names)]
    if adapter.r is not None and not found:
        raise ModelError(
            f"adapter.targets = {adapter.targets}: none of them matches a module of the small copy. Give other targets "
            f"for the comparison: --adapter.targets '[\"{ALL}\"]'."
        )
    return replace(adapter, targets=found, modules_to_save=whole, start=None, dropout=0.0)


def own_settings_here(
    fields: dict[str, Any], model: ModelConfig, adapter: AdapterConfig, optim: Optimizer
) -> Optimizer:
    """Return `optim` without patterns that match no trained parameter of the small model."""
    small = ModelConfig(config=fields, attention="eager", freeze=model.freeze, train_only=model.train_only)
    names = trained_names(ModelSpec.of(small, adapter, scores=gives_scores(load_config(small))))
    found: dict[str, Any] = {
        key: {pattern: value for pattern, value in getattr(optim, key).items() if matching(pattern, names)}
        for key in ("lr_factor_of", "weight_decay_of")
    }
    return replace(optim, **found)


def _spec(fields: dict[str, Any]) -> ModelSpec:
    model = ModelConfig(config=fields, attention="eager")
    return ModelSpec.of(model, scores=gives_scores(load_config(model)))


def attention_here(fields: dict[str, Any], attention: str, *, cpu: bool) -> Any:
    """Return the user's attention; on a CPU sdpa or eager in place of flash attention. Raises ModelError if
    transformers does not have it for this family."""
    instead = cpu and attention.startswith("flash")
    config = load_config(ModelConfig(config=fields))
    try:
        construct(config, "sdpa" if instead or attention == "auto" else attention, torch.float32)
    except ModelError:
        if not instead:
            raise
        return "eager"
    return "sdpa" if instead else attention


def _fields(config: PreTrainedConfig, model_type: str) -> dict[str, Any]:
    fields = without_dropout(config).to_dict()
    for key in ("transformers_version", "dtype", "_name_or_path", *(() if gives_scores(config) else _NO_SCORE)):
        fields.pop(key, None)
    return {**fields, "model_type": model_type}


def _prove(fields: dict[str, Any]) -> None:
    """Run a few tokens forward and backward, several times with the same result. Raises ModelError."""
    config = load_config(ModelConfig(config=fields))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that earlier draws do not decide whether a router's noise shows
            hf = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
            ids = torch.arange(16).unsqueeze(0) % config.get_text_config().vocab_size
            hf(input_ids=ids, use_cache=False).logits.sum().backward()
            seen = []
            for seed in (1, 2, 3, 4):
                torch.manual_seed(seed)
                seen.append(hf.train()(input_ids=ids, use_cache=False).logits.detach())
    except Exception as error:  # transformers' code may fail in any way with untested sizes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelError(f"model: a small copy of a {fields['model_type']} model does not run ({reason}).") from error
    if not all(torch.equal(seen[0], other) for other in seen[1:]):
        raise ModelError(
            f"model: a {fields['model_type']} model draws random numbers in training in addition to dropout (a "
            "router that samples its experts), so no two trainings of it are the same, and nothing can be compared."
        )
