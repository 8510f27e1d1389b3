"""Twenty limits of memory, 35 % above the plan, which adds as much for a heap, and 15 % below: what the kernel kills.

    python tools/bench/plan_limits.py [--returns]

Each rank has a control group (needs root). Its limit is what the process takes before the run, after a small run in the
same process, and a share of the plan. `--returns`: with a C library that returns freed memory from 1 MiB on, as a run
with tiled MLPs sets it; otherwise as all other runs set it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.helpers.memory_limit import Limit  # noqa: E402

RANKS = 2
SHARES = (1.35, 0.85)
SHAPE = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "vocab_size": 16384,
    "head_dim": 64,
}
CELLS = (
    ("none", 0, "plain", "llama"),
    ("none", 1, "recompute", "qwen3"),
    ("none", 1, "offload", "llama"),
    ("none", 2, "plain", "llama"),
    ("none", 3, "plain", "qwen3"),
    ("none", 3, "offload", "qwen3"),
    ("pipeline", 1, "plain", "llama"),
    ("tensor", 1, "plain", "llama"),
    ("sequence", 2, "plain", "llama"),
    ("ema", 2, "plain", "llama"),
)
"""Cells of tests/features/plan/test_plan_ranks.py."""


def under_limit(cell: Any, small: Any, large: Any, name: str, limits: dict[int, int], returns: bool) -> int:
    """Train the large case below a limit; return the bytes that the process took before."""
    from llmtrain.engine.process_memory import keep_freed_memory, return_freed_memory
    from llmtrain.features.plan.rehearsal import walk
    from tests.features.plan.test_plan_ranks import counted, run_of
    from tests.helpers.training import joined

    ranks = joined()
    limit = Limit(f"{name}-{ranks.rank}")
    limit.enter()
    counted(cell, small, 1)
    gc.collect()
    return_freed_memory()
    if not returns:
        keep_freed_memory()
    before = limit.used
    limit.set(before + limits[ranks.rank])

    from llmtrain.training.setup import write_weights

    def fill(setup: Any) -> None:
        write_weights(setup.engine, setup.spec.initial_weights(0, ranks.device), ranks)

    walk(run_of(cell, large), ranks, fill)
    return before


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each limit. Returns 1 if one has not done what the plan says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells, the first is 0 (default: all)")
    parser.add_argument("--returns", action="store_true")
    args = parser.parse_args(argv)
    from llmtrain.features.plan.rehearsal import rehearse
    from tests.features.plan.test_plan_ranks import Cell, case_of, run_of
    from tests.helpers.ranks import RankFailed, RankPool
    from tests.helpers.training import prepared_data

    right = 0
    print(f"{'cell':28} {'planned MB':>11} {'before MB':>10} {'limit':>6}")
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_data(Path(folder))
        for number, each in enumerate(CELLS):
            if args.only and number not in args.only:
                continue
            cell = Cell(*each)
            small = case_of(cell, data, Path(folder))
            large = replace(small, model={**small.model, **SHAPE})
            peaks = {planned.rank: planned.peak for planned in rehearse(run_of(cell, large), range(RANKS), RANKS)}
            before = [0]
            for share in SHARES:
                pool, name, said = RankPool(RANKS), f"plan-{os.getpid()}-{number}-{share}", "trains"
                limits = {rank: int(share * peak) for rank, peak in peaks.items()}
                try:
                    before = pool.run(under_limit, cell, small, large, name, limits, args.returns)
                except RankFailed as error:
                    killed = any(Limit(f"{name}-{rank}").killed for rank in range(RANKS))
                    said = "killed" if killed else f"failed: {error}"
                finally:
                    pool.close()
                    for rank in range(RANKS):
                        Limit(f"{name}-{rank}").folder.rmdir()
                right += said == ("trains" if share > 1 else "killed")
                print(
                    f"{cell!s:28} {max(peaks.values()) / 1e6:11.1f} {max(before) / 1e6:10.1f} {share:6.2f} {said}",
                    flush=True,
                )
    wanted = len(SHARES) * len(args.only or CELLS)
    print(f"{right} of {wanted} limits did what the plan says")
    return int(right < wanted)


if __name__ == "__main__":
    sys.exit(main())
