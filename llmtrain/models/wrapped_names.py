"""Names of tensors that were saved from a model inside of a wrapper, such as torch.compile's."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_WRAPPERS = {"_orig_mod.": "torch.compile", "base_model.model.": "peft", "module.": "DDP"}
"""Part of a name -> the library that adds it when it wraps a model."""


def strange_part(saved: Iterable[str], wanted: Collection[str]) -> str:
    """Return a sentence on the part of names without which most of `saved` would be in `wanted`, or "" if there is
    none."""
    names = list(saved)
    ends = min(wanted, default="")
    before = [name.removesuffix(ends) for name in names if ends and name.endswith(f".{ends}")]
    for part in (*_WRAPPERS, *before):
        if 2 * sum(part in name and name.replace(part, "") in wanted for name in names) > len(names):
            maker = f", which {_WRAPPERS[part]} adds" if part in _WRAPPERS else ""
            return f" The names there contain `{part}`{maker}: save the tensors under their names without this part."
    return ""
