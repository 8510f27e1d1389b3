"""Adds rows to a folder's embedding and head, for tokens that its model does not know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmtrain.config.problems import Places, stop
from llmtrain.config.run import ModelConfig
from llmtrain.models.layout import FolderLayout
from llmtrain.models.skeleton import load_config
from llmtrain.models.source import SafetensorsSource
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import numel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 1 << 22
"""Number of elements read at a time."""


def grown_names(hf: PreTrainedModel) -> set[str]:
    """Return the parameters with a row for each token: the embedding's and the head's, tied ones by their first
    name."""
    ends = [module for module in (hf.get_input_embeddings(), hf.get_output_embeddings()) if module is not None]
    grown = {id(parameter) for module in ends for parameter in module.parameters(recurse=False)}
    return {name for name, parameter in hf.named_parameters() if id(parameter) in grown}


def check_growth(
    hf: PreTrainedModel, model: ModelConfig, frozen: Collection[str], key: str, places: Places | None = None
) -> None:
    """Check that `model.vocabulary` is at least the folder's number of tokens, and that grown parameters train. `key`:
    the setting that decides what trains. Raises ConfigError."""
    if model.vocabulary is None:
        return
    place = (places or {}).get("model.vocabulary")
    of_folder = load_config(replace(model, vocabulary=None)).get_text_config().vocab_size
    if model.vocabulary < of_folder:
        rule = f"{model.pretrained} has {of_folder} tokens, and tokens can only be added"
        raise stop("model.vocabulary", model.vocabulary, rule, "leave it out, or write more", place)
    if model.vocabulary > of_folder and (still := sorted(grown_names(hf) & set(frozen))):
        rule = f"the new rows of {still[0]} would never train: it is frozen"
        modules = ", ".join(name.rpartition(".")[0] for name in still)
        raise stop("model.vocabulary", model.vocabulary, rule, f"let {modules} train ({key})", place)


class GrownSource(SafetensorsSource):
    """A folder whose embedding and head have fewer rows than the model's. Each new row is the mean of the folder's
    rows, in their dtype (Hewitt, https://nlp.stanford.edu/~johnhew/vocab-expansion.html)."""

    def __init__(self, folder: Path, layout: FolderLayout) -> None:
        super().__init__(folder, layout)
        self.grown = {name: layout.shapes[name] for name in grown_names(layout.skeleton)}
        """Shapes in the model of the parameters with a row for each token."""
        self._means: dict[str, Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        of_folder = super().shape(name)
        grown = self.grown.get(name, of_folder)
        return grown if grown[0] > of_folder[0] and grown[1:] == of_folder[1:] else of_folder

    def read(self, name: str, start: int, stop: int) -> Tensor:
        of_folder = numel(super().shape(name))
        if stop <= of_folder:
            return super().read(name, start, stop)
        if name not in self._means:
            self._means[name] = self._mean(name)
        mean = self._means[name]
        first = max(start, of_folder)
        new = mean[(torch.arange(first, stop) - of_folder) % mean.numel()]
        return new if start >= of_folder else torch.cat([super().read(name, start, of_folder), new])

    def read_region(self, name: str, region: Region) -> Tensor:
        if name not in self.grown:
            return super().read_region(name, region)
        spans = [self.read(name, start, start + count) for start, _, count in region.spans()]
        return torch.cat(spans) if spans else super().read(name, 0, 0)

    def _mean(self, name: str) -> Tensor:
        """Return the mean of the folder's rows, flat. It is summed in fp64 and rounded once."""
        shape = super().shape(name)
        width = numel(shape[1:])
        total, rows = torch.zeros(width, dtype=torch.float64), max(1, _CHUNK // width)
        for row in range(0, shape[0], rows):
            values = super().read(name, row * width, min(row + rows, shape[0]) * width)
            total += values.view(-1, width).double().sum(0)
        return (total / shape[0]).to(values.dtype)
