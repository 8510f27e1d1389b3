"""Rule and remedy for an unknown key, and for a value of the wrong type.

An unknown key, flag or value is first looked for among the names of other stacks that features answer to, then among
our own. A name unlike all others gets no guess: a wrong guess costs more than none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin

from llmtrain import features
from llmtrain.base import untrusted
from llmtrain.base.choice import Choice, Entry
from llmtrain.base.trees import leaves
from llmtrain.config.deepspeed.keys import KEYS
from llmtrain.config.help import entries
from llmtrain.config.problems import COMMAND_LINE, WRITTEN, Problems, closest
from llmtrain.config.schema import ENTRIES, SHARED, schema, type_name


@functools.cache
def _elsewhere() -> dict[str, list[tuple[str, str]]]:
    """Return for each option of another stack the (stack, answer) pairs of the features, in the features' order."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for stack, option, answer in features.answers():
        answers.setdefault(option, []).append((stack, answer))
    return answers


def _answer_of(name: str, value: Any) -> tuple[str, str]:
    """Return the (stack, answer) of an option, if possible for this value, such as `sigmoid` of DPO's `loss_type`."""
    answers = _elsewhere()[name]
    word = f"`[{', '.join(map(str, value))}]`" if isinstance(value, list) else f"`{value}`"
    exact = [each for each in answers if word in each[1]]
    return (exact or [each for each in answers if "others: not here" in each[1]] or answers)[0]


def unknown_flag(key: str, text: str, problems: Problems) -> None:
    problems.add(f"--{key}", text, *_answer(key, text, "--"), COMMAND_LINE)


def unknown(cls: type[Any], key: str, value: Any, problems: Problems) -> None:
    section, _, name = key.rpartition(".")
    if "[" not in key:
        rule, remedy = _answer(key, value, "")
    elif f"{section.partition('].')[2]}.{name}" in schema():
        rule, remedy = "stays as it is during a run", f"a stage changes {', '.join(_names(cls))}"
    else:
        near = closest(name, _names(cls))
        rule = "a stage has no such field" if key.startswith("data.stages[") else "there is no such field"
        remedy = f"did you mean {near}?" if near else f"it has {', '.join(_names(cls))}"
    problems.add(key, value, rule, remedy)


def _names(cls: type[Any]) -> list[str]:
    choices = cls.CHOICES.values() if issubclass(cls, Choice) else ()
    selector = [cls.SELECTOR] if issubclass(cls, Choice) else []
    return [*selector, *dict.fromkeys(item.name for each in (cls, *choices) for item in fields(each) if item.init)]


def of_section(cls: type[Any], value: Any) -> tuple[str, str]:
    """Return rule and remedy where the user gave a single value for a section."""
    names = _names(cls)
    missing = re.match(r"(\w+)\s*[:=]?\s*(\S.*)", str(value))
    if isinstance(value, str) and missing and missing[1] in names:
        return "is a section", f"write `{missing[1]}: {missing[2]}` below it, with a colon and a blank"
    if issubclass(cls, Choice) and (choice := _one_of(value, cls.CHOICES)):
        return "is a section", f"write `{cls.SELECTOR}: {choice}` below it"
    return "is a section", f"write its fields below it, such as `{names[0]}: ...`"


def _one_of(value: Any, known: Iterable[str]) -> str | None:
    """Return a known word within a value, such as adamw in transformers' adamw_torch_fused."""
    return min(set(str(value).split("_")) & set(known), default=None)


def _answer(key: str, value: Any, dashes: str) -> tuple[str, str]:
    """Return rule and remedy for an unknown key. `dashes`: what stands before a key where the user wrote it."""
    rule = "there is no such field"
    if now := features.renamed().get(key):
        return f"{rule} any more", f"write {dashes}{now}"
    known, (section, _, name) = schema(), key.rpartition(".")
    sections = {k.partition(".")[0] for k in known if "." in k}
    if key in sections:
        return f"{key} is a section", _its_fields(key, value, dashes)
    if name in sections and isinstance(value, dict):
        return f"{name} is a section of its own", f"write `{name}:` at the beginning of a line, not below `{section}:`"
    if key == "plugin":
        words = " ".join(f"--plugin {_word(each)}" for each in (value if isinstance(value, list) else [value]))
        return "names code, which no configuration does", f"give it on the command line: {words}"
    if dashes and (near := closest(key, ("plugin", "plugin-changed", "config"))):
        return "there is no such flag", f"did you mean --{near}?"
    if (head := section.partition(".")[0]) in ENTRIES:
        rule = rule if head != section else "no plugin and no part of llmtrain has this name"
        held = [*known, *(f"{head}.{entry}" for entry in Entry.SECTIONS.get(head, ()))]
        near = closest(name, [each.removeprefix(f"{section}.") for each in held if each.startswith(f"{section}.")])
        own = "remove it" if head != section else "give the file that defines it: --plugin FILE.py"
        return rule, f"did you mean {dashes}{section}.{near}?" if near else own
    elsewhere = _elsewhere()
    homes = [k for k in known if k.rpartition(".")[2] == name]
    for asked in (key, name, key.replace("-", "_"), name.replace("-", "_")):
        if asked in elsewhere and (_lead(_answer_of(asked, value)[1]) or len(homes) != 1):
            owner, ours = _answer_of(asked, value)
            if isinstance(value, dict) and (lead := _lead(ours) or "").endswith(".name"):
                return rule, f"did you mean {dashes}{lead.removesuffix('.name')}?"
            rule += f"; {owner} has it (migrate.md)" if owner else ""
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
        return rule, _here(_answer_of(near, value)[1], dashes)
    return rule, "remove it; `llmtrain train --help` lists every field"


def _like(section: str, name: str, known: list[str]) -> str | None:
    """Return the most similar known key; None: no key is similar.

    Names are compared without their sections first, because with `train.` all fields of train look similar.
    """
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    if near := closest(name, beside):
        return beside[near]
    everywhere: dict[str, str | None] = {}
    for each in known:
        last = each.rpartition(".")[2]
        everywhere[last] = None if last in everywhere else each  # a name in two sections is ambiguous
    near = closest(name, everywhere)
    if near and everywhere[near]:
        return everywhere[near]
    return closest(f"{section}.{name}" if section else name, known)


def _here(ours: str, dashes: str) -> str:
    """Return the remedy that says a feature's answer."""
    if lead := _lead(ours):
        rest = ours.removeprefix(f"`{lead}`").strip(" :,;")
        return f"did you mean {dashes}{lead}?" + (f" ({rest})" if rest else "")
    if ours.startswith("JSON "):
        return f"the DeepSpeed JSON decides this: {ours.removeprefix('JSON ')}"
    return f"remove it: {ours}" if ours.startswith(("not here", "always")) else f"here: {ours}"


def _lead(ours: str) -> str | None:
    lead = re.match(r"`([\w.]+)`", ours)
    return lead[1] if lead and lead[1] in schema() else None


def _its_fields(section: str, value: Any, dashes: str) -> str:
    """Return the remedy for a section given as one value: flags of its fields, with the values if it was a map."""
    known = [key for key in schema() if key.startswith(f"{section}.")]
    if choice := _one_of(value, get_args(schema().get(f"{section}.name"))):
        return f"write {dashes}{section}.name {choice}"
    given = value
    if not isinstance(given, dict):
        with contextlib.suppress(ValueError):
            given = untrusted.loads(str(value).encode())
    if isinstance(given, dict) and given and all(f"{section}.{name}" in known for name in given):
        words = " ".join(f"{dashes}{section}.{name} {_word(each)}" for name, each in leaves(given))
        return f"write its fields one by one: {words}"
    return f"write its fields one by one, such as {dashes}{known[0]}"


def _word(value: Any) -> str:
    """Return a value quoted for a shell."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def other_method(value: Any) -> str | None:
    """Return the answer to a training method that llmtrain lacks, such as grpo."""
    known = dict(_elsewhere().get(str(value).lower(), ()))
    return known.get("")


def of_type(kind: Any, key: str, value: Any) -> tuple[str, str]:
    """Return rule and remedy for a value that is not of the type `kind`."""
    words = type_name(kind)
    kinds = [get_args(each)[0] if get_origin(each) is Annotated else each for each in (kind, *get_args(kind))]
    literals = [str(a) for k in kinds if get_origin(k) is Literal for a in get_args(k)]
    rule, text = f"must be {words}", str(value)
    if key == "objective.name" and (method := other_method(value)):
        return rule, f"choose one of these; {value} is {method}"
    if "disabled" in literals and text.lower() in ("false", "off", "no", "none", "null"):
        return rule, "did you mean disabled?"
    # transformers' adamw_torch_fused, paged_lion_32bit, cosine_with_restarts
    if near := closest(text, literals) or _one_of(text, literals):
        return rule, f"did you mean {near}?"
    if literals:
        return rule, f"choose one; `llmtrain train --help` explains {key}"
    if value is None:
        return rule, "remove the line for the default"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in kinds:
        return rule, f'put it in quotes: "{value}"'
    if key == "data.path" and isinstance(value, list):
        weights = ", ".join(f"{one}: 1" for one in value)
        return rule, f"several folders are a mixture: write `data.mixture: {{{weights}}}`"
    lines = {entry.key: entry.line for entry in entries() if entry.line}  # form of a line in a map of the user's keys
    if line := next((line for field, line in lines.items() if f"{key}.".startswith(f"{field}.")), None):
        return rule, f"write `{line}` lines below it" if key in schema() else f"write a line `{line}`"
    if key in WRITTEN:
        return rule, WRITTEN[key]
    if number := re.fullmatch(r"(-?\d+),(\d+)", text):
        whole = f"write {number[1]}{number[2]}, without a comma"
        return rule, f"write {number[1]}.{number[2]}, with a decimal point" if float in kinds else whole
    if share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        return rule, f"write {float(share[1]) / 100:g}" if float in kinds else "write the number itself, not a share"
    return rule, f"write {words}; `llmtrain train --help` explains {key}"
