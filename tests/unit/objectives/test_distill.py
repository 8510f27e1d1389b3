"""The divergences from a teacher against plain torch in float64, in chunks, capped, scaled and sharded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.distillation import NOTHING, TeacherSays, Terms, distilled_sums, top_words
from llmtrain.models.loss import About, HeadForm

N, H, V = 37, 16, 50


def terms(beta: float = 0.0, temperature: float = 1.0, alpha: float = 0.0) -> Terms:
    return Terms(beta=beta, temperature=temperature, alpha=alpha)


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, the teacher's logits, labels of which some do not count."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(size, generator=draw) for size in ((N, H), (V, H), (V,)))
    labels = torch.randint(0, V, (N,), generator=draw)
    labels[torch.rand(N, generator=draw) < 0.4] = -100
    return hidden, weight, bias, 2 * torch.randn(N, V, generator=draw), labels


def plainly(student: Tensor, teacher: Tensor, labels: Tensor, t: Terms) -> Tensor:
    """[loss, divergence, next-token loss, entropy of the teacher], float64, token by token."""
    sums = torch.zeros(4, dtype=torch.float64)
    for z, y, label in zip(student.double(), teacher.double(), labels.tolist(), strict=True):
        if label == -100:
            continue
        p, q = (y / t.temperature).softmax(0), (z / t.temperature).softmax(0)
        if t.beta == 0:
            divergence = (p * (p / q).log()).sum()
        elif t.beta == 1:
            divergence = (q * (q / p).log()).sum()
        else:
            m = t.beta * p + (1 - t.beta) * q
            divergence = t.beta * (p * (p / m).log()).sum() + (1 - t.beta) * (q * (q / m).log()).sum()
        nll = -z.log_softmax(0)[label]
        loss = (1 - t.alpha) * t.temperature**2 * divergence + t.alpha * nll
        sums = sums + torch.stack([loss, divergence, nll, -(p * p.log()).sum()])
    return sums


TERMS = [terms(), terms(1.0), terms(0.5), terms(0.1, 2.0), terms(0.0, 3.0, 0.3), terms(1.0, 0.5, 0.7), terms(0.9, 1, 1)]


def in_events(student: Tensor, teacher: Tensor, labels: Tensor, t: Terms, k: int) -> Tensor:
    """As `plainly`, of the teacher's k likeliest words and all others as one word."""
    sums = torch.zeros(4, dtype=torch.float64)
    for z, y, label in zip(student.double(), teacher.double(), labels.tolist(), strict=True):
        if label == -100:
            continue
        likeliest = y.argsort(descending=True)
        p, q = (
            torch.cat([each[likeliest[:k]], each[likeliest[k:]].sum(0, keepdim=True)])
            for each in ((y / t.temperature).softmax(0), (z / t.temperature).softmax(0))
        )
        one = torch.zeros(1, dtype=torch.float64)  # the label's place among logits that are the logarithms of q
        of_events = plainly(t.temperature * q.log().unsqueeze(0), t.temperature * p.log().unsqueeze(0), one.long(), t)
        nll = -z.log_softmax(0)[label]
        loss = (1 - t.alpha) * t.temperature**2 * of_events[1] + t.alpha * nll
        sums = sums + torch.stack([loss, of_events[1], nll, of_events[3]])
    return sums


@pytest.mark.parametrize("t", TERMS, ids=str)
@pytest.mark.parametrize("form", [HeadForm(), HeadForm(scale=0.5, softcap=3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("k", [None, 7, V], ids=["logits", "top_7", "all_words"])
def test_figures_and_gradients_are_those_of_float64(t: Terms, form: HeadForm, k: int | None) -> None:
    """Sums over 22 tokens in fp32: a few units of 1e-7 each, relative. 7 of 50 words have two thirds of the mass."""
    hidden, weight, bias, teacher, labels = drawn()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    got = distilled_sums(*leaves, labels, About(56, form), teacher=said_by(teacher, t, k), terms=t)
    logits = F.linear(*exact) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    want = whole = plainly(logits, teacher, labels, t)
    if k == 7:
        want = in_events(logits, teacher, labels, t, k)
        assert want[1] < 0.98 * whole[1]  # else nothing was left out
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-6), (got, want)
    (got[0] / 3).backward()
    (want[0] / 3).backward()
    for one, other in zip(leaves, exact, strict=True):
        assert other.grad is not None and one.grad is not None and other.grad.abs().max() > 1e-3
        assert torch.allclose(one.grad.double(), other.grad, rtol=1e-4, atol=3e-6)


def said_by(teacher: Tensor, t: Terms, k: int | None) -> TeacherSays:
    """All logits, or the k likeliest words as a column has them."""
    return (lambda rows: teacher[rows].clone()) if k is None else top_words(teacher, k, t.temperature).of


def test_a_teacher_that_is_sure_leaves_nothing_to_the_others() -> None:
    """No mass beyond fp32's smallest number is no infinite divergence, nor a gradient of NaN."""
    hidden, weight, bias, teacher, labels = drawn()
    said = top_words(1e3 * teacher, 3, 1.0)
    assert said.logs[:, -1].min() < -500 and (top_words(teacher, V, 1.0).logs[:, -1] == NOTHING).all()
    for beta in (0.0, 0.3, 1.0):
        leaf = weight.clone().requires_grad_()
        got = distilled_sums(hidden, leaf, bias, labels, About(80, HeadForm()), teacher=said.of, terms=terms(beta))
        got[0].backward()
        assert got.isfinite().all() and leaf.grad is not None and leaf.grad.isfinite().all()


def test_logits_exist_for_few_tokens_at_a_time() -> None:
    hidden, weight, bias, teacher, labels = drawn()
    seen: list[int] = []

    def some(rows: slice) -> Tensor:
        seen.append(len(teacher[rows]))
        return teacher[rows].clone()

    distilled_sums(hidden, weight, bias, labels, About(80, HeadForm()), teacher=some, terms=terms())
    assert seen == [10, 10, 10, 7]


class Shard:
    """A rank's part of the vocabulary; the ranks are threads, which take turns at a barrier."""

    def __init__(self, ranks: threading.Barrier, board: list[Tensor], rank: int, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._ranks, self._board, self._rank = ranks, board, rank

    def _all(self, values: Tensor) -> Tensor:
        self._board[self._rank] = values.clone()
        self._ranks.wait(20)
        every = torch.stack(self._board)
        self._ranks.wait(20)
        return every

    def take_largest(self, values: Tensor) -> None:
        values.copy_(self._all(values).amax(0))

    def add_up(self, values: Tensor) -> None:
        values.copy_(self._all(values).sum(0))


@pytest.mark.parametrize("k", [None, 7, V], ids=["logits", "top_7", "all_words"])
@pytest.mark.parametrize("t", TERMS, ids=str)
def test_a_shared_vocabulary_gives_the_same(t: Terms, k: int | None) -> None:
    """Shards of 30 and 20 words. The hidden state's gradient is a part on each rank; the parts add up."""
    hidden, weight, bias, teacher, labels = drawn()
    ranks, board, cuts = threading.Barrier(2), [torch.empty(0)] * 2, [(0, 30), (30, 20)]

    def found(rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
        first, count = (0, V) if rank is None else cuts[rank]
        leaves = [hidden.clone(), weight[first : first + count].clone(), bias[first : first + count].clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        shard = None if rank is None else Shard(ranks, board, rank, first, count)
        sums = distilled_sums(
            *leaves, labels, About(80, HeadForm(softcap=5.0), shard), terms=t, teacher=said_by(teacher, t, k)
        )
        sums[0].backward()
        assert leaves[0].grad is not None and leaves[1].grad is not None
        return sums.detach(), leaves[0].grad, leaves[1].grad

    want = found(None)
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(found, range(2)))
    for sums, _, _ in got:
        assert torch.allclose(sums, want[0], rtol=1e-5)
    assert torch.allclose(got[0][1] + got[1][1], want[1], atol=1e-5)
    assert torch.allclose(torch.cat([got[0][2], got[1][2]]), want[2], atol=1e-5)
