"""Likely causes of a failed comparison, from its pattern. Likely, not certain: the lines above it are the evidence."""

from __future__ import annotations

import math
import re

from torch import Tensor

from llmtrain.parity.compare import Trace, Verdict

_ONE_FACTOR = 1e-3
"""Gradients whose shares differ by less than this are all off by one factor."""


def hint(got: Trace, want: Trace, verdict: Verdict, clip_norm: float) -> str:
    """One sentence on a failed comparison; `want` is the reference."""
    first = verdict.first
    step, kinds = first[0].step, {difference.kind for difference in first}
    wrong = [d.name for d in first if d.kind == "gradient"] or list(dict.fromkeys(d.name for d in first if d.name))
    missing = sorted(want.parameters[0].keys() ^ got.parameters[0].keys())
    if missing:
        return f"the ranks together hold other parameters than the model: {missing[0]}"
    if untrained := sorted(want.gradients.keys() - got.gradients.keys()):
        return f"the ranks together keep no moment of {untrained[0]}: it is frozen, or in no group of the optimizer"
    if step == 0:
        return "the initial weights did not arrive as they are: loading, or what a rank holds of a tensor, is wrong"
    if step in got.skipped:
        return "the engine skipped this update (a gradient that is not finite, or a loss scale that is too large)"
    if any(not math.isfinite(value) for value in (*got.losses[:step], *got.norms[:step])):
        return "a loss or a gradient norm is not finite"
    if "loss" in kinds and step == 1:
        return _wrong_forward(got, want)
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
        return f"vectors alone drift ({_common(wrong)}): weight decay on them, or gradients that lack a rank's share"
    if kinds <= {"parameter", "movement"} and len(wrong) * 10 < len(want.parameters[0]):
        return f"few parameters drift from step {step} on: {_common(wrong)}"
    return (
        f"the first {step - 1} step(s) agree: what begins later (dropout, schedule, state that is not reset, rows of "
        "another step, a reference that trains), or rounding that grows"
    )


def _wrong_forward(got: Trace, want: Trace) -> str:
    ratio = got.losses[0] / want.losses[0] if want.losses[0] else math.nan
    for count in range(2, 65):
        if min(abs(ratio / count - 1), abs(ratio * count - 1)) < 1e-4:
            times = f"{count}" if ratio > 1 else f"1/{count}"
            return f"the loss is {times} of the true one: it is summed or averaged over the wrong ranks"
    return (
        "the forward pass of step 1 is another, with the same weights: a layer that is skipped, other rows, labels, "
        "positions or a mask (documents), experts that are left out or weighted otherwise, an adapter that is left out "
        "or scaled otherwise, another temperature or direction of a distillation"
    )


def _wrong_gradients(got: Trace, want: Trace, wrong: list[str]) -> str:
    if dead := [name for name in wrong if want.gradients[name].any() and not got.gradients[name].any()]:
        return f"no gradient reaches {_common(dead)}: it is cut off from the loss, or its gradient is not reduced"
    shares = {name: _share(got.gradients[name], want.gradients[name]) for name in want.gradients}
    factor = sorted(shares.values())[len(shares) // 2]  # clipping by a wrong norm gives all of them one factor
    odd = [name for name in wrong if _rest(got.gradients[name], want.gradients[name], factor) > _ONE_FACTOR]
    norm = got.norms[0] / want.norms[0] if want.norms and want.norms[0] else 1.0
    if odd and abs(norm - 1) > 0.1 and abs(norm * factor - 1) < 0.1:  # each rank may have clipped by a norm of its own
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
        return f"all gradients are off by the factor {factor:.4g} after clipping: the clipping is another"
    wrong = odd
    if len(wrong) > 0.9 * len(want.gradients):
        return (
            "the loss is right and all gradients are off, each otherwise: tokens, micro-batches or ranks have the "
            "wrong weight in the mean, or a part of them is left out of the backward pass"
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
    return f"some gradients only: {_common(wrong)}: parameters of this kind are reduced over the wrong group, or not"


def _wrong_update(wrong: list[str], want: Trace) -> str:
    if len(wrong) > 0.5 * len(want.parameters[0]):
        return (
            "loss and gradients are right, the update is not: learning rate, bias correction (step counter), betas, or "
            "weights that are not refreshed after the step"
        )
    if all(want.parameters[0][name].dim() == 1 for name in wrong):
        return f"loss and gradients are right, the update of vectors is not ({_common(wrong)}): weight decay on them"
    return f"loss and gradients are right, the update of some parameters is not: {_common(wrong)}"


def _share(mine: Tensor, expected: Tensor) -> float:
    """The factor of `expected` in `mine`, by least squares."""
    square = float(expected.square().sum())
    return float((mine * expected).sum()) / square if square else 1.0


def _rest(mine: Tensor, expected: Tensor, factor: float) -> float:
    """A gradient's difference that the factor does not explain, relative to the gradient."""
    size = float(expected.square().sum())
    return math.sqrt(float((mine - factor * expected).square().sum()) / size) if size else 0.0


def _common(names: list[str]) -> str:
    """The names with their layers' numbers put together, shortened."""
    kinds = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    return ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
