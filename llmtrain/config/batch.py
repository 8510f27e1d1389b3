"""The batch equation: global_batch = micro_batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.problems import Problems


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The solved equation; counts of sequences, except `accumulation` and `data_parallel`."""

    global_batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int

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
    world: str,
    problems: Problems,
    place: str,
) -> Batch | None:
    """Fill in what is missing. Two numbers give the third.

    With fewer than two the missing accumulation is 1; then global_batch gives micro_batch, and with no
    global_batch a missing micro_batch is 1 (the first rule is DeepSpeed's own).
    Returns None, with a problem added, when no whole numbers solve it. `world` says which world size was
    seen and where it came from.
    """
    given_global = global_batch
    if accumulation is None and (global_batch is None or micro_batch is None):
        accumulation = 1
    if global_batch is None:
        micro_batch = micro_batch or 1
        assert accumulation is not None
        global_batch = micro_batch * accumulation * data_parallel
    unknown, known = "accumulation", (micro_batch or 1) * data_parallel
    if micro_batch is None:
        unknown, known = "micro_batch", (accumulation or 1) * data_parallel
    found = global_batch / known
    if micro_batch is not None and accumulation is not None:
        if global_batch == micro_batch * accumulation * data_parallel:
            return _batch(global_batch, micro_batch, accumulation, data_parallel)
        product = micro_batch * accumulation * data_parallel
        problems.add_text(
            "train.global_batch",
            f"global_batch {given_global} = micro_batch {micro_batch} x accumulation {accumulation}"
            f" x data-parallel {data_parallel} -> {product}: not equal",
            f"global_batch = micro_batch x accumulation x data-parallel ranks; {world}",
            f"a global_batch of {product}, or leave one of the three out",
            place,
        )
        return None
    if global_batch % known == 0:
        solved = global_batch // known
        return _batch(global_batch, micro_batch or solved, accumulation or solved, data_parallel)
    left = [
        f"global_batch {global_batch}",
        f"micro_batch {micro_batch or '?'}",
        f"accumulation {accumulation or '?'}",
        f"data-parallel {data_parallel}",
    ]
    below, above = global_batch // known * known, (global_batch // known + 1) * known
    choices = f"{below} or {above}" if below else f"{above}"
    problems.add_text(
        "train.global_batch",
        f"{left[0]} = {' x '.join(left[1:])} -> {unknown} {found:g}: not whole",
        f"global_batch must be a multiple of {known}; {world}",
        f"a global_batch of {choices}, or another {'micro_batch' if unknown == 'accumulation' else 'accumulation'}",
        place,
    )
    return None


def _batch(global_batch: int, micro_batch: int, accumulation: int, data_parallel: int) -> Batch:
    assert global_batch == micro_batch * accumulation * data_parallel
    return Batch(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        data_parallel=data_parallel,
    )
