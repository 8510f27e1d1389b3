"""A model's head as an objective sees it: the likelihoods of labels, whatever the ranks share; or a score."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import ModelError
from llmtrain.models.loss import HeadForm, chunked_nll_sum, token_nll
from llmtrain.models.score import gives_scores, score_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.models.distillation import TeacherSays, Terms, TopWords


class Head:
    """The last linear layer of a model; a shared vocabulary (tensor parallelism) or shared rows (sequence parallelism)
    are its affair, not its caller's."""

    def __init__(self, hf: PreTrainedModel, chunk: int) -> None:
        """`chunk`: tokens whose logits exist at one time.

        Raises: ModelError, where it is no linear layer.
        """
        layer = score_layer(hf) if gives_scores(hf.config) else hf.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(f"model: the head of {type(hf).__name__} is no linear layer ({type(layer).__name__}).")
        self.form = HeadForm.of(hf.config)
        self.columns = (0, 1)
        """(index, of): which part of each row's tokens this rank's hidden state is."""
        self._layer: Any = layer
        self._vocabulary: Any = getattr(layer, "vocabulary", None)  # its shard, under tensor parallelism
        self._chunk = chunk
        layer.forward = self._forward  # type: ignore[method-assign, assignment]

    def compute(self, loss: Loss, hidden: Tensor) -> Tensor:
        """`loss` of the decoder's output [B, T, H], inside of the layer's own forward: under ZeRO 3 its weight exists
        only there."""
        sums: Tensor = self._layer(hidden, loss)
        return sums

    def nll_sum(self, hidden: Tensor, labels: Tensor, counted: int | None = None) -> Tensor:
        """Summed negative log-likelihood of the counted labels (nats, fp32 scalar), for a `Loss`.

        Args:
            hidden: [b, t, H], what the loss was given, or some of its rows.
            labels: [b, T] of whole rows, already shifted; IGNORE = not counted.
            counted: how many of them count, as far as it is known: the head computes no other token.

        Returns: under sequence parallelism the sum over this rank's columns.
        """
        return self._likelihoods(functools.partial(chunked_nll_sum, counted=self._own(counted)), hidden, labels)

    def token_nll(self, hidden: Tensor, labels: Tensor, counted: int | None = None) -> Tensor:
        """The negative log-likelihood of each label (nats, fp32 [b, t]), 0 where it is not counted.

        For an objective that is no sum over tokens; its backward pass computes the logits a second time.

        Args: as of `nll_sum`.

        Returns: under sequence parallelism this rank's columns.
        """
        return self._likelihoods(functools.partial(token_nll, counted=self._own(counted)), hidden, labels)

    def scores(self, hidden: Tensor) -> Tensor:
        """What a model that gives scores says of texts that end here: fp32 [...], for a `Loss`.

        Args:
            hidden: [..., H], chosen places of what the loss was given.
        """
        scores: Tensor = F.linear(hidden.float(), self._layer.weight.float())
        return scores.squeeze(-1)

    def distilled_sums(self, hidden: Tensor, labels: Tensor, teacher: TeacherSays, terms: Terms) -> Tensor:
        """Sums over the counted tokens, nats, fp32 [4]: loss, divergence from the teacher, next-token loss, the
        teacher's entropy. A gradient goes through the first. Not under sequence parallelism.

        Args:
            hidden, labels: as of `nll_sum`.
            teacher: gives the logits of the same tokens, or their likeliest words.
            terms: of the loss.
        """
        from llmtrain.models.distillation import distilled_sums

        return self._likelihoods(functools.partial(distilled_sums, teacher=teacher, terms=terms), hidden, labels)

    def top_words(self, hidden: Tensor, k: int, temperature: float) -> TopWords:
        """The k likeliest next words at each of N places, without a gradient; for a `Loss`, not under sequence
        parallelism.

        Args:
            hidden: [N, H], chosen places of what the loss was given.
        """
        from llmtrain.models.distillation import TopWords, few_of, top_words

        layer = self._layer
        compute = F.linear if self._vocabulary is None else self._vocabulary.logits
        found = []
        with torch.no_grad():
            for some in hidden.split(few_of(self._chunk)) if len(hidden) else [hidden]:
                values = self.form.apply(compute(some, layer.weight, layer.bias).float())
                found.append(top_words(values, k, temperature))
        return TopWords(words=torch.cat([each.words for each in found]), logs=torch.cat([each.logs for each in found]))

    def values(self, hidden: Tensor) -> Tensor:
        """Logits as the loss sees them, fp32 [..., V], of [..., H]: of a model whose weights are whole here."""
        return self.form.apply(F.linear(hidden, self._layer.weight, self._layer.bias).float())

    def _own(self, counted: int | None) -> int | None:
        """Of this rank's columns: not known where it has a part of them."""
        return counted if self.columns[1] == 1 else None

    def _likelihoods(self, compute: Callable[..., Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
        index, of = self.columns
        own, layer = labels.chunk(of, dim=1)[index], self._layer
        if self._vocabulary is not None:
            hidden = self._vocabulary.shared(hidden)
        about: dict[str, Any] = {"chunk": self._chunk, "form": self.form, "vocabulary": self._vocabulary}
        return compute(hidden, layer.weight, layer.bias, own, **about)

    def _forward(self, hidden: Tensor, loss: Loss | None = None) -> Tensor:
        """The layer as it was (logits), or a loss."""
        layer = self._layer
        if loss is None:
            compute = F.linear if self._vocabulary is None else self._vocabulary.logits
            logits: Tensor = compute(hidden, layer.weight, layer.bias)
            return logits
        if hidden.shape[-1] != layer.in_features:
            raise ModelError(
                f"model: its head takes {layer.in_features} features, and its decoder gives {hidden.shape[-1]}: a "
                "layer between the two is not known here, and the loss needs it. Train another family."
            )
        return loss(self, hidden)


Loss = Callable[[Head, Tensor], Tensor]
"""From a head and the decoder's output [B, T, H] to sums over the micro-batch, the loss first."""
