"""Two optimizer steps and an evaluation of a run, by its own code, on ranks that have no memory and no other ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.topology import Degrees
from llmtrain.engine.deepspeed.rehearsed import rehearsed_ranks
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.models.transformers_private import without_memory
from llmtrain.optim.optimizers import PARAM
from llmtrain.plan.ledger import Ledger
from llmtrain.training.ema import Ema
from llmtrain.training.examine import Checked
from llmtrain.training.setup import Setup

_STEPS = 2
_EVALUATED = 2
"""Micro-batches of an evaluation."""
_MOST_STAGES = 8
_AT_ONCE = 2
"""Ranks that are rehearsed at a time."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Memory of a rank in the rehearsed steps, in bytes."""

    rank: int
    peak: int
    at: str
    """The part of the run in which the peak comes."""
    parts: dict[str, int]
    """Bytes of the peak by their content."""
    kept: int
    """Alive between two steps."""
    saved: int
    """Masters and moments that this rank writes to a checkpoint."""
    curve: list[tuple[str, int]]
    """(part of the step, bytes alive) in the last step, at most some hundred points."""
    cpu_s: float


def rehearse(checked: Checked, ranks: Sequence[int], slots: int) -> Iterator[Rehearsed]:
    """Rehearse these ranks in processes of their own. `slots`: ranks of a host. Yields each when it is done.

    Raises what the rank raises, as text in a RuntimeError.
    """
    fork, waiting = multiprocessing.get_context("fork"), list(ranks)
    running: dict[Connection, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                ours, theirs = fork.Pipe(duplex=False)
                child = fork.Process(target=_in_child, args=(theirs, checked, waiting.pop(0), slots), daemon=True)
                child.start()
                theirs.close()
                running[ours] = child
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                child = running.pop(pipe)
                try:
                    found = pipe.recv()
                except EOFError:
                    child.join()
                    found = f"its process ended with exit code {child.exitcode}"
                if isinstance(found, str):
                    raise RuntimeError(found)
                yield found
    finally:
        for child in running.values():
            child.kill()


def _in_child(pipe: Connection, checked: Checked, rank: int, slots: int) -> None:
    began_s = time.process_time()
    warnings.simplefilter("ignore")  # about tensors without memory
    with rehearsed_ranks(rank, checked.resolved.degrees.world_size, slots) as ranks, without_memory():
        try:
            ledger, saved = walk(checked, ranks)
        except Exception as error:
            pipe.send(f"{traceback.format_exc()}")
            raise SystemExit(1) from error
    pipe.send(
        Rehearsed(
            rank=rank,
            peak=ledger.most,
            at=ledger.at,
            parts={label: size for label, size in ledger.then.items() if size},
            kept=ledger.kept,
            saved=saved,
            curve=ledger.curve,
            cpu_s=time.process_time() - began_s,
        )
    )


def walk(checked: Checked, ranks: Ranks, fill: Callable[[Setup], None] = lambda _: None) -> tuple[Ledger, int]:
    """Set a run up, train two steps and evaluate. Returns (the count, bytes of this rank's part of a checkpoint).

    `fill`: gives the parameters their values, where there is memory for them.
    """
    ledger = Ledger()
    heart.phase("model")
    with ledger:
        setup = Setup(checked, ranks)
    fill(setup)
    with ledger:
        _name_state(ledger, setup)
        session = setup.session()
        ema = None if setup.run.ema.decay is None else Ema(setup)
        with contextlib.closing(setup.loader()) as loader:
            for _ in range(_STEPS):
                ledger.begin_step()
                heart.phase("data")
                batch = next(loader)
                batch = replace(batch, micro_batches=batch.micro_batches[: 2 * setup.resolved.degrees.pipeline])
                session.step(batch)
                _name_state(ledger, setup)
        if setup.run.train.eval:
            heart.phase("evaluate")
            with contextlib.nullcontext() if ema is None else ema.in_place():
                setup.engine.evaluate(batch.micro_batches[:_EVALUATED], setup.objective)
    saved = sum(piece.own_region.numel * piece.dtype.itemsize for piece in setup.engine.state())
    setup.engine.close()
    return ledger, saved


def _name_state(ledger: Ledger, setup: Setup) -> None:
    ledger.mark("weights", setup.engine.module.parameters())
    ledger.mark("weights", (p.ds_tensor for p in setup.engine.module.parameters() if hasattr(p, "ds_tensor")))
    for piece in setup.engine.state():
        with piece.open() as live:
            ledger.mark("masters" if piece.kind == PARAM else "moments", [live])


def kinds(degrees: Degrees) -> dict[int, int]:
    """One rank of each kind -> the number of its pipeline's stages that hold as much.

    Ranks of one stage hold the same. Of a long pipeline the first stages hold most micro-batches; in the middle, each
    stage holds one less than the stage before it.
    """
    first = degrees.place(0)
    stages = dict.fromkeys(range(degrees.pipeline), 1)
    if degrees.pipeline > _MOST_STAGES:
        stages = {0: 1, 1: degrees.pipeline - 2, degrees.pipeline - 1: 1}
    return {degrees.rank(replace(first, pipeline=stage)): standing for stage, standing in stages.items()}
