"""YAML without its traps: plain scalars, maps and lists only.

PyYAML keeps the last of two equal keys, reads `3e-4` as a string, `off` as false and `1:30` as 90, and builds Python
objects for tags. Here a duplicate key, a tag, an anchor or an alias is an error with its line number, and scalars mean
what YAML 1.2 says (`off` is text, which a field of true or false takes for false). The reader works on parser events:
no constructor is ever looked up.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from llmtrain.base.errors import ConfigError
from llmtrain.config.problems import stop

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,40}")  # longer ones become floats: int() refuses 4,300 digits
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_MAX_DEPTH = 20


@dataclass
class Document:
    """A parsed YAML file: its tree, and the line (from 1) of each dotted key."""

    tree: Any
    lines: dict[str, int] = field(default_factory=dict)


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: None, a bool, int, float (also 3e-4) or the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if text.lower().lstrip("+-") in (".inf", ".nan"):
        return float(text.replace(".", "", 1))
    return text


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.lines: dict[str, int] = {}
        self.events = iter(yaml.parse(text, Loader=_LOADER))

    def fail(self, event: Any, key: str, value: Any, rule: str, remedy: str) -> Exception:
        return stop(key or "YAML", value, rule, remedy, f"{self.name}, line {event.start_mark.line + 1}")

    def refuse_extras(self, event: Any, key: str) -> None:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            remedy = "write the value out where it is used"
            raise self.fail(event, key, f"&/*{event.anchor}", "no anchors and aliases", remedy)
        if getattr(event, "tag", None) not in (None, "!"):
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self.fail(event, key, tag, "no tags: a run is plain data", "remove the tag and write the plain value")

    def node(self, event: Any, key: str, depth: int) -> Any:
        self.refuse_extras(event, key)
        if depth > _MAX_DEPTH:
            raise self.fail(event, key, "...", f"nested deeper than {_MAX_DEPTH}", "flatten it")
        if isinstance(event, yaml.ScalarEvent):
            # Plain style is None from the Python parser and "" from libyaml.
            return event.value if event.style else plain_scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            for child in self.events:
                if isinstance(child, yaml.SequenceEndEvent):
                    return items
                items.append(self.node(child, f"{key}[{len(items)}]", depth + 1))
        return self.mapping(key, depth)

    def mapping(self, key: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            self.refuse_extras(event, key)
            if not isinstance(event, yaml.ScalarEvent):
                raise self.fail(event, key, "[...]: ", "a key is one word", "write `key: value`")
            name, line = event.value, event.start_mark.line + 1
            dotted = f"{key}.{name}" if key else name
            if name == "<<" and not event.style:
                raise self.fail(event, dotted, "<<", "no merge keys", "write the keys of the other map out here")
            value = self.node(next(self.events), dotted, depth + 1)
            if name in result:
                rule = f"duplicate key: it is on line {first_line[name]} too, with {result[name]!r}"
                raise self.fail(event, dotted, value, rule, "keep one of the two lines")
            result[name], first_line[name] = value, line
            self.lines[dotted] = line
        return result


def parse(text: str, name: str) -> Document:
    """Parse one YAML document. `name`: the file's name for messages.

    Raises: ConfigError for broken YAML, duplicate keys, tags, anchors and several documents.
    """
    reader = _Reader(text, name)
    tree: Any = None
    documents = 0
    try:
        for event in reader.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise reader.fail(event, "YAML", "---", "one document in a file", "remove the second document")
            elif not isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                tree = reader.node(event, "", 0)
    except yaml.YAMLError as error:
        raise _broken(error, text, name) from None
    return Document(tree=tree, lines=reader.lines)


def _broken(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    """Return PyYAML's error with its line; an error at the end of the file gets the last line."""
    mark = getattr(error, "problem_mark", None)
    lines = text.rstrip().splitlines() or [""]
    number = min(mark.line + 1 if mark else len(lines), len(lines))
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    line = lines[number - 1]
    opened = getattr(error, "context_mark", None)
    if re.search("escape|hexdecimal", what):
        rule = "not valid YAML: a backslash in double quotes begins an escape"
        return stop("YAML", line.strip(), rule, "write single quotes, or slashes in a path", f"{name}, line {number}")
    if opened is not None and "quoted scalar" in str(getattr(error, "context", "")):
        rule = "not valid YAML: the quote that begins here has no end"
        place = f"{name}, line {opened.line + 1}"
        return stop("YAML", lines[opened.line].strip(), rule, "close the quote on this line", place)
    before = max((at for at in range(number - 1) if lines[at].strip()), default=0)
    bare = re.fullmatch(r"(\s*)([A-Za-z_]\w*)(?: +|:)([^\s:#][^:]*)", lines[before])
    if bare and "mapping values" in what:
        rule = "not valid YAML: a key has a colon and a blank behind it"
        place = f"{name}, line {before + 1}"
        return stop("YAML", lines[before].strip(), rule, f"write `{bare[2]}: {bare[3]}`", place)
    if "\t" in line[: len(line) - len(line.lstrip())]:
        rule = "not valid YAML: a tab in the indentation"
        return stop("YAML", line.replace("\t", "\\t"), rule, "indent with blanks", f"{name}, line {number}")
    remedy = "look at the indentation, colons and quotes on this line and the one above"
    return stop("YAML", lines[number - 1].strip(), f"not valid YAML: {what}", remedy, f"{name}, line {number}")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the reader refuses anchors


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML leaves `1e-3` unquoted, as YAML 1.1 has it for a string; our reader would make a number of it.
    # A character that YAML takes for a line break (U+0085) survives in double quotes only.
    style = None if value.isprintable() and isinstance(plain_scalar(value), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(list(value)))


def dump(run: RunConfig | dict[str, Any]) -> str:
    """Return a run as YAML with every field, in the order of the schema; a dict is written as it is."""
    tree = run if isinstance(run, dict) else asdict(run)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
