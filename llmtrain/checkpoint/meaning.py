"""Compares two configurations of a model: the same weights may compute something else."""

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
    r"|vocab_size"  # which the shapes tell
    # Of training alone: the weights mean what they did.
    r"|\w*(dropout|pdrop|layerdrop|jitter|loss)\w*|(\w+_)?init\w*_(range|factor|std|scale)|init_std|\w*_init_scheme"
)
_LENGTHS = re.compile(r"max_position_embeddings|max_seq(uence)?_len(gth)?|model_max_length|n_ctx|context_length")
"""The texts that a model is made for: some kinds of scaled rotary positions read the number, nothing else does."""
_SCALED = re.compile(r'"rope_type": "(?!default")')


def other_meaning(there: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> list[str]:
    """Return `key: A -> B` for each field of two config.json that changes the model's function. Both are read by
    this transformers, with the defaults of the family's class; a field unknown to that class counts only where both
    have it."""
    if there is None or here is None or (there := _plain(there)) == (here := _plain(here)):
        return []
    with contextlib.suppress(Exception):  # of a newer version, or with code of its own: what both tell is compared
        there, here = (_plain(load_config(ModelConfig(config=dict(each))).to_dict()) for each in (there, here))
    return list(_differences(there, here, scaled=bool(_SCALED.search(json.dumps([there, here])))))


def _plain(fields: Mapping[str, Any]) -> Any:
    """As a JSON file gives them back."""
    return json.loads(json.dumps(fields, default=str))


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], *, scaled: bool, prefix: str = "") -> Iterator[str]:
    config = "model_type" in there  # and no map within one
    for key in sorted(there.keys() | here.keys()):
        was, now = there.get(key), here.get(key)
        if was == now or _HARMLESS.fullmatch(key) or (not scaled and _LENGTHS.fullmatch(key)):
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, scaled=scaled, prefix=f"{prefix}{key}.")
        elif not config or (key in there and key in here):
            yield f"{prefix}{key}: {json.dumps(was)} -> {json.dumps(now)}"


def other_scale(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the settings by which the adapters of two trainer states have another scale."""
    was, now = ((state.get("run") or {}).get("adapter") or {} for state in (there, here))
    keys = ("r", "alpha", "rslora") if was.get("r") and now.get("r") else ()
    return [f"adapter.{key}: {was.get(key)} -> {now.get(key)}" for key in keys if was.get(key) != now.get(key)]


def refuse_other_base(mark: Path, config: Any) -> None:
    """Refuse an adapter whose model's configuration is not that of `mark`, llmtrain's record. Raises ModelError."""
    told = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        told = untrusted.loads(mark.read_bytes(), infinite=True).get("model_config")
    if found := other_meaning(told, config.to_dict()):
        raise ModelError(f"{mark.parent}: its adapter was trained beside another configuration of the model: "
                         f"{'; '.join(found)}. Give config.json of the model these values back, or take the whole: "
                         "llmtrain checkpoint to-hf RUN FOLDER --merge.")  # fmt: skip
