"""The JSON's `pipeline` section: llmtrain makes the stages itself, so it reads what DeepSpeed would. No torch."""

from __future__ import annotations

from typing import Any

from llmtrain.config.problems import Problems

_WAYS = ("parameters", "uniform")


def read_partition(tree: dict[str, Any], path: str, stages: int, problems: Problems) -> str | tuple[int, ...]:
    """`pipeline.partition`: one of the ways, or the number of layers of each stage. Refuses what cannot be."""
    section = tree.get("pipeline")
    if stages == 1 or not isinstance(section, dict):
        return _WAYS[0]
    asked = section.get("partition", _WAYS[0])
    key = "pipeline.partition"
    if isinstance(asked, list):
        if len(asked) == stages and all(type(count) is int and count >= 1 for count in asked):
            return tuple(asked)
        rule = f"a list has the number of layers, 1 or more, of each of the {stages} stages (pipeline.stages)"
        problems.add(key, asked, rule, f"write {stages} numbers whose sum is the model's layers", path)
    elif asked not in _WAYS:
        rule = f"stages are balanced by one of {', '.join(_WAYS)}, or given as a list of layer counts"
        problems.add(key, asked, rule, 'write "parameters", or remove it', path)
    return asked if isinstance(asked, str) else _WAYS[0]
