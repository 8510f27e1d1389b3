"""Where the values of parameters come from: random numbers, a Hugging Face folder, or a checkpoint.

Whatever the source, the engine asks for slices of flat tensors by Hugging Face name, so no rank ever needs
the whole model, and the result does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from llmtrain.errors import ModelError
from llmtrain.models.tensorfile import TensorFile, TensorFileError


class ParameterSource(Protocol):
    """Values of parameters by Hugging Face name."""

    origin: str
    """The key and the value that named this source, for messages."""

    def order(self) -> list[str]:
        """All names, in the order in which reading them is cheapest."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flat tensor `name`, on any device, in the source's precision."""


DTYPE_OF = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Floating-point types by safetensors' name."""


def byte_view(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to be read or filled."""
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


class RandomSource:
    """The model's own initialisation, one block (decoder layer, embedding, ...) at a time.

    Each block has its own seed, made of the run's seed and the block's name: the values depend neither on
    the number of ranks nor on the ZeRO stage, and only one block exists in full at any time.
    """

    def __init__(self, skeleton: nn.Module, seed: int, device: torch.device) -> None:
        """`skeleton`: the transformers model on the meta device."""
        self.origin = "model.config"
        self._model = skeleton
        self._seed = seed
        self._device = device
        self._shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
        self._block_of: dict[str, str] = {}
        for block, module in _blocks(skeleton):
            for name, _ in module.named_parameters():
                full = f"{block}.{name}" if block else name
                if full in self._shapes:  # a tied parameter has one name only
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

    @torch.no_grad()
    def _draw(self, block: str) -> dict[str, Tensor]:
        module = copy.deepcopy(self._model.get_submodule(block)).to_empty(device=self._device).float()
        for parameter in module.parameters():
            parameter.fill_(float("nan"))  # what the model's own code leaves out must not pass as a weight
        digest = hashlib.sha256(f"{self._seed}:{block}".encode()).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            module.apply(self._model._init_weights)  # type: ignore[arg-type]
        values: dict[str, Tensor] = {f"{block}.{name}" if block else name: p for name, p in module.named_parameters()}
        for name, value in values.items():
            if name in self._shapes and bool(torch.isnan(value).any()):
                raise ModelError(
                    f"model.config: {type(self._model).__name__} does not initialise its parameter {name}. "
                    "Start from a folder with weights instead (model.pretrained)."
                )
        return values


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Split a model into the members of its module lists and the modules beside them."""
    has_list = any(isinstance(m, nn.ModuleList) for m in module.modules())
    own_parameters = any(True for _ in module.parameters(recurse=False))
    if not has_list or own_parameters:
        if any(True for _ in module.parameters()):
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
    """A Hugging Face folder: model.safetensors, or shards with model.safetensors.index.json.

    Raises:
        ModelError: no safetensors, an index that leaves the folder, a broken or missing shard.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.origin = f"model.pretrained: {self.folder}"
        self._file_of: dict[str, TensorFile] = {}
        for path in self._paths():
            try:
                file = TensorFile(path)
            except TensorFileError as error:
                raise ModelError(f"model.pretrained: {error}") from error
            for name in file.entries:
                if name in self._file_of:
                    raise ModelError(f"model.pretrained: {name} stands in {self._file_of[name].path} and in {path}.")
                self._file_of[name] = file

    def order(self) -> list[str]:
        return sorted(self._file_of, key=lambda name: (str(self._file_of[name].path), name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Reads only these elements."""
        file = self._file_of[name]
        dtype = DTYPE_OF.get(file.entries[name].dtype)
        if dtype is None:
            raise ModelError(f"model.pretrained: {file.path}: {name} has the type {file.entries[name].dtype}.")
        out = torch.empty(stop - start, dtype=dtype)
        try:
            file.read_into(name, start, byte_view(out))
        except TensorFileError as error:
            raise ModelError(f"model.pretrained: {error}") from error
        return out

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if not index.is_file():
            if single.is_file():
                return [single]
            raise ModelError(
                f"model.pretrained: {self.folder} has no model.safetensors and no model.safetensors.index.json. "
                "Only safetensors are read; convert .bin files first (nothing is unpickled)."
            )
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"model.pretrained: {index} is not a weight index: {error!r}.") from error
        for name in names:
            # transformers 5.23 joins these names unchecked (transformers issue 46097): "../x" would leave the folder.
            if not isinstance(name, str) or Path(name).name != name or not (self.folder / name).is_file():
                raise ModelError(f"model.pretrained: {index} names {name!r}, which is no file in {self.folder}.")
        return sorted(self.folder / name for name in names)
