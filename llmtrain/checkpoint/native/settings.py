"""What the optimizer of a DeepSpeed checkpoint was set to, as YAML for a run that goes on from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmtrain.checkpoint.native.files import Files
from llmtrain.checkpoint.native.scan import shown


def optimizer_lines(files: Files) -> list[str]:
    """Lines of a report: the settings of the checkpoint's optimizer, to paste, and what they do not say.

    Where the file has no parameter groups, or groups without the settings of Adam, one line says so.
    """
    groups = _groups(files)
    if not groups or not all(map(_complete, groups)):
        return ["the optimizer's settings are not in it: lr, betas, eps and weight decay are what the run says"]
    first = max(groups, key=lambda group: group["weight_decay"])
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    peak = "" if "initial_lr" in first else "  # of the last step: a schedule's peak is not recorded"
    lines = ["its optimizer, for the YAML of the run:", "  optim:", "    name: adamw"]
    lines.append(f"    lr: {shown(first.get('initial_lr', first['lr']))}{peak}")
    lines.append(f"    betas: [{', '.join(map(shown, first['betas']))}]")
    lines += [f"    {key}: {shown(first[key])}" for key in ("eps", "weight_decay")]
    if decays := _decay(files, groups):
        lines.append(f"    decay: {decays}")
    else:
        by_group = ", ".join(shown(group["weight_decay"]) for group in groups)
        lines.append(f"  # optim.decay cannot say which parameters decay; weight_decay by group is {by_group}")
    if len(set(rates)) > 1:
        lines.append("  # its groups have several learning rates, llmtrain has one: " + ", ".join(map(shown, rates)))
    if len({(*group["betas"], group["eps"]) for group in groups}) > 1:
        lines.append("  # its groups differ in betas or eps, llmtrain has one of each")
    return lines


def _complete(group: dict[str, Any]) -> bool:
    """Whether a foreign group has Adam's settings, as numbers."""
    betas = group.get("betas")
    numbers = [group.get("lr"), group.get("initial_lr", 0.0), group.get("eps"), group.get("weight_decay")]
    numbers += betas if isinstance(betas, (list, tuple)) and len(betas) == 2 else [None]
    return all(type(number) in (int, float) for number in numbers)


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
    """`all`, `matrices`, or None where neither is what the groups do, or the files do not tell."""
    values = {group["weight_decay"] for group in groups}
    if len(values) == 1:
        return "all"
    if len(values) != 2 or min(values) != 0:
        return None
    for group, dimensions in zip(groups, _dimensions(files, groups), strict=True):
        if not dimensions or any((group["weight_decay"] > 0) != (count >= 2) for count in dimensions):
            return None
    return "matrices"


def _dimensions(files: Files, groups: list[dict[str, Any]]) -> list[list[int]]:
    """For each group, how many dimensions its parameters have; an empty list where the files do not tell."""
    named = files.state.get("param_shapes")
    if isinstance(named, list) and len(named) == len(groups):
        return [[len(shape) for shape in group.values()] for group in named]
    optimizer = files.state.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else {}
    found = []
    for group in groups:
        entries = [(inner.get("state") or {}).get(number) for number in group.get("params") or []]
        moments = [entry.get("exp_avg") for entry in entries if isinstance(entry, dict)]
        found.append([moment.dim() for moment in moments if isinstance(moment, Tensor)])
    return found
