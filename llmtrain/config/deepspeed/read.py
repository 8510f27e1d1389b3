"""Read a DeepSpeed JSON and check it against the table of its keys. No DeepSpeed, no torch.

`deep_check` alone imports DeepSpeed, and only when it is called.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hjson

from llmtrain import features
from llmtrain.base.choice import either
from llmtrain.base.errors import ConfigError
from llmtrain.base.imports import without
from llmtrain.base.trees import lookup
from llmtrain.config.deepspeed import keys as table
from llmtrain.config.problems import Problems, closest, read_text, show, stop
from llmtrain.config.strict_yaml import plain_scalar

_SHIPPED = Path(__file__).parents[2] / "commands/shipped/ds_configs"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "num": ((int, float), "a number"),
    "str": ((str,), "a string"),
    "list": ((list,), "a list"),
    "dict": ((dict,), "a section { ... }"),
    "any": ((object,), "a value"),
}
_NO_JSON = re.compile(r"""["']?(\w+)["']?\s*:\s*([-+]?(?:NaN|nan|Infinity|inf)|True|False|None)\b""")
_IN_JSON = {"True": "true", "False": "false", "None": "null"}


def read_json(path: str, place: str | None = None) -> dict[str, Any]:
    """Return the file as a dict. Comments (#, //, /* */) are allowed, duplicate keys are not.

    `place`: where the user wrote the path.

    Raises: ConfigError if the file is missing, broken, or not one object.
    """

    def refused(rule: str, remedy: str, value: str = path, place: str | None = place) -> ConfigError:
        return stop("deepspeed", value, rule, remedy, place)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                rule = f"duplicate key: the file has it twice, first with {seen[key]!r}"
                raise stop(key, value, rule, "keep one of the two", path)
            seen[key] = value
        return seen

    text = read_text("deepspeed", path, "a DeepSpeed JSON", lambda: _no_file(path), place)
    try:
        tree = hjson.loads(text, object_pairs_hook=unique) if text.strip() else None
    except hjson.HjsonDecodeError as error:
        lines = text.splitlines()
        _refuse_cut(text, path)
        for number, line in enumerate(lines, 1):
            if found := _NO_JSON.search(line):  # the parser complains of a later character
                key, word = found.groups()
                rule = "not valid JSON: numbers are finite, and true, false and null are written in lower case"
                remedy = f"write {_IN_JSON.get(word, 'a finite number')}, or remove the key for DeepSpeed's default"
                raise stop(key, word, rule, remedy, f"{path}, line {number}") from None
        at = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
        remedy = "look for a missing comma, quote or bracket just before"
        raise refused(f"not valid JSON: {error.msg}", remedy, at, f"{path}, line {error.lineno}") from None
    except ConfigError:  # a duplicate key
        raise
    except IndexError:  # hjson looks for the end of a comment beyond the end of the text
        raise refused("a comment /* is not closed", "close it with */, or remove it") from None
    except (RecursionError, ValueError, ArithmeticError) as error:  # nested too deep, 10,000 digits, 1e999
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        why = "a number in it is larger than 1.8e308" if isinstance(error, OverflowError) else why
        raise refused(f"not a DeepSpeed JSON: {why}", "write plain values of usual size") from None
    if isinstance(tree, dict) and {"deepspeed", "model", "data", "train"} & tree.keys() and not text.startswith("{"):
        raise refused(
            "looks like a run's YAML, and not like a DeepSpeed JSON",
            "give the path of the JSON; the YAML comes first: RUN.yaml --deepspeed DS.json",
        )
    if not isinstance(tree, dict):
        remedy = "write { ... } around its keys; `llmtrain init DIR` writes examples"
        raise refused("a DeepSpeed JSON is one object { ... }", remedy, place=path)
    return tree


def _no_file(path: str) -> tuple[str, str]:
    """Return rule and remedy for a path without a file. For `zero2` the remedy names the file that llmtrain ships."""
    remedy = "give the path of a DeepSpeed JSON; `llmtrain init DIR` writes some"
    if path == "null":
        return "every run has a DeepSpeed JSON", remedy
    if path.lstrip().startswith("{"):
        return "is the text of a JSON, and not its path", remedy
    meant = re.sub(r"[-_]", "", Path(path).stem.lower())
    for file in _SHIPPED.glob("*.json"):
        if meant == file.stem.replace("_", ""):
            here = Path("ds_configs", file.name)
            remedy = f"write {here if here.exists() else file}, or the path of another DeepSpeed JSON"
    return f"no such file (looked from {Path.cwd()})", remedy


_TOKENS = re.compile(
    r"""\#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z)|"(?P<text>(?:\\.|[^"\\\n])*)(?P<end>"?)|(?P<bracket>[{}\[\]])""", re.DOTALL
)


def _refuse_cut(text: str, path: str) -> None:
    """Raise ConfigError, with the open bracket's place, if the file ends before its brackets are closed."""
    opened: list[tuple[str, str]] = []  # the bracket that closes it, and the key before it
    key = quote = ""
    for token in _TOKENS.finditer(text):
        if token["text"] is not None:
            key, quote = token["text"], "" if token["end"] else '"'
        elif token["bracket"]:
            quote = ""
            if token["bracket"] in "{[":
                opened.append(("}" if token["bracket"] == "{" else "]", key))
            elif opened:
                opened.pop()
    if not opened:
        return
    lines = text.rstrip().splitlines()
    missing = quote + "".join(bracket for bracket, _ in reversed(opened))
    inside = f', within "{opened[-1][1]}"' if opened[-1][1] else ""
    raise ConfigError(
        f"{path} is cut off: it ends in line {len(lines)}, column {len(lines[-1])}{inside}\n"
        f"    rule:   a JSON ends where its first bracket is closed, and {missing} is missing\n"
        "    remedy: copy it or download it again, or write what is missing"
    )


def checked(path: str, problems: Problems) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the file's tree, with main names for aliases and without null keys, and notes for the user.

    Raises: ConfigError with all mistakes in the file.
    """
    given = read_json(path, problems.places.get("deepspeed"))
    stage = lookup(given, "zero_optimization.stage")
    taken = features.reads_json(given, lambda key, value, rule, remedy: problems.add(key, value, rule, remedy, path))
    check = _Check(path, problems, stage if type(stage) is int and stage in table.STAGES else 0, taken)
    tree = check.section(given, table.KEYS, "")
    power, least = (lookup(tree, f"fp16.{name}") for name in ("initial_scale_power", "min_loss_scale"))
    if type(power) is type(least) is int and "fp16.initial_scale_power" not in problems and least > 2**power:
        rule = f"must be at most 2^{power}, at which the loss scale begins (fp16.initial_scale_power)"
        problems.add("fp16.min_loss_scale", least, rule, f"set it to {2**power} or less; 1 is the default", path)
    size, degree = (lookup(tree, f"tensor_parallel.{name}") for name in ("tp.tp_size", "autotp_size"))
    if type(size) is int and size > 1 and size != degree:
        rule = "the number of tensor-parallel ranks is tensor_parallel.autotp_size, and this must be equal to it"
        problems.add("tensor_parallel.tp.tp_size", size, rule, f'remove it, or write "autotp_size": {size}', path)
    problems.raise_if_any()
    unread = check.unread
    if lookup(tree, "log_level") not in ("debug", "info"):
        printing = [key for key in ("dump_state", "comms_logger.enabled") if lookup(tree, key) is True]
        if printing:
            unread['DeepSpeed prints it at log level info: write "log_level": "info" as well'] = printing
    if lookup(tree, "comms_logger.enabled") is True and not lookup(tree, "comms_logger.verbose"):
        why = 'it only collects figures: write "verbose": true for a log line for each message'
        unread[why] = ["comms_logger.enabled"]
    if lookup(tree, "expert_parallel.combine_impl") == "fused_weighted_sum":
        why = "the experts' outputs are added up as by weighted_sum, without DeepSpeed's Triton kernel"
        unread[why] = ["expert_parallel.combine_impl"]
    notes = [f"{path}: {key} has no effect: DeepSpeed does not read it" for key in check.ignored]
    return tree, (*notes, *(f"{path}: {', '.join(keys)}: no effect: {why}" for why, keys in unread.items()))


class _Check:
    """Checks the file against the table of keys."""

    def __init__(self, path: str, problems: Problems, stage: int, by_features: Collection[str]) -> None:
        """`by_features`: keys that features read."""
        self._path, self._problems, self._stage, self._by_features = path, problems, stage, by_features
        self.ignored: list[str] = []
        """Keys that DeepSpeed does not read in any file."""
        self.unread: dict[str, list[str]] = {}
        """Reason -> keys that nothing reads in this file."""

    def _refuse(self, key: str, value: Any, rule: str, remedy: str) -> None:
        self._problems.add(key, value, rule, remedy, self._path)

    def section(self, given: dict[str, Any], known: table.Section, prefix: str) -> dict[str, Any]:
        """Return the accepted keys of a section under their main names."""
        taken: dict[str, Any] = {}
        for key, value in given.items():
            dotted = f"{prefix}{key}"
            name = table.ALIASES.get(dotted, key)
            entry = known.get(name)
            if dotted in table.IGNORED or (not prefix and _is_comment(key)):
                self.ignored.append(dotted)
            elif dotted in table.REMOVED:
                if _is_off(value) or value == table.WAS_OFF.get(dotted):
                    self.ignored.append(dotted)
                else:
                    self._refuse(dotted, value, "DeepSpeed 0.19 has removed it", table.REMOVED[dotted])
            elif entry is None:
                self._refuse(dotted, value, "DeepSpeed knows no such key", _remedy_of_unknown(key, known, prefix))
            elif name != key and name in given:
                rule = f"it is another name of {prefix}{name}, which the file has as well"
                self._refuse(dotted, value, rule, "keep one of the two")
            elif value is None:
                pass
            elif isinstance(entry, table.Key):
                taken[name] = value
                self._value(dotted, value, entry)
            elif isinstance(value, dict):
                taken[name] = self.section(value, entry, f"{dotted}.")
            else:
                one = "stage" if "stage" in entry else "enabled"
                fits = one in entry and (value == "auto" or _is_of(entry[one].kind, value))
                inner = f'"{one}": {show(value)}' if fits else "..."
                self._refuse(dotted, value, "must be a section { ... }", f"write {{{inner}}}, or remove it")
        return taken

    def _value(self, dotted: str, value: Any, key: table.Key) -> None:
        if value == "auto" and key.kind != "dict":
            return
        if not _is_of(key.kind, value):
            words = _KINDS[key.kind][1]
            remedy = f"write {words}, or remove it for DeepSpeed's default"
            bare = value.rstrip(",") if isinstance(value, str) else ""  # hjson takes `True,` for text
            if key.kind == "bool" and bare.lower() in ("true", "false"):
                remedy = f"write {bare.lower()}, without quotes and in lower case"
            elif key.kind in ("int", "num") and _is_of(key.kind, plain_scalar(bare)):
                remedy = f"remove the quotes: {bare}"
            self._refuse(dotted, value, f"must be {words}, and is {_name(value)}", remedy)
        elif outside := key.outside(value):
            self._refuse(dotted, value, *outside)
        elif dotted in self._by_features:
            pass
        elif why := key.why_not(value, self._stage):
            by_stage = self._stage in key.at and len(key.at) < len(table.STAGES)
            at = f" (zero_optimization.stage = {self._stage})" if by_stage else ""
            self._refuse(dotted, value, f"{why.rule}{at}", why.remedy)
        elif value not in ({}, key.default, *key.same) and not key.is_read(self._stage):
            self.unread.setdefault(key.unread or f"nothing reads it at ZeRO {self._stage}", []).append(dotted)


def _is_of(kind: str, value: Any) -> bool:
    """Return True if a value is of a key's kind. A bool is no number, and 5e8 is a whole number."""
    if isinstance(value, bool):
        return kind in ("bool", "any")
    return isinstance(value, _KINDS[kind][0]) or (kind == "int" and isinstance(value, float) and value.is_integer())


def _name(value: Any) -> str:
    names = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "a section"}
    return names.get(type(value), type(value).__name__)


def _is_off(value: Any) -> bool:
    """Return True if a removed section was switched off: null, false, empty, or each of its parts is."""
    if not isinstance(value, dict):
        return value is None or value is False
    if "enabled" in value:
        return value["enabled"] in (False, None)
    return all(_is_off(part) for part in value.values())


def _is_comment(key: str) -> bool:
    return key.startswith("_") or "comment" in key.lower()


def _remedy_of_unknown(key: str, known: table.Section, prefix: str) -> str:
    if remedy := table.UNKNOWN_REMEDIES.get(f"{prefix}{key}"):
        return remedy
    if _is_comment(key):
        return "remove it; comments start with # or //"
    if prefix and key in table.KEYS:
        return f"move it to the top of the JSON, out of {prefix[:-1]}"
    split = [dotted.split(".") for dotted in table.LEAVES]
    elsewhere = list(dict.fromkeys(".".join(parts[: parts.index(key) + 1]) for parts in split if key in parts))
    if len(elsewhere) in (1, 2):  # `enabled` is in many sections
        return f"did you mean {either(elsewhere)}?"
    near = closest(key, known)
    return f"did you mean {prefix}{near}?" if near else "remove it"


def deep_check(exact: dict[str, Any], path: str) -> None:
    """Build DeepSpeed's own configuration object from the dict, so that its validators check every section.

    Takes seconds (imports torch and DeepSpeed), needs no device and starts no process group.
    Raises: ConfigError with DeepSpeed's own words.
    """
    import logging

    with without("mlflow"):
        from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
        from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)  # it would warn of the missing process group
    single = copy.deepcopy(exact)
    # Without a process group DeepSpeed takes the world for one rank.
    single["train_batch_size"] = single["train_micro_batch_size_per_gpu"] * single["gradient_accumulation_steps"]
    try:
        DeepSpeedConfig(single)
    except (ValueError, TypeError, AssertionError, KeyError, AttributeError, DeepSpeedConfigError) as error:
        raise _told_by_deepspeed(error, single, path) from error
    finally:
        logger.setLevel(level)


def _told_by_deepspeed(error: Exception, tree: dict[str, Any], path: str) -> ConfigError:
    details = getattr(error, "errors", None)  # pydantic names the key within the section
    if callable(details):
        problems = Problems()
        for item in details():
            key = ".".join(str(part) for part in item["loc"]) or "deepspeed"
            sections = [name for name in tree if lookup(tree, f"{name}.{key}") == item.get("input")]
            key = f"{sections[0]}.{key}" if len(sections) == 1 and item["loc"] else key
            problems.add(key, item.get("input"), f"DeepSpeed says: {item['msg']}", "correct this value", path)
        return problems.error()
    text = str(error) or type(error).__name__
    return stop("deepspeed", path, f"DeepSpeed refuses it: {text}", "correct the file as this says", path)
