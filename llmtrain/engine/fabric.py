"""An all-reduce of growing size between hosts: `python -m llmtrain.engine.fabric QUESTIONS`, started by doctor on each.

QUESTIONS is JSON: backend, rank, ranks (their hosts' names), address and port of rank 0, device, limit_s. The answer is
one line of JSON: steps (bytes and seconds each) on rank 0, or error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.engine.interfaces import choose_interfaces
from llmtrain.errors import UserError

MARK = "llmtrain-all-reduce "
SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20, 32 << 20)
BUDGET_S = 0.5
"""For one size; the next one is left out when this one has taken more."""


def main(argv: list[str]) -> int:
    """0: done. 1: it failed, and the line says why."""
    ask = json.loads(argv[0])
    started = time.monotonic()
    try:
        answer: dict[str, Any] = {"steps": measure(ask)}
    except UserError as error:
        answer = {"error": str(error)}
    except (RuntimeError, OSError, dist.DistError) as error:
        words = " ".join(str(error).split("\n")[0].split())
        answer = {"error": f"{words or type(error).__name__} (after {time.monotonic() - started:.0f} s)"}
    print("\n" + MARK + json.dumps(answer), flush=True)
    # Destroying a group whose peers are gone can wait for them: the process ends here.
    os._exit(1 if "error" in answer else 0)


def measure(ask: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds of the quickest all-reduce for each size. Raises RuntimeError: ranks are missing, or sums are wrong."""
    rank, world_size = ask["rank"], len(ask["ranks"])
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=ask["address"], MASTER_PORT=str(ask["port"]),
    )  # fmt: skip
    choose_interfaces(ask["backend"])
    device = torch.device("cuda", ask["device"]) if ask["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(ask, rank, world_size)
    limit = timedelta(seconds=ask["limit_s"])
    dist.init_process_group(ask["backend"], store=store, rank=rank, world_size=world_size, timeout=limit)
    steps: list[dict[str, float]] = []
    for size in SIZES_BYTES:
        values = torch.empty(size // 4, device=device)
        first_s = _once(values, rank, world_size, ask)
        times = [first_s]
        # Rank 0 alone decides how often: clocks differ.
        again = torch.tensor(
            [0 if first_s > BUDGET_S else min(8, 1 + int(BUDGET_S / max(1e-6, first_s)))], device=device
        )
        dist.broadcast(again, 0)
        for _ in range(int(again)):
            times.append(_once(values, rank, world_size, ask))
        steps.append({"bytes": size, "seconds": min(times)})
        if int(again) == 0:
            break
    dist.barrier()
    return steps


def _store(ask: dict[str, Any], rank: int, world_size: int) -> dist.TCPStore:
    """Rank 0 serves it; it knows who did not come. Raises RuntimeError."""
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


def _once(values: torch.Tensor, rank: int, world_size: int, ask: dict[str, Any]) -> float:
    """One all-reduce, checked; its seconds."""
    values.fill_(rank + 1.0)
    if values.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    dist.all_reduce(values)
    if values.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - started
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(
            f"the sum of {values.numel()} values is wrong on {ask['ranks'][rank]}: bad memory or network"
        )
    return elapsed_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
