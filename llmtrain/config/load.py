"""Entry point of config/: makes a typed run from a command line and YAMLs, without network, device or torch."""

from __future__ import annotations

import argparse
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from llmtrain.base.choice import Entry
from llmtrain.config import plugins, rules, strict_yaml
from llmtrain.config.deepspeed.join import optimizer_in
from llmtrain.config.deepspeed.keys import KEYS
from llmtrain.config.on_disk import check_on_disk
from llmtrain.config.problems import COMMAND_LINE, Problems, closest, nearest_file, read_text, show, stop
from llmtrain.config.reader import WRONG, members, read
from llmtrain.config.resolve import resolve
from llmtrain.config.run import DataConfig, Run, RunConfig
from llmtrain.config.schema import ENTRIES, choices, schema, sections, subsections
from llmtrain.config.stages import STAGED, StageConfig

_LAUNCHER_FLAGS = ("--local_rank", "--local-rank")
_NO_FIELDS = ("config", "plugin", "plugin-changed")


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A typed run, and the place where the user wrote each dotted key."""

    config: RunConfig
    places: dict[str, str]
    notes: tuple[str, ...] = ()
    """Notes for the user: expanded paths, dropped fields, parts of plugins that the run does not use."""


def load(
    argv: list[str],
    world_size: int,
    world_size_source: str = "WORLD_SIZE",
    *,
    epoch: Callable[[DataConfig], int] | None = None,
) -> Run:
    """`parse` and `resolve` in one.

    Raises: ConfigError.
    """
    parsed = parse(argv)
    return resolve(parsed.config, world_size, world_size_source, places=parsed.places, notes=parsed.notes, epoch=epoch)


def parse(argv: list[str], *, check_paths: bool = True) -> Parsed:
    """Return the typed run of `RUN.yaml ... [--SECTION.FIELD VALUE ...]` (or --config RUN.yaml), without JSON values.

    A later YAML overrides an earlier one value by value, and the command line overrides them all. Without train.run_dir
    the run's folder is named after the last YAML. `check_paths=False` skips the checks of files.

    Raises: ConfigError with every mistake found.
    """
    if "-h" in argv or "--help" in argv:
        from llmtrain.config.help import rules_help, run_parser  # nothing else of a run needs them

        run_parser().print_help()
        print(rules_help())
        raise SystemExit(0)
    configs, words = _split(argv)
    problems = Problems(paths=check_paths)
    tree: dict[str, Any] = {}
    for path in configs:
        _lay(tree, *_read(path), problems)
    _lay(tree, *_typed_words(words, problems), problems)
    optim = tree.get("optim") or {}
    if isinstance(optim, dict) and optim.get("name") is None and (name := optimizer_in(tree.get("deepspeed"))):
        tree["optim"] = {**optim, "name": name}
    config = read(RunConfig, tree, "", problems)
    if config is WRONG:
        raise problems.error()
    config = _from_step_0(config, problems)
    if config.train.run_dir is None:
        config = replace(config, train=replace(config.train, run_dir=f"runs/{Path(configs[-1]).stem}"))
    rules.check_values(config, problems)
    if check_paths:
        rules.refuse(rules.OF_STARTS, config, config, problems)
    if check_paths and not problems.unexpanded:  # a missing path of that kind is one mistake
        check_on_disk(config, problems)
    problems.raise_if_any()
    idle = [
        f"{section}.{name}"
        for section in ENTRIES
        for name in plugins.entries(section)
        if name not in getattr(config, section)
    ]
    unnamed = [f"{key} of a plugin is not used: the run does not enable it (--{key} does)" for key in idle]
    return Parsed(config=config, places=problems.places, notes=(*problems.notes, *unnamed))


def _from_step_0(config: RunConfig, problems: Problems) -> RunConfig:
    """If the first entry of data.stages begins at step 0, move its values into the run's data, batch and schedule."""
    if not config.data.stages or config.data.stages[0].from_step != 0:
        return config
    first, *later = config.data.stages
    at, places = "data.stages[0]", problems.places
    if first.rope is not None:
        rule = "a stage from step 0 cannot change the model's rope_parameters"
        problems.add(f"{at}.rope", first.rope, rule, "write them in model.config")
    staged = {"data": STAGED, "train": ("global_batch", "micro_batch", "accumulation")}
    for section, names in staged.items():
        values = {name: getattr(first.train if section == "train" else first, name) for name in names}
        for name, value in values.items():
            key, inner = f"{section}.{name}", f"{at}.{name}" if section == "data" else f"{at}.{section}.{name}"
            before = getattr(getattr(config, section), name)
            if value is None:
                continue
            if key in places and before not in (None, value):
                rule = f"contradicts {key} = {show(before)} ({places[key]}), which also holds from step 0 on"
                problems.add(inner, value, rule, "remove one of the two")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
            places[key] = places.get(inner, places.get("data.stages", ""))
    if first.schedule is not None:
        if config.schedule != first.schedule and any(key.startswith("schedule.") for key in places):
            rule = f"contradicts schedule.name = {show(config.schedule.name)}, which also holds from step 0 on"
            problems.add(f"{at}.schedule", first.schedule.name, rule, "remove one of the two")
        config = replace(config, schedule=first.schedule)
    moved = {key: places.pop(key) for key in [key for key in places if key.startswith("data.stages[")]}
    for number in range(len(later)):
        before, after = f"data.stages[{number + 1}]", f"data.stages[{number}]"
        places |= {key.replace(before, after, 1): place for key, place in moved.items() if key.startswith(before)}
    return replace(config, data=replace(config.data, stages=later))


def run_words(argv: list[str]) -> list[str]:
    """Return the command line of a run with its YAMLs first, each as --config RUN.yaml.

    Raises: ConfigError: there is no YAML.
    """
    pairs = list(_pairs(argv))
    configs, _ = _split(argv)
    words = [word for path in configs for word in ("--config", path)]
    return [*words, *(word for key, _, own_words in pairs if key != "config" for word in own_words)]


def configs_in(words: Sequence[str]) -> list[str]:
    return [path for flag, path in itertools.pairwise(words) if flag == "--config"]


def plugins_of(argv: list[str]) -> list[str]:
    """Import the plugins that the command line names and return the other words, which may set fields of the plugins.

    Raises: ConfigError.
    """
    plugin_words: list[str] = []
    rest: list[str] = []
    changed, words = False, iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag in (plugins.FLAG, plugins.CHANGED):
            value = value if has_value else next(words, "")
            if flag == plugins.FLAG and value and not value.startswith("--"):
                plugin_words.append(value)
            elif flag == plugins.CHANGED and value == "ok":
                changed = True
            else:
                remedy = "write --plugin FILE.py" if flag == plugins.FLAG else f"write {plugins.CHANGED} ok"
                raise stop(flag, value or None, "needs its value", remedy, COMMAND_LINE)
        else:
            rest.append(word)
    plugins.changed_ok = changed
    if plugin_words or plugins.current:
        from llmtrain.config.plugin_import import use  # most runs have none

        use(plugin_words)
    return rest


def command_words(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the command's own flags and the words of a run: RUN.yaml [--SECTION.FIELD VALUE ...].

    Words after `--` belong to the run.

    Raises: ConfigError: a flag of the command stands after `--`, or a flag before `--` is misspelt.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments, words = parser.parse_known_args(argv[:cut])
    flags = set(re.findall(r"--[a-z][\w-]*", parser.format_help()))
    for word in argv[cut + 1 :]:
        if word.partition("=")[0] in flags and word != "--config":
            rule = f"is a flag of `{parser.prog}`, but all words after -- go to the run"
            raise stop("command line", word, rule, f"write {word} before the --", COMMAND_LINE)
    top_keys = {key.partition(".")[0] for key in schema()}
    for word in words:
        flag = word.partition("=")[0]
        foreign = flag.startswith("--") and flag[2:].partition(".")[0].replace("-", "_") not in {*_NO_FIELDS, *top_keys}
        if foreign and flag not in _LAUNCHER_FLAGS and (near := closest(flag, flags)):
            raise stop("command line", flag, f"is no flag of `{parser.prog}`", f"did you mean {near}?", COMMAND_LINE)
    return arguments, words + argv[cut + 1 :]


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the paths of the YAMLs, and the overrides as (dotted key, text)."""
    pairs = [(key, value) for key, value, _ in _pairs(argv)]
    configs = [value for key, value in pairs if key == "config"]
    if not configs:
        rule = "the run's YAML is missing"
        raise stop("--config", None, rule, "write RUN.yaml, or --config RUN.yaml", COMMAND_LINE)
    return configs, [(key, value) for key, value in pairs if key not in _NO_FIELDS]


def _pairs(argv: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (dotted key, text, words as given) for each flag; a word without dashes counts as --config.

    The flag of a true-or-false field needs no value. The launcher's --local_rank is dropped.
    """
    plugins_of(argv)
    words, not_fields = deque(argv), {*_LAUNCHER_FLAGS, *(f"--{name}" for name in _NO_FIELDS)}
    while words:
        word = words.popleft()
        if word == "--":  # all words here are the run's
            continue
        flag, has_value, value = word.partition("=")
        if not word.startswith("--"):
            if Path(word).is_dir():
                rule = "is a folder, but a run is given by its YAML file"
                raise stop("--config", word, rule, "give the path of a run's YAML", COMMAND_LINE)
            if not word.endswith((".yaml", ".yml")) and not Path(word).is_file():
                raise stop("command line", word, "is not a flag", "write --SECTION.FIELD VALUE", COMMAND_LINE)
            yield "config", word, [word]
            continue
        if (underscored := flag[2:].replace("-", "_")) in schema():  # other tools write --resume-weights-only
            flag = f"--{underscored}"
        taken = [word]
        if not has_value and _is_entry(flag[2:]):
            value = "true"
        elif not has_value:
            following = words[0] if words else None
            if following is not None and not following.startswith("--"):
                value = words.popleft()
                taken.append(value)
            elif schema().get(flag[2:]) is bool or not (flag in not_fields or _field_of(flag[2:])[0]):
                value = "true"  # also of an unknown flag, which is the mistake
            else:
                raise stop(flag, following, "needs a value", f"write {flag} VALUE", COMMAND_LINE)
        if flag not in _LAUNCHER_FLAGS:
            yield flag[2:], value, taken


def _is_entry(key: str) -> bool:
    """Return True for an entry of `parts`, `trackers` or `metrics`: `--parts.count` alone takes its defaults."""
    section, _, name = key.partition(".")
    return section in ENTRIES and name in Entry.SECTIONS.get(section, {})


def _lay(below: dict[str, Any], above: dict[str, Any], places: dict[str, str], problems: Problems) -> None:
    """Merge the layer `above` into `below`, in place. `places`: where the user wrote each key of `above`.

    Maps are merged, any other value replaces the one below, and an empty section changes nothing. If `above` selects
    another choice for a section, the fields of the choice in `below` are dropped with a note.
    """
    for section, base in choices().items():
        old, new = (layer.get(section) for layer in (below, above))
        chosen = new.get(base.SELECTOR) if isinstance(new, dict) else None
        if not (isinstance(old, dict) and isinstance(chosen, str) and chosen in base.CHOICES):
            continue
        for field in [field for field in old if base.owners(field) and field not in base.CHOICES[chosen].own()]:
            key, value = f"{section}.{field}", old.pop(field)
            place = problems.places.pop(key, "the YAML")
            if value is not None and field not in (new or {}):
                problems.notes.append(
                    f"{key} = {show(value)} ({place}) is dropped: {section}.{base.SELECTOR} {chosen} has no such field"
                )
    _merge(below, above, places, problems)
    problems.places |= places


def _merge(
    below: dict[str, Any], above: dict[str, Any], places: dict[str, str], problems: Problems, prefix: str = ""
) -> None:
    maps, typed = {*sections(), *subsections(), *ENTRIES}, COMMAND_LINE in places.values()
    for name, value in above.items():
        key, under = f"{prefix}{name}", below.get(name)
        if isinstance(under, dict) and isinstance(value, dict):
            _merge(under, value, places, problems, f"{key}.")
        elif isinstance(value, dict) and under is not None and (typed or key in maps):
            places.pop(key, None)  # the value below stays, and the reader reports it
            if key == "model.config" and isinstance(under, str):
                remedy = "write all fields below model.config in a YAML"
                problems.add(key, under, "is a path to a file, and a flag cannot change a field in it", remedy)
        elif not (isinstance(under, dict) and value is None and key in maps):
            below[name] = value
            for inner in [place_key for place_key in problems.places if place_key.startswith(f"{key}.")]:
                del problems.places[inner]


def _read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    def no_file() -> tuple[str, str]:
        near = nearest_file(Path(path), "*.yaml", "*.yml")
        remedy = f"did you mean {near}?" if near else "give the path of a run's YAML; `llmtrain init DIR` writes some"
        return f"no such file (looked from {Path.cwd()})", remedy

    text = read_text("--config", path, "a run's YAML", no_file)
    document = strict_yaml.parse(text, path)
    tree = {} if document.tree is None else document.tree
    if not isinstance(tree, dict):
        raise stop("--config", show(tree), "a run is a map of sections", "write `deepspeed: ...`, `model: ...`", path)
    if tree and (tree.keys() <= KEYS.keys() or (path.endswith(".json") and tree.keys() & KEYS.keys())):
        rule = "looks like a DeepSpeed JSON, and not like a run's YAML"
        raise stop("--config", path, rule, f"give the run's YAML first: RUN.yaml --deepspeed {path}")
    return tree, {key: f"{path}, line {line}" for key, line in document.lines.items()}


def _typed_words(words: list[tuple[str, str]], problems: Problems) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the overrides of the command line as a tree, and the place of each of its keys."""
    layer: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, text in words:
        if _is_entry(key) and text == "true":
            section, name = key.split(".")
            layer.setdefault(section, {}).setdefault(name, {})
            continue
        field, kind = _field_of(key)
        if field is None:
            from llmtrain.config import answers

            answers.unknown_flag(key, text, problems)
            continue
        *holders, last = [*field.split("."), *([key[len(field) + 1 :]] if key != field else [])]
        if field == "model.config" and key != field:
            *holders, last = key.split(".")
        node: Any = layer
        for holder in holders:
            node = node.setdefault(holder, {})
            if not isinstance(node, dict):
                reason = f"{holder} is {show(node)}, not a map with fields to override"
                problems.add(f"--{key}", text, reason, "give one of the two", COMMAND_LINE)
                break
        else:
            node[last] = _value_of(key, kind, text)
            places[key] = COMMAND_LINE
    return layer, places


def _field_of(key: str) -> tuple[str | None, Any]:
    """Return the field that a flag sets (the map if it names an entry of one) and the value's type; None: unknown."""
    if key in schema():
        return key, schema()[key]
    for field, kind in schema().items():
        if key.startswith(f"{field}.") and field not in ENTRIES:
            for member in members(kind):
                if get_origin(member) is dict:
                    return field, get_args(member)[1]
            if get_origin(kind) is list and get_args(kind)[0] is StageConfig:
                return None, None
    return None, None


def _value_of(key: str, kind: Any, text: str) -> Any:
    """Parse a word of the command line as YAML for a value of this type."""
    kinds = list(members(kind))
    if text.lower() == "null" and (
        type(None) in kinds or key.partition(".")[0] in choices()
    ):  # the default of a choice
        return None
    nested = any(get_origin(member) in (list, tuple, dict) for member in kinds)
    if Any in kinds or (nested and (text[:1] in ("[", "{") or str not in kinds)):
        return strict_yaml.parse(text, f"{COMMAND_LINE}, --{key}").tree
    return text
