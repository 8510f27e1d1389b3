"""DeepSpeed's names of parameters to Hugging Face's: a prefix to take off, or a pipeline's layers to recognise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError, ModelError
from llmtrain.checkpoint.format import read_file
from llmtrain.config.run import ModelConfig
from llmtrain.models.build import decoder_layers, load_config, skeleton
from llmtrain.models.frozen import frozen_tensors, named_tensors, tensor_shapes

_LAYER_NAME = re.compile(r"([0-9]+)\.(.+)")
_TIED = "tied_modules."

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Target:
    """The Hugging Face model class, on the meta device."""

    model: Any
    shapes: Shapes
    """Shapes of the parameters, in order; a tied one once."""
    aliases: dict[str, str]
    """A tied parameter's other names -> its name."""
    frozen: set[str]
    """Names in `shapes` that no optimizer has."""

    @classmethod
    def of(cls, config: Path) -> Target:
        """`config`: a folder with config.json, or the file. Raises CheckpointError."""
        try:
            model = skeleton(load_config(ModelConfig(config=str(config))))
        except ModelError as error:
            raise CheckpointError(str(error).replace("model.config:", "--model:", 1)) from error
        first = {id(p): name for name, p in named_tensors(model)}
        every = named_tensors(model, remove_duplicate=False)
        aliases = {name: first[id(p)] for name, p in every if first[id(p)] != name}
        return cls(model, tensor_shapes(model), aliases, set(frozen_tensors(model)))


def hf_names(theirs: Shapes, target: Target, given: dict[str, str], where: Path) -> dict[str, str]:
    """Their name -> Hugging Face name, of every parameter of the model class; shapes are compared.

    Args:
        given: what the user says of it (`read_names`); empty: the names themselves are asked.

    Raises:
        CheckpointError: a key is missing, left over, of another shape, or could be two.
    """
    found = given
    if given:
        if unknown := [name for name in given if name not in theirs]:
            raise CheckpointError(
                f"--names: {unknown[0]!r} is no parameter of {where}; it has {', '.join(list(theirs)[:5])}, ..."
            )
    elif all(_LAYER_NAME.fullmatch(name) or name.startswith(_TIED) for name in theirs):
        found = _pipeline(theirs, target, where)
    else:
        found = _prefixed(theirs, target, where)
    _check(found, theirs, target, where)
    return found


def _check(found: dict[str, str], theirs: Shapes, target: Target, where: Path) -> None:
    kind = type(target.model).__name__
    missing = sorted(target.shapes.keys() - found.values())
    if missing or len(set(found.values())) != len(found):
        raise CheckpointError(f"{where}: {kind} needs {missing[:3] or 'each name once'}, which is not there. {_REMEDY}")
    for name, hf in found.items():
        if hf not in target.shapes:
            raise CheckpointError(f"{where}: {name} would be {hf}, which {kind} does not have. {_REMEDY}")
        if theirs[name] != target.shapes[hf]:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(theirs[name])}, {hf} of {kind} has {list(target.shapes[hf])}. "
                "Is it the configuration that this checkpoint was trained with?"
            )


_REMEDY = "Is --model the configuration that it was trained with? If names differ: --names FILE, JSON {theirs: ours}."


def read_names(file: Path | None) -> dict[str, str]:
    """A user's JSON object {their name: Hugging Face name}; empty without a file. Raises CheckpointError."""
    if file is None:
        return {}
    try:
        found = untrusted.loads(read_file(file))
        assert isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    except (OSError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{file}: it is no JSON object of names: {error}.") from error
    return found


def _prefixed(theirs: Shapes, target: Target, where: Path) -> dict[str, str]:
    first = next(iter(target.shapes))
    prefixes = {name[: len(name) - len(first)] for name in theirs if name.endswith(first)}
    fitting = [prefix for prefix in sorted(prefixes) if all(prefix + name in theirs for name in target.shapes)]
    if len(fitting) != 1:
        have = list(theirs)[:3]
        raise CheckpointError(
            f"{where}: its parameters ({', '.join(have)}, ...) are not those of {type(target.model).__name__} "
            f"({', '.join(list(target.shapes)[:3])}, ...), whatever prefix is taken off. {_REMEDY}"
        )
    found = {fitting[0] + name: name for name in target.shapes}
    known = found.keys() | {fitting[0] + alias for alias in target.aliases}
    extra = [name for name in theirs if name not in known]
    if extra:
        raise CheckpointError(
            f"{where}: {extra[0]} belongs to no parameter of {type(target.model).__name__}. {_REMEDY}"
        )
    return found


def _pipeline(theirs: Shapes, target: Target, where: Path) -> dict[str, str]:
    """Decoder layers by suffixes and shapes, in order; the few others by their place before or after, and shape."""
    layers: dict[int, Shapes] = {}
    for name, shape in theirs.items():
        if match := _LAYER_NAME.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = shape
    blocks = _blocks(target)
    matched = {index: pairs for index, layer in layers.items() if (pairs := _same(layer, blocks[0][1]))}
    if len(matched) != len(blocks):
        raise CheckpointError(
            f"{where}: {len(matched)} of its pipeline layers look like one of the {len(blocks)} decoder layers of "
            f"{type(target.model).__name__}. {_REMEDY}"
        )
    found = {}
    for index, (prefix, _) in zip(sorted(matched), blocks, strict=True):
        found.update({f"{index}.{theirs_}": prefix + ours for theirs_, ours in matched[index].items()})
    first, last = min(matched), max(matched)
    inside = next(i for i, name in enumerate(target.shapes) if name.startswith(blocks[0][0]))
    outer = [(i, name) for i, name in enumerate(target.shapes) if not any(name.startswith(p) for p, _ in blocks)]
    rest = {name: shape for name, shape in theirs.items() if name not in found}
    before = {n: s for n, s in rest.items() if n.startswith(_TIED) or int(n.split(".")[0]) < first}
    after = {n: s for n, s in rest.items() if not n.startswith(_TIED) and int(n.split(".")[0]) > last}
    if len(before) + len(after) != len(rest):
        raise CheckpointError(f"{where}: it has layers between the decoder layers. {_REMEDY}")
    found |= _only_way(before, {name: target.shapes[name] for i, name in outer if i < inside}, where)
    return found | _only_way(after, {name: target.shapes[name] for i, name in outer if i > inside}, where)


def _blocks(target: Target) -> list[tuple[str, Shapes]]:
    """(prefix of the names, shapes by suffix) of each decoder layer."""
    layers: nn.ModuleList = decoder_layers(target.model)
    (base,) = [name for name, module in target.model.named_modules() if module is layers]
    return [(f"{base}.{index}.", tensor_shapes(layer)) for index, layer in enumerate(layers)]


def _same(layer: Shapes, block: Shapes) -> dict[str, str]:
    """Suffix in a pipeline layer -> suffix in a decoder layer, or nothing if it is none."""
    pairs = {}
    for ours, shape in block.items():
        ends = [name for name in layer if (name == ours or name.endswith(f".{ours}")) and layer[name] == shape]
        if len(ends) != 1:
            return {}
        pairs[ends[0]] = ours
    return pairs if len(pairs) == len(layer) else {}


def _only_way(theirs: Shapes, ours: Shapes, where: Path) -> dict[str, str]:
    """Pair names of equal shape and equal last component, where there is only one way to do so."""
    found: dict[str, str] = {}
    left = dict(ours)
    while left:
        for name, shape in left.items():
            last = name.rpartition(".")[2]
            fitting = [t for t, s in theirs.items() if t not in found and s == shape and t.rpartition(".")[2] == last]
            if len(fitting) == 1:
                found[fitting[0]] = name
                del left[name]
                break
        else:
            raise CheckpointError(f"{where}: which of {', '.join(theirs) or 'none'} is {next(iter(left))}? {_REMEDY}")
    extra = [name for name in theirs if name not in found]
    if extra:
        raise CheckpointError(f"{where}: {extra[0]} belongs to no parameter of the model. {_REMEDY}")
    return found
