"""Rotary positions that change during a run: a stage's fields for the model's `rope_parameters`, and for its config."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import load_config
from llmtrain.models.transformers_private import warnings_of_rope

_EXTENDS = ("llama3", "yarn", "longrope")
"""Values of rope_type that need the length before scaling (transformers, modeling_rope_utils.py)."""


def turns(plan: Iterable[tuple[Mapping[str, Any], int]]) -> list[tuple[Mapping[str, Any], int]]:
    """Return the RoPE changes of the stages, in order. A resumed run repeats them all, because each starts from the
    length after the one before. `plan`: (fields, sequence length) of each stage."""
    return [change for change, _ in groupby(stage for stage in plan if stage[0])]


def turned(fields: Mapping[str, Any], plan: Iterable[tuple[Mapping[str, Any], int]]) -> Mapping[str, Any]:
    """Return the fields of a model's config.json after these changes. Raises ModelError as `set_rope`."""
    if not (changes := turns(plan)):
        return fields
    config: Any = load_config(ModelConfig(config=dict(fields)))
    for change, length in changes:
        _change(config.get_text_config(decoder=True), change, length, {})
    return dict(json.loads(json.dumps(config.to_dict())))


def refuse(model: Any, fields: Mapping[str, Any], length: int, required: Mapping[str, Any] | None = None) -> str | None:
    """Return why the model cannot have these fields, or None if it can. The model does not change. `required`: the
    fields that must have an effect, because no earlier stage has them; None: all fields."""
    try:
        set_rope(copy.deepcopy(model), fields, length, fields if required is None else required)
    except ModelError as error:
        return str(error)
    return None


def set_rope(model: Any, fields: Mapping[str, Any], length: int, required: Mapping[str, Any] | None = None) -> None:
    """Write fields over `rope_parameters` of the model's config, and rebuild its rotary embeddings.

    Args:
        model: a transformers model, or one with some of its parts.
        fields: for example {"rope_theta": 1e6} or {"rope_type": "yarn", "factor": 4}; if the family has several kinds
            of layers with different positions, one such dict for each kind.
        length: new sequence length in tokens; the config's `max_position_embeddings` is raised to it.
        required: fields that transformers must know for this rope_type, with values that it accepts.

    Raises:
        ModelError: the family has no rotary positions, or transformers refuses a field.
    """
    with_config = [module for module in model.modules() if hasattr(module, "config")]
    rotary = [m for m in with_config if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False))]
    if not rotary:
        raise ModelError("the model has no rotary positions")
    configs = {id(module.config): module.config for module in rotary}
    text_config = model.config.get_text_config(decoder=True)
    configs[id(text_config)] = text_config  # an export writes this one
    for config in configs.values():
        _change(config, fields, length, required or {})
    for module in rotary:
        try:
            fresh = type(module)(config=module.config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{type(module).__name__} cannot be made with these fields: {error!r}") from error
        for name, value in vars(fresh).items():
            if not name.startswith("_") and name not in ("config", "training"):
                setattr(module, name, value)
        for name, values in fresh.named_buffers(recurse=False):
            before = module.get_buffer(name)
            if not bool(values.isfinite().all()):
                raise ModelError(f"{type(module).__name__} computes rotations from these fields that are not finite")
            module.register_buffer(name, values.to(before.device, before.dtype), persistent=False)


def _change(config: Any, changes: Mapping[str, Any], length: int, required: Mapping[str, Any]) -> None:
    before: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    kinds = [key for key, value in before.items() if isinstance(value, dict)]
    if kinds and not all(key in kinds for key in changes):
        raise ModelError(f"its layers have several kinds of rotary positions: give the fields below {', '.join(kinds)}")
    longest = config.max_position_embeddings
    by_kind = {kind: _laid(before[kind], fields, longest) for kind, fields in changes.items()} if kinds else None
    after = before | (_laid(before, changes, longest) if by_kind is None else by_kind)
    config.rope_parameters = after
    try:
        with warnings_of_rope() as warned:
            config.validate_rope()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"transformers says: {error}") from error
    names = [name for fields in (required.values() if kinds else [required]) for name in fields]
    for text in warned:  # a misspelt field, or one of another rope_type, would do nothing
        unknown = text.rpartition(": ")[2] if text.startswith("Unrecognized keys") else ""
        if any(f"'{name}'" in unknown or f"'s {name} field" in text for name in names):
            raise ModelError(f"transformers says: {text}")
    config.max_position_embeddings = max(longest, length)


def _laid(before: Mapping[str, Any], fields: Mapping[str, Any], longest: int) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise ModelError("they must be a map of fields")
    if "type" in fields:  # transformers ignores it beside a rope_type, which every config has by now
        raise ModelError(f"the field is called rope_type: write rope_type: {fields['type']}")
    after = {**before, **fields}
    if after.get("rope_type") in _EXTENDS:
        after.setdefault("original_max_position_embeddings", longest)
    return after
