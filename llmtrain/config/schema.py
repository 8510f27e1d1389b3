"""The fields of a run, from its classes: their keys and types. Help and documentation of them are in help.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from llmtrain.base import choice
from llmtrain.base.choice import Choice
from llmtrain.config.run import RunConfig
from llmtrain.optim.optimizers import Optimizer

SHARED: dict[str, str] = {
    "train.global_batch": "train_batch_size",
    "train.micro_batch": "train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps",
    **{
        f"optim.{item.name}": item.metadata["json"]
        for optimizer in Optimizer.CHOICES.values()
        for item in fields(optimizer)
        if "json" in item.metadata
    },
}
"""YAML key -> JSON key of the same value. optim.name and optimizer.type are compared by config/deepspeed/join.py."""

ENTRIES = ("parts", "trackers", "metrics")
"""Sections whose entries are instances of named classes, which plugins can define too."""


@dataclass(frozen=True, kw_only=True)
class FieldOf:
    """A field of a run, or the selector of a section of choices."""

    key: str
    """Dotted."""
    kind: Any
    """Type hint."""
    cls: type[Any]
    """Class with the field."""
    item: Field[Any]
    choice: str = ""
    """Name of the only choice with the field; empty: all choices have it, or the section has no choices."""

    @property
    def is_selector(self) -> bool:
        return issubclass(self.cls, Choice) and self.item.name == self.cls.SELECTOR


@functools.cache
def sections() -> dict[str, type[Any]]:
    """Return section name -> its class (of a section with choices: the base class)."""
    hints = get_type_hints(RunConfig)
    return {item.name: hints[item.name] for item in fields(RunConfig) if is_dataclass(hints[item.name])}


@functools.cache
def subsections() -> dict[str, type[Any]]:
    """Return dotted key -> class of each section within a section."""
    found: dict[str, type[Any]] = {}
    for section, cls in sections().items():
        for name, kind in get_type_hints(cls).items():
            if isinstance(kind, type) and is_dataclass(kind):
                found[f"{section}.{name}"] = kind
    return found


@functools.cache
def choices() -> dict[str, type[Choice]]:
    return {name: cls for name, cls in sections().items() if issubclass(cls, Choice)}


def default_choice(section: str) -> str:
    default: Any = RunConfig.__dataclass_fields__[section].default_factory
    return str(default.selected())


def entry_sections() -> dict[str, choice.Classes]:
    return {name: known for name, known in choice.Entry.SECTIONS.items() if name in ENTRIES}


@functools.cache
def schema() -> dict[str, Any]:
    """Return dotted key -> type of every field, also of plugins' sources for `llmtrain prepare` (NAME.FIELD)."""
    return {field.key: field.kind for field in (*fields_of_run(), *fields_of_sources())}


def fields_of_sources() -> Iterator[FieldOf]:
    """Yield the fields, as NAME.FIELD, of the sources that plugins bring to `llmtrain prepare`."""
    for name, cls in choice.Entry.SECTIONS.get("sources", {}).items():
        yield from _fields(cls, name)


def fields_of_run() -> Iterator[FieldOf]:
    """Yield every field in the order of the classes; a field that several choices define, once for each of them."""
    yield from (field for field in _fields(RunConfig) if field.key not in sections())
    for section, cls in sections().items():
        shared = [field for field in _fields(cls, section) if field.key not in subsections()]
        if section in choices():
            base = choices()[section]
            names: Any = Literal[tuple(base.CHOICES)]
            selector = base.__dataclass_fields__[base.SELECTOR]
            yield FieldOf(key=f"{section}.{base.SELECTOR}", kind=names, cls=base, item=selector)
            yield from shared
            of_all = {field.key for field in shared}
            for name, chosen in base.CHOICES.items():
                yield from (field for field in _fields(chosen, section, name) if field.key not in of_all)
        else:
            yield from shared
            for key, inner in subsections().items():
                if key.startswith(f"{section}."):
                    yield from _fields(inner, key)
    for section, known in entry_sections().items():
        for name, cls in known.items():
            yield from _fields(cls, f"{section}.{name}")


def _fields(cls: type[Any], section: str = "", choice: str = "") -> Iterator[FieldOf]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        if item.init:
            key = f"{section}.{item.name}".lstrip(".")
            yield FieldOf(key=key, kind=hints[item.name], cls=cls, item=item, choice=choice)


def is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def type_name(kind: Any) -> str:
    """Return a type in words, such as "a whole number or null"."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return "a list of numbers" if args[-1] is ... else f"a list of {len(args)} numbers"
    if origin is list:
        return "a list of maps" if is_dataclass(args[0]) else "a list of text"
    if origin is dict:
        return "a map"
    return " or ".join(type_name(a) for a in args)
