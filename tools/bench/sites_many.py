"""Many sites on one machine: what the coordinator costs, and what a round costs, without a model or a network.

    python tools/bench/sites_many.py --sites 64

coordinator: `llmtrain sites coordinator` in a process of its own, and as many clients as sites, each with its
heartbeat, that meet twice a round and say what a site of that many says. Its CPU seconds are the kernel's.

rounds: the real rounds (`sites/site.py`, `exchange.py`, `transport.py`) of sites that are threads of this process, over
the loopback; an array stands for a model, and a meeting in this process for the coordinator. The CPU time is that of
the process over the number of sites: one core shared by all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RUST_LOG", "warn")

import psutil  # noqa: E402
import torch  # noqa: E402

from llmtrain.engine.api import StateTensor  # noqa: E402
from llmtrain.engine.ranks.ranks import Ranks  # noqa: E402
from llmtrain.features.sites import site  # noqa: E402
from llmtrain.features.sites.membership import Member, TorchftMembers  # noqa: E402
from llmtrain.features.sites.outer_methods import DiLoCo  # noqa: E402
from llmtrain.features.sites.sample_ledger import (  # noqa: E402
    Ledger,
    Request,
    Share,
)
from llmtrain.storage.region import Region  # noqa: E402

TENSORS = 8
MEETINGS = 2
"""Number of meetings in a round."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=64, help="of the coordinator, and the most of a round")
    parser.add_argument("--parameters", type=int, default=100_000, help="4 bytes each, times sites squared, of memory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between two rounds at the coordinator")
    parser.add_argument("--only", choices=["coordinator", "rounds"])
    return parser.parse_args(argv)


def said(sites: int, own: int, round_: int) -> dict[str, Any]:
    """What a site of so many tells the others at a meeting."""
    names = [f"site-{number:03}:0123abcd" for number in range(sites)]
    requests = [Request(site=name, batch=64, steps=100, reserve=1000) for name in names]
    ledger = Ledger(next=10**6).settled({}, requests)
    return {
        "phase": "meet",
        "run": "0" * 16,
        "common": {f"key {number}": "0" * 16 for number in range(20)},
        "was": names[own],
        "round": round_,
        "trained": 6400,
        "weights": [10**7],
        "ledger": ledger.to_json(),
        "checksum": "0" * 33,
        "step": 100 * round_,
        "batch": 64,
        "weight": 10**7,
        "addresses": ["10.0.0.1:12345"],
    }


@contextlib.contextmanager
def coordinator() -> Iterator[tuple[str, psutil.Process]]:
    """HOST:PORT, and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "llmtrain", "sites", "coordinator", "--bind", address]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert process.stdout is not None and process.stdout.readline(), "the coordinator has not started"
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def cpu_s(process: psutil.Process) -> float:
    """Its CPU seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def meetings(options: argparse.Namespace) -> None:
    """The coordinator's table."""
    count = options.sites
    with coordinator() as (address, process), ThreadPoolExecutor(count) as pool:
        clients = [TorchftMembers(address, f"site-{number:03}:0123abcd", 30.0) for number in range(count)]
        began_s, before = time.monotonic(), cpu_s(process)
        time.sleep(min(10.0, options.every_s))
        beats = (cpu_s(process) - before) / (time.monotonic() - began_s)
        costs, spans, sizes = [], [], []
        for round_ in range(options.rounds + 1):  # the first waits for sites that the coordinator may not know
            messages = [said(count, number, round_) for number in range(count)]
            sizes = [len(json.dumps(message)) for message in messages]
            began_s, before = time.monotonic(), cpu_s(process)
            for _ in range(MEETINGS):
                met = list(pool.map(lambda pair: pair[0].meet(pair[1], 60.0), zip(clients, messages, strict=True)))
                assert all(len(members) == count for members in met), [len(members) for members in met]
            costs.append(cpu_s(process) - before)
            spans.append(time.monotonic() - began_s)
        for client in clients:
            client.close()
    cost, span = statistics.median(costs[1:]), statistics.median(spans[1:])
    share = beats + cost / options.every_s
    sent_mb = MEETINGS * count * sum(sizes) / 1e6
    print(
        f"coordinator, {count} sites: heartbeats {beats:.2%} of a core; a round's two meetings {cost:.3f} CPU-s, "
        f"{span:.2f} s; {sent_mb:.1f} MB sent a round ({statistics.mean(sizes):,.0f} bytes a site said)"
    )
    print(f"coordinator, a round every {options.every_s:g} s: {share:.2%} of a core", flush=True)


class Hall:
    """A meeting in this process: everybody is told when all are there."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._here: dict[str, Member] = {}

    def member(self, _coordinator: str, member_id: str, _connect_s: float) -> Any:
        """What `Site` asks for."""
        return SimpleNamespace(
            id=member_id,
            meet=lambda words, limit_s: self.meet(member_id, words, limit_s),
            heard=list,
            close=lambda: None,
        )

    def meet(self, member_id: str, words: Mapping[str, Any], limit_s: float) -> list[Member]:
        """All who have come."""
        self._here[member_id] = Member(id=member_id, message=json.loads(json.dumps(words)))
        self._barrier.wait(limit_s)
        met = sorted(self._here.values(), key=lambda each: each.id)
        self._barrier.wait(limit_s)  # nobody is at the next meeting before all have read
        return met


class Numbers:
    """An engine that holds some tensors and trains nothing."""

    def __init__(self, parameters: int) -> None:
        self._each = parameters // TENSORS
        self._values = torch.randn(TENSORS, self._each)

    def state(self) -> list[StateTensor]:
        """As an engine's."""
        return [
            StateTensor(
                name=f"layers.{number}.weight",
                kind="param",
                region=Region(0, self._each),
                own=slice(0, self._each),
                replica=(0, 1),
                dtype=torch.float32,
                device=torch.device("cpu"),
                open=lambda row=number: contextlib.nullcontext(self._values[row]),  # type: ignore[misc]
            )
            for number in range(TENSORS)
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As an engine's."""
        return {f"layers.{number}.weight": (self._each,) for number in range(TENSORS)}

    def refresh(self) -> None:
        """Nothing is kept elsewhere."""

    def train(self) -> None:
        """A step's change."""
        self._values += 0.01


def at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], Any]]) -> None:
    """Each in a thread of its own."""
    for future in [pool.submit(call) for call in calls]:
        future.result()


def rounds(count: int, compress: Any, options: argparse.Namespace) -> None:
    """One row of the rounds' table."""
    hall, events = Hall(count), []
    sites, engines = [], []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        for number in range(count):
            settings = DiLoCo(
                name=f"site-{number:03}",
                coordinator="127.0.0.1:1",
                sync_every=1,
                compress=compress,
                timeout_s=600.0,
                max_alone_steps=4,
            )
            engine: Any = Numbers(options.parameters)
            engines.append(engine)
            tell = (lambda kind, **fields: events.append((kind, fields))) if number == 0 else (lambda kind, **_: None)
            share = Share(batch=1, tokens=1)
            opened = site.Site(engine, Ranks(), settings, {}, share, tell, members=hall.member)
            sites.append(stack.enter_context(opened))
        at_once(pool, [lambda e=each: e.begin(0, 0, 600.0) for each in sites])  # type: ignore[misc]
        costs, spans = [], []
        for step in range(1, options.rounds + 2):  # the first asks for the indexes
            for engine in engines:
                engine.train()
            began_s, before = time.monotonic(), time.process_time()
            at_once(pool, [lambda e=each, at=step: e.after_update(at, 0.001, complete=False) for each in sites])  # type: ignore[misc]
            costs.append((time.process_time() - before) / count)
            spans.append(time.monotonic() - began_s)
    kind, fields = events[-1]
    assert kind == "synchronise" and len(fields["used"]) == count, (kind, fields)
    received = fields["received_bytes"]
    print(
        f"{count:>6}{compress:>10}{received:>16,}{count * (count - 1):>13,}{statistics.median(costs[1:]):>10.3f}"
        f"{statistics.median(spans[1:]):>10.2f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    options = arguments(argv)
    from machine import about

    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    if options.only != "rounds":
        meetings(options)
    if options.only != "coordinator":
        print(
            f"rounds, {options.parameters:,} parameters\n{'sites':>6}{'compress':>10}{'bytes received':>16}"
            f"{'requests':>13}{'CPU-s':>10}{'wall, s':>10}",
            flush=True,
        )
        for count in sorted({2, min(16, options.sites), options.sites}):
            for compress in ("none", "int4"):
                rounds(count, compress, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
