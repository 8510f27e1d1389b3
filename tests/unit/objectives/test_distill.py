"""The divergences from a teacher against plain torch in float64, in chunks, capped, scaled and sharded."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain import cli
from llmtrain.models.distillation import NOTHING, TeacherSays, Terms, distilled_sums, top_words
from llmtrain.models.loss import HeadForm
from tests.helpers.config_workplace import write

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


@pytest.mark.parametrize("t", TERMS, ids=str)
@pytest.mark.parametrize("form", [HeadForm(), HeadForm(scale=0.5, softcap=3.0)], ids=["plain", "capped"])
def test_figures_and_gradients_are_those_of_float64(t: Terms, form: HeadForm) -> None:
    """Sums over 22 tokens in fp32: a few units of 1e-7 each, relative."""
    hidden, weight, bias, teacher, labels = drawn()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    got = distilled_sums(*leaves, labels, chunk=56, form=form, teacher=lambda rows: teacher[rows].clone(), terms=t)
    logits = F.linear(*exact) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    want = plainly(logits, teacher, labels, t)
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-6), (got, want)
    (got[0] / 3).backward()
    (want[0] / 3).backward()
    for one, other in zip(leaves, exact, strict=True):
        assert other.grad is not None and one.grad is not None and other.grad.abs().max() > 1e-3
        assert torch.allclose(one.grad.double(), other.grad, rtol=1e-4, atol=3e-6)


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
def test_likeliest_words_and_all_others_as_one(t: Terms) -> None:
    """Against the definition in float64, with the gradient; 7 of 50 words, which have about two thirds of the mass."""
    hidden, weight, bias, teacher, labels = drawn()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    form = HeadForm(scale=0.5, softcap=3.0)
    said = top_words(teacher, 7, t.temperature)
    got = distilled_sums(*leaves, labels, chunk=56, form=form, teacher=said.of, terms=t)
    logits = 3.0 * torch.tanh(F.linear(*exact) * 0.5 / 3.0)
    want = in_events(logits, teacher, labels, t, 7)
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-6), (got, want)
    whole = plainly(logits, teacher, labels, t)
    assert want[1] < 0.98 * whole[1]  # else nothing was left out
    (got[0] / 3).backward()
    (want[0] / 3).backward()
    for one, other in zip(leaves, exact, strict=True):
        assert other.grad is not None and one.grad is not None and other.grad.abs().max() > 1e-3
        assert torch.allclose(one.grad.double(), other.grad, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("t", TERMS, ids=str)
def test_all_words_are_the_whole_distribution(t: Terms) -> None:
    """Two ways to the same sums of 50 terms in fp32, 22 tokens."""
    hidden, weight, bias, teacher, labels = drawn()
    found = []
    for says in (lambda rows: teacher[rows].clone(), top_words(teacher, V, t.temperature).of):
        leaf = weight.clone().requires_grad_()
        sums = distilled_sums(hidden, leaf, bias, labels, chunk=80, form=HeadForm(), teacher=says, terms=t)
        sums[0].backward()
        assert leaf.grad is not None
        found.append((sums.detach(), leaf.grad))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=2e-6)


def test_a_teacher_that_is_sure_leaves_nothing_to_the_others() -> None:
    """No mass beyond fp32's smallest number is no infinite divergence, nor a gradient of NaN."""
    hidden, weight, bias, teacher, labels = drawn()
    said = top_words(1e3 * teacher, 3, 1.0)
    assert said.logs[:, -1].min() < -500 and (top_words(teacher, V, 1.0).logs[:, -1] == NOTHING).all()
    for beta in (0.0, 0.3, 1.0):
        leaf = weight.clone().requires_grad_()
        got = distilled_sums(hidden, leaf, bias, labels, chunk=80, form=HeadForm(), teacher=said.of, terms=terms(beta))
        got[0].backward()
        assert got.isfinite().all() and leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(beta: float, temperature: float) -> None:
    hidden, weight, bias, _, labels = drawn()
    weight.requires_grad_()
    got = distilled_sums(hidden, weight, bias, labels, chunk=N * 8, form=HeadForm(), terms=terms(beta, temperature),
                         teacher=lambda rows: F.linear(hidden[rows], weight.detach(), bias))  # fmt: skip
    tolerance = 0.0 if beta in (0.0, 1.0) else 1e-5  # log m is rounded
    assert abs(float(got[0].detach())) <= tolerance and got[3] > 1
    got[0].backward()
    assert weight.grad is not None and weight.grad.abs().max() <= 1e-6


def test_the_ends_of_beta_are_the_two_directions() -> None:
    """Near them the generalised divergence is their multiple: D / beta and D / (1 - beta)."""
    hidden, weight, bias, teacher, labels = (each.double() if each.is_floating_point() else each for each in drawn())
    hidden, bias, teacher = 0.1 * hidden, 0.1 * bias, 0.2 * teacher  # where all ratios are small, the limit is near
    logits = F.linear(hidden, weight, bias)
    counted = labels != -100
    log_q, log_p = logits.log_softmax(1)[counted], teacher.log_softmax(1)[counted]
    forward = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    reverse = F.kl_div(log_p, log_q, log_target=True, reduction="sum")

    def found(beta: float) -> float:
        given: dict[str, Any] = {"chunk": 256, "form": HeadForm(), "terms": terms(beta)}
        return float(distilled_sums(hidden.float(), weight.float(), bias.float(), labels,
                                    teacher=lambda rows: teacher[rows].float(), **given)[1])  # fmt: skip

    assert found(0.0) == pytest.approx(float(forward), rel=1e-6)
    assert found(1.0) == pytest.approx(float(reverse), rel=1e-6)
    assert abs(float(forward) / float(reverse) - 1) > 1e-3  # else nothing is told apart
    assert found(1e-3) / 1e-3 == pytest.approx(float(forward), rel=0.01)
    assert found(1 - 1e-3) / 1e-3 == pytest.approx(float(reverse), rel=0.01)
    assert found(0.5) <= math.log(2) * int(counted.sum())


def test_logits_exist_for_few_tokens_at_a_time() -> None:
    hidden, weight, bias, teacher, labels = drawn()
    seen: list[int] = []

    def some(rows: slice) -> Tensor:
        seen.append(len(teacher[rows]))
        return teacher[rows].clone()

    distilled_sums(hidden, weight, bias, labels, chunk=80, form=HeadForm(), teacher=some, terms=terms())
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
    says: TeacherSays = lambda rows: teacher[rows].clone()  # noqa: E731
    says = says if k is None else top_words(teacher, k, t.temperature).of

    def found(rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
        first, count = (0, V) if rank is None else cuts[rank]
        leaves = [hidden.clone(), weight[first : first + count].clone(), bias[first : first + count].clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        shard = None if rank is None else Shard(ranks, board, rank, first, count)
        sums = distilled_sums(*leaves, labels, chunk=80, form=HeadForm(softcap=5.0), vocabulary=shard, terms=t,
                              teacher=says)  # fmt: skip
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


# --- the configuration


DISTILL = ["--objective.name", "distill"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (DISTILL, "objective.teacher = null"),
        ([*DISTILL, "--objective.teacher", "nowhere"], 'objective.teacher = "nowhere"'),
        ([*DISTILL, "--objective.teacher", "data/x"], "no such folder with a config.json"),
        (["--objective.teacher", "data/x"], "belongs to objective.name distill"),
        ([*DISTILL, "--objective.beta", "1.5"], "must be from 0 to 1\n"),
        ([*DISTILL, "--objective.alpha", "-0.5"], "must be from 0 to 1\n"),
        ([*DISTILL, "--objective.temperature", "0"], "objective.temperature = 0.0"),
        (["--objective.name", "dpo", "--objective.beta", "0"], "must be greater than 0"),
        (["--objective.name", "rpo", "--objective.alpha", "-1"], "must be 0 or greater"),
        (["--objective.temperature", "2"], "set objective.name to distill"),
        (["--objective.top_k", "8"], "belongs to objective.name distill"),
        ([*DISTILL, "--objective.top_k", "0"], "must be at least 1"),
        ([*DISTILL, "--objective.teacher_revision", "main"], "goes with objective.teacher: ORG/NAME"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "check", "run.yaml", *words]) == 2
    assert told in capsys.readouterr().err
