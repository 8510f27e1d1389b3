"""Estimate a step's time: the work of a rehearsed rank divided by the speeds of a device and its links."""

from __future__ import annotations

import math
import multiprocessing
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.choice import either
from llmtrain.base.threads import usable_cores
from llmtrain.base.units import count
from llmtrain.config.load import COMMAND_LINE
from llmtrain.config.problems import stop
from llmtrain.config.run import Run
from llmtrain.features.plan.device import Machines
from llmtrain.features.plan.rehearsal import Rehearsed, kinds
from llmtrain.features.plan.work import Message, Operator
from llmtrain.tracking.metrics import peak_flops

_GB = 1e9
_GPUS = {
    "rtx4090-24": ("RTX 4090", 1008, 32, 32),
    "a100-40": ("A100", 1555, 300, 32),
    "l40s-48": ("L40S", 864, 32, 32),
    "h100-80": ("H100", 3350, 450, 64),
    "a100-80": ("A100", 2039, 300, 32),
    "h200-141": ("H200", 4800, 450, 64),
    "b200-180": ("B200", 8000, 900, 64),
}
"""Name in the table of peaks, and GB/s in one direction: memory, to another GPU of the host (NVLink, else PCIe), to the
host's memory. From the vendors' data sheets."""
_LINKS = {"ib400": (400, True), "ib200": (200, True), "eth100": (100, False), "eth25": (25, False),
          "eth10": (10, False), "eth1": (1, False)}  # fmt: skip
"""Name of a network -> Gbit/s in one direction, and whether each rank has its own network card."""
_OF_GLOO = {"reduce_scatter": 2, "allgather": 1.5}
"""Factors on the bytes of a ring, measured on slow cables. gloo sends a reduce-scatter as an all-reduce, and fills both
directions with an all-gather."""
_HOST_MEMORY = 200 * _GB
"""Bytes a second of a host's memory, for all of its ranks: a guess."""
_PAYLOAD = 0.95
"""Share of an Ethernet link's bits that are no headers."""
_PRODUCTS, _ATTENTION, _PASSES, _CARRIED = 0.64, 0.33, 0.85, 0.8
"""Shares of a peak that kernels get: tools/bench/estimate.py has the sources."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    products: float
    """FLOP/s of matrix products."""
    attention: float
    memory: float
    """Bytes a second that operators read and write."""
    inside: float
    """Bytes a second from a rank to another of its host."""
    to_host: float
    """Bytes a second between a device and its host's memory."""
    across: float = math.inf
    """Bytes a second from a host to others."""
    overhead_s: float = 0.0
    """Seconds that any operator takes at least."""
    trip_s: float = 10e-6
    """Seconds for a message without content."""
    peak: float = math.inf
    """Peak FLOP/s, to which MFU relates; infinite: not known."""
    overlaps: bool = True
    """True if messages travel while the device computes."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTime:
    seconds: float
    parts: dict[str, float]
    """Seconds of each part of a step."""
    hidden_messages: float
    """Seconds of messages that travel while a rank computes."""
    tokens_per_s: float
    """Tokens of all ranks together."""
    mfu: float | None
    steps: int | None
    """Optimizer steps of the run."""
    days: float | None
    price: float | None
    """A device's hour costs this."""
    cost: float | None
    assumed: tuple[str, ...]

    def text(self) -> list[str]:
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        lines = [f"a step: {self.seconds:.3g} s, {count(self.tokens_per_s)} tokens/s of all ranks{mfu} (an estimate)"]
        lines += bars(self.parts, lambda took: f"{took:.3g} s")
        if self.hidden_messages:
            lines.append(f"  {self.hidden_messages:.3g} s of messages are sent while the ranks compute")
        if self.days is not None:
            cost = "" if self.cost is None else f", {self.cost:,.0f} at {self.price:g} for a device's hour"
            lines.append(f"the run: {self.steps:,} steps, {self.days:.3g} days{cost}")
        return [*lines, *(f"  assumed: {note}" for note in self.assumed)]


def bars(parts: Mapping[str, float], text: Callable[[float], str]) -> list[str]:
    """Align labels and numbers, each with a bar."""
    longest, widest = max(parts.values()), max(map(len, parts))
    return [
        f"  {label:<{widest}}  {text(number):>10}  {'#' * round(24 * number / longest)}".rstrip()
        for label, number in parts.items()
    ]


def _link(machines: Machines) -> tuple[float, float, list[str]]:
    """(bytes a second from a host, seconds of a trip, notes)."""
    link, several = machines.link or "ib400", machines.hosts > 1
    if bits := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mg])bit", link.lower()):
        rate = float(bits[1]) * {"m": 1e6, "g": 1e9}[bits[2]] / 8
        return _PAYLOAD * rate, 10e-6, [f"a host sends {_PAYLOAD:.0%} of {link}/s"] * several
    if link.endswith(".json"):
        try:
            pairs = untrusted.loads(Path(link).read_bytes())["fabric"]["pairs"]
            good = [pair for pair in pairs if pair["error"] is None]
            rate, trip_s = (median(pair[key] for pair in good) for key in ("up", "trip_s"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "write `llmtrain doctor --json > fabric.json`"
            raise stop("--link", link, "has no rates between hosts", remedy, COMMAND_LINE) from error
        return rate / 8, trip_s / 2, [f"a host sends {rate / 1e9:.3g} Gbit/s, the median of doctor's pairs"]
    if link not in _LINKS:
        remedy = f"write {either([*_LINKS])}, 40Gbit, or a file of `llmtrain doctor --json`"
        raise stop("--link", link, "is no link", remedy, COMMAND_LINE)
    gbits, for_rank = _LINKS[link]
    rates = f"{_CARRIED:.0%} of {gbits} Gbit/s for each {'rank' if for_rank else 'host'}"
    guess = "" if machines.link else "; --link says another network"
    rate = _CARRIED * gbits * _GB / 8 * (machines.slots if for_rank else 1)
    return rate, 10e-6, [f"hosts send {rates} (a guess{guess})"] * several


def speeds_for(run: Run, machines: Machines) -> Speeds | None:
    """Return the speeds of a device; None: the table does not have it. Raises ConfigError: no such link."""
    across, trip_s, linked = _link(machines)
    if not machines.on_gpu:
        measured = _measured_cpu(run.mix.products, machines.slots)
        notes = (*measured.notes, *linked)
        return replace(measured, across=across, trip_s=max(trip_s, measured.trip_s), notes=notes)
    if machines.device not in _GPUS:
        return None
    chip, memory, inside, to_host = _GPUS[machines.device]
    peak = peak_flops(chip, "bf16")
    assert peak is not None
    return Speeds(
        products=_PRODUCTS * peak,
        attention=_ATTENTION * peak,
        memory=_PASSES * memory * _GB,
        inside=_CARRIED * inside * _GB,
        to_host=_CARRIED * to_host * _GB,
        across=across,
        trip_s=trip_s,
        peak=peak,
        notes=(
            f"products get {_PRODUCTS:.0%} of {peak / 1e12:g} TFLOP/s, attention {_ATTENTION:.0%} (published; no GPU "
            "was measured)",
            f"other operators get {_PASSES:.0%} of {memory} GB/s, none is fused (a guess)",
            f"messages inside a host get {_CARRIED:.0%} of {inside} GB/s (a guess)",
            *linked,
        ),
    )


def step_time(run: Run, machines: Machines, speeds: Speeds, rehearsed: Mapping[int, Rehearsed]) -> StepTime:
    """Estimate a step of the slowest rank. `rehearsed`: one rank of each kind."""
    slots = machines.slots
    degrees, mix, batch = run.mix.degrees, run.mix, run.batch
    zero = run.deepspeed.get("zero_optimization") or {}
    shared = degrees.data * degrees.sequence

    def operator_s(operator: Operator) -> float:
        if mix.offload_optimizer and operator.phase == "step":
            return operator.bytes / (_HOST_MEMORY / slots)
        rate = speeds.attention if "attention" in operator.name else speeds.products
        return max(operator.flops / rate, operator.bytes / speeds.memory) + speeds.overhead_s

    def of_a_layer(message: Message) -> bool:
        """Return True for a message of ranks that share a layer's matrices, who wait for it."""
        return degrees.tensor > 1 and message.group[0] // degrees.tensor == message.group[-1] // degrees.tensor

    def hides(message: Message) -> bool:
        """Return True for a message of ZeRO that is sent while the rank computes."""
        if not speeds.overlaps or degrees.pipeline > 1 or len(message.group) < shared or of_a_layer(message):
            return False
        if message.phase not in ("forward", "backward", "recompute") or message.kind == "alltoall":
            return False
        return mix.zero_stage == 3 or bool(mix.zero_stage and zero.get("overlap_comm"))

    saves_s, saving = 0.0, run.config.checkpoint
    if machines.disk is not None and saving.mode == "sync" and saving.every_steps is not None:
        written = sum(rehearsed[rank].saved * number for rank, number in kinds(degrees).items())
        saves_s = written * degrees.world_size / degrees.pipeline / machines.disk / saving.every_steps
    longest: dict[str, float] = {}
    hidden_s = useful = 0.0
    for rank, number in kinds(degrees).items():
        computing, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
        parts = dict.fromkeys(("computing", "recomputing", "messages", "update", "offload"), 0.0)
        passing = 0.0  # messages without which the next stage cannot begin
        for operation, times in rehearsed[rank].step.items():
            if isinstance(operation, Message):
                took = times * message_s(operation, slots, speeds)
                if hides(operation):
                    hidden[operation.phase] += took
                else:
                    parts["messages"] += took
                passing += took if operation.kind in ("send", "recv") or of_a_layer(operation) else 0.0
            else:
                took = times * operator_s(operation)
                parts[{"recompute": "recomputing", "step": "update"}.get(operation.phase, "computing")] += took
                computing[operation.phase] += took
                useful += operation.flops * times * number if operation.phase != "recompute" else 0
        parts["messages"] += sum(max(0.0, took - computing[phase]) for phase, took in hidden.items())
        # Weights or gradients, once: 2 bytes a parameter for 12 of masters and moments; 4 in fp32.
        part_s = rehearsed[rank].saved / (3 if mix.precision == "fp32" else 6) / speeds.to_host
        parts["offload"] = 2 * part_s * mix.offload_optimizer + 2 * part_s * batch.accumulation * mix.offload_param
        passes = parts["computing"] + parts["recomputing"] + passing
        parts["bubble"] = passes / batch.accumulation * (degrees.pipeline - 1)
        parts["saves"] = saves_s
        if sum(parts.values()) > sum(longest.values()):
            longest, hidden_s = parts, sum(hidden.values())
    seconds, steps, price = sum(longest.values()), run.max_steps, machines.price
    days = None if steps is None else steps * seconds / 86400
    return StepTime(
        seconds=seconds,
        parts={part: took for part, took in longest.items() if took},
        hidden_messages=hidden_s,
        tokens_per_s=batch.tokens / seconds,
        mfu=useful / degrees.pipeline / (seconds * speeds.peak) or None,
        steps=steps,
        days=days,
        price=price,
        cost=None if days is None or price is None else days * 24 * degrees.world_size * price,
        assumed=speeds.notes,
    )


def message_s(message: Message, slots: int, speeds: Speeds) -> float:
    """Seconds of a message in rings: one of each host's ranks at most sends to another host, once around."""
    ranks = len(message.group)
    hosts = len({rank // slots for rank in message.group})
    if ranks == 1 or message.kind == "barrier":
        return 0.0
    trips_s = speeds.trip_s * math.ceil(math.log2(ranks)) * (2 if message.kind == "allreduce" else 1)
    # A stage waits for what it receives as long as the other sends it.
    sent = message.bytes if message.kind == "recv" else message.sent
    if not speeds.overlaps:
        sent *= _OF_GLOO.get(message.kind, 1)
    if hosts == 1:
        return sent / speeds.inside + trips_s
    per_host = ranks / hosts  # a host's other ranks are in other groups, which send at the same time
    leaving = per_host * message.bytes * (1 - per_host / ranks) if message.kind == "alltoall" else sent
    return max(sent / speeds.inside, leaving / (speeds.across * per_host / slots)) + trips_s


def _measured_cpu(precision: str, ranks: int) -> Speeds:
    """Measure this machine in a second, with as many processes as a host has ranks; at most one for each core."""
    at_once = min(ranks, usable_cores())
    # At its end the pool sends SIGTERM, for which the command has a handler.
    default = (signal.SIGTERM, signal.SIG_DFL)
    with multiprocessing.get_context("fork").Pool(at_once, signal.signal, default) as pool:
        measured = pool.map(_measured, [precision] * at_once, chunksize=1)
    products, memory, operators = (median(column) * at_once / ranks for column in zip(*measured, strict=True))
    rates = f"{products / 1e9:.3g} GFLOP/s, {memory / 1e9:.3g} GB/s and {1e6 / operators:.3g} us for an operator"
    return Speeds(
        products=products,
        attention=products,
        memory=memory,
        inside=memory / 2,
        to_host=math.inf,
        trip_s=100e-6,
        overhead_s=1 / operators,
        overlaps=False,
        notes=(f"{rates}, measured here with {at_once} at once",),
    )


def _measured(precision: str) -> tuple[float, float, float]:
    """FLOP/s of products, bytes a second of passes, small operators a second."""
    import torch

    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    matrix, long = torch.ones(384, 384, dtype=dtype), torch.ones(1 << 22, dtype=dtype)
    small = torch.ones(16, requires_grad=True)

    def chain() -> None:
        value = small
        for _ in range(50):
            value = value * 1.0
        value.sum().backward()

    def once(work: Any) -> float:
        took = []
        for _ in range(20):
            began_s = time.perf_counter()
            work()
            took.append(time.perf_counter() - began_s)
        return min(took)  # the others met other programs

    products_s, passes_s, chain_s = once(lambda: matrix @ matrix), once(lambda: long * 2), once(chain)
    return 2 * 384**3 / products_s, 2 * long.nbytes / passes_s, 100 / chain_s
