"""The refusals of a run's model that need no device and no other ranks."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.config.objective import SCORED
from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import ModelConfig, ResolvedRun
from llmtrain.models.adapter import lora_config, other_maps, saved_paths, target_paths
from llmtrain.models.build import decoder_layers, layer_configs, load_config
from llmtrain.models.experts import check_stages, expert_blocks
from llmtrain.models.fields import check_fields
from llmtrain.models.frozen import frozen_names, tensor_shapes
from llmtrain.models.head import Head
from llmtrain.models.language import LanguageModel, compare_losses, documents_in_rows
from llmtrain.models.loss import IGNORE
from llmtrain.models.parallel import pipeline
from llmtrain.models.patches import attention_is, loads_as_causal_model, takes_flash_attention
from llmtrain.models.score import gives_scores
from llmtrain.models.source import refuse_other_shapes
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.probe import probe_copy
from llmtrain.models.vocabulary import check_growth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_TOKENS = 16  # of the rehearsal: sizes that do not fit show at any length
_SHAPES = re.compile(
    r"must match|cannot be multiplied|is invalid for input of size|[Ss]izes of tensors|expected size"
    r"|k not in range"
)
"""Beginnings of torch's errors about sizes that do not fit. Other errors on the meta device say
nothing about the model."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' own remarks: training makes them, too."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@_quietly()
def check_model(resolved: ResolvedRun) -> tuple[ModelSpec, tuple[str, ...]]:
    """Build the run's model on the meta device and let tokens through. Returns it, and notes for the user.

    Raises:
        ConfigError: a field of `model.config`, or a value of the run that does not go with the model.
        ModelError: transformers cannot build it.
    """
    run, model, places = resolved.run, resolved.run.model, resolved.places
    problems = Problems()
    if isinstance(model.config, dict):
        check_fields(model.config, places, problems)
        problems.raise_if_any()
    key = "model.pretrained" if model.pretrained else "model.config"
    _load_config(model, key, places, problems)
    spec = ModelSpec.of(model, run.adapter, scores=run.objective.name in SCORED)
    hf = spec.skeleton
    if model.attention in _FLASH_PACKAGES:
        _check_flash(hf, model.attention, places, problems)
    _check_heads(hf.config.get_text_config(decoder=True), key, places, problems)
    problems.raise_if_any()
    frozen_names(hf, model, places)
    if run.adapter.r is not None:
        paths, saved = target_paths(hf, run.adapter, places), saved_paths(hf, run.adapter, places)
        lora_config(hf, run.adapter, paths, saved, places)
    frozen_by = next((key for key in ("train_only", "freeze") if getattr(model, key)), "")
    check_growth(hf, model, spec.frozen, f"model.{frozen_by}" if frozen_by else "adapter.modules_to_save", places)
    beside = other_maps(hf) if run.adapter.r is not None else {}
    notes = tuple(
        f"adapter: {path} ({what}) gets none; one of {len(beside)} such" for path, what in [*beside.items()][:1]
    )
    notes += _check_length(hf, run.data.sequence_length, key, places, problems)
    problems.raise_if_any()
    if resolved.degrees.pipeline > 1:
        _check_stages(hf, resolved.pipeline_partition, resolved.degrees.pipeline)
    _check_experts(hf, resolved, problems)
    if run.train.balance != "equal" and expert_blocks(hf):
        rule = "the routers of a mixture of experts are balanced over micro-batches that all ranks compute alike"
        problems.add("train.balance", run.train.balance, rule, "set it to equal", places.get("train.balance"))
        problems.raise_if_any()
    _check_copy(hf, key, model.loss_chunk_tokens)
    if run.train.export:
        _check_export(spec)
    _rehearse(copy.deepcopy(hf), key, min(_TOKENS, run.data.sequence_length))
    return spec, notes


def _load_config(model: ModelConfig, key: str, places: Places, problems: Problems) -> None:
    """Let the family's own class check the fields against each other, and tell its words without its stack."""
    try:
        load_config(model)
    except ModelError as error:
        if error.__cause__ is None:
            raise
        said = str(error.__cause__).strip().splitlines()[-1].strip()
        said = re.sub(r"^\w*(Error|Exception): ", "", said)
        given = model.pretrained or model.config
        name = given.get("model_type") if isinstance(given, dict) else given
        problems.add(key, name, f"transformers says: {said}", "correct what it names", places.get(key))
        raise problems.error() from error


def check_weights(spec: ModelSpec) -> None:
    """The folder that the run starts from holds every tensor of the model, in its shape, and so does its adapter's.

    Raises ModelError or ConfigError.
    """
    if spec.model.folder is not None:
        with contextlib.closing(spec.folder_source(spec.model.folder)) as source:
            refuse_other_shapes(source, tensor_shapes(spec.skeleton))
    if spec.adapter.r is not None and spec.adapter.start:
        spec.given_adapter()


def _check_heads(text: Any, key: str, places: Places, problems: Problems) -> None:
    """A key/value head serves equally many attention heads, in every layer."""
    for config in layer_configs(text):
        heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
        if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
            legal = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            name = text.attribute_map.get("num_key_value_heads", "num_key_value_heads")
            rule = f"each of them serves equally many of the {heads} attention heads"
            problems.add(f"{key}.{name}", kv_heads, rule, f"set it to one of {legal}", places.get(key))
            return


def _check_flash(hf: PreTrainedModel, attention: str, places: Places, problems: Problems) -> None:
    package, place = _FLASH_PACKAGES[attention], places.get("model.attention")
    remedy = "set model.attention to sdpa, which picks the fastest kernel of the device"
    if not takes_flash_attention(hf):
        problems.add("model.attention", attention, f"{type(hf).__name__} does not take it", remedy, place)
    elif not any(importlib.util.find_spec(name) for name in (package, "kernels")):
        rule = f"its package {package} is not installed here"
        problems.add("model.attention", attention, rule, f"install it, or {remedy}", place)


def _check_length(hf: PreTrainedModel, length: int, key: str, places: Places, problems: Problems) -> tuple[str, ...]:
    """A sequence may not have more positions than a table of them; beyond what rotary ones were made for: a note."""
    config = hf.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return ()
    name = f"{key}.{config.attribute_map.get('max_position_embeddings', 'max_position_embeddings')}"
    if length <= longest:
        return ()
    if _has_table(hf, longest):
        problems.add(
            "data.sequence_length", length, f"the model has a table of {longest} positions ({name})",
            f"set it to {longest} or less" + (f", or raise {name}" if key == "model.config" else ""),
            places.get("data.sequence_length"),
        )  # fmt: skip
        return ()
    more = f"; set {name} to {length} if that is meant" if key == "model.config" else ""
    return (
        f"data.sequence_length {length} is more than the {longest} positions that the model is made for ({name}): it "
        f"trains, but servers read that number, and rotary positions beyond it are new to pretrained weights{more}",
    )


def _has_table(hf: PreTrainedModel, longest: int) -> bool:
    """True if positions are looked up in a table of about that many rows: learned, or computed once."""
    words = hf.get_input_embeddings()
    tables: list[torch.Tensor] = [
        module.weight for module in hf.modules() if isinstance(module, nn.Embedding) and module is not words
    ]
    tables += [buffer for buffer in hf.buffers() if buffer.dim() == 2]
    return any(longest <= table.shape[0] <= longest + 8 for table in tables)  # OPT and XGLM have two rows more


def _check_experts(hf: PreTrainedModel, resolved: ResolvedRun, problems: Problems) -> None:
    """Experts that ranks share are there."""
    section = resolved.expert_parallel
    if (section.get("enabled") or resolved.degrees.expert > 1) and not expert_blocks(hf):
        key = "autoep_size" if "autoep_size" in section else "enabled"
        rule = f"the experts of a layer are shared, and a {hf.config.model_type} model has no experts"
        problems.add(f"expert_parallel.{key}", section[key], rule, "remove the section", resolved.run.deepspeed)
        problems.raise_if_any()


def _check_stages(hf: PreTrainedModel, asked: str | tuple[int, ...], stages: int) -> None:
    """As many layers as the stages of the pipeline ask for. Raises ModelError."""
    check_stages(hf.config)
    layers = len(decoder_layers(hf))
    if isinstance(asked, tuple):
        pipeline.given(asked, layers, stages)
    else:
        pipeline.uniform(layers, stages)


def _check_copy(hf: PreTrainedModel, key: str, chunk: int) -> None:
    """What a small copy of the model shows: it does not see the tokens that it should predict, and our loss is its own.

    Raises ModelError. Where no small copy of the model works, nothing is known.
    """
    try:
        small = probe_copy(hf)
    except ModelError:
        return
    language = LanguageModel(small, chunk)  # refuses a head that is no linear layer, as training does
    try:
        ids = torch.arange(12).unsqueeze(0) + 3
        other, labels = ids.clone(), ids.roll(-1, dims=1)
        other[0, -1] += 1
        with torch.no_grad():
            if gives_scores(hf.config):
                _check_scores(language, ids, other, key)
                return
            logits, changed = (language.logits(each)[:, :-1] for each in (ids, other))
            counted = labels.masked_fill(labels == ids[0, 0], IGNORE)
            ours = float(language(ids, lambda head, hidden: head.nll_sum(hidden, counted))) / (ids.shape[1] - 1)
    except ModelError:
        raise
    except Exception:  # the copy's sizes do not go together, or it asks for more than tokens
        return
    if not logits.isfinite().all():
        raise ModelError(
            f"{key}: a small {type(hf).__name__} with these settings and random weights gives logits that are not "
            "finite numbers, so every step would be skipped. Compare its factors, scales and rotary positions with "
            "those of a published model."
        )
    _refuse_both_directions(hf, logits, changed, key)
    theirs = float(nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, :-1].flatten()))
    compare_losses(hf, ours, theirs)


def _refuse_both_directions(hf: PreTrainedModel, before: torch.Tensor, after: torch.Tensor, key: str) -> None:
    """Raises ModelError: a later token changes what the model says of earlier ones."""
    if not torch.allclose(before, after, atol=1e-5):
        raise ModelError(
            f"{key}: {type(hf).__name__} reads in both directions, so it sees the token that it should predict. "
            "Take a decoder, such as llama or qwen3."
        )


def _check_scores(language: LanguageModel, ids: torch.Tensor, other: torch.Tensor, key: str) -> None:
    """The same of a model that gives scores. `other`: `ids` [1, T] but for the last token. Raises ModelError."""

    def every(head: Head, hidden: torch.Tensor) -> torch.Tensor:
        return head.scores(hidden)

    ours, changed = (language(each, every) for each in (ids, other))
    _refuse_both_directions(language.hf, ours[:, :-1], changed[:, :-1], key)
    compare_losses(language.hf, float(ours[0, -1]), float(language.logits(ids)))


def _check_export(spec: ModelSpec) -> None:
    """The folder that the run ends with can be written and loaded. Raises ModelError."""
    try:
        hf, _ = spec.skeleton, spec.layout
        if not spec.scores and not loads_as_causal_model(hf.config):
            raise ModelError(
                f"model: transformers makes a {type(hf).__name__} of a part of its configuration, "
                f"{type(hf.config).__name__}, from which it loads no causal language model."
            )
    except ModelError as error:
        raise ModelError(f"{error} Set train.export to false: training and its checkpoints need no folder.") from error


def _rehearse(hf: PreTrainedModel, key: str, tokens: int) -> None:
    """Let tokens through the model on the meta device: sizes that do not fit show there. Raises ModelError."""
    model: Any = hf  # transformers' own types of `to` and of a call say less
    model.to("meta")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), documents_in_rows(None), attention_is(hf.config, "eager"):
            model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and _SHAPES.search(text := str(error).splitlines()[0]):
            raise ModelError(
                f"{key}: the sizes of this {type(hf).__name__} do not go together: a forward pass ends with: {text}. "
                "Compare heads, widths and what else its configuration counts with those of a published model."
            ) from error
    except Exception:  # a model may do what the meta device cannot: nothing is known then
        return
