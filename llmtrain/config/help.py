"""Help and JSON Schema of a run's fields, from the classes' docstrings, and all rules between them."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import operator
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from llmtrain.base.choice import Bound, Choice, Rule, Rules, default_of
from llmtrain.config import rules, topology
from llmtrain.config.problems import show
from llmtrain.config.schema import (
    FieldOf,
    choices,
    default_choice,
    entry_sections,
    fields_of_run,
    fields_of_sources,
    is_required,
    sections,
    subsections,
    type_name,
)
from llmtrain.features import features
from llmtrain.optim.optimizers import Optimizer

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


@dataclass(frozen=True, kw_only=True)
class FieldEntry:
    """One field of a run, as help and docs show it."""

    key: str
    """Dotted."""
    kind: Any
    """Type hint."""
    default: str
    """Default value in words."""
    doc: str
    """Docstring of the field."""
    bound: Bound | None
    line: str | None = None
    """Form of a line, such as `NAME: FOLDER`, if the field is a map with keys of the user's own."""
    owners: tuple[str, ...] = ()
    """Choices of the section that have the field; empty: all of them."""

    @property
    def values(self) -> str:
        """Type and limits in words."""
        kind = type_name(self.kind)
        if self.line is not None:
            kind = kind.replace("a map", f"a map of lines `{self.line}`")
        return kind + (f", {self.bound.words}" if self.bound else "")

    @property
    def meaning(self) -> str:
        """The docstring, preceded by the names of the choices that have the field."""
        return f"{', '.join(self.owners)}: {self.doc}" if self.owners else self.doc


@functools.cache
def entries() -> tuple[FieldEntry, ...]:
    """Return every field, in the order of the classes. A field with several meanings has an entry for each."""
    return _documented(fields_of_run())


def source_entries() -> tuple[FieldEntry, ...]:
    """Return every field of the sources that plugins bring to `llmtrain prepare`."""
    return _documented(fields_of_sources())


def _documented(found: Iterable[FieldOf]) -> tuple[FieldEntry, ...]:
    owners: dict[FieldEntry, list[str]] = {}
    for field in found:
        owners.setdefault(_entry(field), []).extend([field.choice] if field.choice else [])
    return tuple(replace(entry, owners=tuple(names)) for entry, names in owners.items())


def _entry(field: FieldOf) -> FieldEntry:
    cls, item, doc = field.cls, field.item, _doc(field.cls, field.item.name)
    default = "required"
    if field.is_selector:
        described = (f"{name}: {' '.join((inspect.getdoc(one) or '').split())}" for name, one in cls.CHOICES.items())
        doc, default = " ".join((doc, *described)), show(default_choice(cls.SECTION))
    elif not is_required(item):
        default = show(default_of(item) if item.default_factory is MISSING else item.default_factory())
    about = item.metadata
    return FieldEntry(
        key=field.key, kind=field.kind, default=default, doc=doc, bound=about.get("bound"), line=about.get("line")
    )


@functools.cache
def _docstrings(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return the string literal below each field, by (class, field). Python itself does not keep these strings."""
    docs = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef):
            for node, after in zip(cls.body, cls.body[1:], strict=False):
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                ):
                    docs[cls.name, node.target.id] = " ".join(str(after.value.value).split())
    return docs


def _doc(cls: type, field: str) -> str:
    found = (_docstrings(sys.modules[each.__module__]).get((each.__name__, field)) for each in cls.__mro__[:-1])
    return next((doc for doc in found if doc is not None), "")  # a plugin's field may have none


def run_parser() -> ArgumentParser:
    """Make the command line of a run: a flag with type, default and meaning for each field."""
    from jsonargparse import ArgumentParser  # imported here: 0.3 CPU seconds that only --help needs

    parser = ArgumentParser(prog="llmtrain train", usage="%(prog)s RUN.yaml ... [--SECTION.FIELD VALUE ...]")
    help_text = "The YAML; of several the later wins, value by value."
    parser.add_argument("--config", metavar="RUN.yaml", default=argparse.SUPPRESS, help=help_text)
    groups: dict[str, Any] = {}
    same_key: dict[str, list[FieldEntry]] = {}
    for entry in entries():
        same_key.setdefault(entry.key, []).append(entry)
    for key, found in same_key.items():
        section = key.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "run")
        words = [entry.meaning + (f" ({entry.bound.words})" if entry.bound else "") for entry in found]
        kind = functools.reduce(operator.or_, (entry.kind for entry in found))
        default = argparse.SUPPRESS if found[0].default == "required" else json.loads(found[0].default)
        groups[section].add_argument(f"--{key}", type=kind, default=default, help=" ".join(words).replace("%", "%%"))
    return parser


def all_rules() -> list[Rule]:
    """Return every rule between settings, also the rules of optimizers and features."""
    of_features = sum((feature.rules() for feature in features().values()), Rules())
    of_runs = (*rules.OF_FORMS, *rules.OF_STAGES, *rules.OF_MASKS, *rules.OF_STEPS, *of_features.of_forms)
    own = [rule for cls in Optimizer.CHOICES.values() for rule in cls.rules]
    of_values = (*rules.RULES, *of_features.of_values, *rules.OF_STARTS)
    return list(dict.fromkeys([*of_values, *topology.RULES, *of_runs, *of_features.of_steps, *own]))


def rules_help() -> str:
    """Return the end of the `--help` text: which settings exclude which others."""
    others: dict[str, list[str]] = {}
    for rule in all_rules():
        others.setdefault(rule.keys[0], []).extend(key for key in rule.example if key != rule.keys[0])
    lines = [
        f"{key}: {', '.join(dict.fromkeys(found))}" for key, found in sorted(others.items()) if found and "[" not in key
    ]
    wrapped = (textwrap.fill(line, 120, initial_indent="  ", subsequent_indent="      ") for line in lines)
    return "\n".join(
        ["\nrefused with some values of others (the page on configuration has an example of each):", *wrapped]
    )


DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a run's YAML: types, bounds and choices. `config check` applies the rules between fields."""
    top: dict[str, Any] = {entry.key: _value(entry) for entry in entries() if "." not in entry.key}
    top |= {section: _section(section) for section in sections()}
    for section, names in entry_sections().items():
        top[section] = _or_null(_map({name: _section(f"{section}.{name}") for name in names}))
    return {"$schema": DRAFT, "title": "A training run of llmtrain", "required": ["deepspeed"], **_map(top)}


def _map(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _section(section: str) -> dict[str, Any]:
    """Return the schema of a section: a map or null. Where the section has choices, `name` decides on the fields."""
    mine = [entry for entry in entries() if entry.key.rpartition(".")[0] == section]
    if section not in choices():
        inner = {key.rpartition(".")[2]: _section(key) for key in subsections() if key.startswith(f"{section}.")}
        return _or_null(_map({_name(entry): _value(entry) for entry in mine} | inner))
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


def _name(entry: FieldEntry) -> str:
    return entry.key.rpartition(".")[2]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with null allowed, which stands for the default."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "type" in schema:
        known = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {**schema, "type": [*known, *([] if "null" in known else ["null"])]}
    return schema


def _value(entry: FieldEntry) -> dict[str, Any]:
    limits: dict[str, Any] = {**entry.bound.json_schema()} if entry.bound else {}
    value_schema: dict[str, Any] = {"description": entry.meaning}
    if entry.default not in ("required", "null"):
        value_schema["default"] = json.loads(entry.default)
    if entry.line is not None:
        kind = next(get_args(each)[1] for each in (entry.kind, *get_args(entry.kind)) if get_origin(each) is dict)
        limits = {"additionalProperties": {"type": _TYPES[kind], **limits}}
    return {**value_schema, **_kind(entry.kind, limits)}


def _kind(kind: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type hint. `limits`: JSON Schema keywords for a number, or for the keys of a map."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _TYPES:
        return {"type": _TYPES[kind], **limits}
    if isinstance(kind, type) and is_dataclass(kind):
        return _section(kind.SECTION) if issubclass(kind, Choice) else _object(kind)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and args[-1] is not ...:
        return {"type": "array", "items": _kind(args[0], limits), "minItems": len(args), "maxItems": len(args)}
    if origin in (list, tuple):
        return {"type": "array", "items": _kind(args[0], limits)}
    if origin is dict:
        return {"type": "object", **limits}
    if given := next((arg for arg in args if is_dataclass(arg)), None):
        return _or_null(_kind(given, {}))
    either = [_kind(arg, limits if arg is not type(None) else {}) for arg in args]
    enums = [each["enum"] for each in either if "enum" in each]
    if enums:
        named = {"enum": [*enums[0], None]}
        others = [each for each in either if each.get("type", "null") != "null"]
        return {"anyOf": [named, *others]} if others else named
    merged = {key: value for each in either for key, value in each.items()}
    types = [each["type"] for each in either]
    return {**merged, "type": types}


def _object(cls: type[Any]) -> dict[str, Any]:
    """Return the schema of a list's item that is a map with the fields of this class."""
    properties, kinds = {}, get_type_hints(cls)
    for item in fields(cls):
        bound = item.metadata.get("bound")
        limits = bound.json_schema() if bound else {}
        properties[item.name] = {"description": _doc(cls, item.name), **_kind(kinds[item.name], limits)}
    return _map(properties)
