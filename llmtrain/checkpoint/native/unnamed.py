"""Names for the optimizer state of a DeepSpeed checkpoint without ZeRO: it numbers its parameters and knows no names.

Parameters stand in a group in the order of the module. What is not known is which group has which of them. Each
parameter, in the module's order, is offered to the next free place of every group; it fits where the shapes agree and,
where there are fp32 masters, their rounded beginning is the module's copy. One way must remain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.native.files import Files
from llmtrain.checkpoint.native.pickles import PickleFile
from llmtrain.checkpoint.native.state import Span, State, adam_moments
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.tensorfile import numel

_COMPARED = 4096  # elements


@dataclass
class _Group:
    """Places for parameters: `tensors` one each, or one flat tensor for all (`flat`)."""

    entries: list[Any]
    """The optimizer's state of each tensor."""
    masters: list[Tensor]
    """fp32 masters, as many; empty in fp32 training, where there are none."""
    flat: bool
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """Shape of each tensor."""

    def end(self) -> int:
        return numel(self.sizes[0]) if self.flat else len(self.sizes)

    def after(self, place: int, shape: tuple[int, ...]) -> int:
        return place + (numel(shape) if self.flat else 1)

    def fits(self, place: int, shape: tuple[int, ...], file: PickleFile, copy: Span) -> bool:
        if self.after(place, shape) > self.end() or not (self.flat or self.sizes[place] == shape):
            return False
        if not self.masters:
            return True
        count = min(_COMPARED, numel(shape))
        tensor, first = (self.masters[0], place) if self.flat else (self.masters[place], 0)
        held = copy.read(0, count)
        return torch.equal(file.read(tensor, first, first + count).to(held.dtype), held)


def add_unnamed(state: State, files: Files, order: list[str], kinds: tuple[str, ...]) -> None:
    """Masters (if there are any) and moments of a checkpoint without ZeRO.

    Args:
        order: the module's parameters in its order, tied ones once.

    Raises:
        CheckpointError: the state is not Adam's, or could be dealt out to the parameters in more ways than one.
    """
    waiting = list(order)
    for stage, file in enumerate(files.models if files.layers else files.models[:1]):
        groups = _groups(state, file, kinds)
        names = _take(state, files, file, groups, waiting, stage)
        places = _deal(state, file, groups, names)
        for name, (group, place) in zip(names, places, strict=True):
            _add(state, file, groups[group], place, name, kinds, twin=name not in waiting)
        waiting = [name for name in waiting if name not in names]
    if waiting:
        raise CheckpointError(
            f"{files.folder}: the optimizer has no state for {waiting[0]} ({len(waiting)} in all). If it was frozen, "
            "import the weights alone, with --weights-only."
        )


def _groups(state: State, file: PickleFile, kinds: tuple[str, ...]) -> list[_Group]:
    saved = file.tree.get("optimizer")
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{file.path} holds no optimizer state; the weights alone can be imported (--weights-only)."
        )
    inner = saved.get("optimizer_state_dict", saved)
    flat_masters, masters = saved.get("fp32_groups_flat"), saved.get("fp32_groups")
    groups = []
    try:
        for index, group in enumerate(inner["param_groups"]):
            entries = [inner["state"].get(number) for number in group["params"]]
            own = [flat_masters[index]] if flat_masters else list(masters[index]) if masters else []
            own = [file.tensor(tensor) for tensor in own]
            groups.append(_Group(entries, own, bool(flat_masters)))
    except (LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{file.path}: its optimizer state is not what DeepSpeed 0.19.8 writes.") from None
    for one in groups:
        moments = [adam_moments(state, file, entry, 1, kinds)[kinds[0]] for entry in one.entries]
        one.sizes = [tuple(tensor.shape) for tensor in moments]
        if one.masters and [tuple(tensor.shape) for tensor in one.masters] != one.sizes:
            raise CheckpointError(f"{file.path}: masters and moments of the optimizer differ in shape.")
    return groups


def _take(
    state: State, files: Files, file: PickleFile, groups: list[_Group], waiting: list[str], stage: int
) -> list[str]:
    """The names that this pipeline stage has: the next ones, before them what it shares with the first stage."""
    elements = sum(numel(size) for group in groups for size in group.sizes)
    later = [] if stage + 1 < len(files.models) else waiting
    names: list[str] = []
    if later and stage:
        missing = elements - sum(numel(state.shapes[name]) for name in later)
        names = [name for name in state.copies if name not in waiting and numel(state.shapes[name]) == missing][:1]
        elements -= sum(numel(state.shapes[name]) for name in names)
    for name in waiting:
        if elements <= 0:
            break
        elements -= numel(state.shapes[name])
        names.append(name)
    if elements:
        raise CheckpointError(
            f"{file.path}: its optimizer state has other sizes than the module's parameters. If some were frozen, "
            "import the weights alone, with --weights-only."
        )
    return names


def _deal(state: State, file: PickleFile, groups: list[_Group], names: list[str]) -> list[tuple[int, int]]:
    """(group, place in it) of each name."""
    ways: dict[tuple[int, ...], tuple[int, tuple[Any, ...]]] = {tuple(0 for _ in groups): (1, ())}
    for name in names:
        shape = state.shapes[name]
        ahead: dict[tuple[int, ...], tuple[int, tuple[Any, ...]]] = {}
        for places, (count, path) in ways.items():
            for index, group in enumerate(groups):
                if group.fits(places[index], shape, file, state.copies[name]):
                    after = (*places[:index], group.after(places[index], shape), *places[index + 1 :])
                    ahead[after] = (ahead.get(after, (0, ()))[0] + count, (path, (index, places[index])))
        ways = ahead
    count, path = ways.get(tuple(group.end() for group in groups), (0, ()))
    if count != 1:
        raise CheckpointError(
            f"{file.path}: its optimizer state names no parameters, and there are {count} ways to deal it out to them. "
            'Save with ZeRO 1 ("zero_optimization": {"stage": 1}) and import that, or import the weights alone, with '
            "--weights-only."
        )
    found = []
    while path:
        path, place = path
        found.append(place)
    return found[::-1]


def _add(
    state: State, file: PickleFile, group: _Group, place: int, name: str, kinds: tuple[str, ...], *, twin: bool
) -> None:
    index, offset = (0, place) if group.flat else (place, 0)
    tensors = adam_moments(state, file, group.entries[index], 1, kinds)
    if group.masters:
        tensors[PARAM] = group.masters[index]
    else:
        tensors[PARAM] = state.copies[name].tensor
    for kind, tensor in tensors.items():
        home = state.copies[name].file if kind == PARAM and not group.masters else file
        span = Span(home, tensor, offset if kind != PARAM or group.masters else 0, 0, numel(state.shapes[name]))
        (state.twins if twin else state.spans).setdefault((kind, name), []).append(span)
