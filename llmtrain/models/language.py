"""A transformers causal language model that computes the sums of an objective; the form without a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.head import Head, Loss
from llmtrain.models.parameters import LocalParameter, local_parameter, named_tensors
from llmtrain.models.score import at_the_last_place
from llmtrain.models.skeleton import decoder_layers
from llmtrain.models.transformers_private import documents_are, matrices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from llmtrain.models.neftune import Neftune
    from llmtrain.models.routing import Routing


class LanguageModel(nn.Module):
    """A transformers model that computes objectives. Its parameters are named `hf.` + the Hugging Face name."""

    def __init__(self, hf: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self.routing: Routing | None = None
        """Watches the routers of a mixture of experts; None for other models."""
        self.notes: list[str] = []
        """Lines for the log on how this model was built."""
        self.balance: Tensor | None = None
        """This rank's part of the load-balancing loss of the last forward pass in training; None: nothing to add."""
        if hf.base_model is hf:
            raise ModelError(
                f"model: {type(hf).__name__} gives no hidden state without logits (it has no "
                f"{hf.base_model_prefix!r}), but the loss needs the hidden state. Train another family."
            )
        self.head = Head(hf, chunk)
        self.noise: Neftune | None = None
        """Adds noise to the embeddings, in training."""
        self.wants_logits = False
        """True: the loss gets transformers' own logits instead of the hidden state."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.hf.config

    def local_parameters(self) -> list[LocalParameter]:
        """Return this rank's part of each parameter; a tied tensor appears once."""
        return [local_parameter(name, tensor) for name, tensor in named_tensors(self.hf)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by Hugging Face name."""
        shapes = getattr(self.hf, "whole_shapes", None)  # a tensor-parallel rank may lack tensors of other heads
        return shapes or {local.name: local.shape for local in self.local_parameters()}

    def matrices(self) -> Iterator[tuple[nn.Parameter, int, int, bool]]:
        """Yield (matrix [.., rows, columns], rows, columns, True if its rows are the inputs) for each linear layer and
        group of experts in the decoder layers."""
        return matrices(decoder_layers(self.hf))

    def forward(self, inputs: Tensor, loss: Loss, positions: Tensor | None = None) -> Tensor:
        """Return the result of `loss` for the decoder's output. `inputs`: [B, T]. `positions`: [B, T], starting at 0 in
        each document; None: each row is one sequence."""
        if self.wants_logits:
            return loss(self.head, self.logits(inputs))
        return self.head.compute(loss, self.hidden(inputs, positions))

    def hidden(self, inputs: Tensor, positions: Tensor | None) -> Tensor:
        """Return the decoder's output [B, T, H]."""
        options = {} if positions is None else {"position_ids": positions}
        if self.noise is not None:
            self.noise.look(inputs, positions)
        with documents_in_rows(positions):
            return self.decoded(input_ids=inputs, **options)

    def decoded(self, **inputs: Any) -> Tensor:
        """Run the decoder; in training, record what the routers choose."""
        routing = self.routing if self.training else None
        with contextlib.nullcontext() if routing is None else routing.watching():
            hidden_BTH = self.hf.base_model(**inputs, **self._plain_forward()).last_hidden_state
        self.balance = None if routing is None else routing.balance()
        return hidden_BTH

    def logits(self, inputs: Tensor) -> Tensor:
        """Return transformers' own logits for tokens [B, T]; each rank computes them by itself."""
        with at_the_last_place(self.config):
            return self.hf(input_ids=inputs, **self._plain_forward()).logits

    def _plain_forward(self) -> dict[str, Any]:
        has_routers = hasattr(self.config, "output_router_logits")
        return {"use_cache": False, **({"output_router_logits": False} if has_routers else {})}


def compare_losses(hf: PreTrainedModel, in_chunks: float, of_logits: float, *, autocast: bool = False) -> None:
    """Raise ModelError if the loss in chunks differs from that of transformers' logits by more than rounding.
    `autocast`: products are in bf16."""
    tolerance = 1e-4 if hf.dtype == torch.float32 and not autocast else 3e-2
    if not abs(in_chunks - of_logits) <= tolerance * max(1.0, abs(of_logits)):
        raise ModelError(
            f"model: the loss of {type(hf).__name__} computed in chunks is {in_chunks:.6f}, from its own logits "
            f"{of_logits:.6f}. Its head changes the logits in a way that llmtrain does not know, so the run would "
            "train on a wrong loss. Train another family."
        )


@contextlib.contextmanager
def documents_in_rows(positions: Tensor | None) -> Iterator[None]:
    """Tell transformers which tokens of a row belong together: all, or with `positions` those of each document."""
    with documents_are(None if positions is None else (positions == 0).cumsum(-1)):
        yield
