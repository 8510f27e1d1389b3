"""The loss of a head in chunks: both ways to compute it against the definition, their bytes, the rounding.

More than 20 CPU s: one test compiles the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.models import compiler, loss
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE, About, HeadForm, chunked_nll_sums
from tests.helpers.compiled import inductor_in
from tests.helpers.moved import MovedBytes

pytestmark = pytest.mark.long

FORMS = {
    "plain": HeadForm(),
    "scaled": HeadForm(scale=0.25),
    "capped": HeadForm(softcap=3.0),
    "scaled and capped": HeadForm(scale=0.5, softcap=3.0),
}
TOKENS, WORDS, WIDTH = 37, 50, 16


def problem(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, head, its bias, labels of which a third does not count."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias_V = (
        torch.randn(size, generator=generator).to(dtype) for size in ((TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, bias_V if bias else None, labels


def results(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    form: HeadForm,
    *,
    chunk: int = 16,
    factor: float = 0.3,
    z_loss: float = 0.0,
) -> list[Tensor]:
    """Loss, with a z-loss the squares of log Z, and `factor` times the gradients of hidden states, head and bias."""
    *inputs, labels = tensors
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    sums = chunked_nll_sums(*leaves, labels, About(chunk, form, z_loss=z_loss))
    (sums[0] * factor).backward()
    return [*sums.detach(), *(t.grad for t in leaves if t is not None)]


def definition(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor], form: HeadForm, factor: float = 0.3, z_loss: float = 0.0
) -> list[Tensor]:
    """The same in fp32, from the softmax's definition and by autograd."""
    *inputs, labels = tensors
    leaves = [None if t is None else t.float().requires_grad_() for t in inputs]
    hidden, weight, bias = leaves
    logits = (hidden @ weight.T + (0.0 if bias is None else bias)) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    counts = labels != IGNORE
    total = -logits[counts].softmax(-1).gather(1, labels[counts].unsqueeze(1)).log().sum()
    square = logits[counts].exp().sum(-1).log().square().sum()
    ((total + z_loss * square) * factor).backward()
    return [total.detach(), *([square.detach()] if z_loss else []), *(t.grad for t in leaves if t is not None)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest relative error of a tensor, by its norm."""
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("way", ["_in_place", "_fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("z_loss", [0.0, 0.02], ids=["", "z-loss"])
def test_both_ways_compute_the_definition(monkeypatch, way, dtype, bias, form, z_loss):
    """The compiled one as plain PyTorch here; 6e-3: bf16 has 8 bits, and logits, gradient and result are rounded.

    With the z-loss a probability's error counts 1 + 2 x 0.02 log Z times, of a log Z up to 15.
    """
    monkeypatch.setattr(loss, "_elementwise", lambda device: getattr(loss, way))
    monkeypatch.setattr(loss, "_compiled", lambda function: function)
    tensors = problem(dtype, bias=bias)
    got = results(tensors, FORMS[form], z_loss=z_loss)
    error = worst(got, definition(tensors, FORMS[form], z_loss=z_loss))
    assert error < (2e-6 if dtype == torch.float32 else 6e-3) * (1 + 30 * z_loss)


@pytest.mark.parametrize(
    ("name", "bias"), [("plain", False), pytest.param("scaled and capped", True, marks=pytest.mark.slow)]
)
def test_compiled_it_is_the_same_and_makes_no_fp32_logits(tmp_path, monkeypatch, name, bias):
    """Inductor's code for the CPU: of the logits' size, it gives memory to their bf16 gradient only.

    With a cap, inductor keeps fp32 values on a CPU (not on CUDA): it takes a tanh there for dearer than memory.
    """
    from torch._inductor.utils import run_and_get_code

    tensors = problem(torch.bfloat16, bias=bias)
    monkeypatch.setattr(loss, "_elementwise", lambda device: loss._fused)
    with monkeypatch.context() as patch:
        patch.setattr(loss, "_compiled", lambda function: function)
        plain = results(tensors, FORMS[name], chunk=TOKENS)
    with inductor_in(tmp_path):
        got, codes = run_and_get_code(results, tensors, FORMS[name], chunk=TOKENS)
    assert len(codes) == 2
    assert worst(got, definition(tensors, FORMS[name])) < 6e-3
    assert worst(got, [t.float() for t in plain]) < 2e-3  # bf16 that is rounded up instead of down, here and there
    shape = f"({TOKENS}, {WORDS})"
    made = [line for code in codes for line in code.splitlines() if shape in line and "= empty" in line]
    assert sum("bfloat16" in line for line in made) == 1
    assert len(made) == 1 + (name != "plain"), made


class OfLogits(TorchDispatchMode):
    """The operators with a tensor of as many elements as the logits, by name; a compiled function is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self._compiled = False

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._compiled = True
            made = function(*args)
            self._compiled = False
            self.ran.append("kernel")
            return made

        return run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if torch.is_tensor(each)]
        if not self._compiled and any(each.numel() == TOKENS * WORDS for each in tensors):
            self.ran.append(function.overloadpacket.__name__)
        return made


def test_the_fused_way_is_two_kernels_between_the_products(monkeypatch):
    """The first reads the logits, the second writes their gradient; the passes in place are ten."""
    with OfLogits() as seen:
        monkeypatch.setattr(loss, "_elementwise", lambda device: loss._fused)
        monkeypatch.setattr(loss, "_compiled", seen.kernel)
        results(problem(torch.bfloat16, bias=False), HeadForm(), chunk=TOKENS)
    assert [name for name in seen.ran if name != "t"] == ["mm", "kernel", "kernel", "mm", "mm"]


def test_cuda_takes_the_fused_way_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(compiler, "_answers", {"cuda": None, "cpu": None})
    assert loss._elementwise(torch.device("cuda:0")) is loss._fused
    assert loss._elementwise(torch.device("cpu")) is loss._in_place
    monkeypatch.setattr(compiler, "_answers", {"cuda": "no gcc"})
    assert loss._elementwise(torch.device("cuda:0")) is loss._in_place


class LowPrecisionFactors(TorchDispatchMode):
    """Operators with a factor without dimensions beside a narrower tensor: CUDA takes the factor in that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if torch.is_tensor(a)]
        narrow = {t.dtype for t in tensors if t.dim() and t.dtype in (torch.bfloat16, torch.float16)}
        if narrow and any(t.dim() == 0 and t.is_floating_point() and t.dtype not in narrow for t in tensors):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 0.3017), (torch.float16, 70_000.0)])
def test_gradients_are_scaled_in_fp32_and_rounded_once(monkeypatch, dtype, factor):
    """By a factor between two numbers of bf16, and by one that fp16 has no number for: it carries the loss scale."""
    monkeypatch.setattr(loss, "_SCALED_AT_ONCE", 10)
    tensors = problem(dtype, bias=True)
    exact = results(tensors, HeadForm(), factor=1.0)[1]
    with LowPrecisionFactors() as watch:
        got = results(tensors, HeadForm(), factor=factor)[1]
    assert watch.found == []
    want = exact.double() * torch.tensor(factor).double()
    assert torch.equal(got, want.to(dtype))
    assert torch.equal(got, exact.clone().mul_(torch.tensor(factor)))  # on a CPU it has always been so
    # What CUDA made of that multiplication:
    fault = exact * torch.tensor(factor).to(dtype)
    if dtype == torch.bfloat16:
        error, of_fault = (float((result.double() - want).norm() / want.norm()) for result in (got, fault))
        assert error < 2e-3 < 3e-3 < of_fault
    else:
        assert got.isfinite().float().mean() > 0.5 and not fault.isfinite().any()


def test_gradients_are_scaled_in_one_pass():
    """The head's is read in fp32 and written in bf16, the hidden state's read and written; a chunk's product is the
    first value of the head's gradient, not added to zeros."""
    hidden, weight, _, labels = problem(torch.bfloat16, bias=False)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight)]
    with MovedBytes() as forward:
        sums = chunked_nll_sums(*leaves, None, labels, About(TOKENS, HeadForm()))
    assert forward.bytes["zeros_like"] == 0
    with MovedBytes() as backward:
        sums.backward(torch.tensor([0.3]))
    assert backward.total <= 6 * weight.numel() + 4 * hidden.numel() + 256, backward.bytes


def test_a_product_is_added_in_fp32_where_torch_can(monkeypatch):
    """torch can on CUDA only: an operator for the CPU stands in, called as CUDA's would be."""
    calls = itertools.count()

    def addmm(total: Tensor, left: Tensor, right: Tensor, dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Tensor):
        next(calls)
        assert dtype == torch.float32 and out.data_ptr() == total.data_ptr()
        product = left.float() @ right.float()
        return out.add_(product) if beta else out.copy_(product)

    loss.TRIED.clear()
    assert not loss.adds_in_fp32("cpu", torch.bfloat16)
    loss.TRIED.clear()
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        tensors = problem(torch.bfloat16, bias=False)
        got = results(tensors, HeadForm(), chunk=4)
        assert next(calls) == 1 + -(-TOKENS // 4)  # the trial, and each chunk
        assert worst(got, definition(tensors, HeadForm())) < 6e-3
    finally:
        library._destroy()
        loss.TRIED.clear()


def test_a_gpu_that_rounds_each_chunk_is_named_once(monkeypatch, capsys):
    monkeypatch.setattr(loss, "_tried_in_fp32", lambda kind, dtype: False)
    loss.TRIED.clear()
    assert not loss.adds_in_fp32("cpu", torch.bfloat16) and not capsys.readouterr().err
    assert not any(loss.adds_in_fp32("cuda", torch.bfloat16) for _ in range(2))
    assert capsys.readouterr().err.count("rounded once more in each chunk of the loss") == 1
    loss.TRIED.clear()


def test_a_label_beyond_the_vocabulary_is_no_loss():
    hidden, weight, _, labels = problem(torch.float32, bias=False)
    labels[1] = WORDS
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_nll_sums(hidden, weight, None, labels, About(16, HeadForm()))


@pytest.mark.parametrize("compiled", [False, True], ids=["exactly", "in whole chunks"])
@pytest.mark.parametrize("every", [1, 2, 3, TOKENS + 1])
def test_tokens_that_do_not_count_do_not_go_through_the_head(
    monkeypatch: pytest.MonkeyPatch, every: int, compiled: bool
) -> None:
    """Loss and gradients are those of all tokens; of compiled kernels, which have one shape, a chunk is filled up."""
    if compiled:
        monkeypatch.setattr(loss, "_fused", loss._in_place)
    config = AutoConfig.for_model(
        "llama", vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    hf, chunk, seen = AutoModelForCausalLM.from_config(config), 16, []
    given, weight, _, words = problem(torch.float32, bias=False)
    hf.get_output_embeddings().weight.data.copy_(weight)
    head = Head(hf, chunk)
    labels = torch.full((TOKENS,), IGNORE)
    labels[::every] = words.clamp(min=0)[::every]
    labels[0] = IGNORE if every > TOKENS else labels[0]
    counted = int((labels != IGNORE).sum())
    in_chunks = loss.in_chunks

    def watched(leaves: Any, *rest: Any) -> Any:
        seen.append(len(leaves[0]))
        return in_chunks(leaves, *rest)

    monkeypatch.setattr(loss, "in_chunks", watched)
    found = []
    for known in (None, counted):
        hidden, weight = given.clone()[None].requires_grad_(), hf.get_output_embeddings().weight
        total = head.nll_sum(hidden, labels[None], known)
        each = head.token_nll(hidden, labels[None], known)
        grads = torch.autograd.grad(total + each.square().sum(), (hidden, weight))
        found.append([total.detach(), each.detach(), *grads])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    whole = -(-counted // chunk) * chunk if compiled else counted
    assert set(seen) == {TOKENS, TOKENS if whole > 0.9 * TOKENS else whole}
