"""Tiny models of many families, which are data: tests/data/families.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TREE = yaml.safe_load(Path(__file__).parents[1].joinpath("data/families.yaml").read_text())
FAMILIES: dict[str, dict[str, Any]] = _TREE["families"]
FROZEN: dict[str, dict[str, Any]] = _TREE["frozen"]
VARIANTS: dict[str, dict[str, Any]] = _TREE["variants"]
LOW_RANK: dict[str, Any] = _TREE["low_rank"]
HYBRID: dict[str, Any] = _TREE["hybrid"]
EXPERTS = ("mixtral", "qwen3_moe")
"""Those of FAMILIES with experts."""


def tied(fields: dict[str, Any], yes: bool = True) -> dict[str, Any]:
    """The same model with head and embedding in one tensor, or (`yes` False) in two."""
    return {**fields, "tie_word_embeddings": yes}


def summed_loss(model: Any, inputs: Any, labels: Any, positions: Any = None) -> Any:
    """The next-token loss of a LanguageModel (nats), which its head computes."""
    return model(inputs, lambda head, hidden: head.nll_sum(hidden, labels), positions)
