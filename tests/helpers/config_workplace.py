"""A small run folder for the configuration tests: a YAML, a JSON, and a data folder with a manifest."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.deepspeed.join import DEGREE_KEYS
from llmtrain.config.deepspeed.read import lookup
from tests.helpers.prepared import write_prepared

RUN: dict[str, Any] = {
    "deepspeed": "ds.json",
    "model": {"config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}},
    "data": {"path": "data/x", "sequence_length": 128},
    "train": {"global_batch": 8, "micro_batch": 2, "max_steps": 100},
}
DS: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}


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


def write(
    folder: Path,
    run: dict[str, Any] | str | None = None,
    ds: dict[str, Any] | str | None = None,
) -> None:
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
