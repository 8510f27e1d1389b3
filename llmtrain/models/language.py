"""A transformers causal language model that computes an objective's sums: the form without a pipeline."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmtrain.base.errors import ModelError
from llmtrain.models.experts import Routing
from llmtrain.models.head import Head, Loss
from llmtrain.models.parameters import LocalParameter, local_parameter, named_tensors
from llmtrain.models.score import at_the_last_place
from llmtrain.models.transformers_private import ATTENTION_KERNELS, checkpoint_with, documents_are

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class LanguageModel(nn.Module):
    """A transformers causal LM whose forward gives a loss. Its parameters are `hf.` + Hugging Face names."""

    def __init__(self, hf: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self.routing: Routing | None = None
        """Watches the routers of a mixture of experts."""
        self.notes: list[str] = []
        """Lines for the log about the way this model was built."""
        self.balance: Tensor | None = None
        """After a forward pass in training: this rank's part of the load-balancing loss, if it is to be added."""
        if hf.base_model is hf:
            raise ModelError(
                f"model: {type(hf).__name__} cannot be asked for its hidden state without its logits (it has no "
                f"{hf.base_model_prefix!r}), and the loss needs it. Train another family."
            )
        self.head = Head(hf, chunk)
        self.wants_logits = False
        """The loss gets transformers' own logits in place of the hidden state."""

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers configuration."""
        return self.hf.config

    def local_parameters(self) -> list[LocalParameter]:
        """This rank's part of each Hugging Face tensor; a tied one appears once."""
        return [local_parameter(name, tensor) for name, tensor in named_tensors(self.hf)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the whole model, by Hugging Face name."""
        shapes = getattr(self.hf, "whole_shapes", None)  # a tensor-parallel rank may lack what belongs to others' heads
        return shapes or {held.name: held.shape for held in self.local_parameters()}

    def forward(self, inputs: Tensor, loss: Loss, positions: Tensor | None = None) -> Tensor:
        """The result of `loss`.

        Args:
            inputs: [B, T].
            loss: of the decoder's output.
            positions: [B, T], beginning anew with each document that a row holds; None: a row is one sequence.
        """
        if self.wants_logits:
            return loss(self.head, self.logits(inputs))
        return self.head.compute(loss, self.hidden(inputs, positions))

    def hidden(self, inputs: Tensor, positions: Tensor | None) -> Tensor:
        """The decoder's output [B, T, H]."""
        given = {} if positions is None else {"position_ids": positions}
        with documents_in_rows(positions):
            return self.decoded(input_ids=inputs, **given)

    def decoded(self, **given: Any) -> Tensor:
        """The output of transformers' decoder. In training its routers, if it has some, are watched."""
        routing = self.routing if self.training else None
        with contextlib.nullcontext() if routing is None else routing.watching():
            hidden_BTH = self.hf.base_model(**given, **self._plainly()).last_hidden_state
        self.balance = None if routing is None else routing.balance()
        return hidden_BTH

    def logits(self, inputs: Tensor) -> Tensor:
        """transformers' own logits of [B, T] tokens, computed by each rank for itself."""
        with at_the_last_place(self.config):
            return self.hf(input_ids=inputs, **self._plainly()).logits

    def _plainly(self) -> dict[str, Any]:
        """Keyword arguments of forward that switch off the cache and the routers' logits."""
        has_routers = hasattr(self.config, "output_router_logits")
        return {"use_cache": False, **({"output_router_logits": False} if has_routers else {})}


def compare_losses(hf: PreTrainedModel, ours: float, theirs: float) -> None:
    """Raises ModelError when the loss in chunks is not the one of transformers' logits, by more than rounding."""
    tolerance = 1e-4 if hf.dtype == torch.float32 else 3e-2
    if not abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)):
        raise ModelError(
            f"model: the loss of {type(hf).__name__} computed in chunks is {ours:.6f}, from its own logits "
            f"{theirs:.6f}. Its head does something to the logits that is not known here; the run would train on "
            "a wrong loss."
        )


@contextlib.contextmanager
def documents_in_rows(positions: Tensor | None) -> Iterator[None]:
    """Tell transformers which tokens of a row belong together: those of a document, or all without `positions`.

    See `patches.documents_are` for what it would do by itself.
    """
    with documents_are(None if positions is None else (positions == 0).cumsum(-1)):
        yield


def checkpoint_activations(hf: PreTrainedModel, section: dict[str, Any], *, keep_attention: bool) -> None:
    """Recompute each decoder layer in the backward pass; with cpu_checkpointing its input waits on the host.

    `keep_attention`: all of the layer but torch's scaled_dot_product_attention, the one part whose time grows with the
    square of the sequence length. Kept of it are the output [B, T, heads x size] and the sums of the softmax.
    """
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    kept = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _what_to_keep)}
    enable({"use_reentrant": False, **(kept if keep_attention else {})})
    if section.get("cpu_checkpointing"):
        # DeepSpeed's own function for this loses the gathered weights of ZeRO 3 in the recomputation.
        checkpoint_with(hf, _checkpoint_on_host)


def _what_to_keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Torch's policy for keep_attention; on a GPU the kernel is chosen anew for each shape and mask."""
    kept = operator in ATTENTION_KERNELS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_on_host(function: Any, *args: Any) -> Any:
    with saved_tensors_hooks(to_host, from_host):
        return checkpoint(function, *args, use_reentrant=False)


_PIECE_BYTES = 2**26
_Kept = tuple[torch.device, torch.Size, list[Tensor]]


def to_host(tensor: Tensor) -> _Kept:
    """A copy in host memory, in pieces of 64 MiB.

    torch rounds each request for pinned memory up to a power of two (its CachingHostAllocator): the 3.3 GB that a
    layer of 8B keeps of 400,000 tokens would take 4.3, and 32 layers more than a host of 128 GiB has.
    """
    pieces = []
    for part in tensor.detach().reshape(-1).split(_PIECE_BYTES // tensor.element_size()):
        piece = torch.empty(part.shape, dtype=part.dtype, pin_memory=tensor.is_cuda)
        pieces.append(piece.copy_(part, non_blocking=True))  # the host never reads it, so nobody waits
    return tensor.device, tensor.shape, pieces


def from_host(kept: _Kept) -> Tensor:
    """The tensor that `to_host` was given."""
    device, shape, pieces = kept
    whole = torch.empty(shape.numel(), dtype=pieces[0].dtype, device=device)
    for piece, room in zip(pieces, whole.split(max(1, pieces[0].numel())), strict=True):
        room.copy_(piece, non_blocking=True)
    return whole.view(shape)
