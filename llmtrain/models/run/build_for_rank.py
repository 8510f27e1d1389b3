"""Builds this rank's module of a run's model, in the run's form of parallelism."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.base.errors import ModelError
from llmtrain.config.problems import Places, stop
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.topology import Mix
from llmtrain.models.experts import avoid_grouped_product, check_stages, expert_blocks, set_leaf_modules
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.layers import set_up_layers
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.skeleton import DTYPES, construct, decoder_layers, materialise, restore_buffers
from llmtrain.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.models.parallel.pipeline import PipelineLanguageModel


def build_model(run: Run, spec: ModelSpec, device: torch.device, mesh: Mesh) -> LanguageModel | PipelineLanguageModel:
    """Return this rank's module with uninitialised parameters. Only the code of the run's form is imported (all forms
    have 2,500 lines). Raises ModelError if transformers cannot build the model, or not in this form; ConfigError if a
    pipeline stage has nothing to train."""
    model, mix = run.config.model, run.mix
    language: LanguageModel | PipelineLanguageModel
    if mix.degrees.pipeline > 1:
        from llmtrain.models.parallel.pipeline import build_pipeline

        check_stages(spec.config)
        with divided(spec, "pipeline.stages", mix.degrees.pipeline):
            language = build_pipeline(run, spec, device, mesh)
    else:
        hf, note = _own_part(spec, mix, run.deepspeed, device, mesh)
        if spec.adapter.r is not None and mix.degrees.tensor == 1:
            from llmtrain.models.adapter import put_around

            packed = spec.adapter.quantize is not None
            # This gains nothing on a CPU, and ZeRO 3 takes a gradient of A only if its own module is called.
            shares = device.type == "cuda" and mix.zero_stage < 3 and not packed
            put_around(hf, spec.adapted, device, DTYPES[mix.precision], packed=packed, shares_inputs=shares)
            if packed and mix.degrees.expert == 1:
                materialise(hf, device, DTYPES[mix.precision])  # all but the packed layers
        if model.fp8 is not None:  # before experts are sharded: complete ones show which modules are routers
            from llmtrain.models.fp8 import use_fp8

            use_fp8(decoder_layers(hf), model.fp8, emulated=device.type == "cpu")
        avoid_grouped_product(hf, DTYPES[mix.precision])
        routing = None
        if (blocks := expert_blocks(hf)) or mix.degrees.expert > 1:
            from llmtrain.models.parallel.expert_parallel import describe_experts, prepare_experts

            routing = prepare_experts(hf, blocks, mix, run.expert_parallel, device, mesh)
        elif mix.zero_stage == 3:
            set_leaf_modules(hf, blocks)
        hf.config.use_cache = False
        set_up_layers(hf, list(decoder_layers(hf)), model, mix)
        if mix.degrees.sequence > 1:
            from llmtrain.models.parallel.sequence import SequenceLanguageModel

            language = SequenceLanguageModel(hf, model.loss_chunk_tokens, mesh.sequence)
        else:
            language = LanguageModel(hf, model.loss_chunk_tokens)
        if model.neftune_noise_alpha:
            from llmtrain.models.neftune import Neftune

            language.noise = Neftune(hf.get_input_embeddings(), model.neftune_noise_alpha)
        language.routing = routing
        language.notes += [note] if note else []
        if spec.adapter.quantize is not None:
            from llmtrain.models.quantized import packed_line

            language.notes.append(packed_line(hf))
        if routing is not None:
            language.notes.append(describe_experts(mix, routing))
    if model.fp8 is not None:
        from llmtrain.models.fp8 import line

        language.notes.append(line(spec.skeleton, model.fp8, emulated=device.type == "cpu"))
    for local in language.local_parameters():
        if local.name in spec.frozen:
            local.parameter.requires_grad_(False)
    if spec.frozen:
        _check_trained(language, run.config, run.places, mesh)
    return language


def _check_trained(
    language: LanguageModel | PipelineLanguageModel, config: RunConfig, places: Places, mesh: Mesh
) -> None:
    """Check that this rank's pipeline stage has something to train, as DeepSpeed's optimizers need. Raises
    ConfigError."""
    if any(local.trains for local in language.local_parameters()):
        return
    key, patterns = next(
        (key, patterns)
        for key, patterns in (
            ("adapter.targets", config.adapter.targets if config.adapter.r is not None else []),
            ("model.train_only", config.model.train_only),
            ("model.freeze", config.model.freeze),
        )
        if patterns
    )
    rule = f"leaves stage {mesh.place.pipeline} of pipeline.stages {mesh.degrees.pipeline} nothing to train"
    raise stop(key, patterns, rule, "let each stage train something, or use ZeRO without a pipeline", places.get(key))


@contextlib.contextmanager
def divided(spec: ModelSpec, key: str, degree: int) -> Iterator[None]:
    """A context in which a ModelError about the family gets the key that divides the model, and a remedy."""
    try:
        yield
    except ModelError as error:
        about_the_model, _, reason = str(error).partition("model: ")
        if about_the_model:  # the message is about a key's value, and names the key
            raise
        raise ModelError(
            f"{key} {degree}: the ranks cannot divide a {spec.config.model_type} model so. Remove the section: ZeRO 3 "
            f"shards weights, gradients and optimizer of every model. What stands in the way: {reason}"
        ) from error


def _own_part(
    spec: ModelSpec, mix: Mix, exact: dict[str, Any], device: torch.device, mesh: Mesh
) -> tuple[PreTrainedModel, str]:
    """Return this rank's model without a pipeline, and a note for the user or "". Parameters are shards (with ZeRO 3
    partitions of these); shared experts and layers to be packed may be on the meta device."""
    if mix.degrees.tensor > 1:
        from llmtrain.models.parallel.tensor import sharded_model

        with divided(spec, "tensor_parallel.autotp_size", mix.degrees.tensor):
            return sharded_model(spec, mix, exact, device, mesh)
    if mix.zero_stage < 3 and (mix.degrees.expert > 1 or spec.adapter.quantize is not None):
        return spec.own_skeleton(), ""  # on the meta device: a shared or packed parameter is never complete here
    with contextlib.ExitStack() as stack:
        if mix.zero_stage == 3:
            import deepspeed

            # The skeleton must exist already: classes that transformers imports and decorates inside zero.Init lose
            # their decoration at its end, for example the experts' (partition_parameters.py _init_subclass and
            # _disable_class). `dtype` is not passed: on a device without fp16, DeepSpeed 0.19.8 would then always use
            # bf16 (partition_parameters.py _set_dtype); from its config it takes the right one.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=exact, mpu=mesh.mpu))
        else:
            stack.enter_context(device)
        hf = construct(copy.deepcopy(spec.config), spec.model.attention, DTYPES[mix.precision])
    restore_buffers(hf, spec.skeleton, device)
    return hf, ""
