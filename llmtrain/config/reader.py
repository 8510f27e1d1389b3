"""`read` makes typed values from plain data by type hints."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llmtrain.base.choice import HOST_PATH, Choice, Classes, Entry, default_of
from llmtrain.base.redact import holds_secret, redact_text
from llmtrain.config import strict_yaml
from llmtrain.config.problems import Problems, remedy_of, show
from llmtrain.config.schema import ENTRIES, default_choice
from llmtrain.config.stages import Batch, DataConfig, Stages, data_of, stages_of
from llmtrain.optim.schedules import Schedule

WRONG: Any = object()
"""Result of `read` for a wrong value, whose mistake is in the problems."""

_CODE = {
    "auto_map": "it names Python code to import",
    "class_path": "it names Python code to import",
    "init_args": "it goes with a class_path, which names Python code to import",
    "custom_pipelines": "it names Python code to import",
    "trust_remote_code": "no code is loaded from model folders",
    "quantization_config": "training of quantized models is not supported",
    "attn_implementation": "attention is chosen with model.attention",
}
"""Forbidden key of a map of plain data -> reason."""

_MOST_COUNTED = 10**15
"""Upper limit of counted steps, tokens or sequences, whose products fit into 64 bits."""
_FREE_TEXT = "train.sample_prompt"
"""The field whose text may be empty or have line breaks."""


def read_saved(cls: type[Any], saved: Mapping[str, Any]) -> Any:
    """Return an object of `cls` from what a run has saved. Fields that this version does not know are left out.

    Raises: ConfigError.
    """
    problems = Problems(saved=True)
    made = read(cls, dict(saved), "", problems)
    problems.raise_if_any()
    return made


def saved_stages(run: Mapping[str, Any]) -> Stages:
    """Return the stages of a run from the configuration in a checkpoint.

    Raises: KeyError, TypeError, ConfigError: another version of llmtrain has written it.
    """
    data = read_saved(DataConfig, run["data"])
    counts = [run["train"]["global_batch"], *(stage.train.global_batch for stage in data.stages)]
    batches = [
        Batch(
            global_batch=count, micro_batch=count, accumulation=1, data_parallel=1, sequence_length=each.sequence_length
        )
        for count, each in zip(counts, data_of(data), strict=True)
    ]
    return stages_of(data, read_saved(Schedule, run["schedule"]), batches)


def read(kind: Any, value: Any, key: str, problems: Problems) -> Any:
    """Return the value as the type `kind`, or WRONG.

    Args:
        kind: a type hint: dataclasses, choices, lists, tuples, maps, literals, numbers, text, and unions of these.
        value: plain data, as YAML and JSON have it.
    """
    kinds = list(members(kind))
    if value is None and type(None) in kinds:
        return None
    is_path = any(HOST_PATH in getattr(each, "__metadata__", ()) for each in _annotated(kind))
    if is_path and isinstance(value, str) and re.fullmatch(r"\[.*\]", value) and not os.path.exists(value):
        value = strict_yaml.parse(value, key).tree  # a list, as the YAML would have it without quotes
    for each in kinds:
        if is_section(each) and (isinstance(value, dict) or len(kinds) == 1):
            return _section(each, value, key, problems)
        origin = get_origin(each)
        if origin is dict and isinstance(value, dict):
            return _map(get_args(each)[1], get_args(each)[0], value, key, problems)
        if origin in (list, tuple) and isinstance(value, (list, tuple)):
            return _list(each, value, key, problems)
    if value is None and any(get_origin(each) is list and is_section(get_args(each)[0]) for each in kinds):
        return []
    made = _scalar(kinds, value)
    if made is WRONG:
        _refuse_type(kind, key, value, problems)
    elif isinstance(made, str) and is_path:
        path = host_path(key, made, problems)
        of_lines = problems.paths and any(get_origin(each) is list for each in kinds)
        return _lines(key, path, problems) if of_lines else path
    return made


def _lines(key: str, path: str, problems: Problems) -> list[str]:
    """Return the non-empty lines of a file that the user gave in place of a list."""
    lines: list[str] = []
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            problems.add(key, path, "has no line with text", "write an entry on each line")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        remedy = 'give the path of a file with an entry on each line, or a list: ["..."]'
        problems.add(key, path, f"cannot be read: {reason} (looked from {Path.cwd()})", remedy)
    return lines


def _refuse_type(kind: Any, key: str, value: Any, problems: Problems) -> None:
    from llmtrain.config import answers  # most runs make no mistake

    problems.add(key, value, *answers.of_type(kind, key, value))


def _refuse_unknown(cls: type[Any], key: str, value: Any, problems: Problems) -> None:
    from llmtrain.config import answers

    answers.unknown(cls, key, value, problems)


def members(kind: Any) -> Iterator[Any]:
    """Yield the types of a union without their annotations, or the type itself if it is no union."""
    for each in _annotated(kind):
        yield get_args(each)[0] if get_origin(each) is Annotated else each


def _annotated(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_section(kind: Any) -> bool:
    """Return True for a class that YAML writes as a map of its fields."""
    return isinstance(kind, type) and is_dataclass(kind)


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def _of_text(kinds: list[Any], text: str) -> Any:
    """Return the bool or number that a text stands for, such as on, 3e-4 or 10M."""
    if bool in kinds and text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    number = strict_yaml.plain_scalar(text[:-1]) if int in kinds and text[-1:].lower() in _UNITS else None
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        return _scalar(kinds, round(number * _UNITS[text[-1].lower()], 6))
    meant = strict_yaml.plain_scalar(text)
    return WRONG if meant is None or isinstance(meant, str) else _scalar(kinds, meant)


def _scalar(kinds: list[Any], value: Any) -> Any:
    if Any in kinds:
        return value
    literals = [arg for each in kinds if get_origin(each) is Literal for arg in get_args(each)]
    if isinstance(value, str) and (value in literals or str in kinds):
        return value
    if isinstance(value, str):  # in quotes, or of the command line
        return _of_text(kinds, value)
    if isinstance(value, bool):
        return value if bool in kinds else WRONG
    if type(value) in kinds:
        return value
    if isinstance(value, float) and int in kinds and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return float(value) if isinstance(value, int) and float in kinds else WRONG


def _list(kind: Any, value: list[Any] | tuple[Any, ...], key: str, problems: Problems) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if is_section(args[0]):
        made = [read(args[0], one, f"{key}[{at}]", problems) for at, one in enumerate(value)]
        return WRONG if any(one is WRONG for one in made) else made
    kinds = args if origin is tuple and args[-1] is not ... else args[:1] * len(value)
    found = [_scalar(list(members(each)), one) for each, one in zip(kinds, value, strict=False)]
    if len(kinds) != len(value) or any(one is WRONG for one in found):
        _refuse_type(kind, key, value, problems)
        return WRONG
    return origin(found)


def _map(kind: Any, names: Any, given: dict[str, Any], key: str, problems: Problems) -> Any:
    """Read a map whose keys the user chooses."""
    if kind is Any:
        _refuse_code(given, key, problems)
        return given
    made: dict[str, Any] = {}
    for name, value in given.items():
        meant = name
        if HOST_PATH in getattr(names, "__metadata__", ()):
            meant = host_path(f"{key}.{name}", name, problems)
            if meant != name and meant in given:
                problems.add(f"{key}.{name}", name, f"is the same as {meant}, which is given too", "keep one of them")
            problems.places.setdefault(f"{key}.{meant}", problems.places.get(f"{key}.{name}", "the YAML"))
        made[meant] = read(kind, value, f"{key}.{name}", problems)
    return WRONG if any(value is WRONG for value in made.values()) else made


def _refuse_code(tree: dict[str, Any], prefix: str, problems: Problems) -> None:
    """Report keys in a model's config that make transformers import code or change the precision."""
    for name, value in tree.items():
        why = _CODE.get(name) or ("names with _ are internal to transformers" if name.startswith("_") else None)
        if why:
            problems.add(f"{prefix}.{name}", value, f"not allowed: {why}", "remove it")
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _refuse_code(inner, f"{prefix}.{name}", problems)


def _section(cls: type[Any], given: Any, key: str, problems: Problems) -> Any:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        from llmtrain.config import answers

        problems.add(key, given, *answers.of_section(cls, given))
        return WRONG
    is_choice = issubclass(cls, Choice)
    if is_choice and cls not in cls.CHOICES.values():
        cls, given = _chosen(cls, given, key, problems)
    hints, made = get_type_hints(cls, include_extras=True), {}
    known = {item.name: item for item in fields(cls) if item.init}
    for name, value in given.items():
        at = f"{key}.{name}" if key else name
        item = known.get(name)
        if item is None:
            if not problems.saved:
                _refuse_unknown(cls, at, value, problems)
                made[name] = WRONG
        elif name in ENTRIES and not key:
            made[name] = _entries(name, value, problems)
        elif value is None and is_choice:
            problems.places.pop(at, None)  # null is the default
            if not problems.saved and (default := default_of(item)) is not None:
                first = "the DeepSpeed JSON's value, or " if "json" in item.metadata else ""
                problems.notes.append(f"{at}: null asks for {first}the default {show(default)}")
        else:
            made[name] = read_field(item, hints[name], value, at, problems)
    for name, item in known.items():
        if name not in made and item.default is MISSING and item.default_factory is MISSING:
            at = f"{key}.{name}" if key else name
            problems.add(at, None, "is required", item.metadata.get("remedy") or remedy_of(at))
            made[name] = WRONG
    if any(value is WRONG for value in made.values()):
        return WRONG
    try:
        return cls(**made)
    except (TypeError, ValueError) as error:  # of a plugin's __post_init__
        problems.add(key, given, f"class {cls.__name__} refuses it: {error}", "correct its fields")
        return WRONG


def _entries(section: str, given: Any, problems: Problems) -> Any:
    known, made = Entry.SECTIONS.get(section, Classes()), dict[str, Any]()
    if not isinstance(given, dict) and given is not None:
        problems.add(section, given, "is a section", "write `NAME: {FIELD: VALUE}` below it")
        return WRONG
    for name, values in (given or {}).items():
        key = f"{section}.{name}"
        if name in known:
            made[name] = _section(known[name], values, key, problems)
        else:
            _refuse_unknown(Entry, key, values, problems)
            made[name] = WRONG
    return WRONG if any(value is WRONG for value in made.values()) else made


def _chosen(
    base: type[Choice], given: dict[str, Any], key: str, problems: Problems
) -> tuple[type[Any], dict[str, Any]]:
    """Return the class that the section's `name` selects, and the section's other fields."""
    selector = base.SELECTOR
    at = f"{key}.{selector}".lstrip(".")
    given, name = {field: value for field, value in given.items() if field != selector}, given.get(selector)
    known = name is None or (isinstance(name, str) and name in base.CHOICES)
    if not known:
        _refuse_type(Literal[tuple(base.CHOICES)], at, name, problems)
    cls = base.CHOICES[name if known and name is not None else default_choice(base.SECTION)]
    for field in [field for field in given if field not in cls.own() and base.owners(field)]:
        value = given.pop(field)
        meant = strict_yaml.plain_scalar(value) if isinstance(value, str) else value
        if known and meant is not None and not problems.saved:
            problems.add(f"{key}.{field}", meant, *base.refusal(field))
    return cls, given


def read_field(item: Field[Any], kind: Any, value: Any, key: str, problems: Problems) -> Any:
    made = read(kind, value, key, problems)
    if made is not WRONG and not problems.saved:
        _check(item, made, key, problems)
    return made


def _check(item: Field[Any], value: Any, key: str, problems: Problems) -> None:
    """Report a broken bound, an infinite number or an empty text."""
    bound, remedy = item.metadata.get("bound"), item.metadata.get("remedy", "correct the number")
    if isinstance(value, dict):
        for name, each in value.items():
            if bound is not None and not (math.isfinite(each) and bound.holds(each)):
                problems.add(f"{key}.{name}", each, f"must be {bound.words}", remedy)
        return
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        problems.add(key, value, "must be a finite number", "correct the number")
    elif isinstance(value, str):
        _check_text(value, key, problems)
    elif bound is not None and value is not None and not bound.holds(value):
        must = ("both must be" if len(value) == 2 else "each must be") if isinstance(value, tuple) else "must be"
        problems.add(key, value, f"{must} {bound.words}", remedy)
    elif type(value) is int and value > _MOST_COUNTED and not key.endswith(".seed"):
        problems.add(key, value, f"must be at most {_MOST_COUNTED:.0e}", "correct the number")


def _check_text(value: str, key: str, problems: Problems) -> None:
    if key == _FREE_TEXT:
        return
    section, name, *_ = *key.split("."), ""
    if value == "~":
        problems.add(
            key, value, "is a text because of its quotes; without them ~ is YAML's other word for null", "write null"
        )
    elif not value.strip():
        problems.add(key, value, "is empty", remedy_of(key))
    elif not value.isprintable():
        problems.add(key, value, "has control characters, which can change the terminal", "leave them out")
    elif section in Entry.SECTIONS and holds_secret(value):
        entry = Entry.SECTIONS[section].get(name, Entry)
        reason = "has a secret, which config.yaml and each checkpoint would keep"
        problems.add(key, redact_text(value), reason, f"leave it to {entry.OF_SECRETS}")


def host_path(key: str, path: str, problems: Problems) -> str:
    """Expand `~` and `$NAME` in a path as a shell does. A path that exists as written is not changed."""
    if re.match(r"[“”‘’„]|[A-Za-z]:\\", path) and not problems.saved and not os.path.exists(path):
        problems.unexpanded, straight = True, path.strip("“”‘’„")
        quotes = (
            "is in typographic quotes, which YAML takes as a part of the path",
            f'write "{straight}", in straight quotes',
        )
        other = "is a path of Windows", "write a path of this machine, with slashes"
        problems.add(key, path, *(quotes if straight != path else other))
        return path
    if problems.saved or not re.search(r"^~|\$(\w|\{)", path) or os.path.exists(path):
        return path
    meant = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"^~\w*|\$\w+|\$\{[^}]*\}?", meant):
        if problems.paths:
            problems.unexpanded = True
            remedy = "set the variable for every rank (llmtrain launch --env-file does), or write the path out"
            problems.add(key, path, f"the variable {unset[0]} is not set here", remedy)
        return path
    problems.notes.append(f"{key}: {path} is {meant} here")
    return meant
