"""Compares two trainings step by step, and names the likely cause of a difference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby

import torch
from torch import Tensor


@dataclass
class Trace:
    """Losses and gradient norms of each step of a training, and all parameters after each step."""

    losses: list[float] = field(default_factory=list)
    """Mean loss over the counted tokens of the global batch, in nats, before the step's update."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping. Empty in a reference if the run reports another norm (Muon)."""
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """fp32 values by Hugging Face name: at the start, after step 1, after step 2, ... Variants, such as an average of
    the parameters, have names made with VARIANT."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """AdamW's and Lion's first moment after step 1: (1 - beta) x the clipped gradient. Muon's matrices have none."""
    by_sign: bool = False
    """The optimizer steps by a sign: if a gradient is only rounding, two orders of summation differ by a full step."""
    skipped: list[int] = field(default_factory=list)
    """Steps whose update the engine skipped."""

    def until(self, step: int) -> Trace:
        return replace(self, losses=self.losses[:step], norms=self.norms[:step], parameters=self.parameters[: step + 1])


VARIANT = "{} of {}"
"""Name of a parameter in a variant of the parameters (training/parts.py), such as their average."""
NORM = 1e-4  # relative tolerance
PARAMETER = 5e-5  # absolute tolerance of an element
SPREADS = 4.0
"""Tolerated differences are this many times the largest difference between two orders of summation in one process."""
MOVEMENT = 1e-2  # tolerance, as a share of a parameter's movement since the start
CEILINGS = {"loss": 1e-3, "gradient norm": 1e-2, "gradient": 0.05, "movement": 0.25}
"""Kind -> largest tolerance with which passing the fp32 comparison is a proof. The spread of correct trainings sets the
tolerance; if the spread is larger (phimoe: 0.24 nats and 140 % of a movement), an equally large fault would pass."""
_FEW = 0.1
"""Share of the parameters that may exceed the ceiling: for example the gradient of a key's bias is only rounding."""
KINDS = ("loss", "gradient norm", "gradient", "movement", "parameter")
_SETTLED = 5
"""Number of steps between comparisons of parameters below fp32. In the first steps AdamW moves each element by about
the learning rate times the sign of its gradient, and rounding decides the sign if the gradient is only rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one value at one step, and its tolerance."""

    kind: str
    """One of KINDS."""
    name: str = ""
    """Hugging Face name of the parameter; "" for losses and norms."""
    step: int
    """Number of the step, from 1; 0: before step 1."""
    got: float
    tolerated: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Return the difference over its tolerance; above 1, or infinite, is a failure."""
        ratio = self.got / self.tolerated if self.tolerated > 0 else math.inf if self.got > 0 else 0.0
        return ratio if math.isfinite(ratio) else math.inf


@dataclass(frozen=True, kw_only=True)
class Verdict:
    worst: dict[str, Difference]
    """Kind -> the difference with the largest ratio to its tolerance."""
    first: list[Difference] = field(default_factory=list)
    """All failures of the first step that has any, in the order of KINDS, then in the model's order."""
    blunt: Difference | None = None
    """In fp32: the first difference whose tolerance is above its ceiling."""

    @property
    def passed(self) -> bool:
        return not self.first


def compare(got: Trace, want: list[Trace], *, fp32: bool, split: bool) -> Verdict:
    """Compare `got` with `want`, trainings in plain PyTorch that differ only in the order of their sums; the first is
    the reference. The tolerance is SPREADS times their spread, in fp32 at least a fixed amount (reasons in
    docs/developers/parity.md)."""
    loss = 2e-5 if split else 1e-5  # `split`: tensor or sequence parallelism, with other partial sums
    curves = [_curve(got, want, "loss", loss if fp32 else 0.0)]
    curves.append(_curve(got, want, "gradient norm", NORM if fp32 else 0.0))
    last = len(want[0].parameters) - 1
    for step in range(last + 1):
        if fp32 or step in (0, last) or (step >= _SETTLED and step % _SETTLED == 0):
            curves.append(_parameters(got, want, step, fp32=fp32))
        if fp32 and step == 1:
            curves.append(_gradients(got, want))
    found = [difference for curve in curves for difference in curve]
    # A stable sort keeps the model's order.
    found.sort(key=lambda difference: (difference.step, KINDS.index(difference.kind)))
    worst: dict[str, Difference] = {}
    for difference in found:
        if difference.kind not in worst or difference.ratio > worst[difference.kind].ratio:
            worst[difference.kind] = difference
    failed = [difference for difference in found if difference.ratio > 1]
    return Verdict(
        worst={kind: worst[kind] for kind in KINDS if kind in worst},
        first=[difference for difference in failed if difference.step == failed[0].step],
        blunt=_above_ceiling(found) if fp32 else None,
    )


def _above_ceiling(found: list[Difference]) -> Difference | None:
    """Return a difference whose tolerance exceeds its ceiling: any loss or norm, or a parameter if many at one step do;
    or None."""
    for (kind, _), group in groupby(found, key=lambda one: (one.kind, one.step)):
        some = list(group)
        wide = [one for one in some if kind in CEILINGS and one.tolerated > CEILINGS[kind]]
        if len(wide) > (_FEW * len(some) if some[0].name else 0):
            return max(wide, key=lambda one: one.tolerated)
    return None


def _curve(got: Trace, want: list[Trace], what: str, least: float) -> list[Difference]:
    """Compare the loss or gradient norm of every step. The spread is that of all steps, as rounding does not grow
    here."""
    mine, reference, *others = [trace.losses if what == "loss" else trace.norms for trace in (got, *want)]
    if not reference:
        return []
    scale = reference if what == "gradient norm" else [1.0] * len(reference)
    pairs = combinations([reference, *others], 2)
    parted = [abs(a - b) / s for one, other in pairs for a, b, s in zip(one, other, scale, strict=True)]
    tolerated = max(least, SPREADS * max(parted))
    return [
        Difference(kind=what, step=step, got=abs(a - b) / s, tolerated=tolerated, note=f"{a:.6g}, expected {b:.6g}")
        for step, (a, b, s) in enumerate(zip(mine, reference, scale, strict=True), start=1)
    ]


def _parameters(got: Trace, want: list[Trace], step: int, *, fp32: bool) -> list[Difference]:
    """Compare every parameter after a step by its root mean square difference, as a share of its movement; in fp32 also
    by its largest element. (In lower precisions the gradient of some elements is only rounding.)"""
    elements = fp32 and (step == 0 or not want[0].by_sign)
    start, expected = want[0].parameters[0], want[0].parameters[step]
    moved = {name: _root_mean_square(value, start[name]) for name, value in expected.items()}
    shares = {name: _spread(want, step, name, _root_mean_square) / (moved[name] or 1.0) for name in expected}
    usual = sorted(shares.values())[len(shares) * 9 // 10]
    largest = {name: _spread(want, step, name, _largest) for name in expected} if elements else {}
    usual_largest = sorted(largest.values())[len(largest) * 9 // 10] if elements else 0.0
    found = []
    for name, value in expected.items():
        mine = got.parameters[step].get(name)
        if mine is None or mine.shape != value.shape:
            mine = torch.full_like(value, math.nan)
        if elements:
            difference = _largest(mine, value)
            tolerated = max(PARAMETER, SPREADS * max(usual_largest, largest[name]))
            found.append(Difference(kind="parameter", name=name, step=step, got=difference, tolerated=tolerated))
        if step > 0:
            difference = _root_mean_square(mine, value) / (moved[name] or 1.0)
            tolerated = max(MOVEMENT, SPREADS * (shares[name] if fp32 else max(usual, shares[name])))
            found.append(Difference(kind="movement", name=name, step=step, got=difference, tolerated=tolerated))
    return found


def _spread(want: list[Trace], step: int, name: str, measure: Callable[[Tensor, Tensor], float]) -> float:
    """Return the largest difference of one parameter between two orders of summation."""
    return max(measure(a.parameters[step][name], b.parameters[step][name]) for a, b in combinations(want, 2))


def _gradients(got: Trace, want: list[Trace]) -> list[Difference]:
    """Compare every parameter's clipped gradient of step 1 by root mean square, relative to the gradient."""
    found = []
    for name, expected in want[0].gradients.items():
        size = float(expected.square().mean().sqrt()) or 1.0
        spread = max(_root_mean_square(a.gradients[name], b.gradients[name]) / size for a, b in combinations(want, 2))
        mine = got.gradients.get(name)
        note = ""
        difference = math.inf
        if mine is not None and mine.shape == expected.shape:
            difference = _root_mean_square(mine, expected) / size
            share = float((mine * expected).sum() / expected.square().sum())
            note = f"{share:.3g} x the expected one along it"
        tolerated = max(NORM, SPREADS * spread)
        found.append(Difference(kind="gradient", name=name, step=1, got=difference, tolerated=tolerated, note=note))
    return found


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _root_mean_square(a: Tensor, b: Tensor) -> float:
    return float(torch.sqrt((a - b).square().mean()))


# Did the ranks cause a difference, or rounding? AdamW divides a gradient by its own size, so one that is only rounding
# moves a weight by the full learning rate. And a router sends a token to the experts with the largest scores: if the
# last chosen expert and the first one not chosen differ by less than rounding, two correct trainings differ by a full
# token.


COUNT = 6


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Explains a failed comparison by rounding: from `step` on, trainings that differ only by rounding are as far
    apart."""

    step: int
    largest: float
    """Largest difference (nats) between losses of trainings that differ only by rounding."""
    verdict: Verdict
    """Verdict on the ranks when these trainings are further references."""

    proves: bool
    """At least loss and gradients of step 1 were compared before rounding decided."""

    def line(self) -> str:
        return (
            f"from step {self.step} on rounding decides: {COUNT} more trainings in one process, whose weights differ "
            f"in the last place, diverge as far, in the loss by {self.largest:.1e} (a gradient that nearly cancels, or "
            "two experts with equal scores)"
        )


def tie(
    got: Trace, want: list[Trace], verdict: Verdict, nudged: Callable[[int], list[Trace]], *, split: bool
) -> Tie | None:
    """Return the tie that explains a failed fp32 comparison: more orders of summation (`nudged`) diverge as far as the
    ranks. None if the ranks diverge further."""
    first, steps = verdict.first[0].step, len(got.losses)
    if first == 0:
        return None
    for until in dict.fromkeys((first, steps)):  # few steps mostly show a difference beyond rounding
        known = [trace.until(until) for trace in want]
        others = nudged(until)
        wider = compare(got.until(until), [*known, *others], fp32=True, split=split)
        if not wider.passed:
            return None
    failed = [one.first[0] for one in (compare(other, want, fp32=True, split=split) for other in others) if one.first]
    begin = min([first, *(one.step for one in failed if one.step > 0)])
    largest = max(abs(a - b) for other in others for a, b in zip(other.losses, want[0].losses, strict=True))
    proves = begin > 1 or {one.kind for one in verdict.first} <= {"movement", "parameter"}
    return Tie(step=begin, largest=largest, verdict=wider, proves=proves)


_ONE_FACTOR = 1e-3
"""If the shares of gradients differ by less than this, all gradients are off by the same factor."""


def hint(got: Trace, want: Trace, verdict: Verdict, clip_norm: float) -> str:
    """Return the likely cause of a failed comparison; `want` is the reference."""
    first = verdict.first
    step, kinds = first[0].step, {difference.kind for difference in first}
    wrong = [d.name for d in first if d.kind == "gradient"] or list(dict.fromkeys(d.name for d in first if d.name))
    missing = sorted(want.parameters[0].keys() ^ got.parameters[0].keys())
    if missing:
        return f"the parameters of all ranks together are not those of the model: {missing[0]}"
    if untrained := sorted(want.gradients.keys() - got.gradients.keys()):
        return f"the ranks together keep no moment of {untrained[0]}: it is frozen, or in no group of the optimizer"
    if step == 0:
        return "the ranks have other initial weights: loading is wrong, or the part of a tensor that a rank holds"
    if step in got.skipped:
        return "the engine skipped this update (a gradient that is not finite, or a loss scale that is too large)"
    if any(not math.isfinite(value) for value in (*got.losses[:step], *got.norms[:step])):
        return "a loss or a gradient norm is not finite"
    if "loss" in kinds and step == 1:
        return _wrong_forward(got, want)
    if wrong and all(" of " in name for name in wrong):
        variants = ", ".join(sorted({name.partition(" of ")[0] for name in wrong}))
        return f"only the values of {variants} differ: look at its settings, and the steps at which it is updated"
    if step == 1 and "gradient" in kinds:
        return _wrong_gradients(got, want, wrong)
    if step == 1 and kinds == {"gradient norm"}:
        if clip_norm and min(got.norms[0], want.norms[0]) > clip_norm:
            return (
                f"all gradients are {got.norms[0] / want.norms[0]:.4g} times as large, which clipping then hides: "
                "averaged over the wrong number of ranks or micro-batches, or scaled twice"
            )
        return "only the norm is wrong, the gradients are right: it is summed over too few or too many ranks"
    if step == 1:
        return _wrong_update(wrong, want)
    if "gradient norm" not in kinds and wrong and all(want.parameters[0][name].dim() == 1 for name in wrong):
        return f"only vectors drift ({_common(wrong)}): weight decay on them, or gradients that lack a rank's share"
    if kinds <= {"parameter", "movement"} and len(wrong) * 10 < len(want.parameters[0]):
        return f"few parameters drift from step {step} on: {_common(wrong)}"
    return (
        f"the first {step - 1} step(s) agree: something that begins later (dropout, schedule, state that is not reset, "
        "rows of another step, a reference that trains), or rounding that grows"
    )


def _wrong_forward(got: Trace, want: Trace) -> str:
    ratio = got.losses[0] / want.losses[0] if want.losses[0] else math.nan
    for count in range(2, 65):
        if min(abs(ratio / count - 1), abs(ratio * count - 1)) < 1e-4:
            times = f"{count}" if ratio > 1 else f"1/{count}"
            return f"the loss is {times} of the true one: it is summed or averaged over the wrong ranks"
    return (
        "the forward pass of step 1 differs, with the same weights: a layer that is skipped, other rows, labels, "
        "positions or a mask (documents), experts that are left out or weighted otherwise, an adapter that is left out "
        "or scaled otherwise, another temperature or direction of a distillation"
    )


def _wrong_gradients(got: Trace, want: Trace, wrong: list[str]) -> str:
    if dead := [name for name in wrong if want.gradients[name].any() and not got.gradients[name].any()]:
        return f"no gradient reaches {_common(dead)}: it is cut off from the loss, or its gradient is not reduced"
    shares = {name: share(got.gradients[name], want.gradients[name]) for name in want.gradients}
    factor = sorted(shares.values())[len(shares) // 2]  # clipping by a wrong norm scales all by one factor
    odd = [name for name in wrong if _rest(got.gradients[name], want.gradients[name], factor) > _ONE_FACTOR]
    norm = got.norms[0] / want.norms[0] if want.norms and want.norms[0] else 1.0
    if odd and abs(norm - 1) > 0.1 and abs(norm * factor - 1) < 0.1:  # each rank may have clipped by another norm
        return (
            f"gradients are clipped by a norm that is about {norm:.2g} times the true one: the norm is not summed over "
            "all groups of ranks"
        )
    if not odd:
        if abs(norm - 1) > _ONE_FACTOR and abs(norm * factor - 1) < 1e-2:
            return (
                f"all gradients are clipped by a norm that is {norm:.4g} times the true one: the norm is not summed "
                "over all groups of ranks"
            )
        if abs(norm - 1) > _ONE_FACTOR:
            return (
                f"all gradients are off by one factor ({factor:.4g}): averaged over the wrong number of ranks or "
                "micro-batches, or scaled twice"
            )
        return f"all first moments are off by the factor {factor:.4g}: other betas (Lion's swapped?), or other clipping"
    wrong = odd
    if len(wrong) > 0.9 * len(want.gradients):
        return (
            "the loss is right and all gradients are off, each by another factor: tokens, micro-batches or ranks have "
            "the wrong weight in the mean, or a part of them is left out of the backward pass"
        )
    ends = [name for name in wrong if re.search(r"embed|wte|wpe|lm_head|head", name)]
    if len(ends) == len(wrong):
        return (
            f"only the embedding or the head ({wrong[0]}): a tied tensor lacks the gradient of its other use, or a "
            "part of the vocabulary is missing"
        )
    if all(want.gradients[name].dim() == 1 for name in wrong):
        return (
            f"only vectors ({_common(wrong)}): a parameter that several ranks hold lacks the gradients of the others "
            "(the sum over the tensor-parallel or sequence-parallel group)"
        )
    return f"only some gradients ({_common(wrong)}): these are reduced over the wrong group, or not at all"


def _wrong_update(wrong: list[str], want: Trace) -> str:
    if len(wrong) > 0.5 * len(want.parameters[0]):
        return (
            "loss and gradients are right, the update is not: learning rate, bias correction (step counter), betas, or "
            "weights that are not refreshed after the step"
        )
    if all(want.parameters[0][name].dim() == 1 for name in wrong):
        return f"loss and gradients are right, the update of vectors is not ({_common(wrong)}): weight decay on them"
    return f"loss and gradients are right, the update of some parameters is not: {_common(wrong)}"


def share(mine: Tensor, expected: Tensor) -> float:
    """Return the factor of `expected` in `mine`, by least squares."""
    square = float(expected.square().sum())
    return float((mine * expected).sum()) / square if square else 1.0


def _rest(mine: Tensor, expected: Tensor, factor: float) -> float:
    """Return a gradient's difference from `factor` times the expected one, relative to the expected one."""
    size = float(expected.square().sum())
    return math.sqrt(float((mine - factor * expected).square().sum()) / size) if size else 0.0


def _common(names: list[str]) -> str:
    kinds = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    return ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
