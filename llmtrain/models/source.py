"""Sources of parameters' values: random initialisation, a Hugging Face folder, or a checkpoint.

The engine asks a source for slices of flat tensors by Hugging Face name. So no rank ever needs the complete model, and
the result does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from llmtrain.base import untrusted
from llmtrain.base.errors import ModelError
from llmtrain.models.layout import FolderLayout, Part, Placement
from llmtrain.models.parameters import frozen_tensors, named_tensors, tensor_shapes
from llmtrain.models.score import WEIGHT
from llmtrain.models.skeleton import language_model
from llmtrain.models.transformers_private import give_memory, initialise
from llmtrain.storage.addresses import INDEX, SINGLE, leads_out
from llmtrain.storage.pieces import DTYPE_OF, byte_view, pick, read_shared
from llmtrain.storage.region import Region, shared
from llmtrain.storage.tensorfile import TensorFile, TensorFileError, numel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 4 << 20
"""Number of elements compared at a time."""
_MOST_IN_FILE, _MOST_IN_FOLDER = 100_000, 1_000_000
"""Limits on tensors in an external folder: 400,000 names took 18 CPU-seconds to look through. 61 layers with 384
experts and 3 maps each, with a scale and a zero point per map, have 210,816 tensors in dozens of files."""


class ParameterSource(Protocol):
    origin: str
    """The key and value that name this source, for messages."""

    def order(self) -> list[str]:
        """Return all names, in the cheapest order for reading."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flat tensor `name`, on any device, in the source's precision."""

    def read_region(self, name: str, region: Region) -> Tensor:
        """Return the elements of a region of the flat tensor `name`, otherwise as `read`."""


class RandomSource:
    """Values of the model's own initialisation. Each block (decoder layer, embedding, ...) is initialised separately,
    with a seed made from the run's seed and the block's name."""

    def __init__(self, skeleton: PreTrainedModel, seed: int, device: torch.device) -> None:
        self.origin = "model.config"
        self._model = skeleton
        self._seed = seed
        self._device = device
        self._shapes = tensor_shapes(skeleton)
        self.frozen = set(frozen_tensors(skeleton))
        """Names of the tensors that do not train."""
        self._block_of: dict[str, str] = {}
        for block, module in _blocks(skeleton):
            for name, _ in named_tensors(module):
                full = f"{block}.{name}" if block else name
                if full in self._shapes:  # a tied parameter has only its first name
                    self._block_of[full] = block
        self._cached: tuple[str, dict[str, Tensor]] | None = None

    def order(self) -> list[str]:
        return sorted(self._shapes, key=lambda name: (self._block_of[name], name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        block = self._block_of[name]
        if self._cached is None or self._cached[0] != block:
            self._cached = None  # free the old block before the new one is made
            self._cached = (block, self._draw(block))
        return self._cached[1][name].reshape(-1)[start:stop]

    def read_region(self, name: str, region: Region) -> Tensor:
        return pick(self.read(name, 0, numel(self._shapes[name])), region)

    @torch.no_grad()
    def _draw(self, block: str) -> dict[str, Tensor]:
        made = self._model.get_submodule(block)
        module = give_memory(copy.deepcopy(made), torch.empty, self._device).float()
        for parameter in module.parameters():
            parameter.fill_(float("nan"))  # to notice a weight that the model's code does not set
        for name, tensor in frozen_tensors(module).items():
            tensor.copy_(made.get_buffer(name))  # the constructor sets their values
        digest = hashlib.sha256(f"{self._seed}:{block}".encode()).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            try:
                initialise(self._model, module)
            except (AttributeError, TypeError, ValueError) as error:
                raise ModelError(
                    f"model.config: transformers cannot initialise a {type(self._model).__name__} part by part "
                    f"({type(error).__name__}: {error}). Start from a folder with weights instead (model.pretrained)."
                ) from error
        values: dict[str, Tensor] = {f"{block}.{name}" if block else name: t for name, t in named_tensors(module)}
        for name, value in values.items():
            if name in self._shapes and bool(torch.isnan(value).any()):
                raise ModelError(
                    f"model.config: {type(self._model).__name__} does not initialise its parameter {name}. "
                    "Start from a folder with weights instead (model.pretrained)."
                )
        return values


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each member of the model's module lists, and for the modules outside of lists."""
    has_list = any(isinstance(m, nn.ModuleList) for m in module.modules())
    own_tensors = any("." not in name for name, _ in named_tensors(module))
    if not has_list or own_tensors:
        if any(True for _ in named_tensors(module)):
            yield prefix, module
        return
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            for index, layer in enumerate(child):
                yield f"{path}.{index}", layer
        else:
            yield from _blocks(child, path)


class SafetensorsSource:
    """A Hugging Face folder; several threads may read it. With a `layout`, names are the model's, also if files keep a
    parameter in parts; without one they are the files'. Raises ModelError if an index, file or parameter is missing,
    broken or contradictory, or if a path leads out of the folder."""

    def __init__(
        self, folder: str | Path, layout: FolderLayout | None = None, *, asked_by: str = "model.pretrained"
    ) -> None:
        """`asked_by`: the key or command that names the folder, for messages."""
        self.folder = Path(folder)
        self.origin = f"{asked_by}: {self.folder}"
        self._asked_by = asked_by
        self.file_of: dict[str, TensorFile] = {}
        """Name of a tensor in the files -> the open file that holds it."""
        weight_map = self._weight_map()
        for path in self._paths(weight_map):
            try:
                file = TensorFile(path, most=_MOST_IN_FILE)
            except TensorFileError as error:
                raise self._wrong(str(error)) from error
            if len(self.file_of) + len(file.entries) > _MOST_IN_FOLDER:
                raise self._wrong(f"with {path} the folder holds more than {_MOST_IN_FOLDER} tensors, the limit.")
            for name in file.entries:
                if name in self.file_of:
                    raise self._wrong(f"{name} is in {self.file_of[name].path} and in {path}. Remove one of the two.")
                self.file_of[name] = file
        if weight_map is not None:
            self._compare_index(weight_map)
        self.placement = self._place(layout)
        self._parts: dict[str, list[tuple[str, Part]]] = dict(self.placement.parts)
        for name in self.placement.surplus:
            self._parts[name] = [(name, Part(name, 0, self.file_of[name].entries[name].shape))]
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, ((tensor, part), *others) in self._parts.items():
            shape = self.file_of[tensor].entries[tensor].shape
            # A surplus tensor has only its file's shape.
            whole_shape = None if layout is None else layout.shapes.get(name)
            self._shapes[name] = whole_shape if whole_shape is not None and (others or shape == part.shape) else shape
        for tensor, name in self.placement.twins.items():
            self._refuse_other_twin(tensor, name)

    def order(self) -> list[str]:
        def where(name: str) -> tuple[str, int]:
            tensor = self._parts[name][0][0]
            return str(self.file_of[tensor].path), self.file_of[tensor].entries[tensor].begin

        return sorted(self._parts, key=where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtypes(self, name: str) -> set[str]:
        """Return the dtypes of a parameter in the files, by their safetensors names."""
        return {self.file_of[tensor].entries[tensor].dtype for tensor, _ in self._parts[name]}

    def places(self, name: str) -> list[tuple[str, str, Region]]:
        """Return (file name, tensor in it, region of the flat parameter) for each part, in the order of the
        elements."""
        return [(self.file_of[t].path.name, t, Region(p.start, p.numel)) for t, p in self._parts[name]]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements of a parameter. If its parts have several dtypes, the result is fp32."""
        parts = [(t, p) for t, p in self._parts[name] if p.start < stop and start < p.start + p.numel]
        kinds = {self.file_of[tensor].entries[tensor].dtype for tensor, _ in parts}
        out = torch.empty(stop - start, dtype=self._dtype(name, *kinds) if len(kinds) == 1 else torch.float32)
        for tensor, part in parts:
            low, high = max(start, part.start), min(stop, part.start + part.numel)
            place = out[low - start : high - start]
            values = self.read_tensor(tensor, low - part.start, high - part.start, place)
            if values is not place:
                place.copy_(values)
        return out

    def read_region(self, name: str, region: Region) -> Tensor:
        """Read the elements of a parameter in `region`. Short rows are read together with the gaps between them."""
        if region.contiguous:
            return self.read(name, region.start, region.start + region.numel)
        parts = [(t, Region(p.start, p.numel)) for t, p in self._parts[name]]
        kinds = {self.file_of[tensor].entries[tensor].dtype for tensor, _ in parts}
        out = torch.empty(region.numel, dtype=self._dtype(name, *kinds) if len(kinds) == 1 else torch.float32)
        try:
            for tensor, where in parts:
                for rows in shared(region, where):
                    read_shared(self.file_of[tensor], tensor, rows, out)
        except TensorFileError as error:
            raise self._wrong(str(error)) from error
        return out

    def read_tensor(self, tensor: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Read elements of one tensor by the file's name, into `out` if that has the same dtype. Raises ModelError."""
        file = self.file_of[tensor]
        dtype = self._dtype(tensor, file.entries[tensor].dtype)
        if out is None or out.dtype != dtype:
            out = torch.empty(stop - start, dtype=dtype)
        try:
            file.read_into(tensor, start, byte_view(out))
        except TensorFileError as error:
            raise self._wrong(str(error)) from error
        return out

    def close(self) -> None:
        for file in {id(file): file for file in self.file_of.values()}.values():
            file.close()

    def _wrong(self, text: str) -> ModelError:
        return ModelError(f"{self._asked_by}: {text}")

    def _dtype(self, name: str, kind: str) -> torch.dtype:
        if kind not in DTYPE_OF:
            raise self._wrong(f"{self.folder}: {name} has the type {kind}, which no parameter can have.")
        return DTYPE_OF[kind]

    def _place(self, layout: FolderLayout | None) -> Placement:
        if layout is None:
            return Placement(parts={}, surplus=list(self.file_of))
        try:
            placement = layout.place(self.file_of)
        except ModelError as error:
            raise self._wrong(f"{self.folder}: {error}") from error
        if unset := sorted(layout.frozen - placement.parts.keys()):
            raise self._wrong(
                f"{self.folder} lacks {len(unset)} tensors that training does not change, first "
                f"{', '.join(unset[:3])}: they would have no values. Load the folder with transformers and save it "
                "again, which writes the values of a new model."
            )
        for parameter, parts in placement.parts.items():
            for tensor, part in parts:
                shape = self.file_of[tensor].entries[tensor].shape
                if len(parts) > 1 and shape != part.shape:
                    raise self._wrong(
                        f"{self.folder}: {tensor} has the shape {list(shape)} instead of {list(part.shape)}."
                    )
            if sum(part.numel for _, part in parts) < numel(layout.shapes[parameter]):
                begins = {part.start for _, part in parts}
                written = layout.tensors.items()
                lacking = next(name for name, p in written if p.parameter == parameter and p.start not in begins)
                raise self._wrong(f"{self.folder} lacks {lacking}, a part of the model's {parameter}.")
        return placement

    def _weight_map(self) -> dict[str, str] | None:
        """Return tensor -> file name, or None if the folder has a single file."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.is_file():
            if single.is_file():
                return None
            raise self._wrong(
                f"{self.folder} has no {SINGLE} and no {INDEX}. "
                "Only safetensors are read; convert .bin files first (nothing is unpickled)."
            )
        if single.exists():
            raise self._wrong(f"{self.folder} has both {SINGLE} and {INDEX}. One is stale: remove it.")
        try:
            weight_map = untrusted.loads(self._inside(index).read_bytes())["weight_map"]
            if not all(isinstance(name, str) for name in weight_map):
                raise TypeError("a name is no string")
            weight_map.values()
        except ModelError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(f"{index} is not a weight index: {error!r}.") from error
        return weight_map

    def _paths(self, weight_map: dict[str, str] | None) -> list[Path]:
        if weight_map is None:
            return [self._inside(self.folder / SINGLE)]
        for name in weight_map.values():
            # transformers 5.23 joins these names unchecked (transformers issue 46097): "../x" would leave the folder.
            if not isinstance(name, str) or Path(name).name != name or not os.path.isfile(self.folder / name):
                raise self._wrong(f"{self.folder / INDEX} names {name!r}, which is no file in {self.folder}.")
        return [self._inside(self.folder / name) for name in sorted(set(weight_map.values()))]

    def _inside(self, path: Path) -> Path:
        try:
            return refuse_escape(self.folder, path)
        except ModelError as error:
            raise self._wrong(str(error)) from error

    def _compare_index(self, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.file_of or self.file_of[name].path.name != file:
                raise self._wrong(f"{self.folder / INDEX} puts {name} into {file}, which does not hold it.")
        for name, holder in self.file_of.items():
            if name not in weight_map:
                raise self._wrong(f"{holder.path} holds {name}, which {INDEX} does not list.")

    def _refuse_other_twin(self, tensor: str, name: str) -> None:
        """Compare the two copies of a tied weight in a folder, since transformers 5 unties copies that differ, and
        older versions drop the second one. Raises ModelError."""
        size = numel(self._shapes[name])
        same = self.file_of[tensor].entries[tensor].shape == self._shapes[name]
        for start in range(0, size if same else 0, _CHUNK):
            stop = min(size, start + _CHUNK)  # the folder's own values, as a subclass may add some
            one, two = self.read_tensor(tensor, start, stop), SafetensorsSource.read(self, name, start, stop)
            same = same and torch.equal(one.float(), two.float())
        if not same:
            raise self._wrong(
                f"{self.folder}: config.json ties {tensor} to {name}, but they differ. If both are meant, set "
                "tie_word_embeddings to false there; else remove one."
            )


def refuse_other_shapes(
    source: ParameterSource, shapes: dict[str, tuple[int, ...]], *, surplus_too: bool = False
) -> None:
    """Check that the source has all parameters with these shapes, and no others. Raises ModelError. `surplus_too`:
    allow others."""
    available = set(source.order())
    missing = sorted(shapes.keys() - available)
    if missing:
        from llmtrain.models.wrapped_names import strange_part

        hint = strange_part(available, shapes)
        raise ModelError(
            f"{source.origin} lacks {len(missing)} of the model's {len(shapes)} parameters, first "
            f"{', '.join(missing[:3])}. They would stay random."
            + (hint or " Check that the model's configuration is the one of these weights.")
        )
    surplus = sorted(available - shapes.keys())
    if surplus and not surplus_too:
        raise ModelError(
            f"{source.origin} holds {len(surplus)} tensors that the model has no place for, first "
            f"{', '.join(surplus[:3])}. Check that the model's configuration is the one of these weights."
        )
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.origin}: {name} has shape {list(source.shape(name))} there, but the model's configuration "
                f"makes it {list(shape)}. Use the configuration that these weights were made with."
            )


def refuse_escape(folder: Path, path: Path) -> Path:
    """Return `path`, a file of a model folder. Raises ModelError if it is a link out of the folder (`leads_out`)."""
    if (real := leads_out(folder, path)) is None:
        return path
    raise ModelError(f"{path} is a link to {real}, outside of the folder. Put a copy of the file in its place.")


class ScoredSource:
    """Reads a folder's weights without the language-model head, for a model that gives scores. A missing score head is
    initialised from the run's seed, equal on all ranks."""

    def __init__(self, base: SafetensorsSource, layout: FolderLayout, seed: int, device: torch.device) -> None:
        self.base, self.origin = base, base.origin
        self._drawn = RandomSource(layout.skeleton, seed, device)
        self.new = WEIGHT not in base.order()
        """True if the score head is missing in the folder, and so initialised."""
        language = language_model(layout.skeleton)
        names = {name for name, _ in layout.skeleton.named_parameters()}
        head = {id(parameter) for parameter in language.get_output_embeddings().parameters()}
        named = language.named_parameters(remove_duplicate=False)
        self._surplus = {name for name, parameter in named if id(parameter) in head} - names

    def order(self) -> list[str]:
        names = [name for name in self.base.order() if name not in self._surplus]
        return [*names, *([WEIGHT] if self.new else [])]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._of(name).read(name, start, stop)

    def read_region(self, name: str, region: Region) -> Tensor:
        return self._of(name).read_region(name, region)

    def close(self) -> None:
        self.base.close()

    def _of(self, name: str) -> ParameterSource:
        return self._drawn if name == WEIGHT and self.new else self.base
