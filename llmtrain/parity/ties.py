"""Is a difference of the ranks' making, or does rounding decide there?

AdamW divides a gradient by its own size: one that is nothing but rounding moves a weight by the whole learning rate.
And a router sends a token to the experts with the largest scores: where the last one chosen and the first one not
chosen differ by less than rounding, two right trainings part by a whole token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmtrain.parity.compare import Verdict, compare
from llmtrain.parity.trace import Trace

COUNT = 6


@dataclass(frozen=True, kw_only=True)
class Tie:
    """From this step on rounding decides."""

    step: int
    largest: float
    """How far the losses of trainings part (nats) that differ by rounding only."""
    verdict: Verdict
    """Of the ranks, with those trainings among the references."""

    proves: bool
    """Before rounding decided, loss and gradients of step 1 at least have been compared."""

    def line(self) -> str:
        """For the report."""
        return (
            f"from step {self.step} on rounding decides: {COUNT} more trainings in one process, whose weights differ "
            f"in the last place, part as far; in the loss by {self.largest:.1e} (a gradient that nearly cancels, or "
            "two experts with equal scores)"
        )


def tie(
    got: Trace, want: list[Trace], verdict: Verdict, nudged: Callable[[int], list[Trace]], *, split: bool
) -> Tie | None:
    """What a failed comparison in fp32 is, if plain trainings that differ by rounding part as far as the ranks do.

    They are more orders of summation, and the tolerance is made of all of them. `nudged`: from a number of steps to
    COUNT of them. None: the ranks still part by more.
    """
    first, steps = verdict.first[0].step, len(got.losses)
    if first == 0:
        return None
    for until in dict.fromkeys((first, steps)):  # what no rounding explains is mostly seen in few steps
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
