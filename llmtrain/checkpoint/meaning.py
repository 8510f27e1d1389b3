"""Compares two model configurations, since equal weights may compute different functions."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import load_config

_HARMLESS = re.compile(
    r"_?name_or_path|_commit_hash|transformers_version|architectures|(torch_)?dtype|use_cache|return_dict|problem_type"
    r"|output_(attentions|hidden_states|router_logits)|id2label|label2id|num_labels|label_names|\w+_token_(id|index)s?"
    r"|\w*(attn|attention|experts)_implementation\w*|use_(mamba_kernels|mambapy|mem_eff_path|associative_scan)"
    r"|chunk_size(_feed_forward|_lm_head)?|num_logits_to_keep|pretraining_tp|gradient_checkpointing"
    r"|vocab_size"  # the shapes show it
    # These matter only in training: the function of the weights stays the same.
    r"|\w*(dropout|pdrop|layerdrop|jitter|loss)\w*|(\w+_)?init\w*_(range|factor|std|scale)|init_std|\w*_init_scheme"
)
_LENGTHS = re.compile(r"max_position_embeddings|max_seq(uence)?_len(gth)?|model_max_length|n_ctx|context_length")
"""The text length that a model is made for. Only some kinds of scaled rotary positions read it."""
_SCALED = re.compile(r'"rope_type": "(?!default")')


def other_meaning(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> list[str]:
    """Return `key: A -> B` for each field of two config.json that changes the model's function. Missing fields have the
    defaults of the family's class; a field that the class does not know counts only if both have it."""
    if saved is None or current is None or (saved := _plain(saved)) == (current := _plain(current)):
        return []
    with contextlib.suppress(Exception):  # a family that cannot be loaded: the fields are compared as they are
        saved, current = (_plain(load_config(ModelConfig(config=dict(tree))).to_dict()) for tree in (saved, current))
    return list(_differences(saved, current, scaled=bool(_SCALED.search(json.dumps([saved, current])))))


def _plain(fields: Mapping[str, Any]) -> Any:
    """Convert values to their form in a JSON file."""
    return json.loads(json.dumps(fields, default=str))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, scaled: bool, prefix: str = "") -> Iterator[str]:
    config = "model_type" in old  # not a nested map
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if was == now or _HARMLESS.fullmatch(key) or (not scaled and _LENGTHS.fullmatch(key)):
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, scaled=scaled, prefix=f"{prefix}{key}.")
        elif not config or (key in old and key in new):
            yield f"{prefix}{key}: {json.dumps(was)} -> {json.dumps(now)}"


def other_scale(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting by which the adapters of two sections differ in scale."""
    keys = ("r", "alpha", "rslora") if was.get("r") and now.get("r") else ()
    return [f"adapter.{key}: {was.get(key)} -> {now.get(key)}" for key in keys if was.get(key) != now.get(key)]


def refuse_other_base(mark: Path, config: Any) -> None:
    """Raise ModelError if the adapter was trained on another model configuration. `mark`: the exported folder's record
    of it. `config`: the base's configuration."""
    base_config = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        base_config = untrusted.loads(mark.read_bytes(), infinite=True).get("model_config")
    if changes := other_meaning(base_config, config.to_dict()):
        raise ModelError(
            f"{mark.parent}: its adapter was trained on another configuration of the model: {'; '.join(changes)}. Set "
            "the old values in its config.json, or use the merged model: llmtrain checkpoint to-hf RUN FOLDER --merge."
        )
