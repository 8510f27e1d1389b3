"""Load balancing: each data-parallel group takes as many sequences of a step as its measured speed allows.

The loss is the mean over the tokens of the global batch, so it does not depend on the shares. All ranks decide from the
same measurements, without another message.

A rank's speed excludes waiting for others. On a CPU it is the time of a step's forward and backward passes without the
time inside collectives. On a GPU the host does not wait and collectives are in the device's queue, so it is the time
between CUDA events around a forward pass. Under ZeRO 3 this pass waits for parameters; there the events are around each
module with parameters, after these have arrived.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from llmtrain.base import log
from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.progress import Event
from llmtrain.features.balance import BalanceFeature
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Passes, Request

SETTLE_STEPS = 2
"""Steps that are not measured after the start and after a change, while kernels are chosen and code is compiled."""
WINDOW_STEPS = 8
"""Number of steps of which the median counts, so that a single delayed step has no effect."""
LEAST_GAIN = 0.03
"""A change must save at least this share of a step's computing time, so that noise causes no changes."""


def share_out(seconds: Sequence[float], total: int, *, least: int, most: int, unit: int) -> tuple[int, ...]:
    """Return how many of `total` sequences each group gets, so that the slowest group takes the least time.

    Shares are multiples of `unit` from `least` to `most`. `seconds`: time of a sequence in each group.
    """
    shares = [least] * len(seconds)
    ends = [(time_s * (least + unit), least, group) for group, time_s in enumerate(seconds) if least + unit <= most]
    heapq.heapify(ends)
    for _ in range((total - sum(shares)) // unit):
        *_, group = heapq.heappop(ends)  # of two groups with the same time the one with fewer sequences
        shares[group] += unit
        if shares[group] + unit <= most:
            heapq.heappush(ends, (seconds[group] * (shares[group] + unit), shares[group], group))
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class Change:
    """New shares from the next step on, with the reason."""

    before: tuple[int, ...]
    """Sequences of a step in each group."""
    after: tuple[int, ...]
    before_s: float
    """Computing time of the slowest group in a step."""
    after_s: float
    """Computing time in a step after the change, as predicted from the measured speeds."""
    equal_s: float
    """Computing time in a step with equal shares."""
    ideal_s: float
    """Computing time in a step if no rank waited: the speeds of all groups added up."""

    def __str__(self) -> str:
        shares = ", ".join(map(str, self.after[:16])) + (", ..." if len(self.after) > 16 else "")
        return (
            f"ranks of unequal speed now take {shares} sequences of a step. A step computes for {self.after_s:.3g} s "
            f"(before: {self.before_s:.3g} s; with equal shares: {self.equal_s:.3g} s), which is "
            f"{self.ideal_s / self.after_s:.0%} of the ranks' speeds together (with equal shares: "
            f"{self.ideal_s / self.equal_s:.0%})"
        )


class Balance:
    """Computes each group's share of a step from the measured speeds of the ranks."""

    def __init__(self, groups: Sequence[int], *, global_batch: int, accumulation: int, at_once: bool) -> None:
        """`groups`: data-parallel group of each rank. `at_once`: ranks wait for each other in every micro-batch (ZeRO 2
        and 3), so that all micro-batches of a group must have the same size."""
        self._groups, self._count = tuple(groups), max(groups) + 1
        self._total, self._least = global_batch, accumulation
        self._most = BalanceFeature.most_sequences * (global_batch // self._count)
        self._unit = accumulation if at_once else 1
        self._equal = (global_batch // self._count,) * self._count
        self.sequences: tuple[int, ...] = self._equal
        """Sequences of a step, by group."""
        self._forget_speeds()

    def restore(self, saved: Any) -> None:
        """Take the shares from a checkpoint, unless they do not fit this launch."""
        shares = saved.get("sequences") if isinstance(saved, dict) else None
        if not isinstance(shares, list) or not all(type(share) is int for share in shares):
            return
        legal = all(self._least <= share <= self._most and share % self._unit == 0 for share in shares)
        if legal and (len(shares), sum(shares)) == (self._count, self._total):
            self.sequences = tuple(shares)

    def _forget_speeds(self) -> None:
        self._settles = SETTLE_STEPS
        self._window: list[list[int]] = []

    def measured(self, paces: Sequence[int]) -> Change | None:
        """Take the nanoseconds that a sequence took on each rank (0: unknown), once a step.

        Returns a change of the shares if it is worth it; `sequences` then has the new shares.
        """
        if not all(paces):
            return None
        if self._settles:
            self._settles -= 1
            return None
        slowest = [0] * self._count
        for group, pace in zip(self._groups, paces, strict=True):
            slowest[group] = max(slowest[group], pace)
        self._window.append(slowest)
        if len(self._window) < WINDOW_STEPS:
            return None
        seconds = [statistics.median(column) / 1e9 for column in zip(*self._window, strict=True)]
        self._window = []
        after = share_out(seconds, self._total, least=self._least, most=self._most, unit=self._unit)
        before_s, after_s = _slowest(seconds, self.sequences), _slowest(seconds, after)
        if after_s > (1 - LEAST_GAIN) * before_s:
            return None
        change = Change(
            before=self.sequences,
            after=after,
            before_s=before_s,
            after_s=after_s,
            equal_s=_slowest(seconds, self._equal),
            ideal_s=self._total / sum(1 / time_s for time_s in seconds),
        )
        self.sequences = after
        self._forget_speeds()
        return change


def _slowest(seconds: Sequence[float], sequences: Sequence[int]) -> float:
    """Return the seconds that the slowest group takes for its sequences."""
    return max(time_s * count for time_s, count in zip(seconds, sequences, strict=True))


class Pace(Protocol):
    """Measures the speed of this rank."""

    def measured(self, micros: Sequence[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """Return a context that measures the forward and backward passes of these micro-batches."""
        ...

    def take(self) -> int:
        """Return the nanoseconds that a sequence took in a step since the last call; 0: unknown."""
        ...

    def forget(self) -> None:
        """Drop all measurements."""
        ...


class HostPace:
    def __init__(self, waited_s: Callable[[], float] = heart.waited_s, clock: Callable[[], float] = time.monotonic):
        self._waited_s, self._clock = waited_s, clock
        self._found = 0

    @contextlib.contextmanager
    def measured(self, micros: Sequence[MicroBatch]) -> Iterator[None]:
        began_s, waited_s = self._clock(), self._waited_s()
        yield
        own_s = self._clock() - began_s - (self._waited_s() - waited_s)
        rows = sum(len(micro.sequences) for micro in micros)
        self._found = max(1, round(own_s * 1e9 / rows))

    def take(self) -> int:
        pace, self._found = self._found, 0
        return pace

    def forget(self) -> None:
        self._found = 0


class DevicePace:
    """Measures the first forward pass of a step on a GPU. Nothing waits for the device."""

    def __init__(self, module: nn.Module, *, gathers: bool, new_event: Callable[[], Event] | None = None) -> None:
        """`gathers`: parameters are gathered when their module begins (ZeRO 3); DeepSpeed's hooks are registered."""
        self._new_event = new_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._wanted = self._inside = False
        self._open: list[Event] = []
        self._pairs: list[tuple[Event, Event]] = []
        self._ahead: deque[tuple[int, list[tuple[Event, Event]]]] = deque()
        module.register_forward_pre_hook(self._enter)
        timed = [submodule for submodule in module.modules() if any(True for _ in submodule.parameters(recurse=False))]
        for submodule in timed if gathers else [module]:
            submodule.register_forward_pre_hook(self._begin)
            submodule.register_forward_hook(self._end, prepend=True)  # before parameters are given back
        module.register_forward_hook(self._leave)

    @contextlib.contextmanager
    def measured(self, micros: Sequence[MicroBatch]) -> Iterator[None]:
        self._wanted, self._pairs = True, []
        try:
            yield
        finally:
            self._wanted = self._inside = False
        self._ahead.append((len(micros[0].sequences), self._pairs))

    def take(self) -> int:
        pace = 0
        while self._ahead and all(end.query() for _, end in self._ahead[0][1]):
            rows, pairs = self._ahead.popleft()
            pace = max(1, round(sum(begin.elapsed_time(end) for begin, end in pairs) * 1e6 / rows))
        return pace

    def forget(self) -> None:
        self._ahead.clear()

    def _enter(self, *_: Any) -> None:
        self._inside, self._wanted = self._wanted, False

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _begin(self, *_: Any) -> None:
        if self._inside:
            self._open.append(self._record_event())

    def _end(self, *_: Any) -> None:
        if self._inside:
            self._pairs.append((self._open.pop(), self._record_event()))

    def _record_event(self) -> Event:
        event = self._new_event()
        event.record()
        return event


class LoadBalance(Part):
    """Measures this launch's ranks, and divides the sequences of a step among them."""

    key = "shares"

    def __init__(self, launch: Launch) -> None:
        setup = launch.setup
        engine, ranks, batch = setup.engine, setup.ranks, setup.run.batch
        self.pace: Pace = HostPace()
        """Measures this rank."""
        if ranks.device.type == "cuda":
            self.pace = DevicePace(engine.module, gathers=engine.partitions_parameters)
        self._ranks, self._loader, self._tracker = ranks, launch.loader, launch.tracker
        self._balance = Balance(
            [setup.run.mix.degrees.place(rank).data for rank in range(ranks.world_size)],
            global_batch=batch.global_batch,
            accumulation=batch.accumulation,
            at_once=setup.run.mix.zero_stage >= 2,
        )

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences of a step, by data-parallel group."""
        return self._balance.sequences

    def restore(self, saved: Any, folder: Path) -> None:
        self._balance.restore(saved)
        self._loader.share(self.sequences)

    def to_json(self) -> dict[str, Any]:
        return {"sequences": list(self.sequences)}

    def request(self) -> Request:
        paces = [0] * self._ranks.world_size
        paces[self._ranks.rank] = self.pace.take()
        return Request(sums={"paces": paces})

    def around_passes(self, passes: Passes) -> contextlib.AbstractContextManager[None]:
        return self.pace.measured(passes.micro_batches)

    def after_step(self, done: Done) -> None:
        if (change := self._balance.measured(done.agreed.sums["paces"])) is None:
            return
        self.pace.forget()
        self._loader.share(change.after)
        self._tracker.event("shares", step=done.position.step, **asdict(change))
        log.info(f"step {done.position.step}: {change}")
