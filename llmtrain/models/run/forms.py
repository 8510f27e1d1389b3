"""From a resolved run to this rank's module, in the form of parallelism that the run asks for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from llmtrain.config.problems import stop
from llmtrain.config.run import ResolvedRun
from llmtrain.errors import ModelError
from llmtrain.models.build import DTYPES, construct, decoder_layers, restore_buffers
from llmtrain.models.experts import check_stages, expert_blocks
from llmtrain.models.language import LanguageModel, checkpoint_activations
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.models.parallel.pipeline import PipelineLanguageModel


def build_model(
    resolved: ResolvedRun, spec: ModelSpec, device: torch.device, mesh: Mesh
) -> LanguageModel | PipelineLanguageModel:
    """The module with uninitialised parameters; the engine writes the values afterwards, slice by slice.

    Raises:
        ModelError: transformers cannot build the model, or it cannot take this form.
        ConfigError: a run that freezes parameters leaves a rank nothing to train.
    """
    language = _build(resolved, spec, device, mesh)
    for held in language.local_parameters():
        if held.name in spec.frozen:
            held.parameter.requires_grad_(False)
    if spec.frozen:
        _check_trained(language, resolved, mesh)
    return language


def _check_trained(language: LanguageModel | PipelineLanguageModel, resolved: ResolvedRun, mesh: Mesh) -> None:
    """DeepSpeed's optimizers want parameters on every stage, and shared experts (its mark of them: allreduce).

    Raises: ConfigError.
    """
    model, trained = resolved.run.model, [held.parameter for held in language.local_parameters() if held.trains]
    key, patterns = ("model.train_only", model.train_only) if model.train_only else ("model.freeze", model.freeze)
    place = resolved.places.get(key)
    if not trained:
        rule = f"leaves stage {mesh.place.pipeline} of pipeline.stages {resolved.degrees.pipeline} nothing to train"
        raise stop(key, patterns, rule, "let each stage train something, or use ZeRO without a pipeline", place)
    if resolved.degrees.expert > 1 and all(getattr(p, "allreduce", True) for p in trained):
        rule = f"leaves no experts to train, which expert_parallel.autoep_size {resolved.degrees.expert} shares"
        raise stop(key, patterns, rule, "remove expert_parallel: ZeRO 3 shards frozen experts, too", place)


def _build(
    resolved: ResolvedRun, spec: ModelSpec, device: torch.device, mesh: Mesh
) -> LanguageModel | PipelineLanguageModel:
    """Each form is imported where it is chosen: a run has one, and all of them are 2,500 lines."""
    if resolved.degrees.pipeline > 1:
        from llmtrain.models.parallel.pipeline import build_pipeline

        check_stages(spec.config)
        with _divided(spec, "pipeline.stages", resolved.degrees.pipeline):
            return build_pipeline(resolved, spec, device, mesh)
    model = resolved.run.model
    if resolved.degrees.tensor > 1:
        from llmtrain.models.parallel.tensor import shared_model

        with _divided(spec, "tensor_parallel.autotp_size", resolved.degrees.tensor):
            hf = shared_model(resolved, spec, device, mesh)
    elif resolved.degrees.expert > 1 and resolved.zero_stage < 3:
        hf = spec.own_skeleton()
    else:
        hf = _whole_model(resolved, spec, device, mesh)
    routing = None
    if (blocks := expert_blocks(hf)) or resolved.degrees.expert > 1:
        from llmtrain.models.parallel.expert_parallel import describe_experts, prepare_experts

        routing = prepare_experts(hf, blocks, resolved, device, mesh)
    hf.config.use_cache = False
    if model.mlp_tile_tokens is not None:
        from llmtrain.models.structure.mlps import dense_mlps
        from llmtrain.models.tiled import tile_mlps

        tile_mlps(dense_mlps(hf), model.mlp_tile_tokens)
    if resolved.activation_checkpointing:
        section = resolved.deepspeed["activation_checkpointing"]
        checkpoint_activations(hf, section, keep_attention=model.keep_attention)
    if model.compile_layers:
        for layer in decoder_layers(hf):
            layer.compile(dynamic=False)  # a run has one shape, and static kernels are faster
    if resolved.degrees.sequence > 1:
        from llmtrain.models.parallel.sequence import SequenceLanguageModel

        language: LanguageModel = SequenceLanguageModel(hf, model.loss_chunk_tokens, mesh.sequence)
    else:
        language = LanguageModel(hf, model.loss_chunk_tokens)
    language.routing = routing
    if routing is not None:
        language.notes.append(describe_experts(resolved, routing))
    return language


@contextlib.contextmanager
def _divided(spec: ModelSpec, key: str, degree: int) -> Iterator[None]:
    """What is wrong with the family is told with the key that asks to divide it, and with the way around."""
    try:
        yield
    except ModelError as error:
        about_the_model, _, found = str(error).partition("model: ")
        if about_the_model:  # a key's value is wrong, and the message names it
            raise
        raise ModelError(
            f"{key} {degree}: the ranks cannot divide a {spec.config.model_type} model so. Remove the section: ZeRO 3 "
            f"shards weights, gradients and optimizer of every model. What stands in the way: {found}"
        ) from error


def _whole_model(resolved: ResolvedRun, spec: ModelSpec, device: torch.device, mesh: Mesh) -> PreTrainedModel:
    """Every parameter whole, or under ZeRO 3 born partitioned."""
    with contextlib.ExitStack() as stack:
        if resolved.zero_stage == 3:
            import deepspeed

            # The skeleton was made before: what transformers imports in here loses its decorated constructors when it
            # ends, the one of the experts among them (partition_parameters.py _init_subclass and _disable_class).
            # Not given `dtype`: on a device without fp16, DeepSpeed 0.19.8 then takes bf16 whatever was asked for
            # (partition_parameters.py _set_dtype); from its config it takes the right one.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=resolved.deepspeed, mpu=mesh.mpu))
        else:
            stack.enter_context(device)
        hf = construct(copy.deepcopy(spec.config), resolved.run.model.attention, DTYPES[resolved.precision])
    restore_buffers(hf, spec.skeleton, device)
    return hf
