"""`llmtrain checkpoint diff A B`, and `average A B ... OUT`, which averages the parameters of one model's
checkpoints."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmtrain import features
from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.log import Progress
from llmtrain.checkpoint.format import (
    MANIFEST,
    NOWHERE,
    Manifest,
    complete_checkpoints,
    differences,
    hash_file,
    step_folder,
)
from llmtrain.checkpoint.meaning import other_meaning, other_scale
from llmtrain.checkpoint.output import Contents, build_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.verify import wrong_frozen
from llmtrain.storage.checksum import checksum
from llmtrain.storage.tensorfile import numel

_CHUNK = 2 << 20  # elements compared at a time by each thread, which takes 130 MiB
_THREADS = 8
_CONFIG = ("run", "deepspeed", "model_config", "versions", "optimizer", "vocab_size", "data_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Difference:
    kind: str
    name: str
    elements: int
    """Number of elements that differ."""
    largest: float
    """Largest absolute difference; infinite if only one of the two values is a number."""
    index: tuple[int, ...]
    """Index of the largest difference."""


def diff(a: Path, b: Path) -> tuple[list[str], bool]:
    """Return (lines to print, True if the checkpoints differ in nothing but their folder). Raises CheckpointError."""
    manifests = Manifest.read(a), Manifest.read(b)
    sources = [manifest.frozen for manifest in manifests]
    alike = sources.pop() if sources[0] == sources[1] else NOWHERE  # equal sources have equal values
    if changed := next(filter(None, map(wrong_frozen, sources)), None):
        raise changed
    readers = CheckpointReader(a, manifests[0]), CheckpointReader(b, manifests[1])
    trainers = TrainerState.read(a), TrainerState.read(b)
    lines = [f"A  {a}", f"B  {b}"]
    # Entries that only one side has, since a conversion does not know them, get one line each without their contents.
    unequal = [key for key in _CONFIG if len({getattr(trainer, key) is None for trainer in trainers}) == 2]
    left, right = ({k: v for k, v in t.to_json().items() if k not in (*_CONFIG, "layout")} for t in trainers)
    for what, changes in {
        "state": differences(left, right),
        "layout": differences(manifests[0].layout, manifests[1].layout),
        "config": trainers[0].differences(trainers[1], _CONFIG),
    }.items():
        lines += [f"{what:<7}  {line}" for line in changes]
    lines += [f"config   {key}: only in {'A' if getattr(trainers[1], key) is None else 'B'}" for key in unequal]
    same = []
    for key in sorted(readers[0].tensors() | readers[1].tensors(), key=lambda key: (key[1], key[0])):
        kind, name = key
        present = [key in reader.tensors() for reader in readers]
        if not all(present):
            lines.append(f"tensor   {kind} of {name}: only in {'A' if present[0] else 'B'}")
        elif readers[0].shape(name) != readers[1].shape(name):
            lines.append(f"tensor   {kind} of {name}: shape {readers[0].shape(name)} -> {readers[1].shape(name)}")
        else:
            same.append(key)
    others = _compare(readers, [key for key in same if key[1] not in alike.parts])
    lines += [_line(difference) for difference in others]
    equal = len(lines) == 2
    if equal:
        lines.append(f"equal: {len(same)} tensors")
    else:
        most = max(others, key=lambda difference: difference.largest, default=None)
        summary = f"different: {len(others)} of {len(same)} tensors differ in their values"
        lines.append(summary + (f", at most by {most.largest:.3g} ({most.kind} of {most.name})" if most else ""))
    for reader in readers:
        reader.close()
    return lines, equal


def _line(d: Difference) -> str:
    place = ", ".join(map(str, d.index))
    return f"tensor   {d.kind} of {d.name}: by up to {d.largest:.3g} at [{place}], {units.count(d.elements)} elements"


def _compare(readers: tuple[CheckpointReader, CheckpointReader], keys: list[tuple[str, str]]) -> list[Difference]:
    total = sum(8 * numel(readers[0].shape(name)) for _, name in keys)
    with Progress("comparing", total) as progress, ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda key: _compare_tensor(readers, key, progress.advance), keys))
    return [difference for difference in results if difference is not None]


def _compare_tensor(
    readers: tuple[CheckpointReader, CheckpointReader], key: tuple[str, str], advance: Callable[[int], None]
) -> Difference | None:
    kind, name = key
    shape = readers[0].shape(name)
    elements, largest, place = 0, -1.0, 0
    for start in range(0, numel(shape), _CHUNK):
        stop = min(numel(shape), start + _CHUNK)
        differ, gap = _gap(*(reader.read_kind(kind, name, start, stop) for reader in readers))
        elements += int(differ.sum())
        at = int(gap.argmax())
        if differ.any() and float(gap[at]) > largest:
            largest, place = float(gap[at]), start + at
        advance(8 * (stop - start))
    if not elements:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape)) if shape else ()
    return Difference(kind=kind, name=name, elements=elements, largest=largest, index=index)


def _gap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (which elements differ, by how much). NaN equals NaN, and is infinitely far from a number."""
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    gap = (a.double() - b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return differ, gap.where(differ, torch.zeros(()))


def average(sources: list[Path], out: Path) -> list[str]:
    """Write OUT/checkpoints/step-N with the mean of the parameters, computed in fp64, and no moments; N is the step of
    the newest source. Returns the report's lines. Raises CheckpointError: when tensors or models differ, a source is
    damaged, or OUT has checkpoints already."""
    if len({path.resolve() for path in sources}) != len(sources) or len(sources) < 2:
        raise CheckpointError("average takes two or more different checkpoints, then the folder to write.")
    if complete_checkpoints(out / "checkpoints"):
        raise CheckpointError(f"{out} holds checkpoints already; nothing was written. Give a new folder.")
    readers = [CheckpointReader(path) for path in sources]
    trainers = [TrainerState.read(path) for path in sources]
    _refuse_other_models(readers, trainers)
    mean = _Mean(readers)
    newest = max(range(len(sources)), key=lambda i: readers[i].manifest.step)
    step = readers[newest].manifest.step
    first = readers[0]
    shapes = {name: first.shape(name) for name in first.order()}
    total = 4 * sum(map(numel, shapes.values()))
    # A mean is no longer the imported folder byte by byte, and has neither an evaluation nor variants.
    others = ("source", "evaluation", *features.variants())
    entries = {k: v for k, v in trainers[newest].entries.items() if k not in others}
    entries |= {"weights_only": True, "averaged": [str(path) for path in sources]}
    with Progress("averaging", total) as progress:
        contents = Contents(
            step=step,
            shapes=shapes,
            read=mean.read,
            trainer=replace(trainers[newest], entries=entries).to_json(),
            layout={"made_by": "average", "precision": readers[newest].manifest.layout.get("precision")},
        )
        plan = {"average": [hash_file(path / MANIFEST) for path in sources]}
        written = build_checkpoint(step_folder(out / "checkpoints", step), contents, plan, advance=progress.advance)
    for reader in readers:
        reader.close()
    return [
        *(
            f"read     {path}, step {reader.manifest.step}: checksums agree"
            for path, reader in zip(sources, readers, strict=True)
        ),
        f"wrote    {written}: {len(shapes)} tensors, {units.size(total)}, the mean of {len(sources)}, no moments",
    ]


def _refuse_other_models(readers: list[CheckpointReader], trainers: list[TrainerState]) -> None:
    first = readers[0]
    for reader, trainer in zip(readers[1:], trainers[1:], strict=True):
        changed = other_meaning(trainers[0].model_config, trainer.model_config)
        changed += other_scale(trainers[0].section("adapter"), trainer.section("adapter"))
        changed += trainers[0].differences(trainer, ("vocab_size", "tokenizer"))
        if changed:
            both = f"{first.folder} and {reader.folder}"
            raise CheckpointError(f"{both} cannot be averaged, since their models differ: {'; '.join(changed)}.")
        other_shapes, first_shapes = ({name: r.shape(name) for name in r.order()} for r in (reader, first))
        if other_shapes != first_shapes:
            name = sorted(other_shapes.items() ^ first_shapes.items())[0][0]
            shapes = [tensors.get(name, "missing") for tensors in (first_shapes, other_shapes)]
            places = f"{shapes[0]} in {first.folder} and {shapes[1]} in {reader.folder}"
            raise CheckpointError(f"{name} is {places}. Only checkpoints with the same tensors can be averaged.")


class _Mean:
    """Computes the mean of parameters chunk by chunk, for several threads, and compares each source's checksums."""

    def __init__(self, readers: list[CheckpointReader]) -> None:
        self._readers = readers
        self._sums = [reader.manifest.checksums() for reader in readers]
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the mean in fp32. Raises CheckpointError: when these are the last elements
        of a tensor and a source of it is damaged."""
        total = torch.zeros(stop - start, dtype=torch.float64)
        of_chunk = []
        for reader in self._readers:
            values = reader.read_kind(kind, name, start, stop)
            of_chunk.append(checksum(values, start))
            total += values
        with self._lock:
            left = self._left.get(name, numel(self._readers[0].shape(name))) - (stop - start)
            self._left[name] = left
            for sums, value in zip(self._sums, of_chunk, strict=True):
                sums[kind, name] = (sums[kind, name] - value) % 2**64
            damaged = [r for r, sums in zip(self._readers, self._sums, strict=True) if sums[kind, name]]
        if left == 0 and damaged:
            raise wrong_frozen(damaged[0].manifest.frozen, [name]) or CheckpointError(
                f"{damaged[0].folder}: {kind} of {name} is damaged; nothing was written. "
                f"`llmtrain checkpoint verify {damaged[0].folder}` shows the place."
            )
        return (total / len(self._readers)).float()
