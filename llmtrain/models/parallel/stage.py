"""A pipeline stage: the transformers model itself with the parts of other stages taken out.

So masks, rotary embeddings and whatever else transformers hands to a layer are made by its own code on every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.models.build import materialise
from llmtrain.models.language import documents_in_rows
from llmtrain.models.score import at_the_last_place
from llmtrain.models.structure.absent import AbsentAfter, AbsentBefore, AbsentLayer
from llmtrain.models.structure.anatomy import Anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Entrance(AbsentLayer):
    """The last absent layer before a stage's own: here the received hidden state enters.

    What the model makes of its input embeddings (a scale, positions, a projection) was added on the first stage;
    whatever comes out of the absent parts here is put aside.
    """

    received: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """[B, T, H]"""
        received, self.received = self.received, None
        assert received is not None
        return super().forward(received)


class Stage(nn.Module):
    """What one stage computes."""

    def __init__(self, hf: PreTrainedModel, entrance: Entrance | None) -> None:
        super().__init__()
        self.hf = hf
        self._entrance = (entrance,)  # no submodule a second time
        self.conclude: Callable[[Tensor], Tensor] | None = None
        """On the last stage: from the hidden state to the loss."""
        self.wants_logits = False
        """On the last stage: `conclude` gets transformers' own logits instead."""

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens or hidden states, with positions [B, T] if there are documents in the rows; the same comes out."""
        first, positions = given if isinstance(given, tuple) else (given, None)
        kwargs: dict[str, Any] = {"use_cache": False}
        if positions is not None:
            kwargs["position_ids"] = positions
        (entrance,) = self._entrance
        if entrance is None:
            kwargs["input_ids"] = first
        else:
            entrance.received = first
            # Of its shape only: some models scale the embeddings in place (CTRL), and would scale what was received.
            kwargs["inputs_embeds"] = torch.zeros_like(first)
        with documents_in_rows(positions):
            if self.wants_logits:
                with at_the_last_place(self.hf.config):
                    out = self.hf(**kwargs).logits
            else:
                out = self.hf.base_model(**kwargs).last_hidden_state
        if self.conclude is not None:
            return self.conclude(out)
        return out if positions is None else (out, positions)


@dataclass(frozen=True)
class Part:
    """What a stage has of the model."""

    layers: range
    first: bool
    """The embedding, and what else makes the first hidden state."""
    last: bool
    """Final norm and head."""


def build_stage(
    hf: PreTrainedModel,
    anatomy: Anatomy,
    part: Part,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Callable[[nn.Module], None] | None = None,
) -> Stage:
    """Turn the model's skeleton into a stage; what is left of it gets uninitialised memory on the device.

    `shard` gives memory to a tensor-parallel rank's shard instead.
    """
    entrance = _cut(hf, anatomy, part, dtype)
    if shard is not None:
        shard(hf)
    materialise(hf, device, dtype)
    hf.config.use_cache, hf.config.dtype = False, dtype
    return Stage(hf, entrance)


def _cut(hf: PreTrainedModel, anatomy: Anatomy, part: Part, dtype: torch.dtype) -> Entrance | None:
    """Take the other stages' parts out of a model. Returns where the hidden state enters; None on the first stage."""
    as_tuple = anatomy.layers_return_tuples
    absent: dict[str, nn.Module] = {
        layer.path: AbsentLayer(as_tuple) for index, layer in enumerate(anatomy.layers) if index not in part.layers
    }
    entrance = None
    if not part.first:
        entrance = absent[anatomy.layers[part.layers.start - 1].path] = Entrance(as_tuple)
        absent |= {before.path: AbsentBefore(before.width, dtype) for before in anatomy.before}
    if not part.last:
        absent |= {path: AbsentAfter() for path in (*anatomy.after, anatomy.head)}
    for path, module in absent.items():
        hf.set_submodule(path, module)
    return entrance
