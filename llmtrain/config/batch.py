"""The batch equation: global_batch = micro_batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.problems import Problems


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The solved equation, and the length of its sequences."""

    global_batch: int
    """Sequences per optimizer step over all ranks."""
    micro_batch: int
    """Sequences per forward pass of one rank."""
    accumulation: int
    """Micro-batches per optimizer step."""
    data_parallel: int
    """Groups of ranks that see different data."""
    sequence_length: int
    """Tokens."""

    @property
    def tokens(self) -> int:
        """Per optimizer step over all ranks."""
        return self.global_batch * self.sequence_length

    def equation(self) -> str:
        return (
            f"global_batch {self.global_batch} = micro_batch {self.micro_batch}"
            f" x accumulation {self.accumulation} x data-parallel {self.data_parallel}"
        )


def solve(
    *,
    global_batch: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    data_parallel: int,
    sequence_length: int,
    world: str,
    place: str,
    problems: Problems,
) -> Batch | None:
    """Fill in what is missing. Two numbers give the third.

    With fewer than two, a missing accumulation is 1; then global_batch gives micro_batch (as in DeepSpeed), and
    with no global_batch a missing micro_batch is 1.
    Returns None, with a problem added, when no whole numbers solve it. `world` tells which world size was seen
    and where it came from, `place` where the numbers stand.
    """
    if global_batch is None:
        micro_batch, accumulation = micro_batch or 1, accumulation or 1
        global_batch = micro_batch * accumulation * data_parallel
    elif micro_batch is not None and accumulation is not None:
        product = micro_batch * accumulation * data_parallel
        if global_batch != product:
            _refuse(
                (global_batch, micro_batch, accumulation, data_parallel),
                f"{product}: not equal",
                f"global_batch = micro_batch x accumulation x data-parallel ranks; {world}",
                f"a global_batch of {product}, or leave one of the three out",
                place,
                problems,
            )
            return None
    else:
        if micro_batch is None and accumulation is None:
            accumulation = 1
        unknown, other = ("micro_batch", "accumulation") if micro_batch is None else ("accumulation", "micro_batch")
        step = (micro_batch or accumulation or 1) * data_parallel
        solved, rest = divmod(global_batch, step)
        if rest:
            choices = f"{solved * step} or {(solved + 1) * step}" if solved else str(step)
            _refuse(
                (global_batch, micro_batch, accumulation, data_parallel),
                f"{unknown} {global_batch / step:g}: not whole",
                f"global_batch must be a multiple of {step}; {world}",
                f"a global_batch of {choices}, or another {other}",
                place,
                problems,
            )
            return None
        micro_batch, accumulation = micro_batch or solved, accumulation or solved
    return Batch(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        data_parallel=data_parallel,
        sequence_length=sequence_length,
    )


def _refuse(
    numbers: tuple[int | None, ...], outcome: str, rule: str, remedy: str, place: str, problems: Problems
) -> None:
    whole, micro, accumulation, ranks = ("?" if number is None else number for number in numbers)
    equation = f"global_batch {whole} = micro_batch {micro} x accumulation {accumulation} x data-parallel {ranks}"
    problems.add_text("train.global_batch", f"{equation} -> {outcome}", rule, remedy, place)
