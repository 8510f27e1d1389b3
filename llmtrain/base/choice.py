"""Sections of a run in which names select classes, limits of the classes' fields, and rules between settings.

    class Schedule(Choice, section="schedule"): ...    a section of one choice: the fields that every choice has
    class Wsd(Schedule, choice="wsd"): ...             a choice: its own fields, and what it computes

    class Part(Entry, section="parts"): ...            a section of entries, of which a run names any number
    class Count(Part, entry="count"): ...              an entry, whose fields are below `parts.count`

Each choice is a frozen keyword-only dataclass, each entry a keyword-only one. In the YAML a choice is one flat map,
whose `name` selects the class.
"""

from __future__ import annotations

import importlib
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Self

HOST_PATH = "~ and $NAME are expanded"
HostPath = Annotated[str, HOST_PATH]
"""The type of a field that holds a path on a host."""
_Text = str | Callable[[Any, str], str]
"""A text, or a function that makes it from (subject, key that breaks the rule)."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Limits for a number, or for each number of a list."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: Any) -> bool:
        return all(
            (self.above is None or x > self.above)
            and (self.at_least is None or x >= self.at_least)
            and (self.at_most is None or x <= self.at_most)
            and (self.below is None or x < self.below)
            for x in (value if isinstance(value, tuple) else (value,))
        )

    @property
    def words(self) -> str:
        """The limits in words, to follow "must be"."""
        most = None if self.at_most is None else f"at most {_number(self.at_most)}"
        if self.above is not None:
            return " and ".join(filter(None, (f"greater than {_number(self.above)}", most)))
        assert self.at_least is not None
        if most is not None:
            return f"from {_number(self.at_least)} to {most.removeprefix('at most ')}"
        if self.below is not None:
            return f"from {_number(self.at_least)} to just under {_number(self.below)}"
        return f"at least {_number(self.at_least)}" if self.at_least else "0 or greater"

    def json_schema(self) -> dict[str, float]:
        limits = {"exclusiveMinimum": self.above, "minimum": self.at_least}
        limits |= {"maximum": self.at_most, "exclusiveMaximum": self.below}
        return {keyword: limit for keyword, limit in limits.items() if limit is not None}


def _number(value: float) -> str:
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:g}".replace("e+0", "e")


POSITIVE = Bound(above=0)
AT_LEAST_1 = Bound(at_least=1)
NOT_NEGATIVE = Bound(at_least=0)
SHARE = Bound(at_least=0, at_most=1)
BELOW_1 = Bound(at_least=0, below=1)
SECONDS = Bound(above=0, at_most=1e9)
SEED = Bound(at_least=0, at_most=2**63 - 1)


def bounded(default: Any, bound: Bound | None = None, remedy: str = "", **limits: float) -> Any:
    """Return a dataclass field with limits.

    Args:
        bound: the limits; or give them as `limits`, such as `bounded(0.5, at_least=0, at_most=1)`.
        remedy: an example or a reminder for messages about a value outside the limits.
    """
    if limits:
        bound, remedy = Bound(**limits), remedy or f"{default} is the default"
    return field(default=default, metadata={"bound": bound, "remedy": remedy})


def mapped(line: str, bound: Bound | None = None, remedy: str = "", default: Any = MISSING) -> Any:
    """Return a dataclass field for a map whose keys the user chooses.

    Args:
        line: the form of an entry, such as `FOLDER: WEIGHT`.
        bound: limits of each value.
        remedy: an example or a reminder for messages about a value outside the limits.
    """
    metadata = {"line": line, "bound": bound, "remedy": remedy}
    if default is MISSING:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def joined(default: Any, json_key: str, bound: Bound, remedy: str) -> Any:
    """Return a dataclass field that the DeepSpeed JSON may give instead, under `json_key`.

    Its value is None until YAML and JSON are joined; then it is `default` if neither gives one.
    """
    return field(default=None, metadata={"bound": bound, "remedy": remedy, "json": json_key, "default": default})


def default_of(item: Field[Any]) -> Any:
    """Return the value that a field has if neither YAML nor JSON gives one."""
    return item.metadata.get("default", item.default)


class Classes(UserDict[str, Any]):
    """Name -> class of a section, in order.

    The name of a module may stand in place of the class that the module defines: it is imported when the class is asked
    for.
    """

    def __getitem__(self, name: str) -> Any:
        if isinstance(module := self.data[name], str):
            importlib.import_module(module)
        return self.data[name]

    def __setitem__(self, name: str, cls: type) -> None:
        """Raise ValueError if a class of another module has this name."""
        taken = self.data.get(name, cls)
        if cls.__module__ != (taken if isinstance(taken, str) else taken.__module__):
            raise ValueError(f"the name {name!r} of class {cls.__name__} is taken by {self[name].__qualname__}")
        self.data[name] = cls


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Base of the sections whose class is selected by a name in the section, such as `schedule.name`."""

    SECTION: ClassVar[str]
    SELECTOR: ClassVar[str]
    """The field that selects the class; a section's base class declares it, with init=False."""
    CHOICES: ClassVar[Classes]
    """Name -> class of this section."""
    KEYWORD: ClassVar[str] = "choice"
    """Keyword that gives a class its name in its definition."""

    def __init_subclass__(
        cls, *, section: str | None = None, selector: str = "name", choice: str | None = None, **others: Any
    ) -> None:
        super().__init_subclass__(**others)
        if section is not None:
            cls.SECTION, cls.SELECTOR, cls.CHOICES = section, selector, Classes()
        if choice is not None:  # the selector is a field, so that every dump has it
            cls.CHOICES[choice] = cls
            cls.__annotations__ = {**inspect.get_annotations(cls), cls.SELECTOR: "str"}
            setattr(cls, cls.SELECTOR, field(default=choice, init=False))

    @classmethod
    def of(cls, name: str, /, **values: Any) -> Self:
        chosen: Self = cls.CHOICES[name](**values)
        return chosen

    @classmethod
    def selected(cls) -> str:
        return str(getattr(cls, cls.SELECTOR))

    @classmethod
    def own(cls) -> set[str]:
        """Return the names of this choice's fields, with those of its section and without the selector."""
        return {item.name for item in fields(cls) if item.init}

    @classmethod
    def owners(cls, name: str) -> list[str]:
        return [choice for choice, chosen in cls.CHOICES.items() if name in chosen.own()]

    @classmethod
    def refusal(cls, name: str) -> tuple[str, str]:
        """Return (rule, remedy) for a field that only other choices have; the same for YAML, command line and JSON."""
        return cls.refusal_of(cls.owners(name))

    @classmethod
    def refusal_of(cls, owners: list[str]) -> tuple[str, str]:
        """Return (rule, remedy) for a field that only the choices `owners` have."""
        selector = f"{cls.SECTION}.{cls.SELECTOR}"
        one_of = "one of " if len(owners) > 1 else ""
        return (
            f"belongs to {selector} {either(owners)}",
            f"remove it, or set {selector} to {one_of}{', '.join(owners)}",
        )


@dataclass(kw_only=True, eq=False)
class Entry:
    """Base of the sections that hold any number of entries, each a class, such as `parts.NAME`."""

    SECTION: ClassVar[str]
    NAME: ClassVar[str]
    """The class's key in its section."""
    KEYWORD: ClassVar[str] = "entry"
    SECTIONS: ClassVar[dict[str, Classes]] = {}
    """Section of entries -> its classes."""
    OF_SECRETS: ClassVar[str] = "an environment variable"
    """Where a secret for the entry belongs, for the message that refuses a secret in the YAML."""

    def __init_subclass__(cls, *, section: str | None = None, entry: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if section is not None:
            cls.SECTION = section
            Entry.SECTIONS.setdefault(section, Classes())
        if entry is not None:
            Entry.SECTIONS[cls.SECTION][entry] = cls
            cls.NAME = entry


def either(names: list[str]) -> str:
    """Return the names as `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True, eq=False)
class Rule:
    """A combination of settings that is refused. The check, the documentation, `--help` and the tests read this row."""

    keys: tuple[str, ...]
    """Dotted keys of the run or its DeepSpeed JSON whose values the message shows."""
    broken: Callable[[Any], Any]
    """Takes the subject; returns whether it breaks the rule, or with `each` a list of mistakes."""
    reason: _Text
    remedy: _Text
    example: Mapping[str, Any]
    """Dotted key -> value: settings that, in an otherwise valid run, break the rule."""
    each: bool = False
    """If True, `broken` returns a list of mistakes: each a key in place of the first of `keys`, or a tuple in place of
    `keys`."""

    def breaks(self, subject: Any) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """Yield (keys, reason, remedy) for each mistake of the subject."""
        mistakes = self.broken(subject)
        for broken in mistakes if self.each else [self.keys] if mistakes else []:
            keys = (broken, *self.keys[1:]) if isinstance(broken, str) else broken
            reason, remedy = (
                text if isinstance(text, str) else text(subject, keys[0]) for text in (self.reason, self.remedy)
            )
            yield keys, reason, remedy


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules, grouped by what they need to know of a run; `parse` (config/load.py) and `resolve` check them."""

    of_values: tuple[Rule, ...] = ()
    of_forms: tuple[Rule, ...] = ()
    of_steps: tuple[Rule, ...] = ()

    def __add__(self, more: Rules) -> Rules:
        return Rules(
            of_values=self.of_values + more.of_values,
            of_forms=self.of_forms + more.of_forms,
            of_steps=self.of_steps + more.of_steps,
        )
