"""How decoder layers compute, with and without a pipeline: tiled MLPs, recomputation, torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from llmtrain.config.run import ModelConfig
from llmtrain.config.topology import Mix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_up_layers(hf: PreTrainedModel, layers: Sequence[nn.Module], model: ModelConfig, mix: Mix) -> None:
    """Tile the MLPs, and recompute and compile the decoder layers, as the run's settings say. `layers`: this rank's."""
    if model.mlp_tile_tokens is not None:  # imported here: 1,000 lines that analyse the model
        from llmtrain.models.parallel.recompute import tile_mlps
        from llmtrain.models.structure.projections import dense_mlps

        tile_mlps(dense_mlps(hf), model.mlp_tile_tokens)
    if mix.recomputes:
        from llmtrain.models.parallel.recompute import recompute

        # The first layers: the backward pass frees the tensors of the last ones before it recomputes.
        asked = model.recompute.layers
        recomputed = layers[:asked] if isinstance(asked, int) else layers
        on_host, compiled = mix.layer_inputs_on_host, bool(model.compile_layers)
        recompute(recomputed, keep_attention=mix.keep_attention, on_host=on_host, compiled=compiled)
    if model.compile_layers:
        for layer in layers:
            # Not layer.compile(), which also compiles the layer's hooks: in these ZeRO 3 gathers and releases weights.
            # A run has one shape, and static kernels are faster.
            layer.forward = torch.compile(layer.forward, dynamic=False)
            layer.register_forward_pre_hook(_ask_for_a_gradient, with_kwargs=True)
            if mix.zero_stage == 3:  # as one unit: hooks of inner modules would break the graph
                set_z3_leaf_module(layer, True)


def _ask_for_a_gradient(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the hidden state before a trained layer require a gradient, also after frozen embeddings: then all trained
    layers are one graph, and ZeRO 3 releases a layer's weights after its backward pass instead of before."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
        arguments = (*args, *kwargs.values())
        hidden = next(t for t in arguments if isinstance(t, Tensor) and t.is_floating_point())
        hidden.requires_grad_()
