"""Two trainings held against each other, step by step, and what a difference points to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from llmtrain.parity.trace import Trace

NORM = 1e-4  # relative
PARAMETER = 5e-5
SPREADS = 4.0
"""Tolerated multiple of the largest difference between two orders of summation in one process."""
_SETTLED = 5
"""Below fp32 parameters are compared every so many steps. Before that AdamW has moved each element by about the
learning rate times the sign of its gradient, and the sign of a gradient that is all rounding is anyone's."""


def loss_tolerance(split: bool) -> float:
    """fp32, in nats. `split`: tensor or sequence parallel, whose sums are cut in other places."""
    return 2e-5 if split else 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value at one step against what was tolerated there."""

    what: str
    """"loss", "gradient norm", or the Hugging Face name of a parameter."""
    step: int
    """1 is the first; 0: before it."""
    got: float
    tolerated: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Above 1 it failed. What is not finite fails."""
        ratio = self.got / self.tolerated if self.tolerated > 0 else math.inf if self.got > 0 else 0.0
        return ratio if math.isfinite(ratio) else math.inf


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one comparison."""

    worst: dict[str, Difference]
    """By "loss", "gradient norm", "parameters": the difference that came nearest to its tolerance, or beyond."""
    first: list[Difference] = field(default_factory=list)
    """What failed at the first step at which something failed: loss, norm, then parameters in the model's order."""
    hint: str = ""

    @property
    def passed(self) -> bool:
        return not self.first


def compare(got: Trace, want: list[Trace], *, fp32: bool, split: bool) -> Verdict:
    """`got` against the plain training in several orders of summation; the first of them is the reference.

    In fp32 a value may differ by a fixed amount, or by SPREADS times the spread of the orders where that is more; in
    lower precisions by SPREADS times the spread (docs/parity.md says why it is taken as it is here).
    """
    curves = [_curve(got, want, "loss", loss_tolerance(split) if fp32 else 0.0)]
    curves.append(_curve(got, want, "gradient norm", NORM if fp32 else 0.0))
    last = len(want[0].parameters) - 1
    for step in range(last + 1):
        if fp32 or step in (0, last) or (step >= _SETTLED and step % _SETTLED == 0):
            curves.append(_parameters(got, want, step, fp32=fp32))
    found = sorted((difference for curve in curves for difference in curve), key=lambda d: d.step)  # stable
    failed = [difference for difference in found if difference.ratio > 1]
    worst: dict[str, Difference] = {}
    for difference in found:
        kind = difference.what if difference.what in ("loss", "gradient norm") else "parameters"
        if kind not in worst or difference.ratio > worst[kind].ratio:
            worst[kind] = difference
    worst = {kind: worst[kind] for kind in ("loss", "gradient norm", "parameters") if kind in worst}
    return Verdict(worst=worst, first=[d for d in failed if d.step == failed[0].step])


def _curve(got: Trace, want: list[Trace], what: str, least: float) -> list[Difference]:
    """Loss or gradient norm of every step. The spread is the largest of all steps: rounding does not grow in them."""
    mine, reference, *others = [trace.losses if what == "loss" else trace.norms for trace in (got, *want)]
    if not reference:
        return []
    scale = reference if what == "gradient norm" else [1.0] * len(reference)
    parted = [abs(a - b) / s for one, other in combinations([reference, *others], 2)
              for a, b, s in zip(one, other, scale, strict=True)]  # fmt: skip
    tolerated = max(least, SPREADS * max(parted))
    return [
        Difference(what=what, step=step, got=abs(a - b) / s, tolerated=tolerated, note=f"{a:.6g}, expected {b:.6g}")
        for step, (a, b, s) in enumerate(zip(mine, reference, scale, strict=True), start=1)
    ]


def _parameters(got: Trace, want: list[Trace], step: int, *, fp32: bool) -> list[Difference]:
    """Every parameter after a step, in the model's order.

    fp32: its largest element. In lower precisions that element is one whose gradient is all rounding, and AdamW moves
    it by the whole learning rate: there it is the root mean square over the elements.
    """
    measure = _largest if fp32 else _root_mean_square
    expected = want[0].parameters[step]
    spread = {
        name: max(measure(a.parameters[step][name], b.parameters[step][name]) for a, b in combinations(want, 2))
        for name in expected
    }
    moved = {name: _root_mean_square(value, want[0].parameters[0][name]) for name, value in expected.items()}
    shares = sorted(spread[name] / moved[name] for name in expected if moved[name] > 0)
    usual = 0.0 if fp32 or not shares else shares[len(shares) * 9 // 10]
    found = []
    for name, value in expected.items():
        mine = got.parameters[step].get(name)
        difference = math.inf if mine is None or mine.shape != value.shape else measure(mine, value)
        least = PARAMETER if fp32 else SPREADS * usual * moved[name]
        tolerated = max(least, SPREADS * spread[name])
        found.append(Difference(what=name, step=step, got=difference, tolerated=tolerated))
    return found


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _root_mean_square(a: Tensor, b: Tensor) -> float:
    return float(torch.sqrt((a - b).square().mean()))
