"""Find machines that compute wrong: all data-parallel ranks compute losses and gradients of the same sequences.

A defective core gives wrong gradients, and the reduction spreads the damage to all replicas equally, so that a
comparison of replicas (training/replicas.py) finds nothing.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import zlib
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.base.rank import messages
from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.batches import MicroBatch
from llmtrain.data.sequences import IGNORED
from llmtrain.engine.api import GradientPiece
from llmtrain.engine.losses.function import LooksAhead
from llmtrain.engine.ranks.device import device_id
from llmtrain.features.recheck import RecheckConfig
from llmtrain.models import compiler
from llmtrain.models.routing import unwatched
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.replica_check import ReplicaCheck
from llmtrain.training.replicas import Difference, Replicas, ReplicasDiffer, tensor_hash
from llmtrain.training.step import Position, is_due, seed_step

_ROWS, _AFTER_DIFFERENCE = 10, 40
"""Sequences of a check, and of the check after a difference. A module that is wrong in every tenth call is wrong in a
check of 10; one that is wrong at random in one of ten is wrong in a check of 40 with a probability of 98.5 %."""
_BUCKETS, _MARGIN = 17, 8.0
"""How many sums of a gradient are compared where kernels do not repeat their bits, and by how many times a rank's
difference from itself two ranks may differ. The number is a prime, so that no sum is that of a row, which may be 0.
Lengths of 17 random sums differ by a factor of 5 in one of 10^7 pairs."""
_AT_ONCE = _BUCKETS << 20
"""Elements of a gradient that are summed at a time: torch widens a tensor to float64 in a copy of it."""


class Recheck(Part):
    """Compares the ranks' arithmetic at the start of a launch and every `recheck.every` steps."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._every = launch, launch.setup.run.config.section(RecheckConfig).every
        self._engine, self._ranks = launch.setup.engine, launch.setup.ranks
        degrees = launch.setup.run.mix.degrees
        self._data, self._place = degrees.data, degrees.place(self._ranks.rank)
        self._replica = self._ranks.world_size // self._data
        """Number of ranks in a replica, which share a sequence or a matrix."""
        device = self._ranks.seats[self._ranks.rank].device  # another device rounds differently
        self._like = f"at place {self._ranks.rank % self._replica} on {device}"
        """Text that is equal on ranks with equal work."""
        self._turn, self._parts = 0, list[Tensor]()
        self._bound: float | None = None
        """Relative difference that is allowed; None: losses and gradients must be equal bit for bit."""
        self._agreed_step: int | None = None

    def begin(self, position: Position) -> None:
        with heart.during("compare"):
            self._measure_bound(self._micro_batches(position.step))
            self._check_ranks(position.step)

    def after_step(self, done: Done) -> None:
        if is_due(self._every, done.steps):
            with heart.during("compare"):
                self._check_ranks(done.position.step)

    def _check_ranks(self, step: int) -> None:
        """Compare the ranks. Raises on all ranks ReplicasDiffer, or TrainingStopped if there is no majority."""
        micros = self._micro_batches(step)
        if not (differences := self._differences(micros)):
            self._agreed_step = step
            return
        self._measure_bound(micros)  # kernels for this shape of a sequence may not repeat their bits
        odd, computed = Counter({rank for difference in differences for rank in difference.odd}), 0
        while max(odd.values()) < 2 and computed < _AFTER_DIFFERENCE:
            differences = self._differences(micros)  # the same sequences first, then those of other ranks
            odd.update({rank for difference in differences for rank in difference.odd})
            computed += max(1, len(micros))
            micros = self._micro_batches(step)
        if named := sorted(rank for rank, times in odd.items() if times > 1):
            self._end_run(step, named, differences)
        seats = self._seats(sorted(odd))
        text = f"step {step}: {seats} computed a different loss or gradient once, but not on {computed} more."
        log.warn(text)
        self._launch.part(ReplicaCheck).tell(step, "a loss or gradient differed once", sorted(odd), [], text)

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        """Return on all ranks the same sequences, each as a micro-batch: some of a data-parallel rank's next step. The
        ranks take turns."""
        loader, source = self._launch.loader, self._turn % self._data * self._replica
        self._turn += 1
        micros: list[MicroBatch] = []
        with self._ranks.together():
            if self._ranks.rank == source:
                rows = [micro.sequences for micro in loader.build(step).micro_batches]
                mine = [index for row in rows for index in row]
                some = min(_ROWS, -(-3 * len(mine) // 4))  # alone they take longer; a check takes a step at most
                micros = [loader.row(step, index) for index in mine[:some]]
                if len(mine) == len(rows):
                    micros = [self._cut_sequence(micro) for micro in micros]
        return self._ranks.sent_by(source, micros)

    def _cut_sequence(self, micro: MicroBatch) -> MicroBatch:
        """Cut a sequence that would take more memory than in a step: layers here are not compiled and keep 7 bytes,
        compiled ones keep 5. Sequences of answers are not cut."""
        if type(micro) is not MicroBatch:
            return micro
        setup = self._launch.setup
        unit = setup.run.mix.degrees.sequence * (
            16 if setup.run.config.model.fp8 else 1
        )  # fp8's products take 16 tokens
        few = micro.columns(max(1, micro.inputs.shape[1] * 5 // 8 // unit) * unit)
        return few if (few.labels != IGNORED).any() else micro  # an answer that stands at the end

    def _measure_bound(self, micros: list[MicroBatch]) -> None:
        """Compute the sequences twice. If ranks of two or more replicas differ from themselves, set the bound by the
        second largest difference, so that a single wrong machine does not decide it."""
        second, bound, self._bound = -1 - self._replica, self._bound, None
        once, twice = self._gradients(micros), self._gradients(micros)
        if sorted(self._ranks.gather(not torch.equal(once, twice)))[second]:
            self._bound = math.inf
            once, twice = self._gradients(micros), self._gradients(micros)
            apart = float(((once - twice).norm(dim=2) / once.norm(dim=2)).nan_to_num(0.0).max())
            self._bound = max(bound or 0.0, _MARGIN * sorted(self._ranks.gather(apart))[second])

    def _differences(self, micros: list[MicroBatch]) -> list[Difference]:
        values = self._gradients(micros)
        if self._bound is not None:  # 0 near the median rank, else a number of its own
            alike = [value for like, value in self._ranks.gather((self._like, values)) if like == self._like]
            middle = torch.stack(alike).median(dim=0).values
            odd = (values - middle).norm(dim=2) > self._bound * middle.norm(dim=2)
            values = odd.any(dim=1) * (self._ranks.rank + 1)
        by_name = {f"sequence {row} {self._like}": value for row, value in enumerate(values.tolist())}
        return Replicas(self._engine, self._ranks).differences({"sequences": len(micros)}, by_name, parameters=False)

    def _gradients(self, micros: list[MicroBatch]) -> Tensor:
        """Return hashes of each sequence's loss and gradient, int64 [sequences, 2], or, if there is a bound, sums, fp64
        [sequences, 2, _BUCKETS]. The run's random state does not change."""
        objective, device = self._launch.session.objective, self._ranks.device
        values = [torch.zeros((0, 2) if self._bound is None else (0, 2, _BUCKETS), dtype=torch.int64)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(compiler.uncompiled())
            stack.enter_context(unwatched(self._engine.module))  # its counts are of steps
            if isinstance(objective, LooksAhead):
                objective.look(micros, self._engine.evaluate)
            for micro in micros:
                seed_step(0, micro.sequences[0], self._place.sequence)
                # A divisor of a step's size: fp16 would overflow.
                weight = max(1, objective.weight(micro)) * self._data * len(micros)
                self._parts = []
                (sums,) = self._engine.gradients([micro], weight, self._add_piece, objective, alone=True)
                loss = self._hash_or_sums(sums[:1])  # a head that goes wrong after its logits gives a wrong loss alone
                values.append(torch.stack([loss, torch.stack(self._parts).sum(0)]).unsqueeze(0).cpu())
                heart.beat()
        return torch.cat(values)

    def _add_piece(self, piece: GradientPiece) -> None:
        number = zlib.crc32(repr((piece.name, piece.region)).encode())
        self._parts.append(self._hash_or_sums(piece.values, 2 * number + 1))

    def _hash_or_sums(self, values: Tensor, factor: int = 1) -> Tensor:
        """Return a hash of the values times `factor`, or, if there is a bound on differences, sums of the values."""
        if self._bound is None:
            return tensor_hash(values) * factor
        sums = torch.zeros(_BUCKETS, dtype=torch.float64, device=values.device)
        for piece in values.reshape(-1).split(_AT_ONCE):
            padded = F.pad(piece, (0, -piece.numel() % _BUCKETS))
            sums += padded.view(-1, _BUCKETS).sum(dim=0, dtype=torch.float64)
        return sums.nan_to_num(0.0, 0.0, 0.0)

    def _end_run(self, step: int, named: list[int], differences: list[Difference]) -> None:
        sure = all(2 * len(difference.groups[0]) > sum(map(len, difference.groups)) for difference in differences)
        than = "other losses or gradients than the other ranks" if sure else "different ones, and no majority decides"
        before = "earlier checkpoints" if self._agreed_step is None else f"checkpoints after step {self._agreed_step}"
        text = (
            f"after step {step}: {self._seats(named)} twice computed {than}, from equal sequences and parameters. The "
            f"device, memory or processor there is at fault. Nothing is saved, and {before} may be damaged: leave out "
            "the host, and to be sure resume from an older checkpoint (resume: its path)."
        )
        self._launch.part(ReplicaCheck).tell(step, "computes wrong", named, [], text)
        if sure and self._ranks.rank == 0:  # `llmtrain launch` leaves the host out
            cause, host = "computes wrong", self._ranks.seats[named[0]].host
            about: dict[str, Any] = {"signature": f"{cause}: ranks {named}", "text": text, "unfit": True}
            messages.emit("fault", what="recheck", cause=cause, host=host, ranks=named, step=step, **about)
        raise (ReplicasDiffer if sure else TrainingStopped)(text)

    def _seats(self, ranks: list[int]) -> str:
        """Name the hosts and devices of some ranks. All ranks call it."""
        seats, serials = self._ranks.seats, self._ranks.gather(_serial(self._ranks.device))
        return ", ".join(
            f"rank {n} on {seats[n].host} ({seats[n].device} {seats[n].local_rank}{serials[n]})" for n in ranks
        )


def _serial(device: torch.device) -> str:
    """Return a GPU's serial number by nvidia-smi, or else its UUID; "" for a CPU."""
    if not (number := device_id(device)):
        return ""
    asked = ("nvidia-smi", "-i", f"GPU-{number}", "--query-gpu=serial", "--format=csv,noheader")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
        if answer.returncode == 0 and answer.stdout.strip().isalnum():  # else [N/A], or an error's text
            number = answer.stdout.strip()
    return f", serial {number}"
