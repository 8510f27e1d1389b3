"""This process among the ranks of its site, and the messages that ranks exchange through host memory."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.base.errors import UserError
from llmtrain.base.rank.heartbeat import OTHERS, heart
from llmtrain.base.threads import in_thread
from llmtrain.models.parallel.mesh import host_group

T = TypeVar("T")
_IN_TOUCH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    rank: int
    host: str
    local_rank: int
    """Index among the ranks of its host."""
    device: str
    """Name of the device by its driver."""
    pid: int


class AgreedError(UserError):
    """A user's mistake on one rank, raised on all ranks, of which only rank 0 needs to print it."""

    everywhere = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the ranks of one engine (a site), numbered from 0. All ranks call each method together. This
    base class does not communicate: it is for a single process, or for one that imitates `world_size` ranks by assuming
    that they all send its own value. `ConnectedRanks` sends messages."""

    rank: int = 0
    world_size: int = 1
    """Number of ranks of the site."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seats: tuple[Seat, ...] = ()
    """The process of each rank, in order of rank."""
    store: dist.Store | None = None
    """Key-value store that all ranks see, served by rank 0's process."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank, on all ranks."""
        return [value] * self.world_size

    def gather_to_first(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank, on rank 0; an empty list on the others."""
        return [value] * self.world_size if self.rank == 0 else []

    def first(self, make: Callable[[], T]) -> T:
        """Return on all ranks the value of `make()`, which only rank 0 calls."""
        return make()

    def sent_by(self, source: int, value: T) -> T:
        """Return rank `source`'s value on all ranks."""
        return value

    def sum(self, values: Tensor) -> Tensor:
        """Sum a host tensor over the ranks, in place, and return it. int64 wraps around, as checksums need."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum of a host tensor over the ranks, in place, and return it."""
        return values

    def copy_from(self, source: int, values: Tensor) -> None:
        """Fill a host tensor with the one of rank `source`."""

    def agree(self, weight: int, asks: Sequence[int]) -> Callable[[], tuple[int, list[int]]]:
        """Send this rank's numbers of a step at once. Returns a function that waits for their sums over all ranks: of
        the weight by which the step's loss is divided, and of each number in `asks`."""
        return lambda: (weight, list(asks))

    def meet(self) -> None:
        """Wait until all ranks have called this."""

    def among(self, members: Sequence[int], limit_s: float) -> Ranks | None:
        """Return a group of only these ranks, numbered anew; None if this rank is no member. All ranks must make all
        groups, in the same order. `limit_s`: time limit of the group's messages."""
        return self if self.rank in members else None

    def another(self, limit_s: float) -> Ranks:
        """Return the same ranks as a group of its own, for another thread. `limit_s`: limit of the group's messages."""
        ranks = self.among(range(self.world_size), limit_s)
        assert ranks is not None
        return ranks

    def at_length(self, call: Callable[[], T]) -> T:
        """Return the result of a long call on this rank. The ranks exchange messages until all calls have ended, so
        that none waits in a collective for too long. The watch counts the call's work as progress, but not the
        messages. The call's error is raised at the end."""
        future = in_thread(call, "at length")
        heart.awaits(os.getpid())
        while self.sum(torch.tensor(int(not wait([future], _IN_TOUCH_S).done))):
            heart.awaits(OTHERS if future.done() else os.getpid())
        heart.awaits(0)
        return future.result()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise a UserError of one rank on all ranks; raised on one alone, it would leave the others in a collective.
        Raises AgreedError: on every rank."""
        mine: tuple[str, int] | None = None
        try:
            yield
        except UserError as error:
            mine = (str(error), error.exit_code)
        for rank, error_of_rank in enumerate(self.gather(mine)):
            if error_of_rank is not None:
                message, exit_code = error_of_rank
                raise AgreedError(f"rank {rank}: {message}" if rank > 0 else message, exit_code)


@dataclass(frozen=True, kw_only=True)
class ConnectedRanks(Ranks):
    """The ranks of a process group. Messages stay in the site and in host memory: reading one waits for no device."""

    control: Any
    """A gloo group of the site's ranks."""

    @property
    def group_name(self) -> str:
        """Return the name of the process group that carries the messages."""
        return str(self.control.group_name)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values or None, group=self.control, group_dst=0)
        return values

    def first(self, make: Callable[[], T]) -> T:
        return self.sent_by(0, make() if self.rank == 0 else None)  # type: ignore[return-value]

    def sent_by(self, source: int, value: T) -> T:
        box: list[Any] = [value if self.rank == source else None]
        dist.broadcast_object_list(box, group=self.control, group_src=source)
        sent: T = box[0]
        return sent

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.control)
        return values

    def largest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return values

    def copy_from(self, source: int, values: Tensor) -> None:
        dist.broadcast(values, group=self.control, group_src=source)

    def agree(self, weight: int, asks: Sequence[int]) -> Callable[[], tuple[int, list[int]]]:
        if self.world_size == 1:
            return super().agree(weight, asks)
        message = torch.tensor([weight, *asks], dtype=torch.int64)
        work = dist.all_reduce(message, group=self.control, async_op=True)

        @functools.cache
        def sums() -> tuple[int, list[int]]:
            work.wait()
            total, *others = message.tolist()
            return total, others

        return sums

    def meet(self) -> None:
        dist.barrier(group=self.control)

    def among(self, members: Sequence[int], limit_s: float) -> ConnectedRanks | None:
        numbers = dist.get_process_group_ranks(self.control)
        group = host_group([numbers[rank] for rank in members], limit_s)
        if self.rank not in members:
            return None
        seats = tuple(self.seats[rank] for rank in members) if self.seats else ()
        place = list(members).index(self.rank)
        return replace(self, rank=place, world_size=len(members), seats=seats, control=group)
