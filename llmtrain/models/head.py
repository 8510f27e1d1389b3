"""A model's head for objectives: it computes likelihoods of labels, or scores, also with shared vocabulary or rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.loss import IGNORE, About, HeadForm, chunked_nll_sums, has_one_shape, token_nll
from llmtrain.models.score import gives_scores, score_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.models.distillation import TeacherSays, Terms, TopWords


_WORTH_IT = 0.9
"""Share of tokens for the head above which leaving the others out costs more than it saves."""


class SharedRows(Protocol):
    """The ranks that share each row: rank r has columns [r T / degree, (r + 1) T / degree) of it."""

    rank: int
    degree: int

    def of_all(self, shard: Tensor) -> Tensor:
        """Gather [...] from each of these ranks into [degree, ...]. The gradient of a part goes back to its rank."""
        ...


class Head:
    """A model's last linear layer. It hides from the caller whether ranks share the vocabulary (tensor parallelism) or
    rows (sequence parallelism)."""

    def __init__(self, hf: PreTrainedModel, chunk: int) -> None:
        """`chunk`: tokens whose logits exist at one time. Raises ModelError if the head is no linear layer."""
        layer = score_layer(hf) if gives_scores(hf.config) else hf.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"model: the head of {type(hf).__name__} is no linear layer but a {type(layer).__name__}. "
                "Train another family."
            )
        self.form = HeadForm.of(hf.config)
        self.shared_rows: SharedRows | None = None
        """Set under sequence parallelism, where the hidden state has only this rank's columns."""
        self._layer: Any = layer
        self._vocabulary: Any = getattr(layer, "vocabulary", None)  # this rank's shard under tensor parallelism
        self._chunk = chunk
        layer.forward = self._forward  # type: ignore[method-assign, assignment]

    def compute(self, loss: Loss, hidden: Tensor) -> Tensor:
        """Return `loss` of the decoder's output [B, T, H]. It runs inside the layer's own forward, because under ZeRO 3
        the layer's weight exists only there."""
        sums: Tensor = self._layer(hidden, loss)
        return sums

    def nll_sum(self, hidden: Tensor, labels: Tensor, counted: int | None = None) -> Tensor:
        """Return the summed negative log-likelihood (nats) of the counted `labels` [b, T], which are already shifted.
        For use in a `Loss`. Under sequence parallelism it is the sum over this rank's columns. `hidden`: [b, t, H],
        rows of the loss's input. `counted`: number of counted labels, if known, so that the head can leave out the
        others."""
        return self.nll_sums(hidden, labels, counted, 0.0)[0]

    def nll_sums(self, hidden: Tensor, labels: Tensor, counted: int | None, z_loss: float) -> Tensor:
        """Return `nll_sum`, with a z-loss of this coefficient in its gradient, and the sum of log Z squared: fp32
        [2]."""
        labels = self.own(labels)
        rows = self._counted_rows(labels, counted)
        if rows is not None:
            hidden, labels = hidden.flatten(0, 1).index_select(0, rows), labels.flatten()[rows]
        return self._likelihoods(chunked_nll_sums, hidden, labels, z_loss)

    def token_nll(self, hidden: Tensor, labels: Tensor, counted: int | None = None) -> Tensor:
        """Return the negative log-likelihood of each label (nats, fp32 [b, T]), 0 for labels that do not count. The
        backward pass computes the logits a second time. Ranks that share rows get equal values, so pass their sums
        through `once`. For the arguments see `nll_sum`."""
        labels = self.own(labels)
        rows = self._counted_rows(labels, counted)
        if rows is None:
            return self.whole(self._likelihoods(token_nll, hidden, labels))
        nll = self._likelihoods(token_nll, hidden.flatten(0, 1).index_select(0, rows), labels.flatten()[rows])
        return nll.new_zeros(labels.numel()).index_copy(0, rows, nll).view(labels.shape)

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the scores, fp32 [...], of texts that end at these places, by a model with a score head. For use in a
        `Loss`.

        Args:
            hidden: [..., H], chosen places of the loss's input.
        """
        scores: Tensor = F.linear(hidden.float(), self._layer.weight.float())
        return scores.squeeze(-1)

    def scores_at(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the scores, fp32 [A], at `places` (int64 [A]) in the flattened complete rows [B, T].

        Ranks that share rows get equal values, so pass their sums through `once`.

        Args:
            hidden: [B, t, H], the loss's input.
        """
        shared = self.shared_rows
        if shared is None:
            return self.scores(hidden.flatten(0, 1)[places])
        length = hidden.shape[1]
        part = places // length  # number of the part, counted row by row
        scores = self.scores(hidden[part // shared.degree, places % length])
        return shared.of_all(scores.where(part % shared.degree == shared.rank, 0.0)).sum(0)

    def own(self, rows: Tensor) -> Tensor:
        """Cut this rank's columns [B, t, ...] from complete rows [B, T, ...]."""
        shared = self.shared_rows
        return rows if shared is None else rows.chunk(shared.degree, dim=1)[shared.rank]

    def whole(self, columns: Tensor) -> Tensor:
        """Gather complete rows [B, T, ...] from the columns [B, t, ...] of all ranks that share them."""
        shared = self.shared_rows
        return columns if shared is None else shared.of_all(columns).transpose(0, 1).flatten(1, 2)

    def once(self, sums: Tensor) -> Tensor:
        """Divide sums that are equal on all ranks that share rows by their number, so that the ranks' sums add up
        correctly."""
        shared = self.shared_rows
        return sums if shared is None else sums / shared.degree

    def distilled_sums(self, hidden: Tensor, labels: Tensor, teacher: TeacherSays, terms: Terms) -> Tensor:
        """Return the four sums of models/distillation.py, under sequence parallelism over this rank's columns. For the
        arguments see `nll_sum`."""
        from llmtrain.models.distillation import distilled_sums

        distilled = functools.partial(distilled_sums, teacher=teacher, terms=terms)
        return self._likelihoods(distilled, hidden, self.own(labels))

    def top_words(self, hidden: Tensor, k: int, temperature: float) -> TopWords:
        """Return the k likeliest next tokens at each of N places, without a gradient. For use in a `Loss`.

        Args:
            hidden: [N, H], chosen places of the loss's input.
        """
        from llmtrain.models.distillation import TopWords, few_of, top_words

        compute = F.linear if self._vocabulary is None else self._vocabulary.logits
        weight, bias = self._of_dtype(hidden.dtype)
        words = []
        with torch.no_grad():
            for some in hidden.split(few_of(self._chunk)) if len(hidden) else [hidden]:
                values = self.form.apply(compute(some, weight, bias).float())
                words.append(top_words(values, k, temperature))
        return TopWords(words=torch.cat([part.words for part in words]), logs=torch.cat([part.logs for part in words]))

    def values(self, hidden: Tensor) -> Tensor:
        """Return the logits after `form`, fp32 [..., V], from [..., H]; this rank must have all rows of the weight."""
        return self.form.apply(F.linear(hidden, *self._of_dtype(hidden.dtype)).float())

    def _counted_rows(self, labels: Tensor, counted: int | None) -> Tensor | None:
        """Return the indices of tokens for the head, int64 [K], which include all counted tokens; None: all tokens.
        Their number comes from the host, since asking the device would make the host wait. K is a multiple of a chunk
        if kernels are compiled for complete chunks."""
        if counted is None or self.shared_rows is not None:
            return None
        unit = self._chunk if has_one_shape(labels.device) else 1
        rows = -(-counted // unit) * unit
        if rows > _WORTH_IT * labels.numel():
            return None
        return (labels.flatten() == IGNORE).to(torch.int8).argsort(stable=True)[:rows]

    def _likelihoods(
        self, compute: Callable[..., Tensor], hidden: Tensor, labels: Tensor, z_loss: float = 0.0
    ) -> Tensor:
        if self._vocabulary is not None:
            hidden = self._vocabulary.shared(hidden)
        about = About(self._chunk, self.form, self._vocabulary, z_loss)
        return compute(hidden, *self._of_dtype(hidden.dtype), labels, about)

    def _of_dtype(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in this dtype."""
        weight, bias = self._layer.weight, self._layer.bias
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _forward(self, hidden: Tensor, loss: Loss | None = None) -> Tensor:
        layer = self._layer
        if loss is None:
            compute = F.linear if self._vocabulary is None else self._vocabulary.logits
            logits: Tensor = compute(hidden, layer.weight, layer.bias)
            return logits
        if hidden.shape[-1] != layer.in_features:
            raise ModelError(
                f"model: its head takes {layer.in_features} features, but its decoder gives {hidden.shape[-1]}: the "
                "loss would miss a layer between the two, which llmtrain does not know. Train another family."
            )
        # Backward passes run outside of autocast, so autocast is off here and the loss gets bf16 factors, as autocast
        # would make them; what the loss computes in fp32 stays fp32.
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return loss(self, hidden)
        with torch.autocast(kind, enabled=False):
            return loss(self, hidden.to(torch.get_autocast_dtype(kind)))


Loss = Callable[[Head, Tensor], Tensor]
"""Returns sums over the micro-batch, the loss first, from a head and the decoder's output [B, T, H]."""
