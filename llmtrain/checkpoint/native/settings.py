"""What the optimizer of a DeepSpeed checkpoint was set to, as YAML for a run that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmtrain.checkpoint.native.files import Files
from llmtrain.checkpoint.native.scan import shown

_KEYS = ("betas", "eps", "weight_decay")


def optimizer_lines(files: Files) -> list[str]:
    """Lines of a report: the settings of the checkpoint's optimizer, to paste, and what they do not say.

    Nothing where a file has no parameter groups or groups without settings, as universal checkpoints of other tools.
    """
    groups = [group for group in _groups(files) if all(key in group for key in ("lr", *_KEYS))]
    if not groups:
        return ["the optimizer's settings are not in it: lr, betas, eps and weight decay are what the run says"]
    first = max(groups, key=lambda group: _number(group["weight_decay"]))
    decays = _decay(files, groups)
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    lines = ["its optimizer, for the YAML of the run:", "  optim:", "    name: adamw"]
    peak = "" if "initial_lr" in first else "  # of the last step: a schedule's peak is not recorded"
    lines.append(f"    lr: {shown(first.get('initial_lr', first['lr']))}{peak}")
    lines.append(f"    betas: [{', '.join(shown(beta) for beta in list(first['betas'])[:2])}]")
    lines += [f"    {key}: {shown(first[key])}" for key in ("eps", "weight_decay")]
    if decays is not None:
        lines.append(f"    decay: {decays}")
    else:
        lines.append("  # which parameters decay cannot be said by optim.decay: weight_decay by group is "
                     + ", ".join(shown(group["weight_decay"]) for group in groups))  # fmt: skip
    if len({shown(rate) for rate in rates}) > 1:
        lines.append("  # its groups have several learning rates, llmtrain has one: " + ", ".join(map(shown, rates)))
    if any(shown(group[key]) != shown(first[key]) for group in groups for key in ("eps",)):
        lines.append("  # its groups have several values of eps")
    return lines


def _groups(files: Files) -> list[dict[str, Any]]:
    """The parameter groups, from wherever this form keeps them."""
    holders: list[Any] = [files.state.get("optimizer")]
    holders += [file.tree.get("optimizer_state_dict") for stage in files.zero for file in stage[:1]]
    holders += [file.tree for file in files.shared]
    for holder in holders:
        while isinstance(holder, dict):
            found = holder.get("param_groups")
            if isinstance(found, list) and found and all(isinstance(group, dict) and group for group in found):
                return found
            holder = holder.get("optimizer_state_dict") or holder.get("base_optimizer_state")
    return []


def _decay(files: Files, groups: list[dict[str, Any]]) -> str | None:
    """`all`, `matrices`, or None where neither is what the groups do."""
    values = {_number(group["weight_decay"]) for group in groups}
    if len(values) == 1:
        return "all"
    if len(values) != 2 or min(values) != 0:
        return None
    for group, dimensions in zip(groups, _dimensions(files, groups), strict=False):
        if any((_number(group["weight_decay"]) > 0) != (count >= 2) for count in dimensions):
            return None
    return "matrices"


def _dimensions(files: Files, groups: list[dict[str, Any]]) -> Iterator[list[int]]:
    """For each group, how many dimensions its parameters have, where the files tell."""
    named = files.state.get("param_shapes")
    if isinstance(named, list) and len(named) == len(groups):
        yield from ([len(shape) for shape in group.values()] for group in named)
        return
    optimizer = files.state.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else {}
    for group in groups:
        entries = [(inner.get("state") or {}).get(number) for number in group.get("params") or []]
        moments = [entry["exp_avg"] for entry in entries if isinstance(entry, dict) and "exp_avg" in entry]
        yield [moment.dim() for moment in moments if isinstance(moment, Tensor)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
