"""The summed cross-entropy of a language-model head, without the [tokens, vocabulary] logits.

Tokens go through the head in chunks. Because the loss is a scalar, each chunk's gradients are computed in the forward
pass (while its logits exist) and only scaled in the backward pass: the method of Liger's fused linear cross-entropy
(arXiv 2410.10989).

There are two implementations of the operations on each logit. The one for CPUs works in place, with one exponential. On
a GPU such passes would wait for memory (each reads and writes fp32 logits): there torch.compile makes two kernels, both
in the model's precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.base.log import warn_once
from llmtrain.models import compiler
from llmtrain.models.transformers_private import with_values

IGNORE = -100
"""Label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    scale: float = 1.0
    """Factor on the logits (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    softcap: float | None = None
    """The cap in cap * tanh(logits / cap) (Gemma 2); None: no cap."""

    @classmethod
    def of(cls, config: object) -> HeadForm:
        scale = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return cls(scale=scale / divisor, softcap=getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """Apply scale and cap to fp32 logits, in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class Vocabulary(Protocol):
    """A rank's part of a vocabulary that several ranks share, and reductions over these ranks."""

    @property
    def first(self) -> int:
        """Return this rank's first token id."""

    @property
    def count(self) -> int:
        """Return the number of this rank's token ids."""

    def take_largest(self, values: Tensor) -> None:
        """Take the elementwise maximum over the ranks, in place."""

    def add_up(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""


class Labels(NamedTuple):
    """The labels of N tokens; each tensor is [N, 1]."""

    counts: Tensor
    """True if the token counts; or the factor of the token's gradient, which is 0 if it does not count."""
    word: Tensor
    """The label's column among this rank's logits; 0 if it is not there."""
    mine: Tensor
    """True if this rank has the label's logit. Without a shared vocabulary: if the token counts."""

    @classmethod
    def of(cls, labels_N: Tensor, vocabulary: Vocabulary | None) -> Labels:
        counts_N1 = (labels_N != IGNORE).unsqueeze(1)
        if vocabulary is None:
            return cls(counts_N1, labels_N.clamp(min=0).unsqueeze(1), counts_N1)
        word_N1 = labels_N.unsqueeze(1) - vocabulary.first
        mine_N1 = (word_N1 >= 0) & (word_N1 < vocabulary.count)
        return cls(counts_N1, word_N1.masked_fill(~mine_N1, 0), mine_N1)

    def rows(self, rows: slice) -> Labels:
        return Labels(*(part[rows] for part in self))


class About(NamedTuple):
    chunk: int
    """Number of tokens whose logits exist at one time."""
    form: HeadForm
    vocabulary: Vocabulary | None = None
    """This rank's shard, if V is a shard of the vocabulary; all ranks get the same sums."""
    z_loss: float = 0.0
    """Coefficient of the z-loss; 0: no z-loss."""


_Elementwise = Callable[[Tensor, Labels, About, bool], tuple[Tensor, Tensor | None]]


def _in_place(logits_CV: Tensor, labels: Labels, about: About, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return (losses of a chunk's tokens, see `_kept`; gradient of the logits in fp32). Overwrites the logits."""
    form, vocabulary = about.form, about.vocabulary
    logits_CV = form.apply(logits_CV.float())
    slope_CV = None if form.softcap is None else 1.0 - (logits_CV / form.softcap).square()
    # One exponential serves loss and gradient, and every pass is in place: log_softmax or logsumexp would need a second
    # [C, V] tensor and a second exponential.
    most_C1 = logits_CV.amax(1, keepdim=True)
    if vocabulary is not None:
        vocabulary.take_largest(most_C1)
    logits_CV.sub_(most_C1)
    chosen_C1 = logits_CV.gather(1, labels.word)
    exp_CV = logits_CV.exp_()
    kept_CK, share_C1, factor_C1 = _kept(most_C1, exp_CV.sum(1, keepdim=True), chosen_C1, labels, about)
    if not wants_gradient:
        return kept_CK, None
    grad_CV = exp_CV.mul_(share_C1)
    # Not scatter_add_, which torch refuses on CUDA with train.deterministic, although no two indices are the same here.
    grad_CV.scatter_(1, labels.word, grad_CV.gather(1, labels.word) - factor_C1 * labels.mine)
    return kept_CK, grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _fused(logits_CV: Tensor, labels: Labels, about: About, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Compute `_in_place` in two compiled kernels. The gradient has the logits' dtype, and the logits are kept."""
    form, vocabulary = about.form, about.vocabulary
    most_C1, sum_C1, chosen_C1 = _compiled(_softmax_sums)(logits_CV, labels.word, form)
    if vocabulary is not None:
        own_C1 = most_C1.clone()
        vocabulary.take_largest(most_C1)
        sum_C1 = sum_C1 * (own_C1 - most_C1).exp()
    kept_CK, share_C1, factor_C1 = _kept(most_C1, sum_C1, chosen_C1 - most_C1, labels, about)
    if not wants_gradient:
        return kept_CK, None
    own_factor_C1 = factor_C1 * labels.mine
    grad_CV = _compiled(_logits_gradient)(logits_CV, labels.word, most_C1, share_C1, own_factor_C1, form)
    return kept_CK, grad_CV


def _kept(
    most_C1: Tensor, sum_C1: Tensor, chosen_C1: Tensor, labels: Labels, about: About
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses [C, 1] (for a z-loss [C, 2], with log Z squared), the factor of the exponentials in the logits'
    gradient [C, 1], and what to subtract from this gradient at the label [C, 1].

    `sum_C1`: sum of this rank's exponentials, of logits less `most_C1`. `chosen_C1`: the label's logit less `most_C1`;
    any number if the label is another rank's.
    """
    if about.vocabulary is not None:
        both_C2 = torch.cat([sum_C1, chosen_C1.masked_fill(~labels.mine, 0.0)], dim=1)
        about.vocabulary.add_up(both_C2)
        sum_C1, chosen_C1 = both_C2[:, :1], both_C2[:, 1:]
    log_C1, factor_C1 = sum_C1.log(), labels.counts.float() * about.form.scale
    kept_CK, share_C1 = torch.where(labels.counts != 0, log_C1 - chosen_C1, 0.0), factor_C1 / sum_C1
    if about.z_loss:
        log_z_C1 = log_C1 + most_C1
        kept_CK = torch.cat([kept_CK, torch.where(labels.counts != 0, log_z_C1.square(), 0.0)], dim=1)
        share_C1 = share_C1 * (1.0 + 2.0 * about.z_loss * log_z_C1)
    return kept_CK, share_C1, factor_C1


def _softmax_sums(logits_CV: Tensor, word_C1: Tensor, form: HeadForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exponentials of logits less that, and the logit of `word`: [C, 1] in
    fp32."""
    values_CV = form.apply(_widened(logits_CV))
    most_C1 = values_CV.amax(1, keepdim=True)
    sum_C1 = (values_CV - most_C1).exp().sum(1, keepdim=True)
    return most_C1, sum_C1, form.apply(_widened(logits_CV.gather(1, word_C1)))


def _logits_gradient(
    logits_CV: Tensor, word_C1: Tensor, most_C1: Tensor, share_C1: Tensor, factor_C1: Tensor, form: HeadForm
) -> Tensor:
    """Return the gradient of the logits: `share` times the exponentials, less `factor` at `word`. Computed in fp32."""
    values_CV = form.apply(_widened(logits_CV))
    grad_CV = (values_CV - most_C1).exp() * share_C1
    words_1V = torch.arange(logits_CV.shape[1], device=logits_CV.device).unsqueeze(0)
    grad_CV = grad_CV - torch.where(words_1V == word_C1, factor_C1, 0.0)
    if form.softcap is not None:
        grad_CV = grad_CV * (1.0 - (values_CV / form.softcap).square())
    return grad_CV.to(logits_CV.dtype)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.float32, copy=True)  # `apply` works in place; a kernel keeps no copy


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # A run has at most two shapes: a chunk, and the rest of a micro-batch after the last complete one.
    return torch.compile(function, dynamic=False)


def _elementwise(device: torch.device) -> _Elementwise:
    return _fused if device.type == "cuda" and compiler.trouble(device) is None else _in_place


def has_one_shape(device: torch.device) -> bool:
    """Return True if the device has kernels compiled only for the shape of a complete chunk."""
    return _elementwise(device) is _fused


def _add_gradients(
    grad_CV: Tensor,
    hidden_CH: Tensor,
    weight: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    first: bool,
) -> None:
    """Use a chunk's gradient of the logits: write its rows of the hidden state's gradient, and add to the fp32
    gradients of the head, which are uninitialised before the first chunk."""
    if grad_bias is not None:
        grad_bias += grad_CV.sum(0, dtype=torch.float32)
    low_CV = grad_CV.to(weight.dtype)
    if grad_hidden is not None:
        torch.mm(low_CV, weight, out=grad_hidden)
    if grad_weight is None:
        return
    beta = 0 if first else 1
    if hidden_CH.dtype == torch.float32:
        grad_weight.addmm_(low_CV.t(), hidden_CH, beta=beta)
    elif adds_in_fp32(hidden_CH.device.type, hidden_CH.dtype):
        torch.addmm(grad_weight, low_CV.t(), hidden_CH, beta=beta, out_dtype=torch.float32, out=grad_weight)
    elif first:
        grad_weight.copy_(low_CV.t() @ hidden_CH)
    else:
        grad_weight += low_CV.t() @ hidden_CH


TRIED: dict[tuple[str, torch.dtype], bool] = {}
"""(kind of device, dtype) -> result of `adds_in_fp32`."""


def adds_in_fp32(kind: str, dtype: torch.dtype) -> bool:
    """Return True if a kind of device can add a product to an fp32 sum without first rounding the product. This is
    tried once; a GPU that cannot gets a warning."""
    if (kind, dtype) in TRIED:
        return TRIED[kind, dtype]
    works = TRIED[kind, dtype] = _tried_in_fp32(kind, dtype)
    if kind != "cpu" and not works:
        warn_once(
            f"torch {torch.__version__} does not add a product in {dtype} to a sum in fp32 on this device ({kind}): "
            "the gradient of the head's weight is rounded once more in each chunk of the loss, and takes longer"
        )
    return works


@with_values()
def _tried_in_fp32(kind: str, dtype: torch.dtype) -> bool:
    """Try it: torch supports this only on CUDA, with rules for the sum's dtype that change between versions."""
    total = torch.ones(16, 16, device=kind)
    factor = torch.full((16, 16), 1.0 + 2.0**-7, device=kind, dtype=dtype)  # its square has more bits than bf16
    want = total + factor.float() @ factor.float()
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.allclose(total, want, rtol=1e-6, atol=0.0)


_SCALED_AT_ONCE = 1024
"""Number of rows that a CPU scales at once."""


def _scale(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values * factor, rounded once to `dtype`, in one pass; in place if the values have that dtype. `factor`:
    an fp32 scalar on the device.

    The factor is given a dimension, because a scalar would be converted to the values' dtype: up to 0.4 % off in bf16,
    and infinite beyond 65,504 in fp16. A CPU computes such a product in a second tensor, hence the parts.
    """
    scaled = values if dtype == values.dtype else torch.empty_like(values, dtype=dtype)
    rows = _SCALED_AT_ONCE if values.device.type == "cpu" else max(1, len(values))
    for part, into in zip(values.split(rows), scaled.split(rows), strict=True):
        torch.mul(part, factor.view(1), out=into)
    return scaled


def scaled_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients in `ctx.grads` (hidden state, weight, bias; then the head's dtype) times `grad_output`.
    Works once."""
    hidden, weight, bias, dtype = ctx.grads
    ctx.grads = None
    # The factor includes fp16's loss scale: multiply in fp32, then round.
    hidden = None if hidden is None else _scale(hidden, grad_output, hidden.dtype)
    weight = None if weight is None else _scale(weight, grad_output, dtype)
    bias = None if bias is None else _scale(bias, grad_output, dtype)
    return hidden, weight, bias


_Wanted = tuple[bool, bool, bool]
"""For hidden state, weight and bias: True if it needs a gradient."""


OfChunk = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""Gets the logits [C, V] of some tokens, in the head's dtype, which it may overwrite, and the slice of these tokens
among all N. Returns figures of each token, fp32 [C, K], and the logits' gradient (None if no gradient is wanted)."""


def in_chunks(
    leaves: tuple[Tensor, Tensor, Tensor | None], chunk: int, wanted: _Wanted, of_chunk: OfChunk
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return (the figures of each chunk's tokens; the gradients of hidden [N, H], weight [V, H] and bias [V])."""
    hidden, weight, bias = leaves
    figures: list[Tensor] = []
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    # Gradients of the head are summed over chunks in fp32: bf16 would lose the small chunks' share.
    made = torch.empty_like if len(hidden) else torch.zeros_like
    grad_weight = made(weight, dtype=torch.float32) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
    for low in range(0, hidden.shape[0], chunk):
        rows = slice(low, low + chunk)
        hidden_CH = hidden[rows]
        # No other name refers to the logits, so that their memory is free once they are widened.
        each_CK, grad_CV = of_chunk(F.linear(hidden_CH, weight, bias), rows)
        figures.append(each_CK)
        if grad_CV is not None:
            own_hidden = None if grad_hidden is None else grad_hidden[rows]
            _add_gradients(grad_CV, hidden_CH, weight, own_hidden, grad_weight, grad_bias, low == 0)
        del grad_CV  # before the next chunk's logits exist
    return figures, (grad_hidden, grad_weight, grad_bias)


def _token_losses(
    leaves: tuple[Tensor, Tensor, Tensor | None], labels: Labels, about: About, wanted: _Wanted
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    elementwise = _elementwise(leaves[0].device)

    def of_chunk(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        return elementwise(logits_CV, labels.rows(rows), about, any(wanted))

    return in_chunks(leaves, about.chunk, wanted, of_chunk)


class _ChunkedNLL(torch.autograd.Function):
    """Returns sums over the counted tokens, fp32: -log p(label), [1]; with a z-loss also log Z squared, [2], whose
    gradient is included in the first sum's. Inputs: hidden [N, H], weight [V, H], bias [V] or None, labels [N]; V: this
    rank's part of the vocabulary."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, about):
        every, wanted = Labels.of(labels, about.vocabulary), ctx.needs_input_grad[:3]
        figures, grads = _token_losses((hidden, weight, bias), every, about, wanted)
        ctx.grads = (*grads, weight.dtype)
        sums = hidden.new_zeros(2 if about.z_loss else 1, dtype=torch.float32)
        for each_CK in figures:
            for index, each_C in enumerate(each_CK.unbind(1)):
                sums[index] += each_C.sum()
        return sums

    @staticmethod
    def backward(ctx, grad_output):
        return (*scaled_gradients(ctx, grad_output[0]), None, None)


class _TokenNLL(torch.autograd.Function):
    """Returns -log p(label) of each token, fp32 [N]. Inputs as for `_ChunkedNLL`. The backward pass computes the logits
    again, because the tokens' factors are known only then."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, about):
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.about, every = about, Labels.of(labels, about.vocabulary)
        losses, _ = _token_losses((hidden, weight, bias), every, about, (False, False, False))
        return torch.cat([hidden.new_empty(0, 1, dtype=torch.float32), *losses]).squeeze(1)

    @staticmethod
    def backward(ctx, grad_output):
        *leaves, labels = ctx.saved_tensors
        every = Labels.of(labels, ctx.about.vocabulary)
        factors = grad_output.unsqueeze(1).masked_fill(~every.counts, 0.0)
        every = Labels(counts=factors, word=every.word, mine=every.mine)
        _, grads = _token_losses(tuple(leaves), every, ctx.about, ctx.needs_input_grad[:3])
        return (*(None if grad is None else grad.to(leaves[1].dtype) for grad in grads), None, None)


def chunked_nll_sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, about: About) -> Tensor:
    """Return sums over the counted `labels` [...], which are already shifted, fp32: the negative log-likelihood (nats),
    [1]; with a z-loss also the square of log Z, [2]. Z is the sum of the exponentials of the head's logits.

    Only the first sum has a gradient, which includes the z-loss's coefficient times that of the second (PaLM, arXiv
    2204.02311, section 5). `hidden`: [..., H]. `weight`, `bias`: the head's, [V, H] and [V].
    """
    sums: Tensor = _ChunkedNLL.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), about)
    return sums


def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, about: About) -> Tensor:
    """Return the negative log-likelihood of each label (nats, fp32, shaped like `labels`), 0 for labels that do not
    count. For the arguments see `chunked_nll_sums`."""
    losses: Tensor = _TokenNLL.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), about)
    return losses.view(labels.shape)
