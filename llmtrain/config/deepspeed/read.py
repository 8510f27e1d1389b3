"""Read a DeepSpeed JSON and check it against the table of its keys. No DeepSpeed, no torch.

`deep_check` alone imports DeepSpeed, and only when it is called.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import hjson

from llmtrain.base.errors import ConfigError
from llmtrain.config.deepspeed import keys as table
from llmtrain.config.problems import Problems, closest, stop

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "num": ((int, float), "a number"),
    "str": ((str,), "a string"),
    "list": ((list,), "a list"),
    "dict": ((dict,), "a section { ... }"),
}

_NO_JSON = re.compile(r"""["']?(\w+)["']?\s*:\s*([-+]?(?:NaN|nan|Infinity|inf)|True|False|None)\b""")
_IN_JSON = {"True": "true", "False": "false", "None": "null"}


def read_json(path: str) -> dict[str, Any]:
    """The file as a dict; comments (#, //, /* */) are allowed, duplicate keys are not.

    Raises: ConfigError if the file is missing, broken, or not one object.
    """
    file = Path(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise stop(
                    key, value, f"duplicate key: it stands twice, first with {seen[key]!r}", "keep one of the two", path
                )
            seen[key] = value
        return seen

    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        rule = f"no such file (looked from {Path.cwd()})"
        if path == "null" or path.lstrip().startswith("{"):
            rule = "every run has a DeepSpeed JSON" if path == "null" else "is the text of a JSON, and not its path"
        raise stop(
            "deepspeed", path, rule, "give the path of a DeepSpeed JSON; `llmtrain init DIR` writes some"
        ) from None
    except IsADirectoryError:
        raise stop("deepspeed", path, "is a folder", "give the path of a DeepSpeed JSON in it") from None
    except UnicodeDecodeError as error:
        kind = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        rule = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
        raise stop("deepspeed", path, rule, f"save it as UTF-8, such as by `iconv -f {kind} -t UTF-8 {path}`") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the path
        raise stop("deepspeed", path, f"cannot be read: {error}", "give the path of a DeepSpeed JSON") from None
    try:
        tree = hjson.loads(text, object_pairs_hook=unique) if text.strip() else None
    except hjson.HjsonDecodeError as error:
        lines = text.splitlines()
        _refuse_cut(text, path)
        _refuse_words(lines, path)
        at = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
        raise stop(
            "deepspeed", at, f"not valid JSON: {error.msg}", "look for a missing comma, quote or bracket just before",
            f"{path}, line {error.lineno}",
        ) from None  # fmt: skip
    except ConfigError:  # a duplicate key
        raise
    except IndexError:  # hjson looks for the end of a comment beyond the end of the text
        raise stop("deepspeed", path, "a comment /* is not closed", "close it with */, or remove it") from None
    except (RecursionError, ValueError, ArithmeticError) as error:  # nested too deep, 10,000 digits, 1e999
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        why = "a number in it is larger than 1.8e308" if isinstance(error, OverflowError) else why
        raise stop("deepspeed", path, f"not a DeepSpeed JSON: {why}", "write plain values of usual size") from None
    if isinstance(tree, dict) and {"deepspeed", "model", "data", "train"} & tree.keys() and not text.startswith("{"):
        raise stop("deepspeed", path, "looks like a run's YAML, and not like a DeepSpeed JSON",
                   "give the path of the JSON; the YAML stands first: RUN.yaml --deepspeed DS.json")  # fmt: skip
    if not isinstance(tree, dict):
        raise stop(
            "deepspeed",
            path,
            "a DeepSpeed JSON is one object { ... }",
            "write { ... } around its keys; `llmtrain init DIR` writes examples",
            path,
        )
    return tree


_PARTS = re.compile(
    r"""(?P<gap>\s+|\#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z))|(?P<text>"(?:\\.|[^"\\\n])*)(?P<quote>"?)|(?P<open>[{\[])"""
    r"""|(?P<close>[}\]])|(?P<other>[^\s"{}\[\]]+)""",
    re.DOTALL | re.VERBOSE,
)
_CLOSES = {"{": "}", "[": "]"}


def _refuse_cut(text: str, path: str) -> None:
    """Name the place where a file ends before its first bracket is closed: it was cut off.

    Raises: ConfigError if it does.
    """
    open_brackets: list[tuple[str, str]] = []  # and the key before each
    key = quote = ""
    for part in _PARTS.finditer(text):
        if part["gap"]:
            continue
        quote = '"' if part["text"] and not part["quote"] else ""
        if part["text"]:
            key = part["text"][1:]
        elif part["open"]:
            open_brackets.append((part["open"], key))
        elif part["close"] and open_brackets:
            open_brackets.pop()
    if not open_brackets:
        return
    lines = text.rstrip().splitlines()
    missing = quote + "".join(_CLOSES[bracket] for bracket, _ in reversed(open_brackets))
    inside = f', within "{open_brackets[-1][1]}"' if open_brackets[-1][1] else ""
    at = f"line {len(lines)}, column {len(lines[-1])}"
    raise ConfigError(
        f"{path} is cut off: it ends in {at}{inside}\n"
        f"    rule:   a JSON ends where its first bracket is closed, and {missing} is missing\n"
        "    remedy: copy it or download it again, or write what is missing"
    )


def _refuse_words(lines: list[str], path: str) -> None:
    """Name the value that Python writes and JSON does not have: the parser's complaint would be of a later character.

    Raises: ConfigError if there is one.
    """
    for number, line in enumerate(lines, 1):
        if found := _NO_JSON.search(line):
            key, word = found.groups()
            rule = "not valid JSON: numbers are finite, and true, false and null are written in lower case"
            remedy = f"write {_IN_JSON.get(word, 'a finite number')}, or remove the key for DeepSpeed's default"
            raise stop(key, word, rule, remedy, f"{path}, line {number}")


def checked(path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The file, linted: each key under the one name that `keys.KEYS` has for it. Second: notes for the user.

    Raises: ConfigError with all that is wrong with it.
    """
    tree = read_json(path)
    notes = _take_ignored(tree, path)
    problems = Problems()
    _lint(tree, path, problems)
    problems.raise_if_any()
    return _renamed(tree), (*notes, *_without_effect(_renamed(tree), path))


def _renamed(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy with each key under its first name, and without those that are null: they ask for DeepSpeed's default."""
    tree = _without_nulls(tree)
    for dotted, name in table.ALIASES.items():
        section, _, alias = dotted.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and alias in values:
            values[name] = values.pop(alias)
    return tree


def _without_nulls(tree: dict[str, Any]) -> dict[str, Any]:
    linted = {key for key, value in tree.items() if isinstance(value, dict) and key != "params"}  # those: by `join`
    values = {key: _without_nulls(value) if key in linted else value for key, value in tree.items()}
    return {key: copy.deepcopy(value) for key, value in values.items() if value is not None}


def _take_ignored(tree: dict[str, Any], path: str) -> tuple[str, ...]:
    """Remove what DeepSpeed does not read, and say so."""
    ignored = [key for key in tree if key in table.IGNORED or _is_comment(key)]
    for key in ignored:
        del tree[key]
    for dotted in table.REMOVED:
        section, _, key = dotted.rpartition(".")
        holder = lookup(tree, section) if section else tree
        if (
            isinstance(holder, dict)
            and key in holder
            and (_is_off(holder[key]) or holder[key] == table.WAS_OFF.get(dotted))
        ):
            del holder[key]
            ignored.append(dotted)
    return tuple(f"{path}: {key} has no effect: DeepSpeed does not read it" for key in ignored)


def _is_off(value: Any) -> bool:
    """Return True if a removed section asks for nothing: null, false, empty, or each part of it switched off."""
    if not isinstance(value, dict):
        return value is None or value is False
    if "enabled" in value:
        return value["enabled"] in (False, None)
    return all(_is_off(part) for part in value.values())


def _is_comment(key: str) -> bool:
    return key.startswith("_") or "comment" in key.lower()


def _lint(tree: dict[str, Any], path: str, problems: Problems) -> None:
    """Report unknown keys, removed keys, wrong types, and sections that do not work with llmtrain."""
    stage = lookup(tree, "zero_optimization.stage")
    if type(stage) is int and stage not in (0, 1, 2, 3):
        problems.add("zero_optimization.stage", stage, "ZeRO has the stages 0, 1, 2 and 3", "choose one of them", path)
    _lint_section(tree, table.KEYS, "", path, problems)
    for dotted, name in table.ALIASES.items():
        section, _, alias = dotted.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and alias in values and name in values:
            rule = f"it is another name of {section}.{name}, which stands there too"
            problems.add(dotted, values[alias], rule, "keep one of the two", path)
    if "bf16" in tree and "bfloat16" in tree:
        problems.add(
            "bfloat16", tree["bfloat16"], "it is the old name of bf16, which stands there too", "remove it", path
        )
    _refuse(_renamed(tree), path, problems)
    key = "zero_optimization.allgather_bucket_size"
    bucket = lookup(tree, key)
    if key not in problems and isinstance(bucket, (int, float)) and not isinstance(bucket, bool) and bucket % 2:
        rule = "DeepSpeed takes an even number of elements: its messages begin at multiples of 4 bytes"
        problems.add(key, bucket, rule, f"write {int(bucket) + 1}", path)
    scale, least = (lookup(tree, f"fp16.{name}") for name in ("initial_scale_power", "min_loss_scale"))
    if type(scale) is type(least) is int and "fp16.initial_scale_power" not in problems and least > 2**scale:
        rule = f"the loss scale begins at 2^{scale} (fp16.initial_scale_power), which is less"
        problems.add("fp16.min_loss_scale", least, rule, f"set it to {2**scale} or less; 1 is the default", path)
    for key in ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"):
        device = lookup(tree, key)
        if isinstance(device, str) and device not in ("none", "cpu", "nvme", "auto"):
            problems.add(key, device, "a device is cpu or none", 'write "cpu"', path)


def _stage(tree: dict[str, Any]) -> int:
    stage = lookup(tree, "zero_optimization.stage")
    return stage if type(stage) is int and stage in table.STAGES else 0


def _refuse(tree: dict[str, Any], path: str, problems: Problems) -> None:
    """Report each value that the table of keys refuses at the file's ZeRO stage."""
    stage = _stage(tree)
    for dotted, key in table.leaves():
        value = lookup(tree, dotted)
        why = None if value is None or dotted in problems else key.why_not(value, stage)
        if why is not None:
            at = "" if key.refused or stage not in key.at else f" (zero_optimization.stage = {stage})"
            problems.add(dotted, value, f"{why.rule}{at}", why.remedy, path)


def _without_effect(tree: dict[str, Any], path: str) -> list[str]:
    """Notes about values that are accepted and that nothing reads."""
    stage, unread = _stage(tree), dict[str, list[str]]()
    for dotted, key in table.leaves():
        value = lookup(tree, dotted)
        if value not in (None, "auto", {}, key.default, *key.same) and not key.is_read(stage):
            unread.setdefault(key.unread or f"nothing reads it at ZeRO {stage}", []).append(dotted)
    if lookup(tree, "log_level") not in ("debug", "info"):
        printing = [key for key in ("dump_state", "comms_logger.enabled") if lookup(tree, key) is True]
        if printing:
            unread['DeepSpeed prints it at log level info: write "log_level": "info" as well'] = printing
    if lookup(tree, "comms_logger.enabled") is True and not lookup(tree, "comms_logger.verbose"):
        why = 'nothing asks for its summary: write "verbose": true for a line a message'
        unread[why] = ["comms_logger.enabled"]
    return [f"{path}: {', '.join(keys)}: no effect: {why}" for why, keys in unread.items()]


def lookup(tree: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None where a section or the key is missing."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _lint_section(tree: dict[str, Any], known: table.Section, prefix: str, path: str, problems: Problems) -> None:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        kind = known.get(table.ALIASES.get(dotted, key))
        if kind is not None:
            _lint_value(dotted, value, kind, path, problems)
        elif dotted in table.REMOVED:
            problems.add(dotted, value, "DeepSpeed 0.19 has removed it", table.REMOVED[dotted], path)
        else:
            remedy = table.UNKNOWN_REMEDIES.get(dotted) or _unknown_remedy(key, known, prefix)
            problems.add(dotted, value, "DeepSpeed knows no such key", remedy, path)


def _unknown_remedy(key: str, known: table.Section, prefix: str) -> str:
    if _is_comment(key):
        return "remove it; comments start with # or //"
    near = closest(key, known)
    if near:
        return f"did you mean {prefix}{near}?"
    if elsewhere := _home_of(key, table.KEYS, ""):
        return f"did you mean {elsewhere}?"
    return "remove it"


def _home_of(key: str, known: table.Section, prefix: str) -> str | None:
    """The dotted path under which a key of this exact name is known."""
    for name, kind in known.items():
        if name == key:
            return f"{prefix}{name}"
        if isinstance(kind, dict) and (found := _home_of(key, kind, f"{prefix}{name}.")):
            return found
    return None


def _lint_value(dotted: str, value: Any, known: table.Key | table.Section, path: str, problems: Problems) -> None:
    kind = known.kind if isinstance(known, table.Key) else "section"
    if value is None or kind == "any" or (value == "auto" and kind not in ("dict", "section")):
        return
    if isinstance(known, dict):
        if isinstance(value, dict):
            _lint_section(value, known, f"{dotted}.", path, problems)
        else:
            remedy = '{"stage": 1}' if dotted == "zero_optimization" else "{ ... } or remove it"
            problems.add(dotted, value, "must be a section { ... }", f"write {remedy}", path)
        return
    types, words = _KINDS[kind]
    # bool is an int in Python, and 5e8 a float: the first is a mistake here, the second is not.
    whole = kind == "int" and isinstance(value, float) and value.is_integer()
    if whole or (isinstance(value, types) and not (isinstance(value, bool) and kind != "bool")):
        if isinstance(known, table.Key) and dotted not in problems and (outside := known.outside(value)):
            problems.add(dotted, value, *outside, path)
        return
    remedy = f"write {words}, or remove it for DeepSpeed's default"
    bare = value.rstrip(",") if isinstance(value, str) else ""  # hjson takes `True,` for text up to the line's end
    if kind in ("int", "num", "bool") and _reads_as(bare, kind):
        remedy = (
            f"write {bare.lower()}, without quotes and in lower case"
            if kind == "bool"
            else f"remove the quotes: {bare}"
        )
    problems.add(dotted, value, f"must be {words}, and is {_name(value)}", remedy, path)


def _reads_as(text: str, kind: str) -> bool:
    if kind == "bool":
        return text.lower() in ("true", "false")
    try:
        return math.isfinite((int if kind == "int" else float)(text))
    except ValueError:
        return False


def _name(value: Any) -> str:
    names = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "a section"}
    return names.get(type(value), type(value).__name__)


def deep_check(exact: dict[str, Any], path: str) -> None:
    """Build DeepSpeed's own configuration object from the dict: its validators see every section.

    Takes seconds (imports torch and DeepSpeed), needs no device and starts no process group.
    Raises: ConfigError with DeepSpeed's own words.
    """
    import logging

    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)  # it would tell that there is no process group yet
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
    details = getattr(error, "errors", None)  # pydantic tells which key of the section
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
