"""A key, a flag or a value that there is not: what is said of it.

First by the tables of docs/migrate.md, which say what the names of other stacks are here; then by our own names. A name
that is like none is answered by no guess: a wrong one costs more than none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.config import strict_yaml
from llmtrain.config.ds_keys import KEYS
from llmtrain.config.join import SHARED
from llmtrain.config.problems import Problems, closest
from llmtrain.config.reference import schema

_PAGE = Path(__file__).parents[1] / "commands/shipped/docs/migrate.md"
_OWNERS = {"transformers": "transformers", "trl": "TRL", "peft": "PEFT", "llamafactory": "LLaMA-Factory"}
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


def unknown_key(
    key: str, value: Any, place: str | None, problems: Problems, *, flag: bool = False, tokens: int | None = None
) -> None:
    """Add the mistake. `flag`: it stands on the command line; `tokens`: of the run's data, where that is known."""
    rule, remedy = _answer(key, value, "--" if flag else "", tokens)
    problems.add(f"--{key}" if flag else key, value, rule, remedy, place)


def _answer(key: str, value: Any, dashes: str, tokens: int | None) -> tuple[str, str]:
    """Rule and remedy."""
    rule = "there is no such field"
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
            return rule, _here(ours, dashes) + _epochs(ours, value, tokens)
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


def _epochs(ours: str, value: Any, tokens: int | None) -> str:
    """The tokens that so many epochs are."""
    if not ours.startswith("`train.max_tokens`: epochs x") or not tokens:
        return ""
    number = strict_yaml.plain_scalar(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < 1e6:
        return ""
    return f"; {number:g} epochs of the {tokens} here are {round(number * tokens)}"


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


def tokens_of(data: Any) -> int | None:
    """Training tokens of the folder that the section `data` names, as far as it can be read."""
    path = data.get("path") if isinstance(data, dict) else None
    if not isinstance(path, str):
        return None
    try:
        tokens = untrusted.loads((Path(path) / "manifest.json").read_bytes())["tokens"]["train"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None
