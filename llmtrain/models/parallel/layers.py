"""How decoder layers compute, with and without a pipeline: tiled MLPs, recomputation, torch.compile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from llmtrain.config.run import ModelConfig
from llmtrain.models.language import checkpoint_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_up_layers(
    hf: PreTrainedModel, layers: Iterable[nn.Module], model: ModelConfig, recompute: dict[str, Any] | None
) -> None:
    """Let the decoder `layers` of `hf` that are here compute as the model section of the run says.

    `recompute`: the JSON's section activation_checkpointing, if it has one.
    """
    if model.mlp_tile_tokens is not None:  # it takes the model apart: 1,000 lines that other runs do not load
        from llmtrain.models.structure.mlps import dense_mlps
        from llmtrain.models.tiled import tile_mlps

        tile_mlps(dense_mlps(hf), model.mlp_tile_tokens)
    if recompute is not None:
        checkpoint_activations(hf, recompute, keep_attention=model.keep_attention)
    if model.compile_layers:
        for layer in layers:
            layer.compile(dynamic=False)  # a run has one shape, and static kernels are faster
