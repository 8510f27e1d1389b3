"""LoRA of PEFT, as the stacks name its fields."""

from __future__ import annotations

import itertools
import re
from typing import Any

from llmtrain.features.migrate.draft import Draft, Given

_WHOLE = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
"""Module to train as a whole -> its name in most families."""
_OF_PEFT = ["q_proj", "v_proj"]
"""PEFT's target_modules for Llama, Mistral, Qwen2 and others, if none are given (peft/utils/constants.py)."""


def lora(given: Given, draft: Draft, defaults: dict[str, Any]) -> None:
    """Answer r, alpha, dropout, targets and modules_to_save; `defaults`: the stack's, by these names."""
    rank = given.take("lora_r", defaults["r"])
    draft.set("adapter.r", rank, given.source("lora_r"))
    alpha = given.take("lora_alpha", defaults["alpha"] or 2 * rank)
    draft.set("adapter.alpha", float(alpha), given.source("lora_alpha"))
    dropout = given.take("lora_dropout", defaults["dropout"])
    draft.set("adapter.dropout", float(dropout), given.source("lora_dropout"))
    _targets(given, draft, defaults["targets"])
    if whole := _names(given.take("modules_to_save")):
        patterns = [_WHOLE.get(name, f"*.{name}") for name in whole]
        draft.set("adapter.modules_to_save", patterns, given.source("modules_to_save"))
    if ratio := given.take("loraplus_lr_ratio"):
        draft.set("optim.lr_factor_of", {"*lora_B*": float(ratio)}, given.source("loraplus_lr_ratio"))


def without_lora(given: Given, draft: Draft) -> None:
    """Leave LoRA's options out of a run without an adapter, as their stack does."""
    for option in [option for option in given.left if option.startswith(("lora_", "peft_"))]:
        draft.remark(option, given.take(option), "no adapter trains in this run")


def _targets(given: Given, draft: Draft, default: list[str]) -> None:
    linear, names = given.take("target_linear"), _names(given.take("target_modules", default))
    key = given.name("target_modules")
    if linear or names in (["all-linear"], ["all"]):
        draft.set("adapter.targets", ["all-linear"], given.source("target_linear" if linear else "target_modules"))
        return
    if not names:
        names = _OF_PEFT
        draft.remark(key, None, f"PEFT takes {', '.join(names)} for most families; of another one write its own here")
    patterns = []
    for name in names:
        if re.fullmatch(r"[\w.]+", name):
            patterns.append(f"*.{name}")
        elif globs := _globs(name):
            patterns += globs
        else:
            draft.change(key, name, "a regular expression; adapter.targets has patterns with *, ? and [...]")
    draft.set("adapter.targets", patterns or ["all-linear"], given.source("target_modules"))


def _globs(expression: str) -> list[str]:
    """Return patterns for a regular expression of alternatives, `.*` and `\\d+`; none: it has more than these."""
    text = re.sub(r"\[?\\d\]?\+|\.[*+]", "*", expression.strip("^$")).replace("\\.", ".")
    parts = [part.removeprefix("?:").split("|") for part in re.split(r"[()]", text)]
    patterns = ["".join(chosen) for chosen in itertools.product(*parts)]
    return patterns if all(re.fullmatch(r"[\w.*]+", pattern) for pattern in patterns) else []


def _names(value: Any) -> list[str]:
    """A list, or a text with commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return list(value or ())
