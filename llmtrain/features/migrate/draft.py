"""The run that becomes of a foreign configuration: lines of a YAML with their origin, a JSON, commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config import strict_yaml
from llmtrain.config.problems import stop
from llmtrain.config.schema import schema
from llmtrain.features.migrate.rows import word
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Referenced


class Given:
    """The options of a foreign configuration, which are taken one by one; what is left in the end has a row.

    `names`: a name that the code asks for -> the stack's own name of it. An option whose value is null is not given.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.left = {key: value for key, value in values.items() if value is not None}
        self.answered: list[str] = []
        """Options that were taken, by the stack's own names."""
        self._names = names

    def name(self, option: str) -> str:
        return self._names.get(option, option)

    def __contains__(self, option: str) -> bool:
        return self.values.get(self.name(option)) is not None

    def take(self, option: str, default: Any = None) -> Any:
        """Return the option's value. It counts as answered. Raises ConfigError if `default` is a number and the value
        is not."""
        name = self.name(option)
        if name not in self.left:
            return default
        self.answered.append(name)
        value = self.left.pop(name)
        if default is None or isinstance(default, bool) or not isinstance(default, int | float) or value is False:
            return value
        number = strict_yaml.plain_scalar(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise stop(name, value, "must be a number", f"write one, such as {name}: {default}")
        return number

    def need(self, option: str, *kinds: type) -> Any:
        """Return the value of an option without which there is no run: a text, or of `kinds`. Raises ConfigError."""
        name, value = self.name(option), self.values.get(self.name(option))
        if value is None:
            raise stop(name, None, "is missing: no run is without it", "add it")
        if isinstance(value, bool) or not value or not isinstance(value, kinds or str):
            words = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds or (str,)))
            raise stop(name, value, f"must be {words}", "write it so")
        self.take(option)
        return value

    def source(self, option: str) -> str:
        """What a line of the YAML has as its origin: the option, or that it is the other stack's default."""
        name = self.name(option)
        return name if option in self else f"default of {name}"


_KINDS = {str: "a text", list: "a list with entries", int: "a number above 0", float: "a number above 0"}


@dataclass(frozen=True)
class Remark:
    """An option that has no line in the YAML, and why."""

    option: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.option, _short(self.value) if self.option else "", self.reason)))


@dataclass
class Draft:
    """A run in the making."""

    yaml: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Key of the YAML -> (value, its origin)."""
    json: dict[str, Any] = field(default_factory=dict)
    prepare: list[str] = field(default_factory=list)
    """Words of `llmtrain prepare`, without --out."""
    prepare_from: list[str] = field(default_factory=list)
    """Options that these words come from."""
    json_from: list[str] = field(default_factory=list)
    """Options that the JSON comes from."""
    remarks: list[Remark] = field(default_factory=list)
    """Options without a place here that do not change what is trained, and notes for the user."""
    changes: list[Remark] = field(default_factory=list)
    """Options without a place here that change what is trained: the user has to decide."""
    read: list[Remark] = field(default_factory=list)
    """Options that have no line in the draft, but decided the value of other lines."""
    batch_of_rank: tuple[int, str] | None = None
    """Sequences in a step of each data-parallel rank, and their origin, where the whole batch is not given."""
    files: dict[str, str] = field(default_factory=dict)
    """Further files, such as a chat template: name -> text."""

    def set(self, key: str, value: Any, source: str) -> None:
        self.yaml[key] = (value, source)

    def refers_to_start(self) -> bool:
        """True for an objective that compares with the model that training starts from."""
        name, _ = self.yaml.get("objective.name", ("", ""))
        return issubclass(Objective.CHOICES.get(name, Objective), Referenced)

    def set_json(self, key: str, value: Any) -> None:
        """Set a dotted key of the DeepSpeed JSON."""
        *sections, name = key.split(".")
        level = self.json
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = value

    def remark(self, option: str, value: Any, reason: str) -> None:
        self.remarks.append(Remark(option, value, reason))

    def change(self, option: str, value: Any, reason: str) -> None:
        self.changes.append(Remark(option, value, reason))

    def mentions(self, option: str) -> bool:
        """True if the run says where the option went."""
        origins = [source for _, source in self.yaml.values()] + self.prepare_from + self.json_from
        origins += [one.option for one in (*self.remarks, *self.changes)]
        return any(re.search(rf"\b{re.escape(option)}\b", origin) for origin in origins)

    def is_part(self, option: str, split: object) -> bool:
        """True for records of a slice such as train[:10%], or of several splits, which the user has to decide on."""
        if split is None or re.fullmatch(r"[\w.-]+", str(split)):
            return False
        self.change(option, split, "a part of the records: give `llmtrain prepare --source` a file with it alone")
        return True

    def flag(self, name: str, *values: Any) -> None:
        self.prepare += [name, *map(str, values)]

    def yaml_text(self, heading: str, json_name: str) -> str:
        """The YAML, section by section in the order of the reference, with the origin of each line behind it."""
        lines = [f"# {heading}"]
        for title, remarks in (
            ("TRAINS ANOTHER FUNCTION than the file above, until you have decided on:", self.changes),
            ("Worth knowing; there is nothing to decide:", self.remarks),
            ("Read as well:", self.read),
        ):
            if remarks:
                lines += ["#", f"# {title}", *(f"#   {line}" for one in remarks for line in str(one).splitlines())]
        written = {"deepspeed": (json_name, ", ".join(self.json_from) or "ZeRO 2 by itself"), **self.yaml}
        order = {key: place for place, key in enumerate(schema())}
        open_sections: list[str] = []
        for key in sorted(written, key=lambda key: (order.get(key, len(order)), key)):
            *sections, name = key.split(".")
            common = next(
                (i for i, pair in enumerate(zip(sections, open_sections, strict=False)) if pair[0] != pair[1]),
                min(len(sections), len(open_sections)),
            )
            for depth in range(common, len(sections)):
                lines.append(f"{'  ' * depth}{sections[depth]}:")
            open_sections = sections
            value, source = written[key]
            lines.append(f"{'  ' * len(sections)}{name}: {_value(value)}  # {source}")
        return "\n".join(lines) + "\n"

    def json_text(self) -> str:
        return json.dumps(self.json, indent=2) + "\n"


def _value(value: Any) -> str:
    """A value in a YAML, on its line. JSON is YAML, but for floats without a point."""
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if (
        isinstance(value, str)
        and value.isascii()
        and value.replace("_", "").replace("/", "").replace("-", "").isalnum()
    ):
        return value if not value[0].isdigit() and value.lower() not in _WORDS else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that are no text in a YAML."""


def _short(value: Any) -> str:
    text = word(value) if not isinstance(value, dict) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
