"""The summed cross-entropy of a language-model head, without the [tokens, vocabulary] logits.

Tokens go through the head in chunks. As the loss is a scalar, each chunk's gradients are computed right there
in the forward pass (while its logits exist) and only scaled in the backward pass, so nothing is recomputed:
the method of Liger's fused linear cross-entropy (arXiv 2410.10989), written for any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    """What a model does to its logits after the matrix product."""

    scale: float = 1.0
    """Factor on the logits (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    softcap: float | None = None
    """cap * tanh(logits / cap) (Gemma 2)."""

    @classmethod
    def of(cls, config: object) -> HeadForm:
        """From the field names that transformers configs use."""
        scale = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return cls(scale=scale / divisor, softcap=getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """fp32 logits as the loss sees them; changes its argument in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def add_gradients(
    grad_CV: Tensor,
    hidden_CH: Tensor,
    weight: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """From a chunk's gradient of the logits: fills its rows of the hidden state's, adds to the head's (fp32)."""
    if grad_bias is not None:
        grad_bias += grad_CV.sum(0)
    low_CV = grad_CV.to(weight.dtype)
    if grad_hidden is not None:
        torch.mm(low_CV, weight, out=grad_hidden)
    if grad_weight is not None:
        if weight.dtype == torch.float32:
            grad_weight.addmm_(low_CV.t(), hidden_CH)
        else:
            grad_weight += low_CV.t() @ hidden_CH


def scaled_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`ctx.grads` of hidden state, weight and bias (and the head's dtype) times the factor, once."""
    hidden, weight, bias, dtype = ctx.grads
    ctx.grads = None
    # The factor carries the loss scale of fp16: multiply in fp32 before the result is narrowed.
    hidden = None if hidden is None else hidden.mul_(grad_output)
    weight = None if weight is None else weight.mul_(grad_output).to(dtype)
    bias = None if bias is None else bias.mul_(grad_output).to(dtype)
    return hidden, weight, bias


class _ChunkedNLL(torch.autograd.Function):
    """Sum over counted tokens of -log p(label); inputs hidden [N, H], weight [V, H], bias [V] or None, labels [N]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk, form):
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # Gradients of the head are summed over chunks in fp32: bf16 would lose the small chunks' share.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for low in range(0, hidden.shape[0], chunk):
            rows = slice(low, low + chunk)
            hidden_CH, label_C = hidden[rows], labels[rows]
            target_C1 = label_C.clamp(min=0).unsqueeze(1)
            factor_C1 = (label_C != IGNORE).float().unsqueeze(1)
            logits_CV = form.apply(F.linear(hidden_CH, weight, bias).float())
            slope_CV = None if form.softcap is None else 1.0 - (logits_CV / form.softcap).square()
            # One exponential serves the loss and its gradient, and every pass is in place: log_softmax or logsumexp
            # would need a second [C, V] and a second exponential.
            logits_CV.sub_(logits_CV.amax(1, keepdim=True))
            chosen_C1 = logits_CV.gather(1, target_C1)
            exp_CV = logits_CV.exp_()
            sum_C1 = exp_CV.sum(1, keepdim=True)
            total += torch.where(factor_C1 > 0, sum_C1.log() - chosen_C1, 0.0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            factor_C1 *= form.scale
            grad_CV = exp_CV.mul_(factor_C1 / sum_C1).scatter_add_(1, target_C1, -factor_C1)
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            own_hidden = None if grad_hidden is None else grad_hidden[rows]
            add_gradients(grad_CV, hidden_CH, weight, own_hidden, grad_weight, grad_bias)
        ctx.grads = (grad_hidden, grad_weight, grad_bias, weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return (*scaled_gradients(ctx, grad_output), None, None, None)


def chunked_nll_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, chunk: int, form: HeadForm
) -> Tensor:
    """Sum of the negative log-likelihood (nats, fp32 scalar) over the counted tokens.

    Args:
        hidden: [..., H], the decoder's output.
        weight, bias: [V, H] and [V] of the head.
        labels: [...], already shifted; IGNORE where a token does not count.
        chunk: tokens whose logits exist at one time.
    """
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    return _ChunkedNLL.apply(flat_NH, weight, bias, labels.reshape(-1), chunk, form)
