"""The first values of a model that gives scores, from a language model's folder."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmtrain.models.build import skeleton
from llmtrain.models.score import WEIGHT
from llmtrain.models.source import ParameterSource, RandomSource, SafetensorsSource
from llmtrain.storage.region import Region

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.models.layout import FolderLayout


class ScoredSource:
    """A folder's values without its language model's head; where the folder has no score, a new one.

    A new head is drawn as transformers initialises the class, from the run's seed: it is the same on all ranks.
    """

    def __init__(self, base: SafetensorsSource, layout: FolderLayout, seed: int, device: torch.device) -> None:
        self.base, self.origin = base, base.origin
        self._drawn = RandomSource(layout.skeleton, seed, device)
        self.new = WEIGHT not in base.order()
        """True if the head's values are drawn."""
        self._surplus = _head_names(layout.skeleton)

    def order(self) -> list[str]:
        kept = [name for name in self.base.order() if name not in self._surplus]
        return [*kept, *([WEIGHT] if self.new else [])]

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


def language_model(hf: PreTrainedModel) -> PreTrainedModel:
    """A skeleton of the language model that has the same decoder, under the same names."""
    config = copy.deepcopy(hf.config)
    config.architectures = None
    return skeleton(config)


def _head_names(hf: PreTrainedModel) -> set[str]:
    """Names of the head's tensors that the language model of the same decoder has."""
    language = language_model(hf)
    own = {name for name, _ in hf.named_parameters()}
    head = language.get_output_embeddings()
    inside = {id(parameter) for parameter in head.parameters()}
    return {name for name, p in language.named_parameters(remove_duplicate=False) if id(p) in inside} - own
