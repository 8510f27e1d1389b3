"""A small run folder for the configuration tests: a YAML, a JSON, and a data folder with a manifest."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import yaml

from llmtrain.base.choice import Choice, default_of
from llmtrain.base.trees import lookup
from llmtrain.config.deepspeed.join import DEGREE_KEYS
from tests.helpers.prepared import write_prepared
from tools.pages import BASE, BASE_JSON

RUN, DS = BASE, BASE_JSON


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it; a value of `...` removes the key."""
    result = copy.deepcopy(base)
    for key, value in change.items():
        if value is ...:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def nested(dotted: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """The base with a value at a dotted key."""
    section = base
    *sections, last = dotted.split(".")
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    return base


def value_of(base: type[Choice], field: str) -> Any:
    """A legal value of a field of some choices: its default, where it has one."""
    default = default_of(base.CHOICES[base.owners(field)[0]].__dataclass_fields__[field])
    return 5 if default is None else default


def write(folder: Path, run: dict[str, Any] | str | None = None, ds: dict[str, Any] | str | None = None) -> None:
    """Write run.yaml, ds.json and data/x. A dict changes the standard file, a string replaces it."""
    if not (folder / "data/x").exists():
        documents = [[list(range(1, 500))] * 4]
        write_prepared(folder / "data/x", documents, documents, vocab_size=512)
    text = run if isinstance(run, str) else yaml.safe_dump(merged(RUN, run or {}), sort_keys=False)
    (folder / "run.yaml").write_text(text)
    text = ds if isinstance(ds, str) else json.dumps(merged(DS, ds or {}))
    (folder / "ds.json").write_text(text)


def ranks_at_least(path: Path) -> int:
    """The product of the degrees that a DeepSpeed JSON asks for."""
    tree = json.loads(path.read_text())
    degrees = [lookup(tree, key) for key in DEGREE_KEYS.values()]
    return math.prod(degree for degree in degrees if degree)
