"""JSON Schema (draft 2020-12) of a run's YAML, for editors (`llmtrain config schema`), from the classes."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from llmtrain.base import choice
from llmtrain.config.reference import Entry, choices, default_choice, entries, sections

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """The schema of the whole file. It knows types, bounds and choices; what two fields say together, `config check`
    knows."""
    top: dict[str, Any] = {entry.key: _value(entry) for entry in entries() if "." not in entry.key}
    top |= {section: _section(section) for section in sections()}
    for section, names in choice.Entry.SECTIONS.items():
        top[section] = _or_null(_map({name: _section(f"{section}.{name}") for name in names}))
    return {"$schema": DRAFT, "title": "A training run of llmtrain", "required": ["deepspeed"], **_map(top)}


def _map(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _section(section: str) -> dict[str, Any]:
    """A map or nothing. A section of choices allows all their fields, and then for each choice those that it has."""
    mine = [entry for entry in entries() if entry.key.startswith(f"{section}.")]
    if section not in choices():
        return _or_null(_map({_name(entry): _value(entry) for entry in mine}))
    base = choices()[section]
    properties = {_name(entry): {} if entry.owners else _or_null(_value(entry)) for entry in mine}
    rules = []
    for name, chosen in base.CHOICES.items():
        fields = {_name(e): _or_null(_value(e)) for e in mine if name in e.owners}
        fields |= {_name(e): {"type": "null"} for e in mine if e.owners and _name(e) not in chosen.own()}
        named = {"properties": {base.SELECTOR: {"const": name}}, "required": [base.SELECTOR]}
        asked: dict[str, Any] = named
        if name == default_choice(section) and section != "optim":  # there the JSON may name it
            asked = {"anyOf": [named, {"properties": {base.SELECTOR: {"type": "null"}}}]}
        rules.append({"if": asked, "then": {"properties": fields}})
    return {**_or_null(_map(properties)), "allOf": rules}


def _name(entry: Entry) -> str:
    return entry.key.rpartition(".")[2]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with null allowed: where that is no value of its own, it means the default."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "type" in schema:
        known = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {**schema, "type": [*known, *([] if "null" in known else ["null"])]}
    return schema


def _value(entry: Entry) -> dict[str, Any]:
    limits: dict[str, Any] = {**entry.bound.json_schema()} if entry.bound else {}
    told: dict[str, Any] = {"description": entry.meaning}
    if entry.default not in ("required", "null"):
        told["default"] = json.loads(entry.default)
    if entry.key == "data.mixture":
        limits = {"additionalProperties": {"type": "number", "exclusiveMinimum": 0}}
    return {**told, **_kind(entry.kind, limits)}


def _kind(kind: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type. `limits`: keywords of numbers, or of the keys of a map."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _TYPES:
        return {"type": _TYPES[kind], **limits}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _kind(args[0], limits), "minItems": len(args), "maxItems": len(args)}
    if origin is list:
        return {"type": "array", "items": _kind(args[0], limits)}
    if origin is dict:
        return {"type": "object", **limits}
    either = [_kind(arg, limits if arg is not type(None) else {}) for arg in args]
    enums = [each["enum"] for each in either if "enum" in each]
    if enums:
        return {"enum": [*enums[0], None]}
    merged = {key: value for each in either for key, value in each.items()}
    types = [each["type"] for each in either]
    return {**merged, "type": types}
