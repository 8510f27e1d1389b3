"""Places of parameters and moments in a DeepSpeed checkpoint's files, by DeepSpeed's names.

ZeRO 1 and 2 keep one flat tensor for a parameter group, cut evenly over the ranks, with a map of its parts
(param_slice_mappings). ZeRO 3 cuts every parameter by itself and keeps the parts one after another, in the order of
param_shapes. Without ZeRO the optimizer numbers its parameters and has no names: see `add_unnamed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.features.deepspeed_checkpoints.pickles import PickleFile, shown
from llmtrain.features.deepspeed_checkpoints.saved_files import Files
from llmtrain.optim.optimizers import PARAM, AdamW
from llmtrain.storage.tensorfile import numel

MOMENTS = AdamW.state
_TIED = "tied_modules."


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a flat parameter; they begin at element `offset` of a file's flat tensor."""

    file: PickleFile
    tensor: Tensor
    offset: int
    start: int
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        """Elements in the precision of the file."""
        first = self.offset + start - self.start
        return self.file.read(self.tensor, first, first + stop - start)


@dataclass
class State:
    spans: dict[tuple[str, str], list[Span]] = field(default_factory=dict)
    """(kind, name) -> the parts, in order."""
    twins: dict[tuple[str, str], list[Span]] = field(default_factory=dict)
    """Parts of a tied parameter in a second pipeline stage."""
    copies: dict[str, Span] = field(default_factory=dict)
    """The module's own values, in the precision of the forward pass."""
    aliases: dict[str, list[Span]] = field(default_factory=dict)
    """The module's copies under other names of a tied parameter, by its first name."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: dict[Path, int] = field(default_factory=dict)
    """Number of optimizer steps by file."""

    def add(self, kind: str, name: str, span: Span, stage: int = 0) -> None:
        """Append a part; a later pipeline stage repeats a tied parameter."""
        home = self.twins if stage and name.startswith(_TIED) else self.spans
        home.setdefault((kind, name), []).append(span)

    def check_gaps(self) -> None:
        """Raises CheckpointError unless the parts of every tensor cover it once."""
        for (kind, name), spans in [*self.spans.items(), *self.twins.items()]:
            end = 0
            for span in spans:
                if span.start != end:
                    raise CheckpointError(
                        f"{span.file.path}: {kind} of {name} has a gap or an overlap at element {end}."
                    )
                end += span.numel
            if end != numel(self.shapes[name]):
                raise CheckpointError(
                    f"{spans[0].file.path.parent}: {kind} of {name} has {end} elements, its shape "
                    f"{list(self.shapes[name])} has {numel(self.shapes[name])}. A part is missing."
                )

    def note_step(self, file: PickleFile, value: Any) -> None:
        """Record a file's optimizer counter. Raises CheckpointError: the file had another one."""
        step = int(file.number(value))
        if self.steps.setdefault(file.path, step) != step:
            raise CheckpointError(f"{file.path}: the optimizer counts {self.steps[file.path]} steps, and {step}.")

    def step(self) -> int:
        """The optimizer step that all files agree on. Raises CheckpointError."""
        values = {value: path for path, value in self.steps.items()}
        if len(values) > 1:
            counters = ", ".join(f"{value} in {path.name}" for value, path in sorted(values.items()))
            raise CheckpointError(
                f"{next(iter(self.steps)).parent} mixes files of different steps: the optimizer's counter is "
                f"{counters}. DeepSpeed would load that without a word; nothing can be taken from it."
            )
        return next(iter(values), 0)


def add_copies(state: State, files: Files, frozen: Iterable[str] = ()) -> None:
    """Add the module's own tensors. `frozen`: ends of names of buffers that belong to the weights."""
    named: list[tuple[str, PickleFile, Any]] = []
    if files.layers:
        for index, file in sorted(files.layers.items()):
            named += [(f"{index}.{suffix}", file, value) for suffix, value in file.tree.items()]
    else:
        file = files.models[0]
        frozen_ends = tuple(frozen)
        buffers = {n for n in file.tree.get("buffer_names") or [] if not str(n).endswith(frozen_ends)}
        named = [(n, file, value) for n, value in (file.tree.get("module") or {}).items() if n not in buffers]
    for name, file, value in named:
        if not isinstance(name, str) or not name.isprintable():
            raise CheckpointError(f"{file.path}: {shown(name)} is no name of a parameter.")
        if isinstance(value, Tensor):
            tensor = file.tensor(value)
            if tensor.is_floating_point() and tensor.numel():
                state.copies[name] = Span(file, tensor, 0, 0, tensor.numel())
                state.shapes.setdefault(name, tuple(tensor.shape))


def add_zero(state: State, files: Files, kinds: tuple[str, ...]) -> None:
    """Add masters and moments from ZeRO's optimizer files, any stage. Raises CheckpointError."""
    config = files.state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    zero = zero if isinstance(zero, dict) else {}
    # With these settings DeepSpeed's own map of the parts has another order than the parameters.
    in_turn = zero.get("round_robin_gradients") is True and not zero.get("parameter_alignment")
    for stage, ranks in enumerate(files.zero):
        groups = _shape_groups(files.models[stage]) or [_shapes_of_copies(state, ranks)]
        for group in groups:
            state.shapes.update(group)
        for rank, file in enumerate(ranks):
            saved = file.tree.get("optimizer_state_dict")
            if not isinstance(saved, dict):
                raise CheckpointError(f"{file.path} holds no optimizer_state_dict.")
            if "fp32_flat_groups" in saved:
                parts = _zero_3_parts(file, saved, groups, rank, len(ranks))
            elif in_turn:
                parts = _in_order_of_shapes(file, saved, groups, rank)
            else:
                parts = _zero_12_parts(state, file, saved, stage)
            for index, offset, name, start, count in parts:
                for kind, tensor in _flat_tensors(state, file, saved, index, kinds).items():
                    if offset + count > tensor.numel():
                        raise CheckpointError(
                            f"{file.path}: {kind} of group {index} has {tensor.numel()} elements, {name} would end at "
                            f"{offset + count}. (State that is offloaded to NVMe is not in these files.)"
                        )
                    state.add(kind, name, Span(file, tensor, offset, start, count), stage)
    _add_frozen(state, files)


def _shape_groups(file: PickleFile) -> list[dict[str, tuple[int, ...]]]:
    groups = file.tree.get("param_shapes") or []
    try:
        shapes = [{name: tuple(int(size) for size in shape) for name, shape in group.items()} for group in groups]
    except (TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{file.path}: param_shapes is not a list of names with shapes.") from None
    for name in (name for group in shapes for name in group):
        if not isinstance(name, str) or not name.isprintable():
            raise CheckpointError(f"{file.path}: {shown(name)} is no name of a parameter.")
    return shapes


def _shapes_of_copies(state: State, ranks: list[PickleFile]) -> dict[str, tuple[int, ...]]:
    """Shapes from the module's copies, for checkpoints without param_shapes (a bf16 pipeline without ZeRO)."""
    counts: dict[str, int] = {}
    for file in ranks:
        for mapping in (file.tree.get("optimizer_state_dict") or {}).get("param_slice_mappings") or []:
            for name, address in mapping.items():
                counts[name] = counts.get(name, 0) + int(vars(address).get("numel", 0))
    shapes = {}
    for name, count in counts.items():
        homes = [name] if name in state.copies else _tied_homes(state, name, count, set(counts))
        if len(homes) == 1:
            shapes[name] = state.shapes[homes[0]]
    return shapes


def _tied_homes(state: State, name: str, count: int, owned: set[str]) -> list[str]:
    """The copies that can be the tied parameter `name`: those in layers that own no parameter."""
    layers = {other.split(".")[0] for other in owned}
    suffix = name.split(".", 2)[-1]
    return [
        copy
        for copy in state.copies
        if copy.split(".", 1)[-1] == suffix and numel(state.shapes[copy]) == count and copy.split(".")[0] not in layers
    ]


_Part = tuple[int, int, str, int, int]
"""Group, first element in the flat tensor, name, first element in the parameter, elements."""


def _zero_12_parts(state: State, file: PickleFile, saved: dict[str, Any], stage: int) -> Iterator[_Part]:
    for group, mapping in enumerate(saved.get("param_slice_mappings") or _lacks(file, "param_slice_mappings")):
        for name, address in mapping.items():
            where = vars(address)
            offset, count = where.get("start"), where.get("numel")
            if type(offset) is not int or type(count) is not int or offset < 0 or count < 0 or name not in state.shapes:
                raise CheckpointError(f"{file.path}: param_slice_mappings says nothing that makes sense of {name}.")
            home = state.twins if stage and name.startswith(_TIED) else state.spans
            yield group, offset, name, sum(span.numel for span in home.get((PARAM, name), [])), count


def _in_order_of_shapes(
    file: PickleFile, saved: dict[str, Any], groups: list[dict[str, tuple[int, ...]]], rank: int
) -> Iterator[_Part]:
    """The parts by `param_shapes`, whose order is that of the flat tensors; each rank has equally many elements."""
    for group, shapes in enumerate(groups):
        size = _flat_tensors(State(), file, saved, group, ())[PARAM].numel()
        at, low, high = 0, rank * size, (rank + 1) * size
        for name, shape in shapes.items():
            begin, end = max(low, at), min(high, at + numel(shape))
            if begin < end:
                yield group, begin - low, name, begin - at, end - begin
            at += numel(shape)


def _zero_3_parts(
    file: PickleFile, saved: dict[str, Any], groups: list[dict[str, tuple[int, ...]]], rank: int, ranks: int
) -> Iterator[_Part]:
    if saved.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{file.path}: expert-parallel checkpoints of DeepSpeed's are not read.")
    if len(groups) != len(saved["fp32_flat_groups"]):
        raise CheckpointError(f"{file.path}: it has other parameter groups than the model file.")
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            total = numel(shape)
            part = -(-total // ranks)
            start = min(total, part * rank)
            yield group, offset, name, start, min(part, total - start)
            offset += part
        flat = saved["fp32_flat_groups"][group]
        if isinstance(flat, Tensor) and flat.numel() != offset:
            raise CheckpointError(
                f"{file.path}: fp32_flat_groups[{group}] has {flat.numel()} elements, its parameters have {offset}. "
                "(State that is offloaded to NVMe is not in these files.)"
            )


def _flat_tensors(
    state: State, file: PickleFile, saved: dict[str, Any], group: int, kinds: tuple[str, ...]
) -> dict[str, Tensor]:
    """Kind -> the flat tensor of a group; also records the optimizer's step."""
    masters = saved.get("fp32_flat_groups") or saved.get("single_partition_of_fp32_groups")
    if not isinstance(masters, list) or group >= len(masters):
        _lacks(file, "fp32 master parameters")
    flat = {PARAM: file.tensor(masters[group])}  # type: ignore[index]
    if kinds:
        base = saved.get("optimizer_state_dict") or saved.get("base_optimizer_state")
        states = base.get("state") if isinstance(base, dict) else dict(enumerate(base or []))
        flat |= adam_moments(state, file, (states or {}).get(group), flat[PARAM].numel(), kinds)
    return flat


def adam_moments(state: State, file: PickleFile, entry: Any, count: int, kinds: tuple[str, ...]) -> dict[str, Tensor]:
    """The moments of one entry of Adam's state; also records its step. Raises CheckpointError: another optimizer."""
    tensors = {}
    if isinstance(entry, dict):
        tensors = {
            key: file.tensor(v) for key, v in entry.items() if key in kinds or (isinstance(v, Tensor) and v.numel() > 1)
        }
    if set(tensors) != set(kinds) or any(tensor.numel() < count for tensor in tensors.values()):
        raise CheckpointError(
            f"{file.path}: the optimizer keeps {', '.join(sorted(tensors)) or 'nothing'} of {count} elements; Adam's "
            f"{' and '.join(kinds)} were expected. Another optimizer's state cannot be imported; the weights alone "
            "can, with --weights-only."
        )
    if "step" in entry:
        state.note_step(file, entry["step"])
    return tensors


def _add_frozen(state: State, files: Files) -> None:
    first = files.models[0].tree
    shapes = first.get("frozen_param_shapes") or {}
    if "fp32_flat_groups" in files.zero[0][0].tree["optimizer_state_dict"]:
        for name, shape in shapes.items():
            state.shapes[name] = tuple(int(size) for size in shape)
            total, start = numel(state.shapes[name]), 0
            for file in files.models:
                tensor = file.tensor((file.tree.get("frozen_param_fragments") or {}).get(name))
                count = min(tensor.numel(), total - start)
                state.add(PARAM, name, Span(file, tensor, 0, start, count))
                start += count


def place_tied(state: State, files: Files) -> None:
    """Give a tied parameter its copy, from the layer file of its first place. Raises CheckpointError: two fit."""
    owned = {name for _, name in state.spans}
    for name in [name for name in state.shapes if name.startswith(_TIED)] if files.layers else []:
        homes = _tied_homes(state, name, numel(state.shapes[name]), owned)
        if len(homes) != 1:
            raise CheckpointError(
                f"{files.folder}: which of its layer files holds {name}? ({', '.join(homes) or 'none'})"
            )
        state.copies[name] = state.copies.pop(homes[0])
        del state.shapes[homes[0]]


def add_copies_as_masters(state: State, names: list[str]) -> None:
    for name in names:
        state.spans[PARAM, name] = [state.copies[name]]


def read_spans(spans: list[Span], start: int, stop: int) -> Tensor:
    """Read elements of a tensor from its parts, in fp32."""
    parts = [
        span.read(max(start, span.start), min(stop, span.start + span.numel))
        for span in spans
        if span.start < stop and start < span.start + span.numel
    ]
    return torch.cat(parts).float() if len(parts) != 1 else parts[0].float()


def _lacks(file: PickleFile, what: str) -> Any:
    raise CheckpointError(f"{file.path} has no {what}: it is not what DeepSpeed 0.19.8 writes.")


# Names for the optimizer state of a DeepSpeed checkpoint without ZeRO, which numbers its parameters and has no names.
# The parameters in a group keep the order of the module, but the group of each parameter is unknown. Each parameter, in
# the module's order, is offered to the next free place of every group; it fits if the shapes agree and, with fp32
# masters, their rounded beginning is the module's copy. One way must remain.


_COMPARED = 4096  # elements


@dataclass
class _Group:
    """Places for parameters: one tensor each, or one flat tensor for all (`flat`)."""

    file: PickleFile
    entries: list[Any]
    """The optimizer's state of each tensor."""
    masters: list[Tensor]
    """fp32 masters, one per entry; empty in fp32 training, which has none."""
    flat: bool
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """Shape of each tensor."""

    def end(self) -> int:
        return numel(self.sizes[0]) if self.flat else len(self.sizes)

    def after(self, place: int, shape: tuple[int, ...]) -> int:
        return place + (numel(shape) if self.flat else 1)

    def fits(self, place: int, shape: tuple[int, ...], copy: Span) -> bool:
        if self.after(place, shape) > self.end() or not (self.flat or self.sizes[place] == shape):
            return False
        if not self.masters:
            return True
        count = min(_COMPARED, numel(shape))
        tensor, first = (self.masters[0], place) if self.flat else (self.masters[place], 0)
        copied = copy.read(0, count)
        return torch.equal(self.file.read(tensor, first, first + count).to(copied.dtype), copied)


def add_unnamed(state: State, files: Files, order: list[str], kinds: tuple[str, ...]) -> None:
    """Add masters (if any) and moments of a checkpoint without ZeRO. `order`: the module's parameters in its order,
    tied ones once. Raises CheckpointError: not Adam's state, or several ways to assign it."""
    waiting = list(order)
    for stage, file in enumerate(files.models if files.layers else files.models[:1]):
        groups = _groups(state, file, kinds)
        names = _take(state, files, file, groups, waiting, stage)
        places = _deal(state, file, groups, names)
        for name, (group, place) in zip(names, places, strict=True):
            _add(state, groups[group], place, name, kinds, twin=name not in waiting)
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
            tensors = [flat_masters[index]] if flat_masters else list(masters[index]) if masters else []
            tensors = [file.tensor(tensor) for tensor in tensors]
            groups.append(_Group(file, entries, tensors, bool(flat_masters)))
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
    """The names of this pipeline stage: the next ones, preceded by one that it shares with the first stage."""
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
                if group.fits(places[index], shape, state.copies[name]):
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
    places_of = []
    while path:
        path, place = path
        places_of.append(place)
    return places_of[::-1]


def _add(state: State, group: _Group, place: int, name: str, kinds: tuple[str, ...], *, twin: bool) -> None:
    index, offset = (0, place) if group.flat else (place, 0)
    tensors = adam_moments(state, group.file, group.entries[index], 1, kinds)
    if group.masters:
        tensors[PARAM] = group.masters[index]
    else:
        tensors[PARAM] = state.copies[name].tensor
    for kind, tensor in tensors.items():
        home = state.copies[name].file if kind == PARAM and not group.masters else group.file
        span = Span(home, tensor, offset if kind != PARAM or group.masters else 0, 0, numel(state.shapes[name]))
        (state.twins if twin else state.spans).setdefault((kind, name), []).append(span)
