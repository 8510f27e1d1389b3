"""An all-reduce of growing size: `python -m llmtrain.features.doctor.all_reduce QUESTIONS`, by doctor on each host.

QUESTIONS is JSON: mark, backend, ranks (their names, in order), here (this host's: [rank, device] each), address and
port of rank 0, rounds (of pairs of ranks to be measured one by one), limit_s. The answer is one line, mark and then
JSON: on the host of rank 0 steps (bytes and seconds each) and pairs (two ranks and bytes a second), or error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.base.child import read_marked
from llmtrain.base.errors import UserError
from llmtrain.base.rank.device_faults import with_reason
from llmtrain.base.rank.interfaces import choose_interfaces

_SMALL = (4 << 10, 256 << 10, 4 << 20, 32 << 20)
SIZES_BYTES: dict[str, tuple[int, ...]] = {"gloo": _SMALL, "nccl": (*_SMALL, 256 << 20, 1 << 30)}
PAIR_BYTES = {"gloo": 4 << 20, "nccl": 256 << 20}
BUDGET_S = 0.5
"""Time for one size; after a slower one, larger sizes are left out."""


def main(argv: list[str]) -> int:
    """Returns 0, or 1 after a failure, whose reason is in the line."""
    ask = json.loads(argv[0])
    answer = _each_of(ask) if len(ask["here"]) > 1 else _alone(ask)
    print("\n" + ask["mark"] + json.dumps(answer), flush=True)
    # Destroying a group whose peers are gone can wait for them: the process ends here.
    os._exit(1 if "error" in answer else 0)


def _each_of(ask: dict[str, Any]) -> dict[str, Any]:
    """Start a process for each rank of this host; returns the first rank's answer, or the first error."""
    alone = [{**ask, "here": [one], "local_size": len(ask["here"])} for one in ask["here"]]
    words = [[sys.executable, "-m", "llmtrain.features.doctor.all_reduce", json.dumps(part)] for part in alone]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in words]
    answers = []
    for (rank, _), process in zip(ask["here"], started, strict=True):
        answer = read_marked(process.communicate()[0], ask["mark"])
        silent = {"error": f"{ask['ranks'][rank]} ended with code {process.returncode} and printed nothing"}
        answers.append(silent if answer is None else answer)
    return next((answer for answer in answers if "error" in answer), answers[0])


def _alone(ask: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        return measure(ask)
    except UserError as error:
        return {"error": str(error)}
    except (RuntimeError, OSError, dist.DistError) as error:
        words = " ".join(with_reason(str(error)).split())
        who = ask["ranks"][ask["here"][0][0]]
        return {"error": f"{who}: {words or type(error).__name__} (after {time.monotonic() - started:.0f} s)"}


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """Measure as one rank of `ask["ranks"]`; returns the answer. Raises RuntimeError: ranks are missing, or sums are
    wrong."""
    (rank, number), world_size = ask["here"][0], len(ask["ranks"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=ask["address"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(ask.get("local_size", 1)), MASTER_PORT=str(ask["port"]))
    choose_interfaces(ask["backend"])
    device = torch.device("cuda", number) if ask["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(ask, rank, world_size)
    limit = timedelta(seconds=ask["limit_s"])
    dist.init_process_group(ask["backend"], store=store, rank=rank, world_size=world_size, timeout=limit)
    steps = _all_reduces(ask, rank, device)
    store.set(f"pairs/{rank}", json.dumps(_pairs(ask, rank, device)))
    dist.barrier()
    if rank != 0:
        return {}
    shares = [json.loads(store.get(f"pairs/{number}")) for number in range(world_size)]
    return {"steps": steps, "pairs": [pair for share in shares for pair in share]}


def _all_reduces(ask: dict[str, Any], rank: int, device: torch.device) -> list[dict[str, float]]:
    """Seconds of the quickest all-reduce for each size."""
    steps: list[dict[str, float]] = []
    for size in SIZES_BYTES[ask["backend"]]:
        values = torch.empty(size // 4, device=device)
        first_s = _once(values, rank, ask)
        times = [first_s]
        # Rank 0 alone decides how often: clocks differ.
        repeats = torch.tensor(
            [0 if first_s > BUDGET_S else min(8, 1 + int(BUDGET_S / max(1e-6, first_s)))], device=device
        )
        dist.broadcast(repeats, 0)
        for _ in range(int(repeats)):
            times.append(_once(values, rank, ask))
        steps.append({"bytes": size, "seconds": min(times)})
        if int(repeats) == 0:
            break
    return steps


def _pairs(ask: dict[str, Any], rank: int, device: torch.device) -> list[list[float]]:
    """Return [this rank, peer, bytes a second each way] for the pairs with a higher peer."""
    pairs = []
    mine, received = (torch.zeros(PAIR_BYTES[ask["backend"]] // 4, device=device) for _ in range(2))
    for round_ in ask["rounds"]:
        dist.barrier()  # pairs of two rounds are never measured at the same time
        peer = next((sum(pair) - rank for pair in round_ if rank in pair), None)
        if peer is None:
            continue
        times = []
        for _ in range(4):  # the first one makes the connection
            _wait_for(device)
            started = time.perf_counter()
            both = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            _wait_for(device)
            times.append(time.perf_counter() - started)
        if rank < peer:
            pairs.append([rank, peer, mine.nbytes / min(times)])
    return pairs


def _store(ask: dict[str, Any], rank: int, world_size: int) -> dist.TCPStore:
    """Open the store on rank 0, and wait until all ranks have. Raises RuntimeError, which names missing ranks."""
    limit = timedelta(seconds=ask["limit_s"])
    store = dist.TCPStore(ask["address"], ask["port"], world_size, rank == 0, timeout=limit, wait_for_workers=False)
    store.set(f"here/{rank}", socket.gethostname())
    until = time.monotonic() + ask["limit_s"]
    missing = list(range(world_size))
    while missing and time.monotonic() < until:
        missing = [other for other in missing if not store.check([f"here/{other}"])]
        time.sleep(0.02)
    if missing:
        names = ", ".join(ask["ranks"][other] for other in missing)
        raise RuntimeError(f"no rank came from {names} within {ask['limit_s']:g} s")
    return store


def _once(values: torch.Tensor, rank: int, ask: dict[str, Any]) -> float:
    """Return the seconds of an all-reduce, whose result is checked."""
    values.fill_(rank + 1.0)
    _wait_for(values.device)
    started = time.perf_counter()
    dist.all_reduce(values)
    _wait_for(values.device)
    elapsed_s = time.perf_counter() - started
    world_size = len(ask["ranks"])
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(
            f"the sum of {values.numel()} values is wrong on {ask['ranks'][rank]}: bad memory or network"
        )
    return elapsed_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
