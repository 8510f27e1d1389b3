"""The divergence of a head's next-token distribution from a teacher's, without the [tokens, vocabulary] logits.

The method is that of loss.py. All sums over the vocabulary are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.loss import About, Labels, Vocabulary, in_chunks, scaled_gradients

FIGURES = 4
"""Number of figures of a distillation: loss, divergence, next-token loss, entropy of the teacher."""
_TABLES = 8
"""Number of [tokens, vocabulary] tensors in fp32 that a chunk needs at one time. The next-token loss needs one, so
chunks here have this many times fewer tokens."""

TeacherLogits = Callable[[slice], Tensor]
"""Returns the teacher's logits for a slice of a micro-batch's N tokens, fp32 [tokens, V] over the whole vocabulary."""

NOTHING = -1e4
"""Replaces log(0): its exponential is 0 in fp32, and the product of the two is 0 as well, not NaN."""


@dataclass(frozen=True, kw_only=True)
class TopWords:
    """A teacher's distribution at the loss's temperature as k + 1 events: its k likeliest tokens, and any other token.
    The student's distribution is divided into the same events, so D is at most the D of the complete distributions; for
    k = V they are equal."""

    words: Tensor
    """Token ids, int64 [N, k]; in the row of a counted token none occurs twice."""
    logs: Tensor
    """fp32 [N, k + 1]: log-probabilities of these tokens, then of all others together; NOTHING for probability 0. Rows
    of tokens that do not count may hold anything finite."""

    def of(self, rows: slice) -> TopWords:
        return TopWords(words=self.words[rows], logs=self.logs[rows])


TeacherSays = Callable[[slice], Tensor | TopWords]
"""`TeacherLogits`, or a function that returns `TopWords` for the slice."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The loss of a token: (1 - alpha) temperature^2 D + alpha (-log p(label)).

    p is the teacher's distribution and q the student's, both from logits / temperature. D is KL(p || q) for beta 0,
    KL(q || p) for beta 1, and otherwise beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (arXiv
    2306.13649, section 3). The label's probability has temperature 1. The factor temperature^2 keeps the size of the
    gradient (arXiv 1503.02531, section 2).
    """

    beta: float
    temperature: float
    alpha: float


def few_of(chunk: int) -> int:
    """Return the number of tokens in a chunk of distillation. `chunk`: that of the next-token loss."""
    return max(1, chunk // _TABLES)


def distilled_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    about: About,
    *,
    teacher: TeacherSays,
    terms: Terms,
) -> Tensor:
    """Return sums over the counted tokens in nats, fp32 [4]: loss, D, next-token loss, entropy of p; with `TopWords`, D
    and the entropy are those of the k + 1 events. Only the loss has a gradient. For the arguments see
    `chunked_nll_sums` in loss.py."""
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    total, others = _Distilled.apply(flat_NH, weight, bias, labels.reshape(-1), about, teacher, terms)
    return torch.cat([total.unsqueeze(0), others])


class _Distilled(torch.autograd.Function):
    """Returns (loss, the other figures [3]). Inputs: hidden [N, H], weight [V, H], bias [V] or None, labels [N]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, about, teacher, terms):
        every, wanted = Labels.of(labels, about.vocabulary), ctx.needs_input_grad[:3]

        def of_chunk(student_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            apart = partial(_apart, teacher, rows, terms, about.vocabulary, wants_gradient=any(wanted))
            return _of_chunk(student_CV, every.rows(rows), about, terms, apart)

        chunks, grads = in_chunks((hidden, weight, bias), few_of(about.chunk), wanted, of_chunk)
        ctx.grads = (*grads, weight.dtype)
        sums = torch.zeros(FIGURES, dtype=torch.float32, device=hidden.device)
        for each_C4 in chunks:
            sums += each_C4.sum(0)
        total, others = sums[0].clone(), sums[1:].clone()
        ctx.mark_non_differentiable(others)
        return total, others

    @staticmethod
    def backward(ctx, grad_output, _):
        return (*scaled_gradients(ctx, grad_output), None, None, None, None)


_Apart = tuple[Tensor, Tensor | None, Tensor]
"""D [C, 1]; its gradient with respect to the student's logits / temperature, [C, V]; the teacher's entropy [C, 1]."""


def _of_chunk(
    student_CV: Tensor, labels: Labels, about: About, terms: Terms, apart: Callable[[Tensor], _Apart]
) -> tuple[Tensor, Tensor | None]:
    """Return (each token's figures [C, 4], the gradient with respect to the student's logits [C, V] in fp32). V is this
    rank's part of the vocabulary. `apart`: computes `_Apart` from log q [C, V]."""
    form, vocabulary = about.form, about.vocabulary
    values_CV = form.apply(student_CV.float())
    slope_CV = None if form.softcap is None else 1.0 - (values_CV / form.softcap).square()

    exact_CV = _log_softmax(values_CV, 1.0, vocabulary)
    nll_C1 = _added_up(-exact_CV.gather(1, labels.word).masked_fill(~labels.mine, 0.0), vocabulary)
    log_q_CV = exact_CV if terms.temperature == 1.0 else _log_softmax(values_CV, terms.temperature, vocabulary)
    divergence_C1, pull_CV, entropy_C1 = apart(log_q_CV)

    soft = (1.0 - terms.alpha) * terms.temperature
    loss_C1 = soft * terms.temperature * divergence_C1 + terms.alpha * nll_C1
    each_C4 = torch.cat([loss_C1, divergence_C1, nll_C1, entropy_C1], dim=1)
    each_C4 = torch.where(labels.counts, each_C4, 0.0)
    if pull_CV is None:
        return each_C4, None
    grad_CV = pull_CV.mul_(soft)
    if terms.alpha:
        hard_CV = exact_CV.exp()
        hard_CV.scatter_(1, labels.word, hard_CV.gather(1, labels.word) - labels.mine.float())
        grad_CV.add_(hard_CV, alpha=terms.alpha)
    grad_CV.mul_(labels.counts.float() * form.scale)
    return each_C4, grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _apart(
    teacher: TeacherSays,
    rows: slice,
    terms: Terms,
    vocabulary: Vocabulary | None,
    log_q_CV: Tensor,
    *,
    wants_gradient: bool,
) -> _Apart:
    targets = teacher(rows)
    if isinstance(targets, TopWords):
        return _apart_in_events(
            targets.words, targets.logs, terms.beta, vocabulary, log_q_CV, wants_gradient=wants_gradient
        )
    log_p_CV = _log_softmax(targets, terms.temperature, None)
    entropy_C1 = -(log_p_CV.exp() * log_p_CV).sum(1, keepdim=True)
    first, count = _part(vocabulary, log_p_CV)
    log_p_CV = log_p_CV[:, first : first + count]
    return *_divergence(log_p_CV, log_q_CV, terms.beta, vocabulary, wants_gradient=wants_gradient), entropy_C1


def _apart_in_events(
    words_Ck: Tensor,
    log_p_CE: Tensor,
    beta: float,
    vocabulary: Vocabulary | None,
    log_q_CV: Tensor,
    *,
    wants_gradient: bool,
) -> _Apart:
    """Compute `_Apart` over E = k + 1 events, including events whose tokens are on other ranks."""
    first, count = _part(vocabulary, log_q_CV)
    own_Ck = words_Ck - first
    mine_Ck = (own_Ck >= 0) & (own_Ck < count)
    # A token of another rank gets the column behind this rank's, which is cut off again.
    own_Ck = own_Ck.masked_fill(~mine_Ck, count)
    wide_CX = F.pad(log_q_CV, (0, 1), value=0.0)
    log_q_Ck = _added_up(wide_CX.gather(1, own_Ck), vocabulary)
    others_CV = wide_CX.scatter(1, own_Ck, -math.inf)[:, :count]
    log_rest_C1 = _log_of_sum(others_CV, vocabulary)
    log_q_CE = torch.cat([log_q_Ck, log_rest_C1], dim=1)
    divergence_C1, pull_CE = _divergence(log_p_CE, log_q_CE, beta, None, wants_gradient=wants_gradient)
    entropy_C1 = -(log_p_CE.exp() * log_p_CE).sum(1, keepdim=True)
    if pull_CE is None:
        return divergence_C1, None, entropy_C1
    # Tokens of the last event share its gradient in proportion to their probabilities.
    pull_CX = F.pad(others_CV.sub_(log_rest_C1).exp_().mul_(pull_CE[:, -1:]), (0, 1))
    return divergence_C1, pull_CX.scatter_(1, own_Ck, pull_CE[:, :-1])[:, :count].contiguous(), entropy_C1


def top_words(values_CV: Tensor, k: int, temperature: float) -> TopWords:
    """Return the k likeliest tokens. `values_CV`: the teacher's fp32 logits over the whole vocabulary."""
    log_p_CV = _log_softmax(values_CV, temperature, None)
    logs_Ck, words_Ck = log_p_CV.topk(k, dim=1)
    log_rest_C1 = _log_of_sum(log_p_CV.scatter(1, words_Ck, -math.inf), None)
    return TopWords(words=words_Ck, logs=torch.cat([logs_Ck, log_rest_C1], dim=1))


def _log_of_sum(logs_CV: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Return the logarithm of the summed exponentials, [C, 1]; about NOTHING if all exponentials are 0."""
    most_C1 = logs_CV.amax(1, keepdim=True).clamp_(min=NOTHING)
    if vocabulary is not None:
        vocabulary.take_largest(most_C1)
    return _added_up((logs_CV - most_C1).exp().sum(1, keepdim=True), vocabulary).log().add_(most_C1).clamp_(min=NOTHING)


def _part(vocabulary: Vocabulary | None, values_CV: Tensor) -> tuple[int, int]:
    return (0, values_CV.shape[1]) if vocabulary is None else (vocabulary.first, vocabulary.count)


def _divergence(
    log_p_CV: Tensor, log_q_CV: Tensor, beta: float, vocabulary: Vocabulary | None, *, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (D [C, 1], its gradient with respect to the student's logits / temperature [C, V])."""
    if beta == 0.0:
        p_CV = log_p_CV.exp()
        divergence_C1 = _added_up((p_CV * (log_p_CV - log_q_CV)).sum(1, keepdim=True), vocabulary)
        return divergence_C1, log_q_CV.exp().sub_(p_CV) if wants_gradient else None
    q_CV = log_q_CV.exp()
    if beta == 1.0:
        log_m_CV, share = log_p_CV, 1.0
    else:
        log_m_CV, share = torch.logaddexp(log_p_CV + math.log(beta), log_q_CV + math.log1p(-beta)), 1.0 - beta
    ratio_CV = log_q_CV - log_m_CV
    parts = [(q_CV * ratio_CV).sum(1, keepdim=True)]
    if beta != 1.0:
        parts.append((log_p_CV.exp() * (log_p_CV - log_m_CV)).sum(1, keepdim=True))
    sums_CK = _added_up(torch.cat(parts, dim=1), vocabulary)
    of_q_C1 = sums_CK[:, :1]
    divergence_C1 = share * of_q_C1 if beta == 1.0 else share * of_q_C1 + beta * sums_CK[:, 1:]
    # dD/dq is share (log q - log m): the terms with the derivative of m cancel.
    return divergence_C1, ratio_CV.sub_(of_q_C1).mul_(q_CV).mul_(share) if wants_gradient else None


def _log_softmax(values_CV: Tensor, temperature: float, vocabulary: Vocabulary | None) -> Tensor:
    """Return log-probabilities of values / temperature. Student and teacher both use it, and so round alike."""
    most_C1 = values_CV.amax(1, keepdim=True)
    if vocabulary is not None:
        vocabulary.take_largest(most_C1)
    logs_CV = (values_CV - most_C1).div_(temperature)
    log_sum_C1 = _added_up(logs_CV.exp().sum(1, keepdim=True), vocabulary).log()
    return logs_CV.sub_(log_sum_C1)


def _added_up(addend: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    if vocabulary is not None:
        vocabulary.add_up(addend)
    return addend
