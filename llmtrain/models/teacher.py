"""The teacher of a distillation: a frozen model that is complete on every rank that computes a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.problems import Places, stop
from llmtrain.config.run import ModelConfig
from llmtrain.models.distillation import TeacherLogits
from llmtrain.models.experts import avoid_grouped_product
from llmtrain.models.language import LanguageModel
from llmtrain.models.parameters import named_tensors, tensor_shapes
from llmtrain.models.skeleton import DTYPES, construct, restore_buffers
from llmtrain.models.source import SafetensorsSource, refuse_other_shapes
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from llmtrain.storage.checksum import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "objective.teacher"


class Teacher:
    """A model without gradient, optimizer or checkpoint. Ranks that share the student's rows share the teacher's as
    well."""

    def __init__(self, language: LanguageModel) -> None:
        self._language = language.eval().requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        return dict(named_tensors(self._language.hf))

    @torch.no_grad()
    def logits(self, inputs: Tensor, positions: Tensor | None) -> TeacherLogits:
        """Return a function that computes the logits for a slice of this rank's columns [B, t] of the tokens [B, T],
        flattened to B x t."""
        hidden_NH = self._language.hidden(inputs, positions).flatten(0, 1)
        head = self._language.head

        def of_some(rows: slice) -> Tensor:
            with torch.no_grad():
                return head.values(hidden_NH[rows])

        return of_some


def teacher_model(objective: Objective, student: ModelConfig) -> ModelConfig:
    settings: dict[str, Any] = {"attention": student.attention, "loss_chunk_tokens": student.loss_chunk_tokens}
    return ModelConfig(pretrained=objective.teacher, revision=objective.teacher_revision, **settings)


@torch.no_grad()
def load_teacher(
    model: ModelConfig,
    precision: str,
    device: torch.device,
    language: Callable[[PreTrainedModel, int], LanguageModel] = LanguageModel,
) -> Teacher:
    """Load the teacher. `language`: makes the LanguageModel from a transformers model and the tokens in a chunk; a
    subclass if ranks share each row. Raises ModelError if the folder is incomplete."""
    spec = ModelSpec.of(model)
    source = _source(spec)
    refuse_other_shapes(source, tensor_shapes(spec.skeleton))
    teacher = empty_teacher(spec, precision, device, language)
    tensors = teacher.tensors()
    for name in source.order():
        heart.beat()
        tensors[name].copy_(source.read(name, 0, tensors[name].numel()).view(tensors[name].shape))
    return teacher


def empty_teacher(
    spec: ModelSpec,
    precision: str,
    device: torch.device,
    language: Callable[[PreTrainedModel, int], LanguageModel] = LanguageModel,
) -> Teacher:
    """Make a teacher without values. For the arguments see `load_teacher`."""
    with device:
        hf = construct(copy.deepcopy(spec.config), spec.model.attention, DTYPES[precision])
    restore_buffers(hf, spec.skeleton, device)
    avoid_grouped_product(hf, DTYPES[precision])
    hf.config.use_cache = False
    return Teacher(language(hf, spec.model.loss_chunk_tokens))


def _source(spec: ModelSpec) -> SafetensorsSource:
    assert spec.model.folder is not None
    return SafetensorsSource(spec.model.folder, spec.layout, asked_by=KEY)


def teacher_checksums(model: ModelConfig, index: int, of: int) -> dict[str, int]:
    """Return the checksums of every `of`-th tensor in the teacher's files, starting with tensor `index`, by name.
    Raises ModelError."""
    source = _source(ModelSpec.of(model))
    checksums = {}
    for name in sorted(source.order())[index::of]:
        heart.beat()
        values = source.read(name, 0, torch.Size(source.shape(name)).numel())
        checksums[name] = checksum(values)
    return checksums


def check_teacher(
    model: ModelConfig, student: ModelSpec, tokenizer_dir: Path, places: Places, *, sequence: int = 1
) -> None:
    """Check that the teacher is complete, and that teacher and student have the same vocabulary. `tokenizer_dir`: the
    data's tokenizer. `sequence`: number of ranks that share each row. Raises ConfigError or ModelError."""
    spec, place, folder = ModelSpec.of(model), places.get(KEY), str(model.pretrained)
    own_words, teacher_words = student.facts.vocab_size, spec.facts.vocab_size
    if own_words != teacher_words:
        rule = f"its vocabulary has {teacher_words:,} tokens, but the student's has {own_words:,}"
        raise stop(KEY, folder, rule, "choose a teacher and a student of the same vocabulary", place)
    refuse_other_shapes(_source(spec), tensor_shapes(spec.skeleton))
    heads = getattr(spec.config.get_text_config(), "num_attention_heads", None)  # a Mamba has none
    if isinstance(heads, int) and heads % sequence:
        rule = f"its {heads} attention heads cannot be shared by sequence_parallel_size = {sequence} ranks"
        raise stop(KEY, folder, rule, "set that to a number that divides them", place)
    assert model.folder is not None
    if not (model.folder / "tokenizer.json").is_file():  # else config/on_disk.py has compared it
        rule = f"has no tokenizer.json to compare with that of the data ({tokenizer_dir})"
        remedy = "put the one that it was trained with into the folder, and prepare the data with it"
        raise stop(KEY, folder, rule, remedy, place)
