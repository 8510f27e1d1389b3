"""The inline `model.config`: fields of a Hugging Face config.json as plain data.

It never reaches jsonargparse, which imports what a `class_path` names before it checks it, and it may not
hold the keys by which transformers would load code or another precision behind our back.
"""

from __future__ import annotations

import re
from typing import Any

from llmtrain.config.problems import Places, Problems

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


def check(tree: dict[str, Any], places: Places, problems: Problems) -> None:
    """Report everything in the tree that is not plain data, and a missing or odd model_type."""
    _check_map(tree, "model.config", places, problems)
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        problems.add(
            "model.config.model_type", model_type, "a Hugging Face model type is required, such as llama or qwen3",
            "write `model_type: llama` under model.config",
            places.get("model.config.model_type", places.get("model.config")),
        )  # fmt: skip


def _check_map(tree: dict[str, Any], prefix: str, places: Places, problems: Problems) -> None:
    for key, value in tree.items():
        dotted = f"{prefix}.{key}"
        why = _REFUSED.get(key) or ("names with _ are internal to transformers" if key.startswith("_") else None)
        if why:
            problems.add(dotted, value, f"not allowed: {why}", "remove it", places.get(dotted))
        elif isinstance(value, dict):
            _check_map(value, dotted, places, problems)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _check_map(item, dotted, places, problems)
