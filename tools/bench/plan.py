"""Planned against resident memory of CPU ranks: what a rehearsed rank holds at its peak, and what a real one takes.

    python tools/bench/plan.py
    python tools/bench/plan.py --others    # bytes alive at the peak, and three other estimates of them

A real rank trains the same two steps with values. Its resident memory is the highest in the steps less that before the
setup, after a small run in the same process: modules are imported then, and DeepSpeed's ops loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

RANKS, RUNS = 2, 30
M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4
"""malloc.h."""
SHAPE = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "vocab_size": 16384,
}
CELLS = (
    ("none", 0, "plain", "llama"),
    ("none", 1, "recompute", "qwen3"),
    ("none", 2, "plain", "llama"),
    ("none", 3, "plain", "qwen3"),
    ("pipeline", 1, "plain", "llama"),
    ("tensor", 1, "plain", "llama"),
)
"""Cells of tests/features/plan/test_plan_ranks.py."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells, the first is 0 (default: all)")
    parser.add_argument("--others", action="store_true", help="compare with DeepSpeed, accelerate and LLaMA-Factory")
    return parser.parse_args(argv)


def status_of(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def resident(cell: Any, small: Any, large: Any) -> int:
    """Bytes that a real rank takes for the large case, at most, after the small one."""
    from llmtrain.features.plan.rehearsal import walk
    from tests.features.plan.test_plan_ranks import counted, run_of
    from tests.helpers.training import joined

    libc = ctypes.CDLL(None)
    counted(cell, small, 1)

    def begin() -> int:
        gc.collect()
        # Each tensor from 64 KiB on gets pages of its own: what glibc keeps of freed ones is not the plan's matter.
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        libc.mallopt(M_MMAP_MAX, 1 << 16)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest value begins again
        return status_of("VmRSS")

    from llmtrain.training.setup import write_weights

    def fill(setup: Any) -> None:
        write_weights(setup.engine, setup.spec.initial_weights(0, setup.ranks.device), setup.ranks)
        begin()

    began = begin()
    walk(run_of(cell, large), joined(), fill)
    return status_of("VmHWM") - began


def others(cell: Any, run: Any) -> dict[str, float]:
    """Estimates of bytes on a device by what other projects offer; a project that has none for a cell is left out."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    spec = run[1]
    parameters, offload = spec.facts.parameters, cell.work == "offload"
    found: dict[str, float] = {}
    if cell.stage in (1, 2):
        _, found["DeepSpeed"] = estimate_zero2_model_states_mem_needs(parameters, RANKS, 1, offload)
    if cell.stage == 3:
        largest = max(math.prod(shape) for shape in spec.shapes.values())
        needs = estimate_zero3_model_states_mem_needs(parameters, largest, RANKS, 1, offload, offload)
        found["DeepSpeed"] = needs[1]
    found["accelerate"] = max(estimate_training_usage(4 * parameters, "bfloat16").values())
    # "Hardware Requirement" in LLaMA-Factory's README: GB for billions of parameters, of all devices together.
    found["LLaMA-Factory"] = (2 if cell.form in ("lora", "online") else 18) * parameters / RANKS
    return found


def compare_others(wanted: Sequence[int] | None) -> None:
    """Print a row for each run, or each wanted one, and the median and largest error of each estimate."""
    from llmtrain.features.plan.ledger import HOST
    from llmtrain.features.plan.rehearsal import kinds, rehearse
    from tests.features.plan.test_plan_ranks import case_of, counted, cover, run_of
    from tests.helpers.ranks import RankPool
    from tests.helpers.training import prepared_data

    errors: dict[str, list[float]] = {}
    print("run                                counted MB  error of each estimate")
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_data(Path(folder))
        for number, cell in enumerate([cell for cell in cover() if cell.form != "online"][:RUNS]):
            if wanted and number not in wanted:
                continue
            small = case_of(cell, data, Path(folder))
            shape = {**SHAPE, "head_dim": 64, **({"intermediate_size": 224} if cell.family == "mixtral" else {})}
            case = small if small.pretrained else replace(small, model={**small.model, **shape})
            run = run_of(cell, case)
            pool = RankPool(RANKS)
            real = pool.run(counted, cell, case, 1)
            pool.close()
            planned = max(rehearse(run, list(kinds(run[0].mix.degrees)), RANKS), key=lambda each: each.peak)
            peak = real[planned.rank][0]
            # The others estimate a device; here the peak has a save's copy and what is offloaded, too.
            on_device = peak - sum(size for part, size in planned.parts.items() if part.endswith(HOST))
            said = {"plan": planned.peak / peak - 1}
            said |= {name: found / on_device - 1 for name, found in others(cell, run).items()}
            for name, error in said.items():
                errors.setdefault(name, []).append(error)
            listed = "  ".join(f"{name} {error:+.1%}" for name, error in said.items())
            print(f"{cell!s:34} {peak / 1e6:10.1f}  {listed}", flush=True)
    for name, found in errors.items():
        sizes = sorted(map(abs, found))
        print(
            f"{name}: {len(found)} runs, median {statistics.median(sizes):.2%}, largest {sizes[-1]:.1%}, "
            f"below the peak in {sum(error < -0.005 for error in found)}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print both sides of each cell."""
    args = arguments(argv)
    if args.others:
        compare_others(args.only)
        return 0
    wanted = args.only
    from llmtrain.features.plan.rehearsal import kinds, rehearse
    from tests.features.plan.test_plan_ranks import Cell, case_of, run_of
    from tests.helpers.ranks import RankPool
    from tests.helpers.training import prepared_data

    print(f"{'cell':28} {'rank':>4} {'planned MB':>11} {'resident MB':>12}")
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_data(Path(folder))
        for number, each in enumerate(CELLS):
            if wanted and number not in wanted:
                continue
            cell = Cell(*each)
            small = case_of(cell, data, Path(folder))
            large = replace(small, model={**small.model, **SHAPE, "head_dim": 64})
            pool = RankPool(RANKS)
            real = pool.run(resident, cell, small, large)
            pool.close()
            run = run_of(cell, large)
            for planned in rehearse(run, list(kinds(run[0].mix.degrees)), RANKS):
                took = real[planned.rank]
                print(
                    f"{cell!s:28} {planned.rank:4} {planned.peak / 1e6:11.1f} {took / 1e6:12.1f} "
                    f"{planned.peak / took - 1:+.1%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
