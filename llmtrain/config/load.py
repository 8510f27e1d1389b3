"""Command line and YAML to a typed run. Touches no network, no device, and imports no torch.

jsonargparse does the typing. It only ever sees keys that are fields of the schema, with plain values: it
imports a `class_path` before it checks it, so everything else is refused here first: also in the inline `model.config`,
fields of a Hugging Face config.json as plain data without the keys by which transformers would load code or another
precision.

A key, a flag or a value that does not exist is answered by the tables of docs/migrate.md first, which say what the
names of other stacks are here, then by our own names. A name that is like none is answered by no guess: a wrong one
costs more than none.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from llmtrain.base import untrusted
from llmtrain.base.choice import Choice, Entry
from llmtrain.config import plugins, rules, strict_yaml
from llmtrain.config.deepspeed.join import SHARED, optimizer_in
from llmtrain.config.deepspeed.keys import KEYS
from llmtrain.config.problems import Problems, Within, closest, show, stop
from llmtrain.config.resolve import resolve
from llmtrain.config.run import DataConfig, ResolvedRun, RunConfig
from llmtrain.config.schema import choices, default_choice, help_text, schema, sections, subsections, type_name
from llmtrain.config.stages import StageBatch, StageConfig

_PAGE = Path(__file__).parents[1] / "commands/shipped/docs/migrate.md"
_OWNERS = {"transformers": "transformers", "trl": "TRL", "peft": "PEFT", "llamafactory": "LLaMA-Factory"}
_RENAMED = {"model.keep_attention": "model.recompute.keep: attention"}
"""Fields that have moved -> what stands for them now."""
_NO_CONFIGURATION = "transformers.cli.chat.Chat"


def rows(text: str) -> Iterator[tuple[list[str], str]]:
    """(their names, our answer) of each line of a table."""
    for line in re.findall(r"^\| (`.*) \|$", text, re.M):
        theirs, ours = line.split(" | ")
        yield re.findall(r"`([\w.]+)`", theirs), ours


def tables(page: str) -> Iterator[tuple[list[str], str, str]]:
    """(the classes whose options they are, such as trl.SFTConfig, an option, our answer), in the page's order."""
    for classes, text in re.findall(r"<!-- options: (.*?) -->\n(.*?)(?=\n## |\Z)", page, re.S):
        for theirs, ours in rows(text):
            for name in theirs:
                yield classes.split(), name, ours


@functools.cache
def _elsewhere() -> dict[str, tuple[str, str]]:
    """Name -> (who calls something so, what it is here); of several answers the page's first."""
    found: dict[str, tuple[str, str]] = {}
    for classes, name, ours in tables(_PAGE.read_text(encoding="utf-8")):
        if _NO_CONFIGURATION not in classes:
            owner = classes[0].partition(".")[0]
            found.setdefault(name, (_OWNERS.get(owner, owner), ours))
    return found


def unknown_key(key: str, value: Any, place: str | None, problems: Problems, *, flag: bool = False) -> None:
    """Add the mistake. `flag`: it stands on the command line."""
    rule, remedy = _answer(key, value, "--" if flag else "")
    problems.add(f"--{key}" if flag else key, value, rule, remedy, place)


def _answer(key: str, value: Any, dashes: str) -> tuple[str, str]:
    """Rule and remedy."""
    rule = "there is no such field"
    if key in _RENAMED:
        return f"{rule} any more", f"write {_RENAMED[key]}"
    known, (section, _, name) = schema(), key.rpartition(".")
    sections = {k.partition(".")[0] for k in known if "." in k}
    if key in sections:
        return f"{key} is a section", _its_fields(key, value, dashes)
    elsewhere = _elsewhere()
    homes = [k for k in known if k.rpartition(".")[2] == name]
    for asked in (key, name, key.replace("-", "_"), name.replace("-", "_")):
        if asked in elsewhere and (_lead(elsewhere[asked][1]) or len(homes) != 1):
            owner, ours = elsewhere[asked]
            rule += "" if owner == "others" else f"; {owner} has it (migrate.md)"
            return rule, _here(ours, dashes)
    if len(homes) == 1:
        return rule, f"did you mean {dashes}{homes[0]}?"
    if homes:
        return rule, f"did you mean one of {', '.join(dashes + home for home in homes)}?"
    if shared := {theirs: ours for ours, theirs in SHARED.items()}.get(name):
        return rule, f"did you mean {dashes}{shared}?"
    if name in KEYS:
        return rule, "the DeepSpeed JSON decides this: write it there"
    if near := _like(section, name, [*known, *(sections if not section else ())]):
        return rule, f"did you mean {dashes}{near}?"
    if near := closest(name, elsewhere):
        return rule, _here(elsewhere[near][1], dashes)
    return rule, "remove it; `llmtrain train --help` lists every field"


def _like(section: str, name: str, known: list[str]) -> str | None:
    """By names without their sections first: `train.` alone would make any field of train look like any other."""
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    if near := closest(name, beside):
        return beside[near]
    everywhere: dict[str, str | None] = {}
    for each in known:
        last = each.rpartition(".")[2]
        everywhere[last] = None if last in everywhere else each  # of one name in two sections neither is meant
    near = closest(name, everywhere)
    if near and everywhere[near]:
        return everywhere[near]
    return closest(f"{section}.{name}" if section else name, known)


def _here(ours: str, dashes: str) -> str:
    """The page's answer as a remedy."""
    if lead := _lead(ours):
        rest = ours.removeprefix(f"`{lead}`").strip(" :,;")
        return f"did you mean {dashes}{lead}?" + (f" ({rest})" if rest else "")
    if ours.startswith("JSON "):
        return f"the DeepSpeed JSON decides this: {ours.removeprefix('JSON ')}"
    return f"remove it: {ours}" if ours.startswith(("not here", "always")) else f"here: {ours}"


def _lead(ours: str) -> str | None:
    """The field that the page's answer begins with."""
    lead = re.match(r"`([\w.]+)`", ours)
    return lead[1] if lead and lead[1] in schema() else None


def _its_fields(section: str, value: Any, dashes: str) -> str:
    """Return the remedy for a section that was given as one value: its fields one by one, with the values of a map."""
    known = [key for key in schema() if key.startswith(f"{section}.")]
    given = value if isinstance(value, dict) else _map_of(value)
    if given and all(f"{section}.{name}" in known for name in given):
        words = " ".join(f"{dashes}{section}.{name} {_word(each)}" for name, each in given.items())
        return f"write its fields one by one: {words}"
    return f"write its fields one by one, such as {dashes}{known[0]}"


def _map_of(text: Any) -> dict[str, Any]:
    try:
        found = untrusted.loads(str(text).encode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_method(value: Any) -> str | None:
    """Return migrate.md's answer for a training method that llmtrain lacks, such as grpo; None: it has no answer."""
    known = _elsewhere().get(str(value).lower())
    return None if known is None or known[0] != "others" else known[1]


_REFUSED: dict[str, str] = {
    "auto_map": "it names Python code to import",
    "class_path": "it names Python code to import",
    "init_args": "it belongs to a class_path",
    "custom_pipelines": "it names Python code to import",
    "trust_remote_code": "no code is loaded from model folders",
    "quantization_config": "training of quantized models is not supported",
    "attn_implementation": "attention is chosen with model.attention",
}
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]*")


def _check_model_tree(tree: dict[str, Any], problems: Problems) -> None:
    """Report everything in the tree that is not plain data, and a missing or odd model_type."""
    _check_map(tree, "model.config", problems)
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        problems.add(
            "model.config.model_type", model_type, "a Hugging Face model type is required, such as llama or qwen3",
            "write `model_type: llama` under model.config",
            problems.places.get("model.config.model_type", problems.places.get("model.config")),
        )  # fmt: skip


def _check_map(tree: dict[str, Any], prefix: str, problems: Problems) -> None:
    for key, value in tree.items():
        dotted = f"{prefix}.{key}"
        why = _REFUSED.get(key) or ("names with _ are internal to transformers" if key.startswith("_") else None)
        if why:
            problems.add(dotted, value, f"not allowed: {why}", "remove it")
        elif isinstance(value, dict):
            _check_map(value, dotted, problems)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _check_map(item, dotted, problems)


COMMAND_LINE = "command line"
_LAUNCHER_FLAGS = ("--local_rank", "--local-rank")
_NO_FIELDS = ("config", "plugin", "plugin-changed")
_MAPS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "data.mixture": ((int, float), "FOLDER: WEIGHT", "a weight is a number"),
    "eval.sets": (str, "NAME: FOLDER", "a set is the path of a prepared folder"),
    "eval.choices": (str, "NAME: FOLDER", "a set is the path of a prepared folder"),
    "eval.sequences": (int, "NAME: SEQUENCES", "a number of sequences is a whole number"),
    "optim.weight_decay_of": ((int, float), "PATTERN: WEIGHT DECAY", "a weight decay is a number"),
    "optim.lr_factor_of": ((int, float), "PATTERN: FACTOR", "a factor is a number"),
    "eval.mean": ((int, float), "NAME: WEIGHT", "a weight is a number"),
}
"""Maps whose keys are the user's own: type of a value, form of a line, rule of a value."""
_STAGES = "data.stages"
_WITH_DOTS = ("data.mixture", "optim.weight_decay_of", "optim.lr_factor_of")
_FREE_KEYS = ("model.config", _STAGES, *_MAPS)

FORMERLY = {
    "schedule": {"warmup_steps", "decay_steps", "min_ratio"},
    "optim": {"lr", "muon_lr", "muon_momentum", "betas", "eps", "weight_decay", "decay", "clip_norm"},
    "sites": {"sync_every", "pace", "outer_lr", "outer_momentum", "fragments", "overlap_steps", "meet_every"},
    "objective": {"beta", "smoothing", "gamma", "alpha", "desirable_weight", "undesirable_weight", "reference"},
}
"""Section -> the fields that llmtrain wrote into each config.yaml until November 2026, whichever choice was made."""

_REMOVED = {("sites", "mean"): "weighted", ("model", "keep_attention"): False}
"""Fields that are gone, and the default that llmtrain wrote of them into each config.yaml: such a file still loads."""
ENTRIES = ("parts", "trackers", "metrics")
"""Sections whose entries are classes of plugins, by name."""
_MOST_BRACKETS = 1_000
"""In one value: jsonargparse reads text as YAML, by a recursion in C that overflows the stack at some 20,000."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A typed run, and for each dotted key where the user wrote it."""

    run: RunConfig
    places: dict[str, str]
    notes: tuple[str, ...] = ()
    """Paths that were written with `~` or `$NAME`, and what they are here."""


def load(
    argv: list[str],
    world_size: int,
    world_size_source: str = "WORLD_SIZE",
    *,
    epoch: Callable[[DataConfig], int] | None = None,
) -> ResolvedRun:
    """`parse` and `resolve` in one: what the training process calls.

    Raises: ConfigError.
    """
    parsed = parse(argv)
    return resolve(parsed.run, world_size, world_size_source, places=parsed.places, notes=parsed.notes,
                   epoch=epoch)  # fmt: skip


def parse(argv: list[str], *, check_paths: bool = True) -> Parsed:
    """The typed run of `RUN.yaml ... [--SECTION.FIELD VALUE ...]` (or --config RUN.yaml), not yet joined with the JSON.

    Of several YAMLs the later wins, value by value; the last one names the run's folder where none of them does.
    `--help` prints every field and exits. `check_paths=False` leaves out what is on disk, except the YAML.

    Raises: ConfigError with every mistake found.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text())
        raise SystemExit(0)
    configs, overrides = _split(argv)
    tree, places = _layers(configs)
    for (section, field), default in _REMOVED.items():
        if isinstance(given := tree.get(section), dict) and given.get(field) == default:
            del given[field]
    problems = Problems(places)
    places = problems.places
    for key, text in overrides:
        _override(tree, places, key, text, problems)
    later = _take_stages(tree, problems)
    notes, all_expanded = rules.expand_paths(tree, problems if check_paths else Problems(places))
    free = _take_free(tree, problems)
    entries = {section: _take_entries(tree, section, problems) for section in ENTRIES}
    _check_keys(tree, "", problems)
    problems.raise_if_any()
    order = [*configs, COMMAND_LINE]
    chosen = {section: _choose(tree, section, order, problems) for section in choices()}
    run = _typed(tree, chosen, entries, problems)
    run = _put_free(run, free)
    stages, of_stages = _typed_stages(later, order, problems, check_paths=check_paths)
    run, notes = replace(run, data=replace(run.data, stages=stages)), (*notes, *of_stages)
    if check_paths and isinstance(run.train.sample_prompts, str):
        run = _read_prompts(run, run.train.sample_prompts, problems)
    if run.train.run_dir is None:
        run = replace(run, train=replace(run.train, run_dir=f"runs/{Path(configs[-1]).stem}"))
    if isinstance(run.model.config, dict):
        _check_model_tree(run.model.config, problems)
    rules.check_values(run, problems)
    if check_paths and all_expanded:  # what is not there for that reason needs no second mistake
        rules.check_on_disk(run, problems)
    problems.raise_if_any()
    idle = [f"{section}.{name}" for section in ENTRIES for name in plugins.entries(section)
            if name not in getattr(run, section)]  # fmt: skip
    unnamed = [f"{key} of a plugin takes no part: the run does not name it (--{key} does)" for key in idle]
    return Parsed(run=run, places=places, notes=(*notes, *unnamed))


def _read_prompts(run: RunConfig, path: str, problems: Problems) -> RunConfig:
    """With the lines of the file in train.sample_prompts."""
    key, lines = "train.sample_prompts", []
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            problems.add(key, path, "has no line with text", "write one prompt a line")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        problems.add(key, path, f"cannot be read: {reason} (looked from {Path.cwd()})",
                     'give the path of a file with one prompt a line, or a list: ["..."]')  # fmt: skip
    return replace(run, train=replace(run.train, sample_prompts=lines))


def run_words(argv: list[str]) -> list[str]:
    """The words of a run with its YAMLs first, as --config RUN.yaml, whichever way and place they were given in.

    Raises: ConfigError: no YAML.
    """
    pairs = list(_pairs(argv))
    configs, _ = _split(argv)
    words = [word for path in configs for word in ("--config", path)]
    return [*words, *(word for key, _, given in pairs if key != "config" for word in given)]


def configs_in(words: Sequence[str]) -> list[str]:
    """The YAMLs of what `run_words` has returned."""
    return [path for flag, path in itertools.pairwise(words) if flag == "--config"]


def plugins_of(argv: list[str]) -> list[str]:
    """Import the plugins of the command line, before any other word is read: they bring fields. Returns the rest.

    Raises: ConfigError.
    """
    found: list[str] = []
    rest: list[str] = []
    changed, words = False, iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag in (plugins.FLAG, plugins.CHANGED):
            value = value if has_value else next(words, "")
            if flag == plugins.FLAG and value and not value.startswith("--"):
                found.append(value)
            elif flag == plugins.CHANGED and value == "ok":
                changed = True
            else:
                remedy = "write --plugin FILE.py" if flag == plugins.FLAG else f"write {plugins.CHANGED} ok"
                raise stop(flag, value or None, "needs its value", remedy, COMMAND_LINE)
        else:
            rest.append(word)
    plugins.use(found, changed=changed)
    return rest


def command_words(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Part a command line into the command's own flags and the words of a run: RUN.yaml [--SECTION.FIELD VALUE ...].

    The command's flags stand anywhere before `--`; behind it are words of the run only.

    Raises: ConfigError: a flag of the command stands behind `--`, or one before it is misspelt.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    given, words = parser.parse_known_args(argv[:cut])
    own = set(re.findall(r"--[a-z][\w-]*", parser.format_help()))
    for word in argv[cut + 1 :]:
        if word.partition("=")[0] in own and word != "--config":
            rule = f"is a flag of `{parser.prog}`, and behind -- are words of the run"
            raise stop("command line", word, rule, f"write {word} before the --", COMMAND_LINE)
    known = {key.partition(".")[0] for key in schema()}
    for word in words:
        flag = word.partition("=")[0]
        foreign = flag.startswith("--") and flag[2:].partition(".")[0].replace("-", "_") not in {*_NO_FIELDS, *known}
        if foreign and flag not in _LAUNCHER_FLAGS and (near := closest(flag, own)):
            raise stop("command line", flag, f"is no flag of `{parser.prog}`", f"did you mean {near}?", COMMAND_LINE)
    return given, words + argv[cut + 1 :]


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The paths of the run's YAMLs and the (dotted key, text) overrides."""
    pairs = [(key, value) for key, value, _ in _pairs(argv)]
    configs = [value for key, value in pairs if key == "config"]
    if not configs:
        rule = "names the run's YAML"
        raise stop("--config", None, rule, "write RUN.yaml, or --config RUN.yaml", COMMAND_LINE)
    return configs, [(key, value) for key, value in pairs if key not in _NO_FIELDS]


def _pairs(argv: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(dotted key, text, the words as they were given); a word that is no flag is the run's YAML, key config.

    A flag without a value is true, if its field is true or false. The launcher's --local_rank is dropped.
    """
    plugins_of(argv)
    words = deque(argv)
    while words:
        word = words.popleft()
        if word == "--":  # what stands behind it are words of the run, and those before it are, too
            continue
        flag, has_value, value = word.partition("=")
        if not word.startswith("--"):
            if Path(word).is_dir():
                rule = "is a folder, and a run is its YAML"
                raise stop("--config", word, rule, "give the path of a run's YAML", COMMAND_LINE)
            if not word.endswith((".yaml", ".yml")) and not Path(word).is_file():
                raise stop("command line", word, "is not a flag", "write --SECTION.FIELD VALUE", COMMAND_LINE)
            yield "config", word, [word]
            continue
        flag, given = _known_spelling(flag), [word]
        if not has_value and _is_entry(flag[2:]):
            value = "true"
        elif not has_value:
            following = words[0] if words else None
            if following is not None and not following.startswith("--"):
                value = words.popleft()
                given.append(value)
            elif schema().get(flag[2:]) is bool or not _is_flag(flag):
                value = "true"  # of a flag that there is not, too: that is the mistake then
            else:
                raise stop(flag, following, "needs a value", f"write {flag} VALUE", COMMAND_LINE)
        if flag not in _LAUNCHER_FLAGS:
            yield flag[2:], value, given


def _is_entry(key: str) -> bool:
    """True for `parts.count`, the name of a plugin's class: as a flag it takes the class with its defaults."""
    section, _, name = key.partition(".")
    return section in ENTRIES and name in Entry.SECTIONS.get(section, {})


def _is_flag(flag: str) -> bool:
    key = flag[2:]
    free = any(key == one or key.startswith(f"{one}.") for one in _FREE_KEYS)
    return free or key in _NO_FIELDS or key in schema() or flag in _LAUNCHER_FLAGS


def _known_spelling(flag: str) -> str:
    """Other tools write --resume-weights-only: dashes in field names stand for underscores."""
    key = flag[2:].replace("-", "_")
    return f"--{key}" if key in schema() else flag


def _layers(paths: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree of several YAMLs, of which the later wins key by key, and for each key its place."""
    tree, places = _read(paths[0])
    for path in paths[1:]:
        above, lines = _read(path)
        _lay(tree, above, places)
        places |= lines
    return tree, places


def _lay(below: dict[str, Any], above: dict[str, Any], places: dict[str, str], prefix: str = "") -> None:
    """Maps are merged, and else a value replaces the one below it. A section without contents changes nothing."""
    for name, value in above.items():
        key, under = f"{prefix}{name}", below.get(name)
        if isinstance(under, dict) and isinstance(value, dict):
            _lay(under, value, places, f"{key}.")
        elif not (isinstance(under, dict) and value is None and _is_section(key)):
            below[name] = value
            _forget_within(key, places)


def _forget_within(key: str, places: dict[str, str]) -> None:
    """Forget the places of what stood in a map that is replaced."""
    for inner in [each for each in places if each.startswith(f"{key}.")]:
        del places[inner]


def _is_section(key: str) -> bool:
    return key in sections() or key.partition(".")[0] in Entry.SECTIONS


def _read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        rule = f"no such file (looked from {Path.cwd()})"
        raise stop("--config", path, rule, "give the path of a run's YAML; `llmtrain init DIR` writes some") from None
    except UnicodeDecodeError as error:
        kind = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        rule = (
            f"is not UTF-8: byte 0x{error.object[error.start]:02x} in line {error.object.count(10, 0, error.start) + 1}"
        )
        remedy = f"save it as UTF-8, such as by `iconv -f {kind} -t UTF-8 {path}`"
        raise stop("--config", path, rule, remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise stop("--config", path, f"cannot be read: {reason}", "give the path of a run's YAML") from None
    document = strict_yaml.parse(text, path)
    tree = {} if document.tree is None else document.tree
    if not isinstance(tree, dict):
        raise stop("--config", show(tree), "a run is a map of sections", "write `deepspeed: ...`, `model: ...`", path)
    known = {key.partition(".")[0] for key in schema()}
    if tree.keys() & KEYS.keys() and not tree.keys() & known:
        rule = "looks like a DeepSpeed JSON, and not like a run's YAML"
        raise stop("--config", path, rule, f"give the run's YAML first: RUN.yaml --deepspeed {path}")
    return tree, {key: f"{path}, line {line}" for key, line in document.lines.items()}


def _override(tree: dict[str, Any], places: dict[str, str], key: str, text: str, problems: Problems) -> None:
    """Lay one command-line value over the tree. Text stays text: jsonargparse reads it by the field's type."""
    value: Any = text
    free = next((f for f in _FREE_KEYS if key == f or key.startswith(f"{f}.")), None)
    if _is_entry(key) and text == "true":
        section, name = key.split(".")
        tree[section] = {name: None, **(tree.get(section) or {})}
        return
    if free is None and key not in schema():
        unknown_key(key, text, COMMAND_LINE, problems, flag=True)
        return
    parts = key.split(".")
    section = key.partition(".")[0]
    if section in choices() and strict_yaml.plain_scalar(text) is None:
        value = None
    elif free is None and isinstance(number := _whole(key, strict_yaml.plain_scalar(text)), int):
        value = str(number)
    if free is not None:
        value = strict_yaml.parse(text, f"{COMMAND_LINE}, --{key}").tree
        if free in _WITH_DOTS and key != free:  # the rest is a path or a pattern, dots and all
            parts = [*free.split("."), key[len(free) + 1 :]]
    node = tree
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            rule = f"{part} is {show(node[part])} in the YAML, not a map with fields to override"
            problems.add(f"--{key}", text, rule, "change the YAML", COMMAND_LINE)
            return
        node = node[part]
    node[parts[-1]] = value
    _forget_within(key, places)
    places[key] = COMMAND_LINE


def _take_free(tree: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Remove model.config and the maps, whose keys are the user's, from the tree and check their types."""
    taken: dict[str, Any] = {}
    for key in _FREE_KEYS:
        section, name = key.split(".")
        holder = tree.get(section)
        if isinstance(holder, dict) and holder.get(name) is not None:
            taken[key] = holder.pop(name)
    config = taken.get("model.config", {})
    if not isinstance(config, (dict, str)):
        problems.add("model.config", config, "must be a map of config.json fields, or a path",
                     "write `model_type: llama` and the other fields below it")  # fmt: skip
    for key in taken.keys() & _MAPS.keys():
        kind, line, rule = _MAPS[key]
        given = taken[key]
        if not isinstance(given, dict):
            problems.add(key, given, "must be a map", f"write `{line}` lines below it")
            continue
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, kind):
                one = f"{key}.{name}"
                problems.add(one, value, rule, f"write a line `{line}`")
    return taken


_OF_STAGE = {"data": ("path", "mixture", "sequence_length"), "train": ("global_batch", "micro_batch", "accumulation"),
             "schedule": ()}  # fmt: skip
"""Section -> its fields that a stage changes; empty: all."""
_A_LIST = "write a list: [{from_step: 1000, path: FOLDER}, ...]"


def _take_stages(tree: dict[str, Any], problems: Problems) -> list[dict[str, Any]]:
    """Remove data.stages from the tree. A first stage from step 0 gives its values to the run's own sections.

    Returns each other one as the sections of a run, with its `from_step` beside them. `places` of what they hold count
    from the first of them.
    """
    data = tree.get("data")
    given = data.pop("stages", None) if isinstance(data, dict) else None
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(stage, dict) for stage in given):
        problems.add(_STAGES, given, "must be a list of maps", _A_LIST)
        return []
    stages = [_sections_of(number, stage, problems) for number, stage in enumerate(given)]
    if not stages or stages[0]["from_step"] != 0:
        return stages
    first, *later = stages
    for section in _OF_STAGE:
        own = tree[section] = tree.get(section) or {}
        for name, value in first[section].items() if isinstance(own, dict) else ():
            key, inner = f"{section}.{name}", _in_stage(0, f"{section}.{name}")
            if own.get(name) not in (None, value):
                rule = f"from step 0 on the run has {key} = {show(own[name])} ({problems.places.get(key, 'the YAML')})"
                problems.add(inner, value, rule, "remove one of the two")
            own[name], problems.places[key] = value, problems.places.get(inner, problems.places.get(_STAGES, ""))
    moved = {key: problems.places.pop(key) for key in [key for key in problems.places if key.startswith(f"{_STAGES}[")]}
    for number in range(1, len(stages)):
        before, after = f"{_STAGES}[{number}]", f"{_STAGES}[{number - 1}]"
        problems.places |= {
            key.replace(before, after, 1): place for key, place in moved.items() if key.startswith(before)
        }
    return later


def _in_stage(number: int, key: str) -> str:
    """The key that a value of a run has in a stage."""
    return f"{_STAGES}[{number}].{key.removeprefix('data.')}"


def _sections_of(number: int, stage: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """A stage as the sections of a run. What it cannot hold is a mistake, and left out."""

    def refuse(name: str, value: Any, rule: str, remedy: str) -> None:
        key = f"{_STAGES}[{number}].{name}"
        problems.add(key, value, rule, remedy, problems.places.get(key, problems.places.get(_STAGES)))

    first = stage.get("from_step")
    if type(first) is not int:
        refuse("from_step", first, "must be a whole number of optimizer steps", _A_LIST)
    made: dict[str, Any] = {"from_step": first if type(first) is int else number, **{name: {} for name in _OF_STAGE}}
    made["rope"] = None
    known = ("from_step", *_OF_STAGE["data"], "train", "schedule", "rope")
    for name, value in stage.items():
        if value is None and name in known:
            continue  # as in the stage before
        if name in _OF_STAGE["data"]:
            made["data"][name] = value
        elif name not in known:
            near = closest(str(name), known)
            remedy = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
            refuse(name, value, "a stage has no such field", remedy)
        elif name != "from_step" and not isinstance(value, dict):
            refuse(name, value, "is a section", "write its fields below it")
        elif name == "rope" and number == 0 and first == 0:
            refuse(name, value, "from step 0 on the model's own fields count", "write them in model.config")
        elif name == "rope":
            _check_map(value, f"{_STAGES}[{number}].rope", problems)
            made["rope"] = value
        elif name != "from_step":
            made[name] = {field: each for field, each in value.items() if each is not None}
            for field in [field for field in made[name] if field not in (_OF_STAGE[name] or made[name])]:
                refuse(f"{name}.{field}", made[name].pop(field), "stays as it is during a run",
                       f"a stage changes {', '.join(_OF_STAGE[name])}")  # fmt: skip
    return made


def _typed_stages(
    stages: list[dict[str, Any]], order: list[str], problems: Problems, *, check_paths: bool
) -> tuple[list[StageConfig], tuple[str, ...]]:
    """The stages that `_take_stages` has returned, typed as a run of the same sections, and notes on their paths."""
    found: list[StageConfig] = []
    notes: list[str] = []
    for number, stage in enumerate(stages):
        first, rope, prefix = stage.pop("from_step"), stage.pop("rope"), f"{_STAGES}[{number}]."
        inner = {key.removeprefix(prefix): place for key, place in problems.places.items() if key.startswith(prefix)}
        inner = {key if key.partition(".")[0] in _OF_STAGE else f"data.{key}": place for key, place in inner.items()}
        within = Within(problems, partial(_in_stage, number), inner)
        tree: dict[str, Any] = {"deepspeed": "-", **stage}
        own = {section: set(values) for section, values in stage.items()}
        notes += rules.expand_paths(tree, within if check_paths else Problems(inner))[0]
        free = _take_free(tree, within)
        _check_keys(tree, "", within)
        within.raise_if_any()
        chosen = {section: _choose(tree, section, order, within) for section in choices()}
        run = _put_free(_typed(tree, chosen, {name: {} for name in ENTRIES}, within), free)
        given = {name: getattr(run.data, name) for name in own["data"]}
        schedule = run.schedule if own["schedule"] else None
        batch = StageBatch(**{name: getattr(run.train, name) for name in own["train"]})
        found.append(StageConfig(from_step=first, train=batch, schedule=schedule, rope=rope, **given))
    return found, tuple(notes)


def _take_entries(tree: dict[str, Any], section: str, problems: Problems) -> dict[str, Any]:
    """Remove a section of entries from the tree. Returns name -> an object of its class."""
    given, known, built = tree.pop(section, None) or {}, Entry.SECTIONS.get(section, {}), {}
    if not isinstance(given, dict):
        problems.add(section, given, "is a section", "write `NAME: {FIELD: VALUE}` below it")
        return {}
    for name, values in given.items():
        key = f"{section}.{name}"
        if name not in known:
            near = closest(str(name), known)
            remedy = f"did you mean {section}.{near}?" if near else "give the file that defines it: --plugin FILE.py"
            problems.add(key, show(values), "no plugin and no part of llmtrain has this name", remedy)
        elif values is not None and not isinstance(values, dict):
            problems.add(key, values, "is a section", "write its fields below it")
        elif (entry := _entry(key, known[name], values or {}, problems)) is not None:
            built[name] = entry
    return built


def typed_entry(key: str, cls: type, values: Mapping[str, Any]) -> Any:
    """An object of a plugin's class that stands in no YAML, with these values of its fields.

    Raises: ConfigError.
    """
    problems = Problems()
    entry = _entry(key, cls, dict(values), problems)
    problems.raise_if_any()
    for item in fields(cls):
        bound, value = item.metadata.get("bound"), getattr(entry, item.name)
        if bound is not None and value is not None and not bound.holds(value):
            problems.add(f"{key}.{item.name}", value, f"must be {bound.words}", item.metadata["remedy"])
    problems.raise_if_any()
    return entry


def _entry(key: str, cls: type, values: dict[str, Any], problems: Problems) -> Any:
    """An object of these values; None where one of them is wrong."""
    parser, wrong = ArgumentParser(exit_on_error=False, default_env=False), False
    parser.add_class_arguments(cls, "entry")
    for name, value in list(values.items()):
        field = f"{key}.{name}"
        if field not in schema():
            unknown_key(field, value, problems.places.get(field), problems)
            wrong = True
            continue
        values[name] = value if (number := _whole(field, value)) is None else number
        try:
            parser.parse_object({"entry": {name: values[name]}})
        except (ArgumentError, TypeError, ValueError):
            problems.add(field, value, *_type_words(field, value), problems.places.get(field))
            wrong = True
    if wrong:
        return None
    return _build(cls, parser.parse_object({"entry": values})["entry"]) if values else cls()


def _put_free(run: RunConfig, free: dict[str, Any]) -> RunConfig:
    for key, value in free.items():
        section, name = key.split(".")
        if key in _MAPS and _MAPS[key][0] == (int, float):
            value = {each: float(number) for each, number in value.items()}
        run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return run


def _check_keys(tree: dict[str, Any], prefix: str, problems: Problems) -> None:
    """Every key is a field, every section a map, every value a scalar or a list of scalars."""
    known = schema()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in (subsections() if prefix else sections()):
            if value is None:
                tree[name] = {}
            elif isinstance(value, dict):
                _check_keys(value, f"{key}.", problems)
            else:
                example = next(k for k in known if k.startswith(f"{key}.")).rpartition(".")[2]
                problems.add(key, value, "is a section", f"write its fields below it, such as `{example}: ...`")
        elif key not in known:
            unknown_key(key, value, problems.places.get(key), problems)
        elif value is None and prefix.removesuffix(".") in choices():
            continue  # null is the default
        elif value is None and type(None) not in (known[key], *get_args(known[key])) and key != "deepspeed":
            words = type_name(known[key])  # jsonargparse would let it pass
            problems.add(key, None, f"must be {words}", "remove the line for the default")
        elif value == "~":  # which the types below would take for null
            problems.add(key, value, "is YAML's other word for null, in quotes", "write null")
        elif (number := _whole(key, value)) is not None:
            tree[name] = number
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value)):
            problems.add(key, value, *_type_words(key, value), problems.places.get(key))
    if not prefix and tree.get("deepspeed") is None:
        remedy = "write `deepspeed: PATH` of a DeepSpeed JSON; `llmtrain init DIR` writes some, and when to take which"
        problems.add("deepspeed", None, "is required", remedy)


def _whole(key: str, value: Any) -> int | None:
    """The number meant by 1e3 where the field counts something; None: it is no such number, or no such field."""
    kinds = (schema()[key], *get_args(schema()[key]))
    if int in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return None


def _choose(tree: dict[str, Any], section: str, order: list[str], problems: Problems) -> type[Choice]:
    """The class that the section selects. The selector leaves the tree, and with it what is not of that class: each
    such field is a mistake, unless it is null or in a run's own config.yaml of an earlier version. `order`: the files
    and the command line, of which the later one wins."""

    def rank(name: str) -> int:
        place = problems.places.get(f"{section}.{name}", "")
        return order.index(found) if (found := place.rpartition(", line ")[0] or place) in order else -1

    base, fields_here = choices()[section], tree.get(section) or {}
    dumped = FORMERLY[section] <= {
        key for key in fields_here if problems.places.get(f"{section}.{key}") != COMMAND_LINE
    }
    for key in [key for key, value in fields_here.items() if value is None]:
        del fields_here[key]  # null is the default
        if key != base.SELECTOR:
            problems.places.pop(f"{section}.{key}", None)
    unnamed = (section == "optim" and optimizer_in(tree["deepspeed"])) or default_choice(section)
    name = fields_here.pop(base.SELECTOR, unnamed)
    known = isinstance(name, str) and name in base.CHOICES
    if not known:
        key = f"{section}.{base.SELECTOR}"
        problems.add(key, name, *_type_words(key, name), problems.places.get(key))
        name = unnamed
    chosen: type[Choice] = base.CHOICES[name]
    for field in [field for field in fields_here if field not in chosen.own()]:
        value, key = fields_here.pop(field), f"{section}.{field}"
        value = strict_yaml.plain_scalar(value) if isinstance(value, str) else value
        if known and not (dumped and value in base.defaults(field) and problems.places.get(key) != COMMAND_LINE):
            overridden = rank(base.SELECTOR) > rank(field)
            problems.add(key, value, *base.refusal(field, overridden=overridden), problems.places.get(key))
    return chosen


@functools.cache
def _parser(chosen: tuple[type, ...]) -> ArgumentParser:
    """`chosen`: the classes of the sections."""
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(RunConfig, skip={*sections(), *Entry.SECTIONS})
    for section, cls in zip(sections(), chosen, strict=True):
        parser.add_class_arguments(cls, section)
    return parser


def _typed(
    tree: dict[str, Any],
    chosen: dict[str, type[Choice]],
    entries: dict[str, Any],
    problems: Problems,
) -> RunConfig:
    """Types by jsonargparse: the whole tree at once, and key by key only to name what is wrong. `entries`: typed."""
    classes = {**sections(), **chosen}
    parser = _parser(tuple(classes.values()))
    deep = [
        leaf for leaf in _leaves(tree) if isinstance(leaf[1], str) and max(map(leaf[1].count, "[{")) > _MOST_BRACKETS
    ]
    for key, value in deep:
        problems.add(key, value[:40], "has too many brackets", _type_words(key, "")[1])
    if deep:
        problems.raise_if_any()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = parser.parse_object(tree)
            built = {section: _build(cls, found.get(section)) for section, cls in classes.items()}
            return _build(RunConfig, {**found.as_dict(), **built, **entries})
    except (ArgumentError, TypeError, ValueError) as error:
        for key, value in _leaves(tree):
            one: dict[str, Any] = {"deepspeed": "x"}
            *holders, name = key.split(".")
            functools.reduce(lambda node, holder: node.setdefault(holder, {}), holders, one)[name] = value
            try:
                parser.parse_object(one)
            except (ArgumentError, TypeError, ValueError):
                problems.add(key, value, *_type_words(key, value), problems.places.get(key))
        if not problems:
            problems.add("run", None, f"cannot be read: {error}", "`llmtrain train --help` tells every field")
        problems.raise_if_any()
        raise


def _build(cls: type, values: Any) -> Any:
    """A dataclass of these values by the names of its fields."""
    given = {item.name: values[item.name] for item in fields(cls) if item.init}
    kinds = get_type_hints(cls)
    return cls(**{name: _build(kinds[name], value) if isinstance(value, Namespace) else value
                  for name, value in given.items()})  # fmt: skip


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _type_words(key: str, value: Any) -> tuple[str, str]:
    """Rule and remedy for a value of the wrong type."""
    kind = schema()[key]
    words = type_name(kind)
    kinds = (kind, *get_args(kind))
    literals = [str(a) for k in kinds if get_origin(k) is Literal for a in get_args(k)]
    if key == "objective.name" and (method := other_method(value)):
        return f"must be {words}", f"choose one of these; {value} is {method}"
    if "disabled" in literals and str(value).lower() in ("false", "off", "no", "none", "null"):
        return f"must be {words}", "did you mean disabled?"
    if near := closest(str(value), literals):
        return f"must be {words}", f"did you mean {near}?"
    if literals:
        return f"must be {words}", f"choose one; `llmtrain train --help` tells what {key} means"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in kinds:
        return f"must be {words}", f'put it in quotes: "{value}"'
    if key in rules.WRITTEN:
        return f"must be {words}", rules.WRITTEN[key]
    return f"must be {words}", f"write {words}; `llmtrain train --help` tells what {key} means"
