"""Learning rate and weight decay of single parameters."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from llmtrain.config.problems import Places, nearest, stop
from llmtrain.models.parameters import local_parameter
from llmtrain.models.skeleton import decoder_layers
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import Optimizer


class OwnSettings(NamedTuple):
    lr_factor: float = 1.0
    """Factor on the learning rate of the parameter's group."""
    weight_decay: float | None = None
    """None: `optim.decay` decides."""


def own_settings(spec: ModelSpec, optim: Optimizer, places: Places | None = None) -> dict[str, OwnSettings]:
    """Return the settings of each trained parameter by its Hugging Face name, a tied one's by its first name. Raises
    ConfigError: a pattern matches no trained parameter, or two patterns give one parameter different values."""
    names = trained_names(spec)
    factors, decays = (
        _by_pattern(f"optim.{field}", getattr(optim, field), names, places or {})
        for field in ("lr_factor_of", "weight_decay_of")
    )
    depths = dict(_depths(spec.adapted))
    return {
        name: OwnSettings(factors.get(name, 1.0) * optim.layer_decay ** depths.get(name, 0), decays.get(name))
        for name in names
    }


def trained_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Return the first name of each trained parameter -> all its names."""
    tied: dict[int, list[str]] = {}
    for path, parameter in spec.adapted.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(local_parameter(path, parameter).name)
    return {names[0]: names for names in tied.values() if names[0] not in spec.frozen}


def matching(pattern: str, names: dict[str, list[str]]) -> list[str]:
    return [first for first, tied in names.items() if any(fnmatchcase(name, pattern) for name in tied)]


def _by_pattern(key: str, values: dict[str, float], names: dict[str, list[str]], places: Places) -> dict[str, float]:
    by_name: dict[str, tuple[str, float]] = {}
    for pattern, value in values.items():
        matched = matching(pattern, names)
        place = places.get(f"{key}.{pattern}", places.get(key))
        if not matched:
            near = nearest(pattern, names) or next(iter(names))
            rule = "matches no parameter that trains"
            raise stop(f"{key}.{pattern}", value, rule, f"correct it; one of them is {near}", place)
        for name in matched:
            other, earlier = by_name.setdefault(name, (pattern, value))
            if earlier != value:
                rule = f"{other} gives {name} another value, {earlier:g}"
                raise stop(f"{key}.{pattern}", value, rule, "let only one of the two match it", place)
    return {name: value for name, (_, value) in by_name.items()}


def _depths(hf: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (name, number of layers between parameter and head): 0 in the last decoder layer, all for an embedding."""
    layers = decoder_layers(hf)
    inside = {id(parameter) for parameter in layers.parameters()}
    depth = {id(p): len(layers) - 1 - index for index, layer in enumerate(layers) for p in layer.parameters()}
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            depth |= {id(p): len(layers) for p in module.parameters() if id(p) not in inside}
    for path, parameter in hf.named_parameters():
        if id(parameter) in depth:
            yield local_parameter(path, parameter).name, depth[id(parameter)]
